"""FLIPS: clusters of clients with similar labels, all represented equally often.

Bhope, Jayaram, Venkateswaran, Kumar, Verma: FLIPS: Federated Learning using Intelligent Participant Selection
(Middleware 2023, arXiv 2308.03901). k-means on the clients' label shares l_k / n_k makes clusters; each seat goes to
the cluster whose clients were chosen least often so far, and in it to the client chosen least often (ties are drawn).
The paper finds the number of clusters by the Davies-Bouldin index; here it is M, or `clusters`.

k-means (SciPy's, from centres drawn by k-means++) depends on seed and counts only, so clusters are made again when
clients come, change or leave, and are the same after a restart. It ends in a local optimum, often with clusters of one
client that would train every round: of ten starts the one whose clients are nearest to their centres is kept (fewer
starts above 819 clients, one above 4,096). Above 8,192 clients the centres are found on 8,192 of them, drawn at random,
and everybody joins the nearest. Stragglers are not over-provisioned: who drops out is not replaced within the round.

How often clusters had their turn means nothing for other clusters, so a state says of how many starts its clusters are
the best, and one of another number is refused where that makes others. An older one does not say it. Clusters have
their turns equally often, so unless the times that it counted are more even over today's clusters than over those of a
single start, which the first version had, they are taken for counted for the latter.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.draws import draw_place
from fedentopt.selection.per_client import ClientFigures, as_pairs, read_pairs
from fedentopt.selection.selector import Selector, check_int, selector
from fedentopt.selection.ward import scipy_part
from fedentopt.settings import setting

SAMPLE = 1 << 13
STARTS = 10
_PASSES = 20
_CHUNK = 1 << 14


@selector("flips", label="FLIPS")
class FLIPSSelector(Selector):
    """k-means clusters of label shares take turns, and so do the clients of a cluster."""

    clusters: int | None = setting(None, help="number of clusters; none: M", low=1)

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        scipy_part("cluster.vq", self.name)
        self._times = ClientFigures(0.0)
        self._kept: tuple[int, int, np.ndarray] | None = None

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        times = self._times.by_number(self._table).astype(np.int64)
        clusters = self.labels()
        used = np.bincount(clusters, weights=times).astype(np.int64)
        rng = self.rng()
        here = clusters[available]
        order = np.argsort(here, kind="stable")
        starts = np.searchsorted(here[order], np.arange(used.size + 1))
        members = [available[order[starts[c] : starts[c + 1]]] for c in range(used.size)]
        picked: list[int] = []
        while len(picked) < min(self.cohort_size, available.size):
            open_clusters = [c for c in range(used.size) if members[c].size]
            cluster = _least(rng, np.array(open_clusters), used[open_clusters])
            number = _least(rng, members[cluster], times[members[cluster]])
            picked.append(number)
            used[cluster] += 1
            members[cluster] = members[cluster][members[cluster] != number]
        self._times.add([self._table.ids[number] for number in picked], 1)
        return picked

    def labels(self) -> np.ndarray:
        """The cluster of every client, by number."""
        if self._kept is None or self._kept[:2] != (self._table.version, self.seed):
            self._kept = (self._table.version, self.seed, self._clustered())
        return self._kept[2]

    def _clustered(self, most_starts: int | None = None) -> np.ndarray:
        count = min(self.clusters or self.cohort_size, len(self._table))
        sizes = self.sizes
        rng = np.random.default_rng([self.seed, 0x464C])
        rows, classes = self._table.rows.held_classes(self._table.num_classes or 1)
        some = np.arange(len(rows))
        if some.size > SAMPLE:
            some = np.sort(rng.choice(some.size, SAMPLE, replace=False))
        shares = rows.take(some).dense(classes) / np.where(sizes[some] > 0, sizes[some], 1.0)[:, None]
        starts = max(1, min(most_starts or STARTS, SAMPLE // some.size))
        ends = [self._centres(rng, shares, count) for _ in range(starts)]
        centres = ends[0] if starts == 1 else min(ends, key=lambda end: _spread(shares, end))
        found = np.empty(len(rows), dtype=np.int64)
        # argmin of |x - c|^2 is that of |c|^2 - 2 x c: one product per chunk.
        offsets = (centres**2).sum(axis=1).astype(np.float32)
        turned = np.ascontiguousarray(-2 * centres.T, dtype=np.float32)
        for start in range(0, len(rows), _CHUNK):
            part = rows.part(start, start + _CHUNK)
            own = sizes[start : start + _CHUNK]
            near = (part.dense(classes) / np.where(own > 0, own, 1.0)[:, None]).astype(np.float32) @ turned
            near += offsets
            found[start : start + _CHUNK] = near.argmin(axis=1)
        return found

    def _centres(self, rng: np.random.Generator, shares: np.ndarray, count: int) -> np.ndarray:
        """Where k-means ends from one start."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a cluster that has become empty: it keeps its centre
            k_means = scipy_part("cluster.vq", self.name).kmeans2
            centres, _ = k_means(shares, _spread_out(rng, shares, count), iter=_PASSES, minit="matrix")
        return np.asarray(centres)

    def forget_clients(self, gone: Collection[ClientId]) -> None:
        self._times.forget(gone)

    def memory(self) -> dict[str, Any]:
        return {"times": as_pairs(self._times), "starts": STARTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Selector.load_state_dict`; one that counted the turns of other clusters is refused."""
        before = self._times, self._round, self.seed
        super().load_state_dict({"starts": None, **state} if isinstance(state, Mapping) else state)
        starts = state.get("starts")
        if starts != STARTS and self._counted_for_others(starts):  # by the state's seed, which is this one's now
            self._times, self._round, self.seed = before
            raise InputError(
                f"state: counts the turns of clusters that were the best of {starts or 1} start(s) of k-means, and of "
                f"{STARTS}, as made here, others are the best; accepted: what this version kept"
            )

    def remember(self, memory: Mapping[str, Any]) -> None:
        times = read_pairs("times", memory["times"], low=1, whole=True)
        if memory["starts"] is not None:
            check_int("state: starts", memory["starts"], 1)
        self._times = ClientFigures(0.0, times)

    def _counted_for_others(self, starts: int | None) -> bool:
        """Whether times were counted for other clusters than today's: those of so many starts, or, where that is not
        known, those of one unless turns are more even over today's."""
        times = self._times.by_number(self._table)
        if not times.any():
            return False
        now, before = self.labels(), self._clustered(starts or 1)
        if _same_groups(now, before):
            return False
        return starts is not None or _unevenness(now, times) >= _unevenness(before, times)


def _same_groups(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether clusters are the same but for their numbers."""
    pairs = len(set(zip(one.tolist(), other.tolist(), strict=True)))
    return bool(pairs == np.unique(one).size == np.unique(other).size)


def _unevenness(clusters: np.ndarray, times: np.ndarray) -> float:
    """Turns of the cluster that had most, minus those of the one that had fewest."""
    turns = np.bincount(clusters, weights=times)[np.unique(clusters)]
    return float(turns.max() - turns.min())


def _least(rng: np.random.Generator, among: np.ndarray, times: np.ndarray) -> int:
    """One of those with the fewest times, drawn."""
    fewest = among[times == times.min()]
    return int(fewest[rng.integers(fewest.size)])


def _spread(points: np.ndarray, centres: np.ndarray) -> float:
    """Squared distances of all points to the nearest centre, summed."""
    squares = (centres**2).sum(axis=1) - 2 * points @ centres.T
    return float((squares.min(axis=1) + (points**2).sum(axis=1)).sum())


def _spread_out(rng: np.random.Generator, points: np.ndarray, count: int) -> np.ndarray:
    """k-means++: each centre drawn by its squared distance to the nearest so far; at most one per distinct point."""
    centres = [points[rng.integers(len(points))]]
    nearest = ((points - centres[0]) ** 2).sum(axis=1)
    while len(centres) < count and nearest.max() > 1e-18:
        centres.append(points[draw_place(rng, np.cumsum(nearest))])
        nearest = np.minimum(nearest, ((points - centres[-1]) ** 2).sum(axis=1))
    return np.array(centres)
