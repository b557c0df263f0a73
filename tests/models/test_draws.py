"""Layers that draw without being dropout layers: their numbers are a function of the step's key, like masks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import drawing_models
import toy
from drawing_models import DRAWING
from fedentopt.errors import InputError
from fedentopt.models import build, dropout_key, keyed_draws
from fedentopt.models.keyed_draws import FIRST, KeyedDraws
from fedentopt.models.keyed_dropout import DropoutKey, KeyedDropout
from fedentopt.simulation.engine import RunOptions, Task, run_stack

SIZES = {"clients": 4, "cohort": "2", "rounds": 2, "epochs": 1, "batch_size": 16, "lr": 0.05, "partition": "iid"}


def made(name: str) -> nn.Module:
    return build(f"drawing_models:{name}", 3, seed=1, image_size=8)


def drawing(key: int) -> KeyedDraws:
    draws = KeyedDraws(DropoutKey(), recurrent=False)
    draws.key.set(key)
    return draws


@pytest.mark.parametrize("name", DRAWING)
def test_every_stock_layer_draws_by_the_key_and_leaves_torchs_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    model = made(name)
    draws, key = keyed_draws(model), dropout_key(model)
    assert draws is not None
    assert key is draws.key
    x = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(3))

    def step(number: int, of: nn.Module) -> torch.Tensor:
        dropout_key(of).set(number)
        with keyed_draws(of).step():
            return of(x).detach()

    first = step(1, model)
    assert torch.equal(step(1, copy.deepcopy(model)), first)
    assert not torch.equal(step(2, model), first)
    assert torch.equal(step(1, model), first)
    assert torch.equal(model.eval()(x), copy.deepcopy(model)(x))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", DRAWING)
def test_alone_in_a_sweep_in_threads_and_resumed_a_run_is_the_same_to_the_bit(name: str) -> None:
    configs = [toy.config(model=f"drawing_models:{name}", seed=seed, **SIZES) for seed in (1, 2)]
    memories = [toy.Memory() for _ in configs]
    tasks = [Task(config, memory) for config, memory in zip(configs, memories, strict=True)]
    options = {"device": "cpu", "checkpoint_every": 1}
    together = run_stack(tasks, toy.images(), RunOptions(workers=2, **options))
    again = toy.Memory()
    again.saved = memories[0].saves[0]
    assert again.saved[0].round == 1
    torch.rand(5)  # torch's own generator is of no matter
    [resumed] = run_stack([Task(configs[0], again)], toy.images(), RunOptions(workers=1, **options))
    [alone] = toy.run(configs[:1], toy.images(), workers=1)
    assert toy.difference(alone, together[0]) == 0
    assert toy.difference(alone, resumed) == 0
    assert toy.difference(alone, together[1]) > 0
    [streamed] = toy.run(configs[:1], toy.images(), trainer="streams")
    assert toy.difference(alone, streamed) < 1e-5


def test_code_that_calls_a_drawing_model_draws_by_the_key() -> None:
    config = toy.config(model="drawing_models:f_dropout", algorithm="moon", **SIZES)
    others = [config, config.replace(seed=9)]
    [alone], [together, _] = toy.run([config], toy.images(), workers=1), toy.run(others, toy.images(), workers=2)
    assert toy.difference(alone, together) == 0


def test_such_a_model_is_not_stacked() -> None:
    with pytest.raises(InputError, match="cannot be stacked"):
        toy.run([toy.config(model="drawing_models:lstm", **SIZES)], toy.images(), trainer="stacked")


def test_a_dropout_function_drops_what_a_layer_of_its_number_would() -> None:
    x = torch.ones(30, 40)
    draws = drawing(7)
    layers = [KeyedDropout(p, draws.key, FIRST + number) for number, p in enumerate((0.1, 0.7))]
    with draws.step():
        found = [F.dropout(x, layer.p) for layer in layers]
    for layer, got in zip(layers, found, strict=True):
        torch.testing.assert_close(got, layer(x), rtol=1e-6, atol=0)
    with draws.step():
        values, kept = torch.ops.aten.native_dropout(x, 0.1, True)  # what dropout is on a GPU
    assert torch.equal(values, layers[0](x))
    assert torch.equal(kept, values != 0)


def test_draws_have_their_distributions() -> None:
    x = torch.zeros(200, 300)
    with drawing(11).step():
        normal = torch.normal(2.0, 3.0, (200, 300))
        like = x.clone().normal_(2.0, 3.0)
        means = torch.normal(x + 2, 3.0)
        uniform = x.clone().uniform_(-1, 3)
        waits = x.clone().exponential_(4.0)
        whole = torch.randint(-2, 3, (200, 300))
        order = torch.randperm(1000)
        coins = torch.bernoulli(x + 0.3)
        slopes = F.rrelu(x - 1, 0.2, 0.6, training=True)
    for drawn in (normal, like, means):
        assert drawn.mean().item() == pytest.approx(2, abs=0.05)
        assert drawn.std().item() == pytest.approx(3, abs=0.05)
        inside = ((drawn - 2).abs() < 3).float().mean().item()
        assert inside == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.01)
    assert (uniform.min() >= -1, uniform.max() < 3) == (True, True)
    assert uniform.mean().item() == pytest.approx(1, abs=0.02)
    assert waits.min() > 0
    assert waits.mean().item() == pytest.approx(0.25, abs=0.005)
    assert [(whole == value).float().mean().item() for value in range(-2, 3)] == pytest.approx([0.2] * 5, abs=0.01)
    assert whole.dtype == torch.int64
    assert sorted(order.tolist()) == list(range(1000)) != order.tolist()
    assert coins.mean().item() == pytest.approx(0.3, abs=0.01)
    assert (-slopes).mean().item() == pytest.approx(0.4, abs=0.005)
    assert 0.2 <= (-slopes).min() < (-slopes).max() < 0.6


def test_the_gradient_passes_where_the_forward_did() -> None:
    x = torch.linspace(-2, 2, 60, requires_grad=True)
    with drawing(3).step():
        dropped, leaky = F.dropout(x, 0.5), F.rrelu(x, training=True)
    for out in (dropped, leaky):
        (gradient,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(gradient * x.detach(), out.detach())


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("in_evaluation", r"bernoulli_.* in evaluation mode, where F.dropout needs training=self.training"),
        ("own_generator", "draws from a generator of its own"),
        ("repeated", "draws random numbers in the backward pass"),
        ("unknown", "aten.poisson.default draws random numbers that cannot be keyed"),
    ],
)
def test_what_cannot_be_keyed_is_refused(name: str, told: str) -> None:
    assert hasattr(drawing_models, name)
    with pytest.raises(InputError, match=rf"model: drawing_models:{name}: .*{told}"):
        made(name)
