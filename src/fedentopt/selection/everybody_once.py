"""A start in which everybody trains once, for selectors that know a client by what it told after training.

Clients that have not told anything yet go first, those tried least before the others, in random order. One that drops
out is tried again, three times in all; from then on it is no reason to wait, and is taken when seats stay empty. So
the start takes ceil(K / M) rounds when nobody drops out, and clients that join later train in the next round.

What clients told is how their training moved the last layer, per unit of step size where that is known
(`Observation.travel`). It must be known of all or of none: the two are not of one scale, and comparing them would take
whoever is told the other way for an outlier.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection.cohort import ClientId, Cohort
from fedentopt.selection.feedback import Head, Observation
from fedentopt.selection.per_client import ClientVectors, as_pairs, read_pairs
from fedentopt.selection.selector import Selector

TRIES = 3


class EverybodyOnce(Selector):
    """Picks whoever is unknown first; the known are picked by `pick_known`. What is known is a vector per client."""

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self._tries: dict[ClientId, int] = {}  # of those that have told nothing yet
        self._vectors = self.make_vectors()
        self._per_travel: bool | None = None  # whether the vectors are per unit of step size; None: there are none yet

    def make_vectors(self) -> ClientVectors:
        """Where what clients told is kept."""
        return ClientVectors()

    @abstractmethod
    def pick_known(self, known: np.ndarray, seats: int) -> list[int]:
        """At most so many of the clients with these numbers, ascending, all of whom have a vector."""

    def finish(self, picked: list[int]) -> Cohort:
        """The cohort of these clients."""
        return self.cohort(picked)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Cohort:
        is_known = self.rows_of(available) >= 0
        if is_known.all():
            return self.finish(self.pick_known(available, self.cohort_size))
        unknown = available[~is_known]
        tries = np.array([self._tries.get(self._table.ids[number], 0) for number in unknown], dtype=np.int64)
        order = np.lexsort((self.rng(0).random(unknown.size), tries))
        waiting = unknown[order][tries[order] < TRIES]
        given_up = unknown[order][tries[order] >= TRIES]
        picked = waiting[: self.cohort_size].tolist()
        known = available[is_known]
        if len(picked) < self.cohort_size and known.size:
            picked += self.pick_known(known, self.cohort_size - len(picked))
        picked += given_up[: self.cohort_size - len(picked)].tolist()
        cohort = self.finish(picked)
        for number in picked:
            client = self._table.ids[number]
            if client not in self._vectors:
                self._tries[client] = self._tries.get(client, 0) + 1
        return cohort

    def rows_of(self, numbers: np.ndarray) -> np.ndarray:
        """Rows of the vectors of the clients with these numbers; -1 for those without one."""
        return np.asarray(self._vectors.by_number(self._table)[numbers])

    def learn_changes(self, observations: Mapping[ClientId, Observation], change: Callable[[Head], np.ndarray]) -> None:
        """Keep how the last layers of registered clients moved, as the vectors that `change` makes of them."""
        heads = {
            client: (change(seen.head), seen.travel)
            for client, seen in observations.items()
            if seen.head is not None and client in self._table
        }
        known = {travel is not None for _, travel in heads.values()}
        if len(known | ({self._per_travel} if self._vectors.ids else set())) > 1:
            raise InputError(
                f"observe: travel, what the step sizes add up to, is known of some clients and not of others, now or "
                f"before; accepted: known of all, or of none (what a version of {self.name} kept that did not divide "
                f"by it cannot be continued: start anew)"
            )
        for client, (_, travel) in heads.items():
            if travel is not None and travel < 0:
                raise InputError(f"observe: travel {travel!r} of client {client!r}; accepted: at least 0")
        if known:
            (self._per_travel,) = known
        with np.errstate(over="ignore"):  # as in `learn`
            vectors = {client: vector / (travel or 1.0) for client, (vector, travel) in heads.items()}
        self.learn(vectors)

    def learn(self, vectors: Mapping[ClientId, np.ndarray]) -> None:
        """Keep what registered clients told; what is not finite counts as not told."""
        with np.errstate(over="ignore"):  # beyond single precision is not finite either
            told = {c: np.asarray(vector, dtype=np.float32) for c, vector in vectors.items() if c in self._table}
        here = {client: vector for client, vector in told.items() if np.isfinite(vector).all()}
        self._vectors.put(here, len(self._table))
        for client in here:
            self._tries.pop(client, None)

    def forget_clients(self, gone: Collection[ClientId]) -> None:
        self._vectors.forget(gone)
        for client in gone:
            self._tries.pop(client, None)

    def memory(self) -> dict[str, Any]:
        per_travel = self._per_travel if self._vectors.ids else None
        return {"tries": as_pairs(self._tries), "vectors": self._vectors.ids, "per_travel": per_travel}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Selector.load_state_dict`; what an older version kept was not divided by step sizes."""
        super().load_state_dict({"per_travel": False, **state} if isinstance(state, Mapping) else state)

    def remember(self, memory: Mapping[str, Any]) -> None:
        tries = read_pairs("tries", memory["tries"], low=1, whole=True)
        per_travel = memory["per_travel"]
        if not isinstance(per_travel, bool) and (per_travel is not None or memory["vectors"]):
            raise InputError(
                f"state: per_travel is {per_travel!r}; accepted: true, false, or null where nobody has a vector"
            )
        self._vectors.remember(memory["vectors"])
        self._tries, self._per_travel = tries, per_travel

    def arrays(self) -> dict[str, np.ndarray]:
        return self._vectors.arrays()

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._vectors.load(arrays)
