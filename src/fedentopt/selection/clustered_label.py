"""Clustered sampling by labels: Algorithm 2 of Fraboni et al. with label shares in the place of gradients.

Clients are compared by the angle between their label counts, arccos(l_i l_j / (|l_i| |l_j|)), 0 where a report is
empty; the rest is as in `clustered_update`: Ward's tree, groups of mass at most 1, M bins, one client from each with
weight 1/M. Counts are enough, so there is nothing to wait for and the tree is made once. It is no method of the paper.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedentopt.selection.clustered import TreeSelector
from fedentopt.selection.per_client import angles
from fedentopt.selection.selector import selector
from fedentopt.selection.ward import LARGEST, ward_tree


@selector("clustered-label", label="Clustered (labels)")
class ClusteredLabelSelector(TreeSelector):
    """One client from each of M groups with similar label counts, weights 1/M, unbiased."""

    largest = LARGEST
    all_pairs = True

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self._kept: tuple[int, bytes, np.ndarray] | None = None

    def tree(self, available: np.ndarray) -> np.ndarray:
        version, who = self._table.version, available.tobytes()
        if self._kept is None or self._kept[:2] != (version, who):
            rows, classes = self._table.rows.take(available).held_classes(self._table.num_classes or 1)
            counts = rows.dense(classes)
            squares = (counts**2).sum(axis=1)
            directions = counts / np.sqrt(np.where(squares > 0, squares, 1.0))[:, None]
            distances = angles(directions, directions, squares, squares)
            # A copy of a client points the same way exactly, whatever the product's last digit says.
            _, same = np.unique(directions, axis=0, return_inverse=True)
            distances[same.ravel()[:, None] == same.ravel()[None, :]] = 0.0
            self._kept = (version, who, ward_tree((distances + distances.T) / 2, self.name))
        return self._kept[2]
