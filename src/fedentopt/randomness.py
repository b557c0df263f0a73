"""Randomness as a function: every draw is a hash of what it is for, so no generator carries a state.

A key is folded from (seed, purpose, round, client, ...). Draw number i of a key is `mix64(key + i * GOLDEN)`,
the i-th output of a splitmix64 stream that starts at the key (Steele, Lea, Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014). The same arithmetic exists here for NumPy and for torch's tensors (whose operators are
all it takes: nothing here imports torch) and in the kernels, so CPU and GPU see the same sample orders and the same
augmentations, alone or in a stack.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK = (1 << 64) - 1


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


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 numbers; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix64_torch(x: Tensor) -> Tensor:
    """splitmix64's output function on a tensor of int64 numbers, modulo 2^64."""
    z = x + signed(GOLDEN)
    z = (z ^ shift_right(z, 30)) * signed(MULTIPLIERS[0])
    z = (z ^ shift_right(z, 27)) * signed(MULTIPLIERS[1])
    return z ^ shift_right(z, 31)


def uniform_torch(keys: Tensor, counter: int) -> Tensor:
    """Draw number `counter` of every key as float32 in [0, 1): the top 24 bits."""
    bits = shift_right(mix64_torch(keys + signed((counter * GOLDEN) & MASK)), 40)
    return bits.float() * (2.0**-24)
