"""Dropout masks as a function of keys."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchvision.ops import StochasticDepth

from fedentopt.models import build, dropout_key
from fedentopt.models.keyed_dropout import (
    DropoutKey,
    KeyedDropout,
    KeyedStochasticDepth,
    key_dropout,
    uniform,
)
from fedentopt.randomness import mix64_torch

GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def splitmix64(x: int) -> int:
    z = (x + GOLDEN) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def keyed(p: float, key: int = 7, layer: int = 0) -> KeyedDropout:
    made = KeyedDropout(p, DropoutKey(), layer)
    made.key.set(key)
    return made


def test_mix64_gives_the_published_sequence() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    states = torch.tensor([signed((1234567 + i * GOLDEN) & MASK) for i in range(4)])
    assert [x & MASK for x in mix64_torch(states).tolist()] == published


def test_draws_follow_their_formula() -> None:
    for key, layer in ((0, 0), (1 << 63, 3), (MASK, 17)):
        drawn = uniform(torch.tensor(signed(key)), layer, 5)
        start = splitmix64((key + (layer + 1) * GOLDEN) & MASK)
        expected = [(splitmix64((start + i * GOLDEN) & MASK) >> 40) * 2.0**-24 for i in range(5)]
        assert drawn.tolist() == expected


def test_a_share_of_p_is_dropped_and_the_rest_scaled() -> None:
    x = torch.ones(400, 500)
    for p in (0.2, 0.5):
        out = keyed(p)(x)
        assert (out == 0).float().mean().item() == pytest.approx(p, abs=0.005)
        assert torch.equal(out[out != 0].unique(), torch.tensor([1 / (1 - p)]))
        assert (out == 0).float().mean(0).std().item() < 0.03, "the columns are dropped unevenly"


def test_the_ends_and_evaluation() -> None:
    x = torch.rand(50, 20)
    assert torch.equal(keyed(0.0)(x), x)
    assert not keyed(1.0)(x).any()
    assert torch.equal(keyed(0.9).eval()(x), x)


def test_masks_depend_on_key_layer_and_element_only() -> None:
    x = torch.ones(8, 100)
    first = keyed(0.5)(x)
    state = torch.get_rng_state()
    torch.rand(9)
    assert torch.equal(keyed(0.5)(x), first)
    torch.set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(keyed(0.5, key=8)(x), first)
    assert not torch.equal(keyed(0.5, layer=1)(x), first)
    assert torch.equal(keyed(0.5)(x[:3]), first[:3]), "a sample's mask depends on those after it"


def test_the_key_is_written_in_place() -> None:
    layer = keyed(0.5)
    tensor = layer.key.value
    layer.key.set(99)
    assert layer.key.value is tensor
    assert torch.equal(layer(torch.ones(64)), keyed(0.5, key=99)(torch.ones(64)))
    layer.key.set(torch.tensor(7))
    assert torch.equal(layer(torch.ones(64)), keyed(0.5)(torch.ones(64)))


def test_channels_and_rows_are_dropped_whole() -> None:
    model = nn.Sequential(nn.Dropout2d(0.5), nn.Dropout1d(0.5), nn.Dropout3d(0.5), StochasticDepth(0.5, "row"))
    key = key_dropout(model)
    assert key is not None
    key.set(5)
    x = torch.ones(20, 30, 4, 4)
    channels = model[0](x).flatten(2)
    assert torch.equal(channels.amin(2), channels.amax(2))
    assert (channels[..., 0] == 0).float().mean().item() == pytest.approx(0.5, abs=0.1)
    single = model[1](torch.ones(30, 8))  # two dimensions: one sample of (channels, length)
    assert torch.equal(single.amin(1), single.amax(1))
    assert 0 < (single[:, 0] == 0).sum() < 30
    volume = model[2](torch.ones(30, 3, 3, 3))  # four dimensions: one sample of (channels, depth, height, width)
    assert torch.equal(volume.flatten(1).amin(1), volume.flatten(1).amax(1))
    rows = model[3](x).flatten(1)
    assert torch.equal(rows.amin(1), rows.amax(1))
    assert 0 < (rows[:, 0] == 0).sum() < 20


def test_batch_mode_drops_all_or_nothing() -> None:
    model = nn.Sequential(StochasticDepth(0.5, "batch"))
    key = key_dropout(model)
    assert key is not None
    outcomes = []
    for step in range(200):
        key.set(step)
        out = model(torch.ones(4, 3))
        assert out.unique().numel() == 1
        outcomes.append(bool(out.any()))
    assert sum(outcomes) == pytest.approx(100, abs=30)


def test_every_dropout_of_efficientnet_is_keyed_and_shares_one_key() -> None:
    before = torch.get_rng_state()
    model = build("efficientnet-b0", 10, seed=0)
    kinds = {type(layer) for layer in model.modules()}
    assert not kinds & {nn.Dropout, StochasticDepth}
    layers = [layer for layer in model.modules() if isinstance(layer, KeyedDropout)]
    assert sum(isinstance(layer, KeyedStochasticDepth) for layer in layers) == 16
    assert len({id(layer.key) for layer in layers}) == 1
    assert sorted(layer.layer for layer in layers) == list(range(17))
    key = dropout_key(model)
    assert key is not None
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    outputs = []
    for step in (1, 1, 2):
        key.set(step)
        outputs.append(copy.deepcopy(model)(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_the_key_is_no_part_of_the_model_but_follows_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    key = key_dropout(model)
    assert key is not None
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert not list(model.buffers())
    key.set(11)
    twin = copy.deepcopy(model).double()
    other = dropout_key(twin)
    assert other is not None
    assert other is not key
    assert other.value.dtype == torch.int64
    other.set(12)
    assert key.value.item() == 11
    assert dropout_key(model.to("meta")).value.device.type == "meta"
    assert dropout_key(nn.Linear(2, 2)) is None


def test_a_layer_used_twice_stays_one_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Dropout(0.3)

    model = Twice()
    key_dropout(model)
    assert model.first is model.second
    assert isinstance(model.first, KeyedDropout)


def test_a_stack_of_keys_gives_every_model_its_own_masks() -> None:
    layer = keyed(0.5)

    def step(key: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        layer.key.value = key
        return layer(x)

    keys, x = torch.tensor([7, 8, 9]), torch.ones(3, 6, 5)
    stacked = torch.vmap(step)(keys, x)
    for key, out in zip(keys.tolist(), stacked, strict=True):
        assert torch.equal(out, keyed(0.5, key=key)(x[0]))
