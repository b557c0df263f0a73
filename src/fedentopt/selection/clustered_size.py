"""Clustered sampling by sizes: M distributions from the numbers of samples alone.

Fraboni et al. (ICML 2021), Algorithm 1. Clients are ordered by p_k = n_k / sum n, largest first (ties: registered
first), and their masses M p_k poured into M bins of capacity 1, one after the other; a client that does not fit goes
on into the next bin. One client is drawn from each bin by its mass there and weighs 1/M, so that E[weight of k] = p_k:
the average is unbiased, and no client with p_k <= 1/M can fill more than two seats.

Masses are whole numbers here (`bins`), where the authors' code rounds to 10^-10.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedentopt.selection.bins import Bins, bins_by_size, whole_sizes
from fedentopt.selection.clustered import ClusteredSelector
from fedentopt.selection.selector import selector


@selector("clustered-size", label="Clustered (sizes)")
class ClusteredSizeSelector(ClusteredSelector):
    """One client from each of M bins filled by numbers of samples, weights 1/M, unbiased."""

    sizes_only = True

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self._kept: tuple[Any, Bins] | None = None  # the bins of the last round serve as long as nothing changes

    def bins(self, available: np.ndarray) -> Bins:
        version = self._table.version
        if available.size < len(self._table):
            return bins_by_size(whole_sizes(self.sizes[available], self.cohort_size), self.cohort_size)
        if self._kept is None or self._kept[0] != version:
            self._kept = (version, bins_by_size(whole_sizes(self.sizes, self.cohort_size), self.cohort_size))
        return self._kept[1]
