"""The server's table of label counts: who is registered, in which order, and what each client holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.reports import client_ids, read_reports
from fedentopt.selection.rows import MOST_CLASSES, Rows


class CountTable:
    """Label counts by client. A client's number is its place in the order of registration, which breaks ties.

    Changes are collected and worked in when the rows are next read, so that many small ones between two rounds
    cost one pass over the table.
    """

    def __init__(self) -> None:
        self.num_classes: int | None = None
        self.version = 0  # grows with every change, so that whoever derives something from the rows can tell
        self._named: list[Any] | None = None  # the classes, where series or data frames have named them
        self._ids: list[ClientId] = []
        self._numbers: dict[ClientId, int] = {}
        self._numbered = True  # whether every id is its own number
        self._blocks: list[Rows] = []
        self._changes: list[tuple[np.ndarray, Rows]] = []  # numbers of clients and their new counts
        self._sizes: tuple[int, np.ndarray] | None = None  # version, and what was added up then

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, client: object) -> bool:
        return client in self._numbers

    @property
    def ids(self) -> Sequence[ClientId]:
        """Client ids by number."""
        return self._ids

    def number(self, client: ClientId) -> int:
        """A registered client's number."""
        return self._numbers[client]

    def register(
        self, counts: Any, ids: Sequence[object] | None, noisy: bool, num_classes: int | None,
        check_number: Callable[[int, int], None] = lambda clients, classes: None,
    ) -> None:  # fmt: skip
        """Add new clients; one that is already known is refused, and so is what `check_number` refuses of how many
        there would be, of how many classes; nothing is added then."""
        names, rows, classes, named = read_reports(counts, ids, noisy, self._expected(num_classes), self._named)
        for name in names:
            if name in self._numbers:
                numbered = ids is None and not isinstance(counts, Mapping)
                hint = "; an array without ids numbers its clients from 0" if numbered else ""
                raise InputError(
                    f"client {name!r}: already registered; accepted: new clients (update changes counts{hint})"
                )
        if not names:
            return
        start = len(self)
        check_number(len(self) + len(names), classes)
        self.num_classes, self._named = classes, named
        self._numbers.update(zip(names, range(len(self._ids), len(self._ids) + len(names)), strict=True))
        self._ids.extend(names)
        self._numbered = self._numbered and names == list(range(start, len(self)))
        self._blocks.append(rows)
        self.version += 1

    def share(self, other: CountTable, num_classes: int | None, check_number: Callable[[int, int], None]) -> None:
        """Take over another table's clients and counts, which were read and checked there; one with clients of its own
        refuses. Rows are never written to, so both keep the same ones until one of them changes."""
        if len(self):
            raise InputError(f"counts: a table for {len(self)} registered clients; accepted: before the first ones")
        if not len(other):
            return
        assert other.num_classes is not None
        if self._expected(num_classes) not in (None, other.num_classes):
            raise InputError(
                f"counts: {other.num_classes} classes; accepted: {num_classes}, as set or registered before"
            )
        check_number(len(other), other.num_classes)
        self.num_classes, self._named = other.num_classes, other._named
        self._ids, self._numbers, self._numbered = other._ids.copy(), other._numbers.copy(), other._numbered
        self._blocks = [other.rows]
        self.version += 1

    def update(self, counts: Any, ids: Sequence[object] | None, noisy: bool) -> None:
        """Replace the counts of known clients, which keep their numbers; if one is unknown nothing changes."""
        names, rows, _, named = read_reports(counts, ids, noisy, self.num_classes, self._named)
        numbers = self.numbers_of(names)
        if names:
            self._named = named
            self._changes.append((numbers, rows))
            self.version += 1

    def remove(self, ids: Iterable[object]) -> set[ClientId]:
        """Forget clients; later ones move up. An unknown id is refused, and then nothing is removed."""
        gone = set(client_ids(ids))
        drop = np.zeros(len(self), dtype=bool)
        drop[self.numbers_of(gone)] = True
        if gone:
            self._blocks = [self.rows.take(np.flatnonzero(~drop))]
            self._ids = [name for name in self._ids if name not in gone]
            self._numbers = dict(zip(self._ids, range(len(self._ids)), strict=True))
            self._numbered = self._ids == list(range(len(self._ids)))
            self.version += 1
        return gone

    def numbers_of(self, clients: Iterable[ClientId], what: str = "client") -> np.ndarray:
        """Numbers of these clients; an unknown one is refused."""
        try:
            return np.fromiter((self._numbers[client] for client in clients), dtype=np.int64)
        except KeyError as error:
            raise InputError(f"{what} {error.args[0]!r}: not registered; accepted: ids given to register") from None

    def numbers_marked(self, clients: Any) -> np.ndarray | None:
        """Numbers, ascending, of clients whose ids are their numbers and given as an array of them; else None."""
        if not self._numbered or type(clients) is not np.ndarray:  # a masked array is refused where ids are read
            return None
        if clients.ndim != 1 or clients.dtype.kind not in "iu" or not clients.size:
            return None
        if clients.min() < 0 or clients.max() >= len(self):
            return None
        marked = np.zeros(len(self), dtype=bool)
        marked[clients] = True
        return np.flatnonzero(marked)

    def find(self, clients: Iterable[ClientId]) -> np.ndarray:
        """Numbers of these clients, -1 for an unknown one."""
        return np.fromiter((self._numbers.get(client, -1) for client in clients), dtype=np.int64)

    @property
    def sizes(self) -> np.ndarray:
        """Sum of every client's counts, by number; not to be written to."""
        if self._sizes is None or self._sizes[0] != self.version:
            self._sizes = (self.version, self.rows.totals())
        return self._sizes[1]

    @property
    def rows(self) -> Rows:
        """All counts, row by row in order of registration."""
        if len(self._blocks) != 1:
            self._blocks = [Rows.concatenate(self._blocks)]
        if self._changes:
            order = np.arange(len(self))
            end = len(self)
            for numbers, rows in self._changes:  # in order, so that the last change of a client counts
                order[numbers] = end + np.arange(len(rows))
                end += len(rows)
            self._blocks = [Rows.concatenate([self._blocks[0], *(rows for _, rows in self._changes)]).take(order)]
            self._changes = []
        return self._blocks[0]

    def _expected(self, num_classes: int | None) -> int | None:
        if num_classes is None:
            return self.num_classes
        if isinstance(num_classes, bool) or not isinstance(num_classes, (int, np.integer)) or num_classes < 1:
            raise InputError(f"num_classes: {num_classes!r} is not a number of classes; accepted: 1 or more")
        if num_classes > MOST_CLASSES:
            raise InputError(f"num_classes: {num_classes} is too large; accepted: at most 2**31")
        if self.num_classes not in (None, num_classes):
            raise InputError(
                f"num_classes: {num_classes}; accepted: {self.num_classes}, as for the clients already registered"
            )
        return int(num_classes)
