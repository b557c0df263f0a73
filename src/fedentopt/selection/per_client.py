"""What selectors keep per client: figures as pairs in their state, vectors as rows beside it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, ItemsView, Iterable, Mapping
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.reports import client_id, client_ids
from fedentopt.selection.table import CountTable

Distance = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
LONGEST = 2.0**125  # two vectors of that length are at most 2^126 apart, which single precision holds
SHRUNK = 2.0**-64  # a power of two: no digit of a distance is lost


def as_pairs(figures: Mapping[ClientId, float] | ClientFigures) -> list[list[Any]]:
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
        if isinstance(value, bool) or not number or not is_finite(value) or value < low or client in figures:
            raise refusal
        figures[client] = value
    return figures


def is_finite(value: float) -> bool:
    """Whether a float can hold it: whole numbers of a state may be of any length."""
    return abs(value) <= sys.float_info.max


def read_ids(name: str, ids: Any) -> list[ClientId]:
    """Distinct client ids from a list of a state; anything else is refused."""
    try:
        listed = list(client_ids(ids)) if isinstance(ids, list) else None
    except InputError:
        listed = None
    if listed is None or len(set(listed)) < len(listed):
        raise InputError(f"state: {name} is {_short(ids)}; accepted: a list of client ids, each once")
    return listed


class ClientFigures:
    """A number per client, and all of them as an array by client number, which is brought up to date for the clients
    whose numbers changed; made anew only when clients come or leave."""

    def __init__(self, default: float, figures: Mapping[ClientId, float] | None = None) -> None:
        """`default` stands in the array for clients without a number."""
        self._default = default
        self._figures: dict[ClientId, float] = dict(figures or {})
        self._kept: tuple[CountTable, int, np.ndarray] | None = None
        self._changed: set[ClientId] = set()

    def __contains__(self, client: object) -> bool:
        return client in self._figures

    def __getitem__(self, client: ClientId) -> float:
        return self._figures[client]

    def __setitem__(self, client: ClientId, figure: float) -> None:
        client = client_id(client)  # NumPy's whole numbers are ids as good as any, but none that JSON keeps
        self._figures[client] = figure
        self._changed.add(client)

    def items(self) -> ItemsView[ClientId, float]:
        """Clients and their numbers, in the order of their first one."""
        return self._figures.items()

    def add(self, clients: Iterable[ClientId], more: float) -> None:
        """Raise the numbers of these clients; one without any has had 0."""
        for client in clients:
            self[client] = self._figures.get(client, 0) + more

    def forget(self, gone: Collection[ClientId]) -> None:
        """Drop the numbers of these clients."""
        for client in gone:
            self._figures.pop(client, None)
        self._kept = None

    def by_number(self, table: CountTable) -> np.ndarray:
        """The array (K,), not to be written to."""
        if self._kept is None or self._kept[0] is not table or self._kept[1] != table.version:
            array, changed = np.full(len(table), self._default), list(self._figures)
        else:
            array, changed = self._kept[2], [client for client in self._changed if client in self._figures]
        numbers = table.find(changed)
        known = numbers >= 0
        array[numbers[known]] = np.array([self._figures[client] for client in changed], dtype=np.float64)[known]
        self._kept, self._changed = (table, table.version, array), set()
        return array


class ClientVectors:
    """A float32 vector per client, and the distances between all of them where a distance is given.

    Distances are kept as float32 and brought up to date for the clients whose vectors change; they are part of what is
    kept, so that a selector that is continued has the same bits. `distance` takes vectors (m, P) and (n, P) and the
    squared lengths of either, and gives (m, n). Where all vectors have length 1 or 0 (`units`), so have their squares.
    Where somebody else keeps the vectors, distances alone may come (`put_distances`). While a vector is so long that
    float32 might not hold its distances, all of them are kept `SHRUNK`: only their relations count.
    """

    def __init__(self, distance: Distance | None = None, *, units: bool = False) -> None:
        self._distance = distance
        self._squares_of = _unit_squares if units else _squares
        self._kept: tuple[CountTable, int, np.ndarray] | None = None
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

    def by_number(self, table: CountTable) -> np.ndarray:
        """The row of every client of the table, by number, -1 for those without a vector; not to be written to."""
        if self._kept is None or self._kept[0] is not table or self._kept[1] != table.version:
            self._kept = (table, table.version, self.places(table.ids))
        return self._kept[2]

    def between(self, some: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Distances (m, n) between the clients with these rows."""
        return np.asarray(self._distances.take(some, axis=0).take(others, axis=1), dtype=np.float64)

    def put(self, vectors: Mapping[ClientId, np.ndarray], clients: int) -> None:
        """Take new vectors of some of so many clients; all must have the length of those that are kept."""
        if not vectors:
            return
        flat = [np.asarray(vector, dtype=np.float32).ravel() for vector in vectors.values()]
        length = self._room.shape[1] if self._places else flat[0].size
        for client, vector in zip(vectors, flat, strict=True):
            if vector.size != length:
                accepted = f"{length or 'distances alone'}, as {'before' if self._places else 'of others'}"
                raise InputError(f"observe: {vector.size} numbers of client {client!r}; accepted: {accepted}")
        given = np.array(flat)
        before, kept, scale = len(self._places), self.rows, self._scale()
        changed = self._places_for(vectors)
        if len(self._places) > len(self._room):  # more than is needed now: growing each time would copy all each time
            room = max(len(self._places), min(2 * len(self._places), clients))
            self._room = np.empty((room, given.shape[1]), np.float32)
            if before:
                self._room[:before] = kept
        self._room[changed] = given
        self._squares[changed] = self._squares_of(given)
        if self._scale() != scale:
            self._measure_all()
        elif self._distance is not None:
            self._keep(changed, self._distance(given, self.rows, self._squares[changed], self._squares))

    def put_distances(self, clients: Collection[ClientId], distances: np.ndarray, table: CountTable) -> None:
        """Take new distances (m, K) of some clients to all of the table, by number, where nobody has a vector here."""
        if self._room.size:
            raise InputError("observe: distances after vectors; accepted: vectors, as before")
        changed = self._places_for(clients)
        places = self.by_number(table)
        known = np.flatnonzero(places >= 0)
        block = np.zeros((changed.size, len(self._places)))
        block[:, places[known]] = distances[:, known]
        self._keep(changed, block)

    def _places_for(self, clients: Collection[ClientId]) -> np.ndarray:
        """The places of these clients; those that have none get one."""
        self._awaited = []
        before = len(self._places)
        for client in clients:
            self._places.setdefault(client_id(client), len(self._places))
        if more := len(self._places) - before:
            self._kept = None
            self._squares = np.pad(self._squares, (0, more))
            self._distances = np.pad(self._distances, (0, more))
        return self.places(clients)

    def _keep(self, changed: np.ndarray, distances: np.ndarray) -> None:
        """Keep new distances (m, n) between the clients with these places and all."""
        scale = self._scale()
        block = (distances if scale == 1 else distances * scale).astype(np.float32)
        block[:, changed] = np.maximum(block[:, changed], block[:, changed].T)  # the same both ways, to the bit
        block[np.arange(changed.size), changed] = 0
        self._distances[changed] = block
        self._distances[:, changed] = block.T

    def _scale(self) -> float:
        """What distances are kept at: a function of the vectors, so that whoever is continued knows it too."""
        return SHRUNK if self._squares.max(initial=0.0) > LONGEST**2 else 1.0

    def _measure_all(self) -> None:
        """Make all distances anew, where they are kept at another scale from now on."""
        if self._distance is not None:
            everybody = np.arange(len(self._places))
            self._keep(everybody, self._distance(self.rows, self.rows, self._squares, self._squares))

    def forget(self, gone: Collection[ClientId]) -> None:
        """Drop the vectors of these clients."""
        kept = [client for client in self._places if client not in gone]
        scale = self._scale()
        self._awaited = [] if any(client in gone for client in self._awaited) else self._awaited
        if len(kept) < len(self._places):
            places = self.places(kept)
            self._room, self._squares = self._room[places] if self._room.size else self._room, self._squares[places]
            self._distances = self._distances[np.ix_(places, places)]
            self._places = {client: place for place, client in enumerate(kept)}
            self._kept = None
            if self._scale() != scale:
                self._measure_all()

    def remember(self, ids: Any) -> None:
        """Whose vectors come with `load`; without it they have none."""
        self._awaited = read_ids("vectors", ids)
        self._places, self._kept = {}, None
        self._room, self._squares = np.zeros((0, 0), np.float32), np.zeros(0)
        self._distances = np.zeros((0, 0), np.float32)

    def arrays(self) -> dict[str, np.ndarray]:
        """What `load` takes."""
        if not self._places:
            return {}
        kept = {"vectors": self.rows} if self._room.size else {}
        return kept if self._distance is None else {**kept, "distances": self._distances}

    def load(self, arrays: Mapping[str, np.ndarray], *, vectors: bool = True) -> None:
        """Take over the arrays of another; one that does not fit its ids is refused. Without `vectors`, they may be
        distances alone."""
        ids = self.ids
        n = len(ids)
        if not n and not arrays:  # what `arrays` gives as long as nobody has a vector
            return
        square = (n, n) if self._distance is not None else None
        rows, distances = arrays.get("vectors"), arrays.get("distances")
        if rows is None and not vectors:
            rows = np.zeros((n, 0), np.float32)
        if rows is None or rows.ndim != 2 or len(rows) != n or (square and getattr(distances, "shape", None) != square):
            shapes = {name: tuple(array.shape) for name, array in arrays.items()}
            raise InputError(f"arrays: {shapes}; accepted: those of the {n} clients that the state names")
        for name, array in (("vectors", rows), ("distances", distances)):
            if array is not None and not np.isfinite(array).all():
                raise InputError(f"arrays: {name} are not all finite; accepted: finite numbers")
        self._places, self._awaited = {client: place for place, client in enumerate(ids)}, []
        self._kept = None
        self._room = np.array(rows, np.float32)
        self._squares = self._squares_of(self._room)
        self._distances = np.zeros((n, n), np.float32) if distances is None else np.array(distances, np.float32)


def _squares(rows: np.ndarray) -> np.ndarray:
    """Squared lengths, each by itself, so that its bits do not depend on the others."""
    return np.array([float(wide @ wide) for wide in (row.astype(np.float64) for row in rows)])


def _unit_squares(rows: np.ndarray) -> np.ndarray:
    """Squared lengths of vectors that have length 1 or are 0."""
    return np.asarray(rows.any(axis=1), dtype=np.float64)


def angles(some: np.ndarray, others: np.ndarray, some_squares: np.ndarray, other_squares: np.ndarray) -> np.ndarray:
    """arccos of the cosine between vectors of length 1; 0 where one of them is 0."""
    # Where there are fewer of one kind, as of clients that just trained, BLAS is twice as fast with them on the right.
    products = (others @ some.T).T if len(some) < len(others) else some @ others.T
    cosines = products.astype(np.float64)
    np.clip(cosines, -1.0, 1.0, out=cosines)
    cosines[some_squares == 0] = 1.0
    cosines[:, other_squares == 0] = 1.0
    return np.asarray(np.arccos(cosines, out=cosines))


def unit(vector: np.ndarray) -> np.ndarray | None:
    """The vector at length 1, as float32; 0 stays 0. None where it is not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        flat = np.asarray(vector, dtype=np.float32).ravel()
        square = float(flat @ flat)
    if 1e-20 < square < 1e20:  # nothing was lost to the ends of single precision, and nothing is not finite
        return np.asarray(flat * np.float32(1 / math.sqrt(square)))
    wide = np.asarray(vector, dtype=np.float64).ravel()
    peak = float(np.abs(wide).max(initial=0.0))
    if not math.isfinite(peak):
        return None
    if peak > 0 and not 1e-140 < peak < 1e140:  # squares would leave double precision too
        wide = wide / peak
    square = float(wide @ wide)
    return np.asarray(wide / math.sqrt(square) if square > 0 else wide, dtype=np.float32)


def euclidean(some: np.ndarray, others: np.ndarray, some_squares: np.ndarray, other_squares: np.ndarray) -> np.ndarray:
    """Euclidean distances: in double precision a product of all loses less than single precision can hold."""
    products = some.astype(np.float64) @ others.astype(np.float64).T
    return np.asarray(np.sqrt(np.maximum(some_squares[:, None] + other_squares[None, :] - 2 * products, 0.0)))


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 80 else f"{shown[:60]}..."
