"""Sparse rows of label counts: only what a client holds is stored, so a thousand classes cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_CLASSES = 2**31  # class numbers are int32
_SCATTERED = 1 << 16  # classes beyond which those that nobody holds are left out of dense tables


@dataclass(frozen=True, eq=False)
class Rows:
    """Counts of several clients, row by row: row i holds `values[indptr[i]:indptr[i+1]]` of the classes
    `classes[indptr[i]:indptr[i+1]]`; every stored value is above 0.
    """

    indptr: np.ndarray  # int64 (R + 1,)
    classes: np.ndarray  # int32 (nnz,)
    values: np.ndarray  # float64 (nnz,)

    def __len__(self) -> int:
        return self.indptr.size - 1

    @classmethod
    def from_lengths(cls, lengths: np.ndarray, classes: np.ndarray, values: np.ndarray) -> Rows:
        """Rows of these lengths, entries in order."""
        indptr = np.zeros(lengths.size + 1, dtype=np.int64)
        np.cumsum(lengths, out=indptr[1:])
        return cls(indptr, classes, values)

    @classmethod
    def concatenate(cls, blocks: Sequence[Rows]) -> Rows:
        """All rows of all blocks, one after another."""
        if len(blocks) == 1:
            return blocks[0]
        lengths = np.concatenate([np.diff(block.indptr) for block in blocks] or [np.zeros(0, dtype=np.int64)])
        return cls.from_lengths(
            lengths,
            np.concatenate([block.classes for block in blocks] or [np.zeros(0, dtype=np.int32)]),
            np.concatenate([block.values for block in blocks] or [np.zeros(0)]),
        )

    def take(self, rows: np.ndarray) -> Rows:
        """The rows with these numbers, in this order."""
        starts = self.indptr[rows]
        lengths = self.indptr[rows + 1] - starts
        taken = Rows.from_lengths(lengths, self.classes[:0], self.values[:0])
        entries = np.arange(taken.indptr[-1]) + np.repeat(starts - taken.indptr[:-1], lengths)
        return Rows(taken.indptr, self.classes[entries], self.values[entries])

    def part(self, start: int, stop: int) -> Rows:
        """The rows from `start` up to `stop`, without a copy of their entries; `stop` may be beyond the last."""
        indptr = self.indptr[start : stop + 1]
        span = slice(indptr[0], indptr[-1])
        return Rows(indptr - indptr[0], self.classes[span], self.values[span])

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Classes and values of one row."""
        span = slice(self.indptr[i], self.indptr[i + 1])
        return self.classes[span], self.values[span]

    def owners(self) -> np.ndarray:
        """For every entry, the number of its row (int32)."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.indptr))

    def owner(self, entry: int) -> int:
        """The number of the row that one entry belongs to."""
        return int(np.searchsorted(self.indptr, entry, side="right")) - 1

    def filter(self, kept: np.ndarray) -> Rows:
        """The same rows with only the entries marked in the boolean vector `kept`."""
        before = np.concatenate(([0], np.cumsum(kept)))
        return Rows(before[self.indptr], self.classes[kept], self.values[kept])

    def repeated_class(self) -> int | None:
        """A row that names a class twice, or None."""
        owners, classes = self.owners(), self.classes
        if ((np.diff(classes) > 0) | (np.diff(owners) > 0)).all():  # sorted within rows, as they mostly are
            return None
        order = np.lexsort((classes, owners))
        owners, classes = owners[order], classes[order]
        same = (np.diff(owners) == 0) & (np.diff(classes) == 0)
        return int(owners[np.argmax(same)]) if same.any() else None

    def totals(self) -> np.ndarray:
        """Sum of every row."""
        return self.row_sums(self.values)

    def row_sums(self, entries: np.ndarray) -> np.ndarray:
        """Sum, row by row, of a value for every entry."""
        if not entries.size:
            return np.zeros(len(self))
        return np.bincount(self.owners(), weights=entries, minlength=len(self))

    def held_classes(self, num_classes: int) -> tuple[Rows, int]:
        """The same counts with fewer classes, for dense tables in which a class that nobody holds makes no difference.

        Only of very many classes, where such a table could be beyond all memory: leaving some out of sums changes their
        last digits.
        """
        if num_classes <= _SCATTERED:
            return self, num_classes
        held, numbers = np.unique(self.classes, return_inverse=True)
        return Rows(self.indptr, numbers.astype(np.int32), self.values), max(held.size, 1)

    def dense(self, num_classes: int) -> np.ndarray:
        """The same as a (R, C) float64 matrix."""
        table = np.zeros((len(self), num_classes))
        table[self.owners(), self.classes] = self.values
        return table
