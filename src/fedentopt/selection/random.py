"""Uniform random selection: M of the available clients, without replacement, all equally likely.

McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data (AISTATS 2017).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedentopt.selection.cohort import Cohort
from fedentopt.selection.selector import TableSelector, check_int

_DRAW = 0x5253  # keeps these draws apart from others made with the same seed


class RandomSelector(TableSelector):
    """Uniform selection. A draw is a function of (seed, round), so the state is two numbers."""

    name = "random"

    def __init__(self, cohort_size: int, seed: int = 0) -> None:
        super().__init__(cohort_size)
        self.seed = check_int("seed", seed, 0)

    def _pick(self, rows: np.ndarray) -> Cohort:
        rng = np.random.default_rng([self.seed, _DRAW, self._round])
        return self._cohort(rng.choice(rows, min(self.cohort_size, rows.size), replace=False).tolist())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the selector that made `state` stood; its seed becomes this one's."""
        self._check_state(state)
        seed = check_int("state: seed", state["seed"], 0)
        super().load_state_dict(state)
        self.seed = seed
