"""Power-of-choice, rpow-d: no question; the loss that clients told when they last trained stands for the present one.

Cho, Wang, Joshi (AISTATS 2022), section 3.1; see `power_of_choice`. A client's loss is the mean over the samples of
all local steps of its last round; that of a client that has not trained yet is infinite, so everybody is tried first
(in the order drawn).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from fedentopt.selection.cohort import ClientId, Cohort
from fedentopt.selection.feedback import Observation
from fedentopt.selection.per_client import ClientFigures, as_pairs, read_pairs
from fedentopt.selection.power_of_choice import PowerOfChoice
from fedentopt.selection.selector import selector


@selector("rpow-d", label="Power-of-choice (recent)")
class RPowDSelector(PowerOfChoice):
    """Of `d` clients drawn by size, those with the largest loss when they last trained; equal weights."""

    needs: ClassVar[frozenset[str]] = frozenset({"loss"})

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self._losses_told = ClientFigures(np.nan)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Cohort:
        drawn = self.drawn(available)
        told = self._losses_told.by_number(self._table)[drawn]
        untried, tried = drawn[np.isnan(told)][: self.cohort_size], drawn[~np.isnan(told)]
        best = tried[np.lexsort((tried, -told[~np.isnan(told)]))]
        picked = [*untried.tolist(), *best.tolist()][: self.cohort_size]
        return self.cohort(picked, weights=(1 / len(picked),) * len(picked))

    def observe(self, observations: Mapping[ClientId, Observation]) -> None:
        """Keep the losses of those that trained."""
        for client, seen in observations.items():
            if seen.loss is not None and math.isfinite(seen.loss) and client in self._table:
                self._losses_told[client] = float(seen.loss)

    def forget_clients(self, gone: Collection[ClientId]) -> None:
        self._losses_told.forget(gone)

    def memory(self) -> dict[str, Any]:
        return {"losses": as_pairs(self._losses_told)}

    def remember(self, memory: Mapping[str, Any]) -> None:
        self._losses_told = ClientFigures(np.nan, read_pairs("losses", memory["losses"]))
