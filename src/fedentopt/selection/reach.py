"""Which clients can still be the best pick: a bound that rules most of them out unseen.

With q the target (uniform for entropy), let e(x) = sum_c |x_c - |x| q_c| be the imbalance of counts x. By Pinsker's
inequality and the triangle inequality, a client with counts l added to gathered labels L has

    KL(L + l || q) >= ((e(l) - e(L)) / (|L| + |l|))**2 / (2 ln 2)      where e(l) > e(L)

so to reach a divergence of k bits it needs e(l) <= e(L) + t (|L| + |l|) with t = sqrt(2 ln 2 k): when the cohort
is nearly balanced, only clients that are small or balanced themselves can help, and with clients sorted by
imbalance those come first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from fedentopt.selection.rows import Rows

_PROBE = 2048
_FEW = 16  # narrowing down must leave at most every 16th row to be worth it
_SLACK = 1e-6  # relative widening of the bound, far above its own rounding


class Reach:
    """The rows in classes of similar size, each in order of imbalance, so that those in reach come first."""

    def __init__(self, rows: Rows, totals: np.ndarray, target: np.ndarray) -> None:
        self._target = target
        # |x_c - n q_c| for the classes a row holds, n q_c for all the others.
        due = np.repeat(totals, np.diff(rows.indptr)) * target[rows.classes]
        imbalance = totals + rows.row_sums(np.abs(rows.values - due) - due)
        size_class = np.frexp(totals)[1]
        self._order = np.lexsort((imbalance, size_class))
        self._imbalance = imbalance[self._order]
        self._totals = totals[self._order]
        edges = np.flatnonzero(np.diff(size_class[self._order])) + 1
        self._spans = [slice(a, b) for a, b in pairwise([0, *edges.tolist(), len(rows)])]
        self._largest = [float(self._totals[span].max()) for span in self._spans]

    def candidates(
        self, gathered: np.ndarray, open_rows: np.ndarray, divergences: Callable[[np.ndarray], np.ndarray], tie: float
    ) -> np.ndarray | None:
        """Rows, ascending, that hold every open row within `tie` bits of the best pick; None if that saves little.

        `divergences` gives KL(L + l || q) of rows, exactly.
        """
        size = float(gathered.sum())
        own = float(np.abs(gathered - size * self._target).sum()) * (1 + _SLACK)
        few = self._order.size // _FEW
        if _length(self._within(own, 0.0, size)) > few:  # even a perfect pick would leave too many in reach
            return None
        least, spans, shrinking = np.inf, self._spans, True
        while shrinking:
            depth = _length(spans)
            step = max(1, depth // _PROBE)
            probe = np.concatenate([self._order[span.start : span.stop : step] for span in spans])
            least = min(least, float(divergences(probe[open_rows[probe]]).min(initial=np.inf)))
            if least == np.inf:  # hardly anybody is open
                return None
            t = math.sqrt(2 * math.log(2) * (max(least, 0.0) + 2 * tie)) * (1 + _SLACK)
            spans = self._within(own, t, size)
            shrinking = _length(spans) < depth // 2
        if _length(spans) > 4 * few:
            return None
        near = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        near = near[self._imbalance[near] - t * self._totals[near] <= own + t * size]
        rows = np.sort(self._order[near])
        rows = rows[open_rows[rows]]
        return rows if rows.size <= few else None

    def _within(self, own: float, t: float, size: float) -> list[slice]:
        """The stretches of the order that hold all rows with e <= own + t (size + n)."""
        spans = []
        for span, largest in zip(self._spans, self._largest, strict=True):
            depth = np.searchsorted(self._imbalance[span], own + t * (size + largest), side="right")
            spans.append(slice(span.start, span.start + int(depth)))
        return spans


def _length(spans: list[slice]) -> int:
    return int(sum(span.stop - span.start for span in spans))
