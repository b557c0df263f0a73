"""Draws by weight: several clients without replacement, or one from weights that are given as logarithms."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np


def draw_by_weight(rng: np.random.Generator, weights: np.ndarray, size: int) -> np.ndarray:
    """Places drawn one after another, each with probability proportional to its weight among those left.

    Places of weight 0 come last, all alike. With arrival times Exp(1) / weight the first to arrive is the first drawn
    (Efraimidis, Spirakis: Weighted random sampling with a reservoir, 2006), so one pass is enough.
    """
    scale = float(weights.max(initial=0.0))
    race = rng.exponential(size=weights.size)
    with np.errstate(divide="ignore", over="ignore"):
        times = race / (weights / scale if scale > 0 else np.zeros(weights.size))
    size = min(size, weights.size)
    if 8 * size < weights.size:  # a few of many: only those that can be among the first are sorted
        last = np.partition(times, size - 1)[size - 1] if size else 0.0
        near = np.flatnonzero(times <= last)
        return np.asarray(near[np.lexsort((race[near], times[near]))][:size])
    return np.asarray(np.lexsort((race, times))[:size])


def draw_one(rng: np.random.Generator, log_weights: np.ndarray) -> int:
    """A place, with probability proportional to exp(log weight); -inf is never drawn unless all are."""
    top = float(log_weights.max())
    if not math.isfinite(top):
        return int(rng.integers(log_weights.size))
    return draw_place(rng, np.exp(log_weights - top).cumsum())


def weight_sums(log_weights: np.ndarray) -> np.ndarray:
    """Running sums for `draw_place`, with which a place is drawn as `draw_one` does."""
    top = float(log_weights.max())
    return np.asarray((np.exp(log_weights - top) if math.isfinite(top) else np.ones(log_weights.size)).cumsum())


def draw_place(rng: np.random.Generator, sums: np.ndarray | list[float]) -> int:
    """A place by weights whose running sums these are; one of weight 0 is never drawn, the last sum must be above 0."""
    whole = float(sums[-1])
    mark = min(rng.random() * whole, math.nextafter(whole, 0.0))  # which rounding might make the whole sum
    return bisect_right(sums, mark) if isinstance(sums, list) else int(sums.searchsorted(mark, side="right"))
