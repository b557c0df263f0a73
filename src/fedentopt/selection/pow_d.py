"""Power-of-choice, pow-d: candidates report the loss of the global model on all their data.

Cho, Wang, Joshi (AISTATS 2022); see `power_of_choice`. Each round costs the d candidates the global model and a
forward pass over their whole training data, and the server d numbers. A candidate that does not answer trains only if
too few others do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from fedentopt.selection.cohort import ClientId, Cohort
from fedentopt.selection.feedback import Candidates
from fedentopt.selection.power_of_choice import PowerOfChoice
from fedentopt.selection.selector import selector


@selector("pow-d", label="Power-of-choice")
class PowDSelector(PowerOfChoice):
    """Of `d` clients drawn by size, those with the largest loss on all their data; equal weights."""

    needs: ClassVar[frozenset[str]] = frozenset({"candidate_loss"})

    def candidates(self, available: Iterable[ClientId] | None = None) -> Candidates:
        drawn = self.drawn(self.available_numbers(available))
        return Candidates(tuple(self._table.ids[number] for number in drawn), self.samples)

    @property
    def samples(self) -> int | None:
        """How many samples a candidate looks at; None: all."""
        return None

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Cohort:
        """Among those who answered, and then the other candidates; clients may have come or gone since."""
        drawn = self.drawn(available)
        if losses is None:
            return self.largest_loss(drawn, np.full(drawn.size, np.nan))
        answered = available[~np.isnan(losses[available])]
        others = drawn[~np.isin(drawn, answered)]
        return self.largest_loss(np.concatenate([answered, others]), losses[np.concatenate([answered, others])])
