"""FedEntOpt with exchanges: the greedy cohort, improved until no single exchange raises its entropy.

A method of this project. After FedEntOpt's greedy choice (`entropy`) each member in turn, in the order picked, is
replaced by the client outside that makes the cohort's label entropy (with a target: the negative divergence) highest,
where that gains more than 1e-9 bits, and so on until nobody can be replaced. Who is in the buffer stays out; a client
that enters takes the place in the buffer of the one it replaces, which is free again. The first client, drawn
uniformly, may be replaced too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from fedentopt.selection.cohort import ClientId
from fedentopt.selection.entropy import EntropySelector
from fedentopt.selection.measures import row_scores
from fedentopt.selection.scorer import FEW_CELLS
from fedentopt.selection.scoring import TIE_BITS, lowest_within_tie
from fedentopt.selection.selector import selector
from fedentopt.settings import setting


@selector("fedentopt-swap", label="FedEntOpt + swaps")
class EntropySwapSelector(EntropySelector):
    """FedEntOpt's cohort, then exchanges of single clients until none raises the entropy; the same buffer."""

    run_settings: ClassVar[Mapping[str, Any]] = {
        **EntropySelector.run_settings,
        "buffer": setting("50%", help="buffer, Q: a number or a per cent of K, at most K-M", amount=True),
    }

    def exchange(
        self, picked: list[int], buffer: OrderedDict[ClientId, None], rows: np.ndarray, closed: np.ndarray
    ) -> list[int]:
        picked = list(picked)
        place, kept = 0, 0  # members in a row that nobody could replace
        small = self._small_table(rows, closed)
        while kept < len(picked):
            better = (
                self._better(picked, place, rows, closed) if small is None else self._better_of(small, picked, place)
            )
            kept += 1
            if better is not None:
                _take_place(buffer, self._table.ids[picked[place]], self._table.ids[better])
                picked[place], kept = better, 1
            place = (place + 1) % len(picked)
        return picked

    def _small_table(self, rows: np.ndarray, closed: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Those who may be in the cohort, ascending, and their counts; None where they are many."""
        classes = self._table.num_classes or 1
        if (rows.size - closed.size) * classes > FEW_CELLS:
            return None
        among = np.setdiff1d(rows, closed, assume_unique=True)
        return among, self._table.rows.take(among).dense(classes)

    def _better_of(self, small: tuple[np.ndarray, np.ndarray], picked: list[int], place: int) -> int | None:
        """The same as `_better`, by definition."""
        among, counts = small
        places = np.searchsorted(among, picked)
        others = np.delete(places, place)
        scores = row_scores(counts + counts[others].sum(axis=0), self._log_scores)
        present = scores[places[place]]
        scores[others] = -np.inf
        best = lowest_within_tie(scores)
        return int(among[best]) if scores[best] > present + TIE_BITS else None

    def _better(self, picked: list[int], place: int, rows: np.ndarray, closed: np.ndarray) -> int | None:
        """Who should have that member's place, if anybody."""
        scores = self._scorer.begin(rows, closed)
        for i, number in enumerate(picked):
            if i != place:
                scores.gather(number)
        best = scores.best()
        both = self._table.rows.take(np.array([best, picked[place]])).dense(self._table.num_classes or 1)
        others = self._table.rows.take(np.array(picked[:place] + picked[place + 1 :], dtype=np.int64))
        both += others.dense(self._table.num_classes or 1).sum(axis=0)
        found, present = row_scores(both, self._log_scores)
        return best if found > present + TIE_BITS else None


def _take_place(buffer: OrderedDict[ClientId, None], old: ClientId, new: ClientId) -> None:
    """Put a client where another was in the buffer; if that one has left it already, so has this one."""
    if old not in buffer:
        return
    entries = [new if client == old else client for client in buffer]
    buffer.clear()
    buffer.update(dict.fromkeys(entries))
