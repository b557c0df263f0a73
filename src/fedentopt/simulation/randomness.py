"""Randomness as a function: every draw is a hash of what it is for, so no generator carries a state.

A key is folded from (seed, purpose, round, client, ...). Draw number i of a key is `mix64(key + i * GOLDEN)`,
the i-th output of a splitmix64 stream that starts at the key (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014). The same arithmetic exists here for NumPy, beside the dropout layers for torch, and in
`kernels` for Triton, so CPU and GPU see the same sample orders and the same augmentations, alone or in a stack.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

from fedentopt.models.keyed_dropout import mix64 as mix64_torch
from fedentopt.models.keyed_dropout import shift_right

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = (1 << 64) - 1
__all__ = ["GOLDEN", "generator", "key", "mix64", "mix64_torch", "signed", "uniform_torch"]


def _mix(x: int) -> int:
    x = (x + GOLDEN) & MASK
    x = ((x ^ (x >> 30)) * MULTIPLIERS[0]) & MASK
    x = ((x ^ (x >> 27)) * MULTIPLIERS[1]) & MASK
    return x ^ (x >> 31)


def key(seed: int, purpose: str, *numbers: int) -> int:
    """A 64-bit key for one purpose, such as key(seed, "order", round, client)."""
    value = _mix(_mix(seed & MASK) ^ zlib.crc32(purpose.encode()))
    for number in numbers:
        value = _mix(value ^ (number & MASK))
    return value


def signed(value: int) -> int:
    """The same 64 bits as torch's int64 holds them."""
    return value - (1 << 64) if value >= 1 << 63 else value


def generator(seed: int, purpose: str, *numbers: int) -> np.random.Generator:
    """A NumPy generator that starts at the key, for draws that happen on the host only."""
    return np.random.Generator(np.random.PCG64(key(seed, purpose, *numbers)))


def mix64(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function on an array of uint64."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIERS[0])
        x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIERS[1])
        mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def uniform_torch(keys: torch.Tensor, counter: int) -> torch.Tensor:
    """Draw number `counter` of every key as float32 in [0, 1): the top 24 bits."""
    bits = shift_right(mix64_torch(keys + signed((counter * GOLDEN) & MASK)), 40)
    return bits.to(torch.float32) * (2.0**-24)
