"""The greedy step of FedEntOpt: which open client, added to the labels gathered so far, scores best.

With L the labels gathered so far and l a client's counts, the score is H(L + l), or -KL(L + l || target). Scores
within 1e-9 bits of the best count as equal, and the client with the lowest number wins, so that no pick hangs
on rounding. `ExactScores` evaluates the definition for every client; `columns.ColumnScores` finds the
same client with far less work where there are many.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fedentopt.selection.measures import row_scores

TIE_BITS = 1e-9


class Scores(Protocol):
    """The scores of one round in the making."""

    open: np.ndarray  # bool (R,): may be picked

    def best(self) -> int:
        """The open row to pick next; at least one must be open and something gathered."""

    def gather(self, row: int) -> None:
        """Add a row's labels to the gathered ones and close it."""

    def admit(self, row: int) -> None:
        """Open a row that was closed."""


def lowest_within_tie(scores: np.ndarray) -> int:
    """Place of the first score that counts as equal to the best one."""
    return int(np.argmax(scores >= scores.max() - TIE_BITS))


class ExactScores:
    """The definition, evaluated for every row: the reference, and the fastest way for a hundred clients."""

    def __init__(self, table: np.ndarray, open_rows: np.ndarray, log_target: np.ndarray | None) -> None:
        self.open = open_rows.copy()
        self._bar = np.where(open_rows, 0.0, -np.inf)
        self._table = table
        self._log_target = log_target
        self._gathered = np.zeros(table.shape[1])

    def best(self) -> int:
        scores = row_scores(self._table + self._gathered, self._log_target)
        scores += self._bar
        return lowest_within_tie(scores)

    def gather(self, row: int) -> None:
        self._gathered += self._table[row]
        self.open[row] = False
        self._bar[row] = -np.inf

    def admit(self, row: int) -> None:
        self.open[row] = True
        self._bar[row] = 0.0
