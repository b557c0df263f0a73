"""Which clients can still be the best pick: a bound that one matrix product evaluates for all of them.

With q the target (uniform for entropy), L the gathered labels, l a client's counts and p = (L + l) / |L + l|, let

    chi2 = sum_c (p_c - q_c)**2 / q_c  =  (b(l) + 2 sum_c l_c y_c + b(L)) / (|L| + |l|)**2,
    b(x) = sum_c x_c**2 / q_c - |x|**2,    y_c = (L_c - |L| q_c) / q_c

of which b(l) never changes. Since (1 + x) ln(1 + x) - x >= x**2 / (2 (1 + x / 3)), and no p_c / q_c - 1 is above
m sqrt(chi2) with m = max_c q_c**-0.5,

    ln 2 KL(p || q) >= chi2 / (2 (1 + m sqrt(chi2) / 3))

so whoever reaches a divergence has a chi2 below a limit. The closer to the target, the sharper that is: as a rule a
handful of clients is left, whose divergence is then evaluated. The product is in single precision, and the limit wider
by what that can be off.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fedentopt.selection.rows import Rows

_CHUNK = 1 << 15  # clients worked on at a time, so that what is touched stays in the cache
_FEW = 16  # at most every 16th row may be left, else evaluating all of them is as good
_LEAST_WEIGHT = 1e-6  # of a class in the target: with less, chi2 says little about the divergence
_LEAST_SIZE = 1e-9  # of the gathered labels, relative to the largest client: with less, single precision runs out
_EPS = float(np.finfo(np.float32).eps)


class Screen:
    """The rows of counts in single precision, class by class, relative to the largest row."""

    def __init__(self, rows: Rows, totals: np.ndarray, target: np.ndarray) -> None:
        self._target = target
        self._scale = max(float(totals.max(initial=0.0)), float(np.finfo(np.float64).tiny))
        self._counts: list[np.ndarray] = []  # a chunk each: of part of one matrix, NumPy would multiply a copy
        self._own = np.empty(len(rows), dtype=np.float32)
        self._sizes = (totals / self._scale).astype(np.float32)
        for start in range(0, len(rows), _CHUNK):
            part = rows.part(start, start + _CHUNK)
            shares = part.values / self._scale
            counts = np.zeros((target.size, len(part)), dtype=np.float32)
            counts[part.classes, part.owners()] = shares
            self._counts.append(counts)
            shares **= 2
            shares /= target[part.classes]
            own = part.row_sums(shares) - (totals[start : start + _CHUNK] / self._scale) ** 2
            self._own[start : start + _CHUNK] = np.maximum(own, 0.0)
        self._chi2 = np.empty(len(rows), dtype=np.float32)
        self._scratch = np.empty(min(_CHUNK, len(rows)), dtype=np.float32)

    @staticmethod
    def serves(rows: Rows, target: np.ndarray) -> bool:
        """Whether the counts, with all their zeros, are worth a matrix, and the target is one the bound can take."""
        cells = len(rows) * target.size
        return bool(target.min() >= _LEAST_WEIGHT) and cells <= max(4 * rows.values.size, 32 * len(rows))

    def candidates(
        self, gathered: np.ndarray, open_rows: np.ndarray, divergences: Callable[[np.ndarray], np.ndarray], tie: float
    ) -> np.ndarray | None:
        """Rows, ascending, that hold every open row within `tie` bits of the best pick; None if that saves little.

        `divergences` gives KL(L + l || q) of rows, exactly.
        """
        labels = gathered / self._scale
        size = float(labels.sum())
        if size < _LEAST_SIZE:
            return None
        excess = labels / size / self._target - 1.0
        own = float((self._target * excess**2).sum())
        least = self._work_out(size, excess, own, open_rows)
        start = int(np.argmin(least)) * _CHUNK
        best = start + int(np.argmin(self._chi2[start : start + _CHUNK]))
        if not open_rows[best]:  # nobody is open
            return None
        divergence = max(float(divergences(np.array([best]))[0]), 0.0)
        limit = self._limit(divergence + 2 * tie, excess, own)
        near = np.concatenate(
            [
                i * _CHUNK + np.flatnonzero(self._chi2[i * _CHUNK : (i + 1) * _CHUNK] <= limit)
                for i in np.flatnonzero(least <= limit)
            ]
        )
        return near if near.size * _FEW <= self._chi2.size else None

    def spread(self, gathered: np.ndarray, open_rows: np.ndarray) -> tuple[np.ndarray, float, float] | None:
        """chi2 of all rows in single precision, infinite for closed ones, and bounds (a, r): the true one is at least
        (chi2 - a) / (1 + r). None where too little is gathered. The array is the same one each time."""
        labels = gathered / self._scale
        size = float(labels.sum())
        if size < _LEAST_SIZE:
            return None
        excess = labels / size / self._target - 1.0
        own = float((self._target * excess**2).sum())
        self._work_out(size, excess, own, open_rows)
        # `_rounding` at chi, with (chi + sqrt(own))**2 <= 2 chi**2 + 2 own
        unit = 4 * _EPS * (self._target.size + 8)
        return self._chi2, unit * (float(np.abs(excess).max()) / 2 + 3 * own), 2 * unit

    def _work_out(self, size: float, excess: np.ndarray, own: float, open_rows: np.ndarray) -> np.ndarray:
        """chi2 of all rows, infinite for closed ones; returns the least of every chunk."""
        y = (2 * size * excess).astype(np.float32)
        base, whole = np.float32(own * size**2), np.float32(size)
        least = []
        for start, counts in zip(range(0, self._chi2.size, _CHUNK), self._counts, strict=True):
            span = slice(start, start + _CHUNK)
            chi2 = self._chi2[span]
            np.dot(y, counts, out=chi2)
            chi2 += self._own[span]
            chi2 += base
            sizes = np.add(self._sizes[span], whole, out=self._scratch[: chi2.size])
            sizes *= sizes
            chi2 /= sizes
            np.copyto(chi2, np.inf, where=~open_rows[span])
            least.append(chi2.min())
        return np.array(least)

    def _limit(self, divergence: float, excess: np.ndarray, own: float) -> float:
        """What chi2, as worked out, is at most for a row with at most this divergence."""
        k = math.log(2) * divergence
        middle = k / 3 / math.sqrt(self._target.min())
        chi = middle + math.sqrt(middle**2 + 2 * k)
        return chi**2 + self._rounding(chi, excess, own)

    def _rounding(self, chi: float, excess: np.ndarray, own: float) -> float:
        """By how much chi2 may be off where it is chi**2.

        A product of C terms is off by C units in the last place of the sum of their sizes at most, and a few roundings
        follow. With e the largest excess, |L| |l| <= (|L| + |l|)**2 / 4 bounds that sum by e / 2, relative to the
        divisor; and by the triangle inequality sqrt(b(l)) / (|L| + |l|) is at most chi + sqrt(b(L)) / |L|.
        """
        magnitude = float(np.abs(excess).max()) / 2 + (chi + math.sqrt(own)) ** 2 + own
        return 4 * _EPS * (self._target.size + 8) * magnitude
