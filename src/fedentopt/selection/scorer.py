"""Which way of scoring serves a round best; all ways find the same clients."""

from __future__ import annotations

import numpy as np

from fedentopt.selection.columns import ColumnIndex, ColumnScores
from fedentopt.selection.scoring import ExactScores, Scores
from fedentopt.selection.table import CountTable

_FEW_CELLS = 1 << 14  # clients times classes up to which evaluating everything is faster than bookkeeping


class Scorer:
    """Starts rounds over a table of counts, keeping what can be kept from one round to the next."""

    def __init__(self, table: CountTable, log_target: np.ndarray | None) -> None:
        self._table = table
        self._log_target = log_target
        self._kept: tuple[int, np.ndarray | ColumnIndex] | None = None  # version of the table, and what was made of it

    def begin(self, rows: np.ndarray, closed: np.ndarray) -> Scores:
        """A round over the clients with these numbers; those at the places `closed` may not be picked yet."""
        open_rows = np.ones(rows.size, dtype=bool)
        open_rows[closed] = False
        if rows.size < len(self._table):
            prepared = self._prepare(rows)
        elif self._kept is not None and self._kept[0] == self._table.version:
            prepared = self._kept[1]
        else:
            prepared = self._prepare(None)
            self._kept = (self._table.version, prepared)
        if isinstance(prepared, ColumnIndex):
            return ColumnScores(prepared, open_rows)
        return ExactScores(prepared, open_rows, self._log_target)

    def _prepare(self, numbers: np.ndarray | None) -> np.ndarray | ColumnIndex:
        rows, classes = self._table.rows, self._table.num_classes
        assert classes is not None
        if numbers is not None:
            rows = rows.take(numbers)
        if len(rows) * classes <= _FEW_CELLS:
            return rows.dense(classes)
        return ColumnIndex(rows, classes, self._log_target)
