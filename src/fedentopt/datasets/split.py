"""A test split for data that comes without one."""

from __future__ import annotations

import numpy as np

SEED = 0x5EED
SHARE = 5  # one in five


def held_out(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices (train, test), ascending: a fifth of every class (rounded, at least one of two) for the test.

    The draw depends on nothing but the labels and a fixed seed, so everyone gets the same split.
    """
    rng = np.random.Generator(np.random.PCG64(SEED))
    test = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = max(round(len(members) / SHARE), 1 if len(members) > 1 else 0)
        test.append(rng.permutation(members)[:count])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen
