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
    """The scores of one round in the making, over clients by number."""

    def candidates(self) -> np.ndarray:
        """Those that may be picked, ascending."""

    def best(self) -> int:
        """The one to pick next; there must be a candidate, and something gathered."""

    def gather(self, row: int) -> None:
        """Add a client's labels to the gathered ones; it is no candidate any more."""

    def admit(self, row: int) -> None:
        """Make a client a candidate."""


def lowest_within_tie(scores: np.ndarray) -> int:
    """Place of the first score that counts as equal to the best one."""
    return int(np.argmax(scores >= scores.max() - TIE_BITS))


class ExactScores:
    """The definition, evaluated for every row: the reference, and the fastest way for a hundred clients."""

    def __init__(self, table: np.ndarray, open_rows: np.ndarray, log_target: np.ndarray | None) -> None:
        self._bar = np.where(open_rows, 0.0, -np.inf)
        self._table = table
        self._log_target = log_target
        self._gathered = np.zeros(table.shape[1])

    def candidates(self) -> np.ndarray:
        return np.flatnonzero(self._bar == 0)

    def best(self) -> int:
        scores = row_scores(self._table + self._gathered, self._log_target)
        scores += self._bar
        return lowest_within_tie(scores)

    def gather(self, row: int) -> None:
        self._gathered += self._table[row]
        self._bar[row] = -np.inf

    def admit(self, row: int) -> None:
        self._bar[row] = 0.0
