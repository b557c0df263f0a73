"""What selectors keep per client: figures as pairs in their state, vectors as rows beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.reports import client_ids

Distance = Callable[[np.ndarray, np.ndarray], np.ndarray]


def as_pairs(figures: Mapping[ClientId, float]) -> list[list[Any]]:
    """Figures by client as JSON keeps them: ids may be numbers, which keys of JSON may not."""
    return [[client, value] for client, value in figures.items()]


def read_pairs(name: str, pairs: Any, *, low: float = -math.inf, whole: bool = False) -> dict[ClientId, Any]:
    """Figures by client from what `as_pairs` made; anything else, and figures below `low`, are refused."""
    kind = "whole numbers" if whole else "numbers"
    refusal = InputError(
        f"state: {name} is {_short(pairs)}; accepted: pairs of a client and its number, "
        f"{kind}{f' of at least {low:g}' if low > -math.inf else ''}, each client once"
    )
    if not isinstance(pairs, list):
        raise refusal
    figures: dict[ClientId, Any] = {}
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise refusal
        (client,), value = read_ids(name, pair[:1]), pair[1]
        number = isinstance(value, int) or (isinstance(value, float) and not whole)
        if isinstance(value, bool) or not number or not math.isfinite(value) or value < low or client in figures:
            raise refusal
        figures[client] = value
    return figures


def read_ids(name: str, ids: Any) -> list[ClientId]:
    """Distinct client ids from a list of a state; anything else is refused."""
    try:
        listed = list(client_ids(ids)) if isinstance(ids, list) else None
    except InputError:
        listed = None
    if listed is None or len(set(listed)) < len(listed):
        raise InputError(f"state: {name} is {_short(ids)}; accepted: a list of client ids, each once")
    return listed


class ClientVectors:
    """A float32 vector per client, and the distances between all of them where a distance is given.

    Distances are kept as float32 and brought up to date for the clients whose vectors change; they are part of what is
    kept, so that a selector that is continued has the same bits. `distance(some, all)` is (m, n) for vectors (m, P)
    and (n, P).
    """

    def __init__(self, distance: Distance | None = None) -> None:
        self._distance = distance
        self._places: dict[ClientId, int] = {}
        self._awaited: list[ClientId] = []  # named by a state whose arrays have not come yet
        self.rows = np.zeros((0, 0), np.float32)
        self._distances = np.zeros((0, 0), np.float32)

    @property
    def ids(self) -> list[ClientId]:
        """Clients with a vector, in the order of their first one."""
        return list(self._places) or list(self._awaited)

    def __contains__(self, client: object) -> bool:
        return client in self._places

    def places(self, clients: Collection[ClientId]) -> np.ndarray:
        """Rows of these clients; -1 for those without a vector."""
        return np.fromiter((self._places.get(client, -1) for client in clients), dtype=np.int64)

    def between(self, some: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Distances (m, n) between the clients with these rows."""
        return np.asarray(self._distances[np.ix_(some, others)], dtype=np.float64)

    def put(self, vectors: Mapping[ClientId, np.ndarray]) -> None:
        """Take new vectors; all must have the length of those that are kept."""
        if not vectors:
            return
        self._awaited = []
        given = np.stack([np.asarray(vector, dtype=np.float32).ravel() for vector in vectors.values()])
        if self._places and given.shape[1] != self.rows.shape[1]:
            raise InputError(f"observe: vectors of {given.shape[1]} numbers; accepted: {self.rows.shape[1]}, as before")
        before = len(self._places)
        for client in vectors:
            self._places.setdefault(client, len(self._places))
        more = len(self._places) - before
        if more:
            empty = np.zeros((more, given.shape[1]), np.float32)
            self.rows = np.concatenate([self.rows.reshape(before, given.shape[1]), empty])
            self._distances = np.pad(self._distances, (0, more))
        changed = self.places(vectors)
        self.rows[changed] = given
        if self._distance is not None:
            block = self._distance(self.rows[changed], self.rows).astype(np.float32)
            block[:, changed] = np.maximum(block[:, changed], block[:, changed].T)  # the same both ways, to the bit
            block[np.arange(changed.size), changed] = 0
            self._distances[changed] = block
            self._distances[:, changed] = block.T

    def forget(self, gone: Collection[ClientId]) -> None:
        """Drop the vectors of these clients."""
        kept = [client for client in self._places if client not in gone]
        self._awaited = [] if any(client in gone for client in self._awaited) else self._awaited
        if len(kept) < len(self._places):
            places = self.places(kept)
            self.rows = self.rows[places]
            self._distances = self._distances[np.ix_(places, places)]
            self._places = {client: place for place, client in enumerate(kept)}

    def remember(self, ids: Any) -> None:
        """Whose vectors come with `load`; without it they have none."""
        self._awaited = read_ids("vectors", ids)
        self._places = {}
        self.rows = np.zeros((0, 0), np.float32)
        self._distances = np.zeros((0, 0), np.float32)

    def arrays(self) -> dict[str, np.ndarray]:
        """What `load` takes."""
        if not self._places:
            return {}
        kept = {"vectors": self.rows}
        return kept if self._distance is None else {**kept, "distances": self._distances}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over the arrays of another; one that does not fit its ids is refused."""
        ids = self.ids
        n = len(ids)
        square = (n, n) if self._distance is not None else None
        rows, distances = arrays.get("vectors"), arrays.get("distances")
        if rows is None or rows.ndim != 2 or len(rows) != n or (square and getattr(distances, "shape", None) != square):
            shapes = {name: tuple(array.shape) for name, array in arrays.items()}
            raise InputError(f"arrays: {shapes}; accepted: those of the {n} clients that the state names")
        self._places, self._awaited = {client: place for place, client in enumerate(ids)}, []
        self.rows = np.array(rows, np.float32)
        if distances is not None:
            self._distances = np.array(distances, np.float32)


def angles(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """arccos of the cosine between vectors of length 1; 0 where one of them is 0."""
    cosines = np.clip((some @ others.T).astype(np.float64), -1.0, 1.0)
    cosines[~some.any(axis=1)] = 1.0
    cosines[:, ~others.any(axis=1)] = 1.0
    return np.asarray(np.arccos(cosines))


def unit(vector: np.ndarray) -> np.ndarray:
    """The vector at length 1, float32; 0 stays 0."""
    wide = np.asarray(vector, dtype=np.float64).ravel()
    largest = float(np.abs(wide).max(initial=0.0))
    if largest == 0:
        return np.zeros(wide.size, np.float32)
    wide = wide / largest
    return np.asarray(wide / np.sqrt(wide @ wide), dtype=np.float32)


def euclidean(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Euclidean distances, from differences: of nearby vectors nothing is lost."""
    return np.stack([np.sqrt(((others - one) ** 2).sum(axis=1, dtype=np.float64)) for one in some])


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 80 else f"{shown[:60]}..."
