"""Which way of scoring serves a round best; all ways find the same clients."""

from __future__ import annotations

import numpy as np

from fedentopt.selection.columns import ColumnIndex, ColumnScores
from fedentopt.selection.rows import Rows
from fedentopt.selection.scoring import ExactScores, Scores
from fedentopt.selection.table import CountTable

FEW_CELLS = 1 << 14  # clients times classes up to which evaluating everything is faster than bookkeeping


class Scorer:
    """Starts rounds over a table of counts, keeping what can be kept from one round to the next."""

    def __init__(self, table: CountTable, log_target: np.ndarray | None) -> None:
        self._table = table
        self._log_target = log_target
        self._kept: tuple[int, np.ndarray | ColumnIndex] | None = None  # version of the table, and what was made of it
        self._few: tuple[int, np.ndarray, np.ndarray | ColumnIndex] | None = None  # the same, of these rows

    def begin(self, rows: np.ndarray, closed: np.ndarray) -> Scores:
        """A round over the clients with the numbers `rows`, ascending; those in `closed` may not be picked yet."""
        open_rows = np.zeros(len(self._table), dtype=bool)
        open_rows[rows] = True
        open_rows[closed] = False
        if 2 * rows.size < len(self._table):  # of the few who are here, a table of their own
            few = self._few
            if few is None or few[0] != self._table.version or not np.array_equal(few[1], rows):
                few = self._few = (self._table.version, rows.copy(), self._prepare(self._table.rows.take(rows)))
            return _Few(rows, self._start(few[2], open_rows[rows]))
        if self._kept is None or self._kept[0] != self._table.version:
            self._kept = (self._table.version, self._prepare(self._table.rows))
        return self._start(self._kept[1], open_rows)

    def _prepare(self, rows: Rows) -> np.ndarray | ColumnIndex:
        classes = self._table.num_classes
        assert classes is not None
        if len(rows) * classes <= FEW_CELLS:
            return rows.dense(classes)
        return ColumnIndex(rows, classes, self._log_target)

    def _start(self, prepared: np.ndarray | ColumnIndex, open_rows: np.ndarray) -> Scores:
        if isinstance(prepared, ColumnIndex):
            return ColumnScores(prepared, open_rows)
        return ExactScores(prepared, open_rows, self._log_target)


class _Few:
    """Scores over some of the clients: numbers outside, places among those few inside."""

    def __init__(self, rows: np.ndarray, scores: Scores) -> None:
        self._rows = rows
        self._scores = scores

    def candidates(self) -> np.ndarray:
        return np.asarray(self._rows[self._scores.candidates()])

    def best(self) -> int:
        return int(self._rows[self._scores.best()])

    def gather(self, row: int) -> None:
        self._scores.gather(int(np.searchsorted(self._rows, row)))

    def admit(self, row: int) -> None:
        self._scores.admit(int(np.searchsorted(self._rows, row)))
