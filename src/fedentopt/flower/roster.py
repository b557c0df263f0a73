"""A selector kept in step with a federation whose clients come late, change their counts, come back and go.

Selectors break ties by order of registration. Those who are known before the first round stand in the order of their
ids; whoever comes later stands behind them, so that nothing a selector has learnt of a client's number moves.

FedEntOpt's buffer may hold at most K - M of K clients. A federation knows K only as its nodes report, so the buffer
is kept at that limit, with a warning, for as long as too few clients are known.

A client's size is whatever it says, and one that claims 2^53 samples of every class would make any cohort it is in look
even. Counts are therefore scaled down, shares of the classes unchanged, where their sum exceeds `size_cap` times the
median of all known clients' sums.

Where reports are audited (`audit`), what a client's training shows may take the place of its report. Its size is then
what it reports, or what its weight in the average says at the usual number of samples per weight, whichever is less:
weights may be samples times epochs, or all 1. Where nobody reports (a selector that reads labels from last layers),
`num-examples` of the replies is all that is known of sizes, and the same cap is put on that.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.flower.audit import Watch
from fedentopt.flower.report import ClientId, Report, id_order
from fedentopt.selection import Cohort, CohortWarning, EntropySelector, Selector

log = logging.getLogger("flwr")


class Roster:
    """The clients a selector knows."""

    def __init__(self, selector: Selector, size_cap: float | None = None, watch: Watch | None = None) -> None:
        self.selector = selector
        self.size_cap = size_cap
        self.watch = watch
        self.buffer_size = selector.buffer_size if isinstance(selector, EntropySelector) else None
        self._reports: dict[ClientId, Report] = {}
        self._sizes: dict[ClientId, float] = {}
        self._capped: dict[ClientId, float] = {}  # most samples that a client's counts were scaled to
        self._beliefs: dict[ClientId, np.ndarray] = {}  # counts that stand in the place of reports
        self._heard: dict[ClientId, float] = {}  # numbers of samples from replies, where nobody reports

    def take(self, reports: Sequence[Report]) -> None:
        """Learn new clients and new counts of known ones."""
        new = sorted((r for r in reports if r.client not in self._reports), key=lambda report: id_order(report.client))
        known = [report for report in reports if report.client in self._reports]
        for report in reports:
            self._reports[report.client] = report
            if report.client not in self._beliefs:
                self._sizes[report.client] = _size(report.counts)
                self._capped.pop(report.client, None)
        if self.watch is not None:
            self.watch.take(reports)
        known = [report for report in known if report.client not in self._beliefs]
        for noisy, batch in groupby(known, key=lambda report: report.noisy):
            self.selector.update({report.client: report.counts for report in batch}, noisy=noisy)
        for noisy, batch in groupby(new, key=lambda report: report.noisy):
            self.selector.register({report.client: report.counts for report in batch}, noisy=noisy)
        if reports:
            self._cap_sizes()

    def forget(self, clients: Iterable[ClientId]) -> None:
        """Remove clients."""
        gone = [client for client in clients if client in self._reports]
        if not gone:
            return
        self.selector.remove(gone)
        for client in gone:
            del self._reports[client], self._sizes[client]
            for kept in (self._capped, self._beliefs, self._heard):
                kept.pop(client, None)
        if self.watch is not None:
            self.watch.forget(gone)
        self._cap_sizes()

    def believe(self, counts: Mapping[ClientId, np.ndarray]) -> None:
        """Let these counts stand in the place of what the clients report."""
        for client, row in counts.items():
            self._beliefs[client] = row
            self._sizes[client] = _size(row)
            self._capped.pop(client, None)
        if counts:
            self.selector.update(dict(counts), noisy=True)
            self._cap_sizes()

    def samples(self, weights: Mapping[ClientId, float]) -> dict[ClientId, float]:
        """How many samples clients are taken for whose training replies have these weights."""
        if self.nobody_reports:
            self._heard.update(weights)
            most = float("inf") if self.size_cap is None else self.size_cap * _median(self._heard.values())
            for client in [client for client in weights if weights[client] > most]:
                log.warning("client %s claims %g samples: taken for %g", client, weights[client], most)
                self._heard[client] = most
            return {client: self._heard[client] for client in weights}
        sizes = {client: max(_size(self._reports[client].counts), 1.0) for client in weights}
        if all(weight == 1 for weight in weights.values()):
            return sizes
        ratios = sorted(sizes[client] / weight for client, weight in weights.items())
        usual = ratios[(len(ratios) - 1) // 2]
        return {client: min(sizes[client], weight * usual) for client, weight in weights.items()}

    @property
    def nobody_reports(self) -> bool:
        """Whether clients are not asked for their label counts, since the selector reads labels from last layers."""
        return takes_no_reports(self.selector)

    def counts_of(self, client: ClientId) -> np.ndarray:
        """Label counts as the server believes them, before sizes are capped."""
        if self.nobody_reports:
            return np.asarray(self.selector.counts[self.selector.numbers_of([client])[0]])
        return np.asarray(np.maximum(self._beliefs.get(client, self._reports[client].counts), 0.0))

    def capped(self) -> list[ClientId]:
        """Clients that claim more than `size_cap` allows, ordered by client id."""
        return sorted(self._capped, key=id_order)

    def size_of(self, client: ClientId) -> float:
        """How many samples the selector believes a client to have."""
        if self.nobody_reports:
            return self._heard.get(client, 1.0)
        return self._capped.get(client, self._sizes[client])

    def _cap_sizes(self) -> None:
        """Scale down the counts of clients that claim too much, and back up those that no longer do."""
        if self.size_cap is None or not self._sizes:
            return
        most = self.size_cap * _median(self._sizes.values())
        if most <= 0:  # most clients report nothing but noise below 0
            return
        over = {client: most for client, size in self._sizes.items() if size > most}
        for client in self._capped.keys() | over.keys():
            if self._capped.get(client) == over.get(client):
                continue
            counts = self._beliefs.get(client, self._reports[client].counts)
            if client in over:
                if client not in self._capped:
                    log.warning(
                        "client %s claims %g samples, more than %g times the median: taken for %g",
                        *(client, self._sizes[client], self.size_cap, most),
                    )
                counts = np.maximum(counts, 0.0) * (most / self._sizes[client])
            self.selector.update({client: counts}, noisy=client in self._beliefs or self._reports[client].noisy)
        self._capped = over

    def select(self, available: Sequence[ClientId], losses: Mapping[ClientId, float] | None = None) -> Cohort:
        """The next cohort among these clients; `losses` are what the selector's candidates answered."""
        if isinstance(self.selector, EntropySelector) and self.buffer_size is not None:
            room = min(self.buffer_size, max(0, len(self._reports) - self.selector.cohort_size))
            if room != self.selector.buffer_size:
                log.warning(
                    "buffer of %d instead of %d: %d clients are known, %d train each round",
                    *(room, self.buffer_size, len(self._reports), self.selector.cohort_size),
                )
                self.selector.buffer_size = room
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CohortWarning)  # told to the log, where Flower's users look
            told = {} if losses is None else {"losses": losses}
            cohort = self.selector.select(available=available, **told)
        if len(cohort.clients) < self.selector.cohort_size and cohort.weights is None:
            log.warning("cohort of %d instead of %d clients", len(cohort.clients), self.selector.cohort_size)
        if cohort.released:
            log.info("released from the buffer early, since others are away: %s", cohort.released)
        return cohort

    def state_dict(self) -> dict[str, Any]:
        """What is needed, beside the reports and the selector's arrays, to go on identically; JSON-serialisable."""
        buffer_now = self.selector.buffer_size if isinstance(self.selector, EntropySelector) else None
        state: dict[str, Any] = {
            "buffer_size": self.buffer_size,
            "buffer_size_now": buffer_now,
            "selector": self.selector.state_dict(),
        }
        if self.watch is not None:
            state["audit"] = self.watch.state_dict()
        if self._heard:
            state["samples"] = [[client, number] for client, number in self._heard.items()]
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], reports: Sequence[Report], arrays: Mapping[str, np.ndarray] | None = None
    ) -> None:
        """Go on from `state_dict()` with these clients, in the order they were let in; other settings are refused."""
        own, saved = self.selector.state_dict(), state["selector"]
        settings = {name: (own.get(name), saved.get(name)) for name in ("seed", "target", "release")}
        for name, (here, there) in ({"buffer_size": (self.buffer_size, state["buffer_size"])} | settings).items():
            if here != there:
                raise InputError(f"{name}: {here!r}, but the checkpoint was written with {there!r}")
        self.forget(list(self._reports))  # of a run before, where this one is continued by the same object
        for report in reports:
            self._reports[report.client] = report
            self._sizes[report.client] = _size(report.counts)
        for noisy, batch in groupby(reports, key=lambda report: report.noisy):
            self.selector.register({report.client: report.counts for report in batch}, noisy=noisy)
        self._heard = dict(state.get("samples", ()))
        self._cap_sizes()
        if self.watch is not None:
            self.watch.take(reports)
            self.watch.load_state_dict(state.get("audit"))
            self.believe(self.watch.beliefs(self._reports))
        if isinstance(self.selector, EntropySelector):
            self.selector.buffer_size = state["buffer_size_now"]
        self.selector.load_state_dict(state["selector"])
        if arrays:
            self.selector.load_arrays(arrays)


def takes_no_reports(selector: Selector) -> bool:
    """Whether a selector reads labels from last layers alone."""
    return bool(getattr(selector, "labels_from_heads", False)) and not getattr(selector, "reads_label_counts", True)


def _size(counts: np.ndarray) -> float:
    return float(np.maximum(counts, 0.0).sum())


def _median(values: Iterable[float]) -> float:
    return float(np.median(np.fromiter(values, np.float64)))
