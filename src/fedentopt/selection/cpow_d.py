"""Power-of-choice, cpow-d: candidates report the loss on one mini-batch, which costs them less.

Cho, Wang, Joshi (AISTATS 2022), section 3.1; see `power_of_choice`. The loss is the mean over min(b, n_k) samples
drawn anew each round.
"""

from __future__ import annotations

from fedentopt.selection.pow_d import PowDSelector
from fedentopt.selection.selector import selector
from fedentopt.settings import setting


@selector("cpow-d", label="Power-of-choice (batch)")
class CPowDSelector(PowDSelector):
    """Of `d` clients drawn by size, those with the largest loss on `batch` samples drawn anew; equal weights."""

    batch: int = setting(64, help="samples that a candidate looks at", low=1)

    @property
    def samples(self) -> int:
        return self.batch
