"""The greedy step for many clients: keep every client's score up to date instead of computing it anew.

With f(x) = x log2 x, f(0) = 0, N = |L + l| and q the target where there is one, a client with counts l scores

    H(L + l) + sum_c p_c log2 q_c  =  log2 N - (B + g - sum_c (L_c + l_c) log2 q_c) / N,
    B = sum_c f(L_c),    g = sum over the classes c the client holds of f(L_c + l_c) - f(L_c)

so when a client joins the cohort, g changes only for clients that hold one of *its* classes, and by an amount that
depends on l_c alone: looked up in a small table where counts are whole. A class held by few clients is a list of
them, one held by many a full column. All that is made when first
a pick comes that the screen (`screen.py`) leaves open.

Rounding makes these scores differ from the definition by at most a bound that is carried along; a pick that the
bound leaves open is settled by the definition itself. So the client found is always the one `ExactScores` finds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedentopt.selection.measures import row_scores
from fedentopt.selection.rows import Rows
from fedentopt.selection.scoring import TIE_BITS, lowest_within_tie
from fedentopt.selection.screen import Screen

_CHUNK = 1 << 14  # clients worked on at a time, so that what is touched stays in the cache
_LARGEST_TABLE = 1 << 16
_CELLS = 1 << 20
_MANY = 1 << 12  # rows from which on ruling most of them out pays for itself
_TINY = np.finfo(np.float64).tiny
_WORST_ERROR = 1e-10  # bits; beyond it the scores are summed up afresh


def _xlog2x(x: np.ndarray) -> np.ndarray:
    return np.asarray(x * np.log2(x + (x == 0)))


@dataclass(frozen=True, eq=False)
class Column:
    """The counts of one class: of the clients `rows` only, or of all of them where `rows` is None."""

    rows: np.ndarray | None
    values: np.ndarray  # int32 where whole and small enough for a table, else float64
    largest: int  # the largest count where `values` is int32, else 0

    @classmethod
    def build(cls, rows: np.ndarray, values: np.ndarray, clients: int) -> Column:
        """The column of the clients `rows`, ascending, which hold `values` of the class."""
        # A table pays where it is shorter than the column and fits the cache.
        small = bool(values.size) and values.max() < min(_LARGEST_TABLE, values.size)
        whole = small and bool((values == np.floor(values)).all())
        values = values.astype(np.int32) if whole else values
        largest = int(values.max()) if whole else 0
        if 4 * rows.size < clients:
            return cls(rows, values, largest)
        full = np.zeros(clients, dtype=values.dtype)
        full[rows] = values
        return cls(None, full, largest)

    def change(self, before: float, after: float) -> ColumnChange:
        """How g changes for holders of this class when L_c goes from `before` to `after`."""
        table = _growth(np.arange(self.largest + 1.0), before, after) if self.values.dtype == np.int32 else None
        return ColumnChange(self, before, after, table)


@dataclass(frozen=True, eq=False)
class ColumnChange:
    """One class whose gathered count went from `before` to `after`; `table` is by count, where there is one."""

    column: Column
    before: float
    after: float
    table: np.ndarray | None

    def amounts(self, span: slice, out: np.ndarray | None = None) -> np.ndarray:
        """What to add to g for the entries `span` of the column, in `out` where that saves an array."""
        values = self.column.values[span]
        if self.table is None:
            return _growth(values, self.before, self.after)
        return self.table.take(values, out=out, mode="clip")


def _growth(x: np.ndarray, before: float, after: float) -> np.ndarray:
    """(f(after + x) - f(after)) - (f(before + x) - f(before)), in as few arrays as it takes."""
    larger = x + after
    growth = np.log2(larger)
    growth *= larger
    smaller = np.add(x, before, out=larger)
    loss = np.log2(np.maximum(smaller, _TINY))  # f(0) = 0
    loss *= smaller
    growth -= loss
    growth += float(_xlog2x(np.asarray(before)) - _xlog2x(np.asarray(after)))
    return np.asarray(growth)


class ColumnIndex:
    """What the scores of any round over the same rows share."""

    def __init__(self, rows: Rows, num_classes: int, log_target: np.ndarray | None) -> None:
        self.rows = rows
        self.num_classes = num_classes
        self.log_target = log_target
        self.totals = rows.totals()
        self.screen = None
        if len(rows) >= _MANY:
            target = np.full(num_classes, 1 / num_classes) if log_target is None else np.exp2(log_target)
            if Screen.serves(rows, target):
                self.screen = Screen(rows, self.totals, target)

    @cached_property
    def own(self) -> np.ndarray:
        """g for L = 0."""
        return self.rows.row_sums(_xlog2x(self.rows.values))

    @cached_property
    def pull(self) -> np.ndarray | None:
        """sum_c l_c log2 q_c of every row, where there is a target."""
        if self.log_target is None:
            return None
        return self.rows.row_sums(self.rows.values * self.log_target[self.rows.classes])

    @cached_property
    def log_scale(self) -> float:
        """Bound on the logarithms that occur, for the bound on rounding."""
        logs = [1.0, float(np.log2(max(self.totals.max(), 1.0)))]
        if self.rows.values.size:
            logs.append(-float(np.log2(self.rows.values.min())))
        return max(logs) + (0.0 if self.log_target is None else float(-self.log_target.min()))

    @cached_property
    def columns(self) -> list[Column]:
        """The counts class by class."""
        owners, classes = self.rows.owners(), self.rows.classes
        # Stable, so clients stay in order within a class; on 16-bit keys NumPy sorts by radix.
        keys = classes.astype(np.uint16) if self.num_classes < 1 << 16 else classes
        order = np.argsort(keys, kind="stable")
        ends = np.cumsum(np.bincount(classes, minlength=self.num_classes))
        return [
            Column.build(owners[entries], self.rows.values[entries], len(self.rows))
            for entries in np.split(order, ends[:-1])
        ]

    def screened(self, gathered: np.ndarray, open_rows: np.ndarray) -> np.ndarray | None:
        """The few rows among which the best pick must be, or None where a bound cannot narrow it down."""
        if self.screen is None:
            return None
        top = np.log2(self.num_classes) if self.log_target is None else 0.0
        return self.screen.candidates(gathered, open_rows, lambda rows: top - self.exact(rows, gathered), TIE_BITS)

    def exact(self, places: np.ndarray, gathered: np.ndarray) -> np.ndarray:
        """Scores of these rows by definition."""
        step = max(1, _CELLS // self.num_classes)
        scores = np.empty(places.size)
        for i in range(0, places.size, step):
            table = self.rows.take(places[i : i + step]).dense(self.num_classes)
            scores[i : i + step] = row_scores(table + gathered, self.log_target)
        return scores


class ColumnScores:
    """Scores of one round over a `ColumnIndex`; closed rows carry g = infinity and so never win."""

    def __init__(self, index: ColumnIndex, open_rows: np.ndarray) -> None:
        self._open = open_rows.copy()
        self._index = index
        self._gathered = np.zeros(index.num_classes)
        self._worked_in = np.zeros(index.num_classes)  # the gathered labels that g knows of
        self._g = np.empty(0)  # made when it is first needed
        self._passes = self._columns_done = 0  # since g was last summed up afresh
        self._pause = self._unasked = 0
        self._scratch = np.empty((2, min(_CHUNK, open_rows.size)))

    def candidates(self) -> np.ndarray:
        return np.flatnonzero(self._open)

    def gather(self, row: int) -> None:
        classes, values = self._index.rows.row(row)
        self._gathered[classes] += values
        self._open[row] = False
        if self._g.size:
            self._g[row] = np.inf

    def admit(self, row: int) -> None:
        self._open[row] = True
        if not self._g.size:
            return
        classes, values = self._index.rows.row(row)
        held = self._worked_in[classes]
        self._g[row] = (_xlog2x(held + values) - _xlog2x(held)).sum()

    def best(self) -> int:
        # With nothing but empty reports so far, log2 0 would have no place below.
        places = self._screened() if self._gathered.any() else np.flatnonzero(self._open)
        if places is not None:
            return int(places[lowest_within_tie(self._index.exact(places, self._gathered))])
        if not self._g.size:
            self._g = np.where(self._open, self._index.own, np.inf)
        changes = self._changes()
        error = self._error(0, 0)
        tops = np.array([self._work_in(changes, start).max() for start in range(0, self._open.size, _CHUNK)])
        best = tops.max()
        # The first row that may count as equal to the best...
        start = int(np.argmax(tops >= best - TIE_BITS - 2 * error)) * _CHUNK
        scores = self._scores(start)
        place = int(np.argmax(scores >= best - TIE_BITS - 2 * error))
        if scores[place] >= best - TIE_BITS + 2 * error:  # ... does so whatever the rounding was
            return start + place
        return self._settle(best - TIE_BITS - 2 * error)

    def _screened(self) -> np.ndarray | None:
        """Rows that hold the best pick, if they are few. While they are not, ever more picks pass without asking."""
        if self._unasked:
            self._unasked -= 1
            return None
        places = self._index.screened(self._gathered, self._open)
        self._pause = 2 * self._pause + 1 if places is None else 0
        self._unasked = self._pause
        return places

    def _settle(self, threshold: float) -> int:
        """The pick by definition, among all rows that may count as equal to the best."""
        near = np.concatenate(
            [start + np.flatnonzero(self._scores(start) >= threshold) for start in range(0, self._open.size, _CHUNK)]
        )
        return int(near[lowest_within_tie(self._index.exact(near, self._gathered))])

    def _scores(self, start: int) -> np.ndarray:
        """Scores of one chunk, as far as worked in; valid until the next call."""
        index, span = self._index, slice(start, start + _CHUNK)
        size = min(_CHUNK, self._open.size - start)
        n, scores = self._scratch[0, :size], self._scratch[1, :size]
        base = float(_xlog2x(self._gathered).sum())
        np.add(index.totals[span], self._gathered.sum(), out=n)
        if index.pull is None:
            np.add(self._g[span], base, out=scores)
        else:
            assert index.log_target is not None
            np.subtract(self._g[span], index.pull[span], out=scores)
            scores += base - float(self._gathered @ index.log_target)
        scores /= n
        np.log2(n, out=n)
        return np.subtract(n, scores, out=scores)

    def _changes(self) -> list[ColumnChange]:
        """Bring g up to the gathered labels in all short columns; returns what is left to do in the full ones."""
        changed = np.flatnonzero(self._gathered != self._worked_in)
        held = np.flatnonzero(self._gathered)
        if self._error(1, changed.size) > _WORST_ERROR and self._columns_done > 4 * held.size:
            self._g = np.where(self._open, self._index.own, np.inf)
            self._worked_in[:] = 0
            self._passes = self._columns_done = 0
            changed = held
        self._passes += 1
        self._columns_done += changed.size
        changes = [self._index.columns[c].change(self._worked_in[c], self._gathered[c]) for c in changed]
        self._worked_in[:] = self._gathered
        for change in changes:
            if change.column.rows is not None:
                self._g[change.column.rows] += change.amounts(slice(None))
        return [change for change in changes if change.column.rows is None]

    def _work_in(self, changes: list[ColumnChange], start: int) -> np.ndarray:
        """Work changes of full columns into one chunk of g; returns its scores, while it is in the cache."""
        span = slice(start, start + _CHUNK)
        g = self._g[span]
        for change in changes:
            g += change.amounts(span, out=self._scratch[0, : g.size])
        return self._scores(start)

    def _error(self, more_passes: int, more_columns: int) -> float:
        """Bound on the error of a score after so many passes and columns more.

        With N the size of cohort and client together, a pass adds for every changed class four values of f, each
        off by a few units in the last place of x log2 x, x summing up to N at most over the classes: 40 such
        units of N log2 N are ample. Every column adds one rounding of g itself, and the score a fixed number.
        """
        log_n = self._index.log_scale + float(np.log2(1.0 + self._gathered.sum()))
        units = 40.0 * (self._passes + more_passes + 4) + 2.0 * (self._columns_done + more_columns)
        return float(np.finfo(np.float64).eps) * log_n * units
