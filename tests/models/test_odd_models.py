"""Whatever a user's model does, every trainer trains that model: FedAvg written out in float64 says what is right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import toy
from fedentopt.errors import InputError
from fedentopt.models import build, head_name, host_reads
from fedentopt.partition import parse, partition
from fedentopt.randomness import key
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.trainers import choice
from sample_order import batches

NOT_STACKED = (
    "frozen", "untracked", "masked", "across", "contrast", "deciding", "spectral_norm", "smoothed", "smoothed_data",
)  # fmt: skip
MODELS = [
    "frozen", "tied", "shared", "sequential_with_a_forward", "linear_with_a_forward", "convolution_with_a_forward",
    "weight_norm", "hooked", "ends_in_relu", "untracked", "stepwise", "masked", "head_first", "unused", "viewing",
    "across", "contrast", "deciding", "sharper", "spectral_norm", "smoothed", "smoothed_data",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # steps of a few microseconds: threads would only wait for each other
    yield
    torch.set_num_threads(before)


def config(model: str, **settings: object) -> RunConfig:
    base = {
        "model": f"odd_models:{model}", "clients": 2, "cohort": "2", "rounds": 2, "epochs": 3, "batch_size": 16,
        "partition": "dir:0.3", "lr": 0.05, "lr_decay": 0.9, "momentum": 0.9, "weight_decay": 1e-3, "seed": 5,
    }  # fmt: skip
    return toy.config(**(base | toy.PLAIN | settings))


def fedavg(cfg: RunConfig) -> dict[str, torch.Tensor]:
    """The model that FedAvg ends with, by torch's own optimiser."""
    data = toy.images()
    parts = partition(data.y_train, parse(cfg.partition), 2, cfg.seed, num_classes=3, min_samples=1)
    x, y = (torch.from_numpy(data.x_train).double() / 255 - 0.4) / 0.25, torch.from_numpy(data.y_train)
    model = build(cfg.model, 3, seed=key(cfg.seed, "model") >> 1, image_size=8).double()
    sizes = np.array([len(i) for i in parts.indices], dtype=float)
    for number in range(1, cfg.rounds + 1):
        trained = []
        for client in range(2):
            own = copy.deepcopy(model).train()
            lr = cfg.lr * cfg.lr_decay ** (number - 1)
            optimiser = torch.optim.SGD(own.parameters(), lr=lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay)
            for chosen in batches(parts.indices[client], cfg, number, client):
                optimiser.zero_grad()
                F.cross_entropy(own(x[chosen]), y[chosen]).backward()
                optimiser.step()
            trained.append(own.state_dict())
        shares = sizes / sizes.sum()
        model.load_state_dict({n: sum(s * t[n] for s, t in zip(shares, trained, strict=True)) for n in trained[0]})
    return dict(model.state_dict())


@pytest.mark.parametrize("trainer", ["loop", "stacked", "streams"])
@pytest.mark.parametrize("model", MODELS)
def test_a_users_model_trains_as_torch_would(model: str, trainer: str) -> None:
    cfg = config(model)
    if trainer == "stacked" and model in NOT_STACKED:
        with pytest.raises(InputError, match="cannot be stacked; accepted: auto, streams, loop"):
            toy.run([cfg], toy.images(), trainer=trainer)
        return
    (outcome,) = toy.run([cfg], toy.images(), trainer=trainer)
    expected, start = fedavg(cfg), build(cfg.model, 3, seed=key(cfg.seed, "model") >> 1, image_size=8).state_dict()
    assert outcome.diverged_round is None
    assert outcome.model.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(outcome.model[name].double(), value, atol=3e-6, rtol=1e-5)
    moved = max(float((outcome.model[n] - start[n]).nan_to_num().abs().max()) for n in start)
    assert moved > 1e-2


def test_a_buffer_that_a_forward_assigns_is_the_clients_own() -> None:
    cfg = config("smoothed", clients=6, cohort="6", rounds=3)
    (one,), (three,) = (toy.run([cfg], toy.images(), trainer="loop", workers=workers) for workers in (1, 3))
    assert toy.difference(one, three) == 0.0


@pytest.mark.parametrize("trainer", ["stacked", "streams"])
def test_models_are_judged_in_evaluation_mode(trainer: str) -> None:
    (expected,), (found,) = (toy.run([config("sharper")], toy.images(), trainer=name) for name in ("loop", trainer))
    assert [r.loss for r in found.records] == pytest.approx([r.loss for r in expected.records], rel=1e-5)


@pytest.mark.parametrize(("model", "trainer"), [("viewing", "stacked"), ("deciding", "streams"), ("across", "streams")])
def test_on_a_gpu_only_a_model_that_can_be_stacked_is(
    model: str, trainer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in ("runs_on", "wide_runs_on"):
        monkeypatch.setattr(choice, where, lambda device: False)
    made = build(f"odd_models:{model}", 3, seed=0, image_size=8)
    assert choice.choose_trainer("auto", made, torch.device("cuda"), 8) == trainer


def filled(x: torch.Tensor, where: Any, value: torch.Tensor | float) -> torch.Tensor:
    x = x.clone()
    x[where] = value
    return x


@pytest.mark.parametrize(
    ("of", "reads"),
    [
        (lambda x: x * 2, False), (lambda x: x[:, torch.tensor([0, 1, 1])], False),
        (lambda x: x.where(x > 1, 0), False),
        (lambda x: x * float(x.max()), True), (lambda x: x if x.min() > 0 else -x, True),
        (lambda x: x - x[x > 1].sum(), True), (lambda x: x * len(x.nonzero()), True),
        (lambda x: x * x.amax((1, 2, 3)).tolist()[0], True), (lambda x: x * float(x.cpu().numpy().max()), True),
        (lambda x: filled(x, x.amax((1, 2, 3)) > 1, x[0] * 2), True), (lambda x: filled(x, x > 1, x.mean()), True),
        (lambda x: x.index_put(indices=[x > 1], values=x.mean()), True), (lambda x: filled(x, x > 1, 0.0), False),
        (lambda x: filled(x, (0, x[0] > 1), 0.0), False), (lambda x: filled(x, torch.tensor([1]), x[:1]), False),
    ],
)  # fmt: skip
def test_whether_numbers_of_a_model_reach_python(of: Callable[[torch.Tensor], torch.Tensor], reads: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self, classes: int) -> None:
            super().__init__()
            self.last = torch.nn.Linear(3 * 64, classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(of(x).flatten(1))

    assert host_reads(build("mine", 3, seed=0, image_size=8, factory=Model)) is reads


@pytest.mark.parametrize(("model", "reads"), [("cumulative", True), ("untracked", False), ("spectral_norm", False)])
def test_whether_numbers_reach_torchs_own_layers(model: str, reads: bool) -> None:
    assert host_reads(build(f"odd_models:{model}", 3, seed=0, image_size=8)) is reads


def test_trying_a_model_takes_no_draws_from_its_start() -> None:
    class Model(torch.nn.Module):
        def __init__(self, drops: bool) -> None:
            super().__init__()
            self.last, self.drops = torch.nn.Linear(3 * 64, 3), drops

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(F.dropout(x.flatten(1), 0.5, self.training and self.drops))

    plain, drawing = (
        build("mine", 3, seed=1, image_size=8, initialisation="layers", factory=lambda _, drops=drops: Model(drops))
        for drops in (False, True)
    )
    assert torch.equal(plain.last.weight, drawing.last.weight)


def test_a_mask_of_infinities_may_come_with_start_weights(tmp_path: Path) -> None:
    state = build("odd_models:masked", 3, seed=7, image_size=8).state_dict()
    save_file(state, tmp_path / "start.safetensors")
    model = build("odd_models:masked", 3, seed=0, image_size=8, weights=str(tmp_path / "start.safetensors"))
    assert torch.equal(model.linear.weight, state["linear.weight"])
    assert torch.equal(model.mask, state["mask"])
    save_file(state | {"mask": -state["mask"]}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"tensor 'mask' of .* holds NaN or infinity"):
        build("odd_models:masked", 3, seed=0, image_size=8, weights=str(tmp_path / "other.safetensors"))


def test_what_is_frozen_stays_to_the_last_bit() -> None:
    cfg = config("frozen", algorithm="scaffold", rounds=5, seed=1)
    (outcome,) = toy.run([cfg], toy.images())
    start = build(cfg.model, 3, seed=key(1, "model") >> 1, image_size=8).state_dict()
    assert torch.equal(outcome.model["1.weight"], start["1.weight"])
    assert not torch.equal(outcome.model["3.weight"], start["3.weight"])


def test_runs_of_several_seeds_keep_their_own_frozen_layers() -> None:
    configs = [config("frozen", seed=seed) for seed in (1, 2)]
    for cfg, together in zip(configs, toy.run(configs, toy.images()), strict=True):
        (alone,) = toy.run([cfg], toy.images())
        assert toy.difference(together, alone) == 0.0


def test_a_shared_tensor_is_kept_under_all_its_names_and_once_in_a_row() -> None:
    from fedentopt.simulation.layout import FlatLayout

    model = build("odd_models:tied", 3, seed=0, image_size=8)
    layout = FlatLayout(model)
    state = layout.unpack(layout.pack(model.state_dict()))
    assert state.keys() == model.state_dict().keys()
    assert torch.equal(state["a.weight"], state["b.weight"])
    assert layout.num_parameters == sum(p.numel() for p in model.parameters())


def test_a_batch_of_one_passes_batchnorm_without_statistics() -> None:
    (outcome,) = toy.run([config("untracked", clients=30, cohort="10", partition="iid", batch_size=3)], toy.images(61))
    assert outcome.diverged_round is None


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(InputError, match="no parameter that requires a gradient; accepted: at least one"):
        build("odd_models:nothing_to_train", 3, seed=0, image_size=8)


class Numbers(torch.nn.Linear):
    """A layer that also holds a tensor of another type, and computes with it."""

    def __init__(self, other: torch.Tensor, *, cast: bool) -> None:
        super().__init__(3 * 8 * 8, 4)
        self.register_buffer("other", other)
        self.cast = cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = x.flatten(1).mean(1, keepdim=True).to(torch.float64)
        moved = own @ (self.other.abs().to(torch.float64) if self.cast else self.other)
        return super().forward(x.flatten(1)) + moved.to(torch.float32)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.ones(1, 1, dtype=torch.float64), "holds other in float64 and fails in float32, in which models train"),
        (torch.ones(1, 1, dtype=torch.complex64), "holds other in complex64; accepted: real numbers"),
        (torch.tensor([[2**24 + 1]]), "holds other in int64, beyond what float32 counts; accepted: up to 2\\*\\*24"),
        (torch.tensor([[-(2**40)]]), "holds other in int64, beyond what float32 counts"),
    ],
)
def test_numbers_that_float32_does_not_hold_are_refused(other: torch.Tensor, words: str) -> None:
    cast = other.dtype != torch.float64
    with pytest.raises(InputError, match=f"model: own {words}"):
        build("own", 4, seed=0, image_size=8, factory=lambda classes: Numbers(other, cast=cast))


@pytest.mark.parametrize("other", [torch.ones(1, 1, dtype=torch.float64), torch.tensor([[2**24]])])
def test_numbers_that_survive_float32_are_taken(other: torch.Tensor) -> None:
    model = build("own", 4, seed=0, image_size=8, factory=lambda classes: Numbers(other, cast=True))
    assert torch.equal(model.state_dict()["other"], other)


@pytest.mark.parametrize("kind", [torch.uint16, torch.uint32, torch.uint64, torch.bool])
def test_whole_numbers_of_every_kind_are_taken(kind: torch.dtype) -> None:
    """Torch has no maximum of some of them."""
    layer = torch.nn.Linear(3 * 8 * 8, 4)
    layer.register_buffer("codes", torch.tensor([0, 1], dtype=kind))
    model = build(
        "own", 4, seed=0, image_size=8, factory=lambda classes: torch.nn.Sequential(torch.nn.Flatten(), layer)
    )
    assert model.state_dict()["1.codes"].tolist() == [0, 1]
    if kind not in (torch.uint16, torch.bool):
        layer.codes = torch.tensor([0, 2**24 + 1], dtype=kind)
        with pytest.raises(InputError, match="beyond what float32 counts"):
            build(
                "own", 4, seed=0, image_size=8, factory=lambda classes: torch.nn.Sequential(torch.nn.Flatten(), layer)
            )


def test_images_lie_channels_last_for_models_that_can_have_it() -> None:
    """A model that reshapes what a convolution gives works on either order; one that takes a view of it on one."""
    from fedentopt.models import keeps_order

    assert keeps_order(build("odd_models:viewing", 3, seed=0, image_size=8))
    assert keeps_order(build("odd_models:insisting", 3, seed=0, image_size=8))
    assert not keeps_order(build("odd_models:convolution_with_a_forward", 3, seed=0, image_size=8))


def test_the_last_layer_is_the_one_called_last() -> None:
    assert head_name(build("odd_models:head_first", 3, seed=0, image_size=8)) == "head"
    settings = {"algorithm": "fedconcat", "clusters": 2, "rounds": 40, "concat_max_rounds": 10}
    (outcome,) = toy.run([config("head_first", **settings)], toy.images())
    assert outcome.model["head.weight"].shape == (3, 2 * 16)


def test_weights_fit_a_model_without_a_linear_layer(tmp_path: Path) -> None:
    name = "odd_models:without_linear"
    save_file(build(name, 3, seed=1, image_size=8).state_dict(), tmp_path / "w.safetensors")
    model = build(name, 3, seed=2, image_size=8, weights=str(tmp_path / "w.safetensors"))
    assert torch.equal(model.state_dict()["0.weight"], build(name, 3, seed=1, image_size=8).state_dict()["0.weight"])
    save_file(build(name, 4, seed=1, image_size=8).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="has shape"):
        build(name, 3, seed=2, image_size=8, weights=str(tmp_path / "other.safetensors"))
