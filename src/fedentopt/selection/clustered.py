"""What the three ways of clustered sampling share: M bins, one client drawn from each, each with weight 1/M.

Fraboni, Vidal, Kameni, Lorenzi: Clustered Sampling: Low-Variance and Improved Representativity for Clients Selection
in Federated Learning (ICML 2021). A client drawn from two bins is in the cohort once, with double weight. The paper
asks for p_k <= 1/M; a client with more fills several bins, and may be drawn from each. Bins are made of the
clients available, with their share of the samples available.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from typing import Any

import numpy as np

from fedentopt.selection.bins import Bins, bins_by_group, full_and_rest, whole_sizes
from fedentopt.selection.cohort import Cohort
from fedentopt.selection.selector import Selector
from fedentopt.selection.ward import cut_by_mass, scipy_part


class ClusteredSelector(Selector):
    """Draws one client from each of M distributions."""

    own_weights = True

    @abstractmethod
    def bins(self, available: np.ndarray) -> Bins:
        """The bins of this round, over places among the clients with these numbers."""

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Cohort:
        times = Counter(available[self.bins(available).draw(self.rng())].tolist())
        return self.cohort(list(times), weights=tuple(n / self.cohort_size for n in times.values()))


class TreeSelector(ClusteredSelector):
    """Algorithm 2: bins from groups of similar clients, cut from a tree."""

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        scipy_part("cluster.hierarchy", self.name)  # refused now, not in the first round

    @abstractmethod
    def tree(self, available: np.ndarray) -> np.ndarray:
        """Ward's tree over places among the clients with these numbers."""

    def bins(self, available: np.ndarray) -> Bins:
        sizes = whole_sizes(self.sizes[available], self.cohort_size)
        _, rest = full_and_rest(sizes, self.cohort_size)
        groups = cut_by_mass(self.tree(available), rest, int(sizes.sum()))
        return bins_by_group(sizes, groups, self.cohort_size, self.rng(1))
