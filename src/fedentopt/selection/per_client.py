"""What selectors keep per client: figures as pairs in their state, vectors as rows beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.reports import client_ids

Distance = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


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
    kept, so that a selector that is continued has the same bits. `distance` takes vectors (m, P) and (n, P) and the
    squared lengths of either, and gives (m, n).
    """

    def __init__(self, distance: Distance | None = None) -> None:
        self._distance = distance
        self._places: dict[ClientId, int] = {}
        self._awaited: list[ClientId] = []  # named by a state whose arrays have not come yet
        self._room = np.zeros((0, 0), np.float32)  # for the rows of those who will come
        self._squares = np.zeros(0)
        self._distances = np.zeros((0, 0), np.float32)

    @property
    def ids(self) -> list[ClientId]:
        """Clients with a vector, in the order of their first one."""
        return list(self._places) or list(self._awaited)

    @property
    def rows(self) -> np.ndarray:
        """The vectors, in the order of `ids`."""
        return self._room[: len(self._places)]

    def __contains__(self, client: object) -> bool:
        return client in self._places

    def places(self, clients: Collection[ClientId]) -> np.ndarray:
        """Rows of these clients; -1 for those without a vector."""
        return np.fromiter((self._places.get(client, -1) for client in clients), dtype=np.int64, count=len(clients))

    def between(self, some: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Distances (m, n) between the clients with these rows."""
        return np.asarray(self._distances[np.ix_(some, others)], dtype=np.float64)

    def put(self, vectors: Mapping[ClientId, np.ndarray], clients: int) -> None:
        """Take new vectors of some of so many clients; all must have the length of those that are kept."""
        if not vectors:
            return
        given = np.stack([np.asarray(vector, dtype=np.float32).ravel() for vector in vectors.values()])
        if self._places and given.shape[1] != self._room.shape[1]:
            length = self._room.shape[1]
            raise InputError(f"observe: vectors of {given.shape[1]} numbers; accepted: {length}, as before")
        self._awaited = []
        before = len(self._places)
        kept = self.rows
        for client in vectors:
            self._places.setdefault(client, len(self._places))
        more = len(self._places) - before
        if len(self._places) > len(self._room):  # more than is needed now: growing each time would copy all each time
            self._room = np.empty((max(before + more, min(2 * (before + more), clients)), given.shape[1]), np.float32)
            if before:
                self._room[:before] = kept
        if more:
            self._squares = np.pad(self._squares, (0, more))
            self._distances = np.pad(self._distances, (0, more))
        changed = self.places(vectors)
        self._room[changed] = given
        self._squares[changed] = _squares(given)
        if self._distance is not None:
            block = self._distance(given, self.rows, self._squares[changed], self._squares).astype(np.float32)
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
            self._room, self._squares = self._room[places], self._squares[places]
            self._distances = self._distances[np.ix_(places, places)]
            self._places = {client: place for place, client in enumerate(kept)}

    def remember(self, ids: Any) -> None:
        """Whose vectors come with `load`; without it they have none."""
        self._awaited = read_ids("vectors", ids)
        self._places = {}
        self._room, self._squares = np.zeros((0, 0), np.float32), np.zeros(0)
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
        self._room = np.array(rows, np.float32)
        self._squares = _squares(self._room)
        self._distances = np.zeros((n, n), np.float32) if distances is None else np.array(distances, np.float32)


def _squares(rows: np.ndarray) -> np.ndarray:
    """Squared lengths, each by itself, so that its bits do not depend on the others."""
    return np.array([float(wide @ wide) for wide in (row.astype(np.float64) for row in rows)])


def angles(some: np.ndarray, others: np.ndarray, some_squares: np.ndarray, other_squares: np.ndarray) -> np.ndarray:
    """arccos of the cosine between vectors of length 1; 0 where one of them is 0."""
    cosines = np.clip((some @ others.T).astype(np.float64), -1.0, 1.0)
    cosines[some_squares == 0] = 1.0
    cosines[:, other_squares == 0] = 1.0
    return np.asarray(np.arccos(cosines))


def unit(vector: np.ndarray) -> np.ndarray:
    """The vector at length 1, in its precision; 0 stays 0."""
    wide = np.asarray(vector, dtype=np.float64).ravel()
    square = float(wide @ wide)
    return np.asarray(wide / np.sqrt(square) if square > 0 else wide, dtype=np.asarray(vector).dtype)


def euclidean(some: np.ndarray, others: np.ndarray, some_squares: np.ndarray, other_squares: np.ndarray) -> np.ndarray:
    """Euclidean distances: in double precision a product of all loses less than single precision can hold."""
    products = some.astype(np.float64) @ others.astype(np.float64).T
    return np.asarray(np.sqrt(np.maximum(some_squares[:, None] + other_squares[None, :] - 2 * products, 0.0)))


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 80 else f"{shown[:60]}..."
