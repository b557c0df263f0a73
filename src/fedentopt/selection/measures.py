"""Measures of balance: entropy of labels, coverage of classes, evenness of selection.

Entropy is Shannon's, in bits, of the counts normalised to a distribution p: H = -sum_c p_c log2 p_c. A cohort
whose entropy exceeds log2(C - 1) must hold all C classes, since C - 1 classes cannot reach more.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError

_TINY = np.finfo(np.float64).tiny


def entropy(counts: ArrayLike) -> float:
    """Entropy in bits of one vector of label counts; 0 for an all-zero one, negative entries count as 0."""
    return float(row_scores(_vector("counts", counts)[None, :])[0]) + 0.0  # never -0.0


def selection_entropy(times_selected: ArrayLike) -> float:
    """Normalised selection entropy H_norm in [0, 1] of how often each of K clients was selected.

    1 means all equally often; with a single client it is 1, with no selection at all 0.
    """
    times = _vector("times_selected", times_selected)
    if times.size == 1 and times[0] > 0:
        return 1.0
    return min(entropy(times) / float(np.log2(max(times.size, 2))), 1.0)


def classes_covered(counts: ArrayLike) -> int:
    """Number of classes with at least a trace of a sample (a count above 0)."""
    return int(np.count_nonzero(_vector("counts", counts) > 0))


def covers_all(entropy: float, num_classes: int) -> bool:
    """Whether this entropy alone proves that all classes are covered: H > log2(C - 1).

    Sufficient, not necessary: a skewed cohort may cover every class with less.
    """
    if num_classes < 1:
        raise InputError(f"num_classes: {num_classes!r} is out of range; accepted: 1 or more")
    # C - 1 classes that are perfectly even must not pass because their entropy was rounded up.
    return num_classes == 1 or entropy > float(np.log2(num_classes - 1)) + 1e-12


def row_scores(table: np.ndarray, log_target: np.ndarray | None = None) -> np.ndarray:
    """What the greedy choice maximises, for every row of non-negative counts: H(p), or -KL(p || target).

    `log_target` is log2 of the target distribution. This is the definition; the fast paths must agree with it. A row
    without any sample scores like one that holds nothing but the class with the least weight: as H, its score is the
    lowest there is, so no data is never the best data.
    """
    ones = _ones(table.shape[1])
    # Empty classes and rows meet the smallest positive number instead of 0, and contribute 0 all the same.
    totals = table @ ones
    p = table / np.maximum(totals, _TINY, out=totals)[:, None]
    terms = np.maximum(p, _TINY)
    np.log2(terms, out=terms)
    if log_target is not None:
        terms -= log_target
    terms *= p
    scores = terms @ ones
    np.negative(scores, out=scores)
    if log_target is not None:
        scores[totals <= _TINY] = log_target.min()
    return np.asarray(scores)


@cache
def _ones(size: int) -> np.ndarray:
    ones = np.ones(size)
    ones.flags.writeable = False
    return ones


def _vector(name: str, values: ArrayLike) -> np.ndarray:
    vector = np.asarray(values)
    if vector.ndim != 1 or vector.size == 0 or vector.dtype.kind not in "biuf":
        raise InputError(
            f"{name}: an array of shape {vector.shape} and type {vector.dtype}; accepted: a vector of numbers"
        )
    vector = vector.astype(np.float64)
    if not np.isfinite(vector).all():
        at = int(np.argmin(np.isfinite(vector)))
        raise InputError(f"{name}: {vector[at]} at position {at}; accepted: finite numbers")
    return np.asarray(np.maximum(vector, 0.0))
