"""Laplace noise for trials of a privacy budget, as a function of seed, client name and class.

Whoever joins, leaves or moves in the table changes nobody else's noise, and the same clients report the same in every
call. The draw is Laplace's inverse distribution function at a uniform number that is hashed from the three. For
simulation only: see `fedentopt.privacy` for what a real client sends.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError
from fedentopt.labels import LARGEST_COUNT
from fedentopt.privacy import LEAST_EPSILON, check_epsilon
from fedentopt.randomness import GOLDEN, key, mix64


def keyed_laplace(counts: ArrayLike, epsilon: float, clients: Sequence[object], seed: int) -> np.ndarray:
    """Counts (clients, classes) plus Laplace noise of scale 1/epsilon, float64.

    Refused: counts that are not finite or not one row per client, and an epsilon so small that a count leaves the
    numbers that can be counts.
    """
    values = np.asarray(counts, dtype=np.float64)
    if values.ndim != 2 or len(clients) != len(values) or not np.isfinite(values).all():
        raise InputError(
            f"counts: shape {values.shape} for {len(clients)} clients; accepted: one row of finite numbers per client"
        )
    scale = 1.0 / check_epsilon(epsilon)
    keys = mix64(_name_keys(tuple(clients)) ^ np.uint64(key(seed, "label noise")))
    bits = mix64(keys[:, None] + np.arange(values.shape[1], dtype=np.uint64) * np.uint64(GOLDEN))
    # The middle of one of 2**52 steps: never 0 or 1, where the inverse of the distribution has no value.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52 - 0.5
    noisy = values - scale * np.sign(uniform) * np.log1p(-2.0 * np.abs(uniform))
    if ((np.abs(values) <= LARGEST_COUNT) & ~(np.abs(noisy) <= LARGEST_COUNT)).any():
        raise InputError(
            f"epsilon: {epsilon!r} gives noise of scale {scale:g}, beyond what a count can be (2**53); accepted: a "
            f"larger one, such as {LEAST_EPSILON:g}"
        )
    return noisy


@lru_cache(maxsize=1)  # many budgets and seeds are tried on one federation
def _name_keys(clients: tuple[object, ...]) -> np.ndarray:
    names = (hashlib.blake2b(repr(client).encode(), digest_size=8).digest() for client in clients)
    return np.frombuffer(b"".join(names), dtype="<u8").astype(np.uint64)
