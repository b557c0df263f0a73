"""Draws are functions of keys: the published splitmix64 stream, the same in NumPy and torch, well spread."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedentopt.randomness import GOLDEN, generator, key, mix64, mix64_torch, signed, uniform_torch

# First outputs of splitmix64 from state 0 (Vigna's splitmix64.c; also the test vector of Java's SplittableRandom).
PUBLISHED = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_published_stream():
    with np.errstate(over="ignore"):
        states = np.arange(3, dtype=np.uint64) * np.uint64(GOLDEN)
    assert mix64(states).tolist() == PUBLISHED
    ours = mix64_torch(torch.arange(3) * signed(GOLDEN))
    assert [int(v) % 2**64 for v in ours] == PUBLISHED


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_numpy_and_torch_agree(values):
    numpy = mix64(np.array(values, dtype=np.uint64))
    ours = mix64_torch(torch.tensor([signed(v) for v in values]))
    assert [int(v) % 2**64 for v in ours] == numpy.tolist()


def test_keys_depend_on_everything_they_are_given():
    keys = {
        key(seed, purpose, round_, client)
        for seed in range(4)
        for purpose in ("order", "augment")
        for round_ in range(20)
        for client in range(20)
    }
    assert len(keys) == 4 * 2 * 20 * 20
    assert key(0, "order", 1, 2) != key(0, "order", 2, 1)
    assert key(0, "order", 1) != key(0, "order", 1, 0)
    assert generator(1, "x", 2).random() == generator(1, "x", 2).random() != generator(1, "x", 3).random()


def test_uniforms_are_uniform_and_uncorrelated():
    keys = torch.tensor([signed(key(7, "test", i)) for i in range(20000)])
    draws = torch.stack([uniform_torch(keys, j) for j in range(4)]).double()
    assert float(draws.min()) >= 0
    assert float(draws.max()) < 1
    assert torch.allclose(draws.mean(1), torch.full((4,), 0.5, dtype=torch.float64), atol=0.01)
    assert torch.allclose(draws.var(1), torch.full((4,), 1 / 12, dtype=torch.float64), atol=0.003)
    correlation = torch.corrcoef(draws) - torch.eye(4, dtype=torch.float64)
    assert float(correlation.abs().max()) < 0.03
