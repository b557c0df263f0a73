"""The clients a selector knows, kept in step with a federation whose clients come late, change their counts and go.

FedEntOpt's buffer may hold at most K - M of K clients. A federation knows K only as its clients report, so the buffer
is kept at that limit for as long as too few are known.

A client's size is whatever it says, and one that claims 2^53 samples of every class would make any cohort it is in look
even: beside it those of honest clients vanish. Counts are therefore scaled down, shares of the classes unchanged, where
their sum exceeds `size_cap` times the median of all known clients' sums.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Generic, TypeVar

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection import ClientId, Cohort, CohortWarning, EntropySelector, Selector
from fedentopt.server.report import Report
from fedentopt.server.state_files import check_json

R = TypeVar("R", bound=Report)


class Members(Generic[R]):
    """Reports by client, and the selector that chooses among those who gave them. `size_cap` None or 0: no limit."""

    def __init__(self, selector: Selector, size_cap: float | None) -> None:
        self.selector = selector
        self.size_cap = size_cap
        self.buffer_size = selector.buffer_size if isinstance(selector, EntropySelector) else None
        self.reports: dict[ClientId, R] = {}
        self._sizes: dict[ClientId, float] = {}  # samples claimed
        self._capped: dict[ClientId, float] = {}  # most samples that a client's counts were scaled to

    # --- counts
    def claim(self, client: ClientId) -> tuple[np.ndarray, bool]:
        """A client's counts as they are before sizes are capped, and whether they are noisy."""
        report = self.reports[client]
        return report.counts, report.noisy

    def size_of(self, client: ClientId) -> float:
        """How many samples the selector believes a client to have."""
        return self._capped.get(client, self._sizes[client])

    def note_size(self, client: ClientId, counts: np.ndarray) -> None:
        """These are the counts that the selector is told of a client from now on."""
        self._sizes[client] = total(counts)
        self._capped.pop(client, None)

    def register(self, reports: Iterable[R]) -> None:
        """Let clients in, in this order, by which selectors break ties."""
        _tell(self.selector.register, reports)

    def renew(self, reports: Iterable[R]) -> None:
        """Tell the selector new counts of clients it knows."""
        _tell(self.selector.update, reports)

    def cap_sizes(self) -> list[ClientId]:
        """Scale down the counts of clients that claim too much, and back up those that no longer do.

        Returns those that were not scaled down before.
        """
        if not self.size_cap or not self._sizes:
            return []
        most = self.size_cap * median(self._sizes.values())
        if most <= 0:  # most clients report nothing but noise below 0
            return []
        over = {client: most for client, size in self._sizes.items() if size > most}
        changed = [client for client in self._sizes if self._capped.get(client) != over.get(client)]
        for client in changed:
            counts, noisy = self.claim(client)
            if client in over:
                counts = np.maximum(counts, 0.0) * (most / self._sizes[client])
            self.selector.update({client: counts}, noisy=noisy)
        before, self._capped = self._capped, over
        return [client for client in changed if client in over and client not in before]

    # --- cohorts
    def fit_buffer(self) -> int | None:
        """Keep FedEntOpt's buffer at what the known clients allow; its new size where that changed it."""
        if not isinstance(self.selector, EntropySelector) or self.buffer_size is None:
            return None
        room = min(self.buffer_size, max(0, len(self.reports) - self.selector.cohort_size))
        if room == self.selector.buffer_size:
            return None
        self.selector.buffer_size = room
        return room

    def select(self, available: Sequence[ClientId], losses: Mapping[ClientId, float] | None = None) -> Cohort:
        """The next cohort among these clients, of which at least one is needed; `losses` are what the selector's
        candidates answered."""
        self.fit_buffer()
        told = {} if losses is None else {"losses": losses}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CohortWarning)  # told to the log, where a framework's users look
            return self.selector.select(available=available, **told)

    # --- state
    def state_dict(self) -> dict[str, Any]:
        """The buffer's size and the selector's memory, JSON-serialisable; reports and arrays are kept apart."""
        now = self.selector.buffer_size if isinstance(self.selector, EntropySelector) else None
        memory = self.selector.state_dict()
        if not type(self.selector).__module__.startswith("fedentopt."):
            check_json(memory, f"selector: memory() of {type(self.selector).__name__}")
        return {
            "buffer_size": self.buffer_size,
            "buffer_size_now": now,
            "selector": memory,
        }

    def check_saved(self, state: Mapping[str, Any], own: Sequence[str], selector: Sequence[str], where: str) -> None:
        """Refuse a state in which one of these settings, here or of the selector, is another, naming it."""
        memory = self.selector.state_dict()
        pairs = {name: (getattr(self, name), state.get(name)) for name in own}
        pairs |= {name: (memory.get(name), state["selector"].get(name)) for name in selector}
        for name, (here, there) in pairs.items():
            if here != there:
                raise InputError(
                    f"{name}: {here!r}, but the {where} was written with {there!r}; accepted: the same, or another "
                    f"{where}"
                )

    def load_memory(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None) -> None:
        """Take over what `state_dict` gave and the selector's arrays, with the clients let in already."""
        if isinstance(self.selector, EntropySelector):
            self.selector.buffer_size = state["buffer_size_now"]
        restore_selector(self.selector, state["selector"], arrays)


def restore_selector(selector: Selector, memory: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None) -> None:
    """Put back what a selector remembers; one that has seen nobody train yet has no arrays."""
    selector.load_state_dict(memory)
    if arrays:
        selector.load_arrays(arrays)


def total(counts: np.ndarray) -> float:
    """How many samples counts add up to; noise below 0 counts as 0."""
    return float(np.maximum(counts, 0.0).sum())


def median(values: Iterable[float]) -> float:
    """The median of some numbers."""
    return float(np.median(np.fromiter(values, np.float64)))


def _tell(tell: Callable[..., None], reports: Iterable[Report]) -> None:
    """Reports in their order, noisy and true ones in calls of their own."""
    for noisy, batch in groupby(reports, key=lambda report: report.noisy):
        tell({report.client: report.counts for report in batch}, noisy=noisy)
