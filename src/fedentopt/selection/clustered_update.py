"""Clustered sampling by updates: clients that move the model the same way share a distribution.

Fraboni et al. (ICML 2021), Algorithm 2. A client's representative gradient g_k is its model after training minus the
global model it started from, of the last time it trained; 0 before. Clients i and j are arccos(g_i g_j / (|g_i| |g_j|))
apart, 0 if one of the two is 0. Ward's tree is cut into the largest groups of mass M sum p_k <= 1. The M heaviest
groups are bins; the clients of the others, the lightest group first and shuffled within it, fill the bins up to 1.
One client is drawn from each bin and weighs 1/M: unbiased.

The distances are the tree's distances; the authors' code hands the matrix of distances to SciPy as if its rows were
features. Masses are whole numbers (`bins`), where it rounds to 10^-10.

The server keeps an update per client, K times the model in float32, and all angles between them. Where it keeps the
updates itself, the selector is told cosines, and keeps the angles.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import compress
from typing import Any, ClassVar

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection.clustered import TreeSelector
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.feedback import Observation
from fedentopt.selection.per_client import ClientVectors, angles, unit
from fedentopt.selection.selector import selector
from fedentopt.selection.ward import LARGEST, ward_tree


@selector("clustered-update", label="Clustered (updates)")
class ClusteredUpdateSelector(TreeSelector):
    """One client from each of M groups that move the model alike, weights 1/M, unbiased."""

    needs: ClassVar[frozenset[str]] = frozenset({"update"})
    cosines_suffice = True
    sizes_only = True
    largest = LARGEST
    all_pairs = True

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self._updates = ClientVectors(angles, units=True)

    def tree(self, available: np.ndarray) -> np.ndarray:
        places = self._updates.by_number(self._table)[available]
        known = np.flatnonzero(places >= 0)
        if known.size == available.size:
            return ward_tree(self._updates.between(places, places), self.name)
        distances = np.zeros((available.size, available.size))
        distances[known[:, None], known] = self._updates.between(places[known], places[known])
        return ward_tree(distances, self.name)

    def observe(self, observations: Mapping[ClientId, Observation]) -> None:
        """Keep the direction of every update, its length does not matter; or the angles to all others."""
        here = {client: seen for client, seen in observations.items() if client in self._table}
        cosines = {client: seen.cosines for client, seen in here.items() if seen.cosines is not None}
        if cosines:
            self._keep_angles(cosines)
        updates = {client: seen.update for client, seen in here.items() if client not in cosines}
        units = {client: unit(update) for client, update in updates.items() if update is not None}
        finite = {client: direction for client, direction in units.items() if direction is not None}
        self._updates.put(finite, len(self._table))

    def _keep_angles(self, cosines: Mapping[ClientId, np.ndarray]) -> None:
        everybody = len(self._table)
        for client, row in cosines.items():
            if np.shape(row) != (everybody,):
                raise InputError(
                    f"observe: cosines of client {client!r} of shape {np.shape(row)}; accepted: ({everybody},), one "
                    f"per registered client"
                )
        table = np.array(list(cosines.values()), dtype=np.float64)
        finite = np.asarray(np.isfinite(table).all(axis=1))
        angles_to_all = np.arccos(np.clip(table[finite], -1.0, 1.0))
        self._updates.put_distances(list(compress(cosines, finite)), angles_to_all, self._table)

    def forget_clients(self, gone: Collection[ClientId]) -> None:
        self._updates.forget(gone)

    def memory(self) -> dict[str, Any]:
        return {"vectors": self._updates.ids}

    def remember(self, memory: Mapping[str, Any]) -> None:
        self._updates.remember(memory["vectors"])

    def arrays(self) -> dict[str, np.ndarray]:
        return self._updates.arrays()

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._updates.load(arrays, vectors=False)
