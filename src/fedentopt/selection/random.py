"""Uniform random selection: M of the available clients, without replacement, all equally likely.

McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data (AISTATS 2017).
"""

from __future__ import annotations

import numpy as np

from fedentopt.selection.selector import Selector, selector


@selector("random", label="Random")
class RandomSelector(Selector):
    """Uniform selection. A draw is a function of (seed, round), so the state is two numbers."""

    reads_label_counts = False
    stream = 0x5253

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        drawn: list[int] = self.rng().choice(available, min(self.cohort_size, available.size), replace=False).tolist()
        return drawn
