"""The clients of a Flower federation that a selector knows: their order, and whose word is taken for their counts.

Selectors break ties by order of registration. Those who are known before the first round stand in the order of their
ids; whoever comes later stands behind them, so that nothing a selector has learnt of a client's number moves.

How the buffer fits those known and how claimed sizes are capped is `server.members`; both are said in the log.

Where reports are audited (`audit`), what a client's training shows may take the place of its report. Its size is then
what it reports, or what its weight in the average says at the usual number of samples per weight, whichever is less:
weights may be samples times epochs, or all 1. Where nobody reports (a selector that reads labels from last layers),
`num-examples` of the replies is all that is known of sizes, and the same cap is put on that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedentopt.flower.audit import Watch
from fedentopt.flower.report import ClientId, Report, id_order
from fedentopt.selection import Cohort, Selector
from fedentopt.server.members import Members, median, total

MOST_SAMPLES = 2.0**52
"""Of a client that is believed to hold only one class this is still a count, however its shares were rounded."""

log = logging.getLogger("flwr")


class Roster(Members[Report]):
    """The clients a selector knows."""

    def __init__(self, selector: Selector, size_cap: float | None = None, watch: Watch | None = None) -> None:
        super().__init__(selector, size_cap)
        self.watch = watch
        self._beliefs: dict[ClientId, np.ndarray] = {}  # counts that stand in the place of reports
        self._heard: dict[ClientId, float] = {}  # numbers of samples from replies, where nobody reports

    def take(self, reports: Sequence[Report]) -> None:
        """Learn new clients and new counts of known ones."""
        new = sorted((r for r in reports if r.client not in self.reports), key=lambda report: id_order(report.client))
        known = [report for report in reports if report.client in self.reports]
        for report in reports:
            self.reports[report.client] = report
            if report.client not in self._beliefs:
                self.note_size(report.client, report.counts)
        if self.watch is not None:
            self.watch.take(reports)
        self.renew(report for report in known if report.client not in self._beliefs)
        self.register(new)
        if reports:
            self.cap_sizes()

    def forget(self, clients: Iterable[ClientId]) -> None:
        """Remove clients."""
        gone = [client for client in clients if client in self.reports]
        if not gone:
            return
        self.selector.remove(gone)
        for client in gone:
            del self.reports[client], self._sizes[client]
            for kept in (self._capped, self._beliefs, self._heard):
                kept.pop(client, None)
        if self.watch is not None:
            self.watch.forget(gone)
        self.cap_sizes()

    def believe(self, counts: Mapping[ClientId, np.ndarray]) -> None:
        """Let these counts stand in the place of what the clients report."""
        for client, row in counts.items():
            self._beliefs[client] = row
            self.note_size(client, row)
        if counts:
            self.selector.update(dict(counts), noisy=True)
            self.cap_sizes()

    def samples(self, weights: Mapping[ClientId, float]) -> dict[ClientId, float]:
        """How many samples clients are taken for whose training replies have these weights."""
        if not weights:
            return {}
        if self.nobody_reports:
            self._heard.update(weights)
            most = MOST_SAMPLES
            if self.size_cap is not None:
                most = min(most, self.size_cap * median(self._heard.values()))
            for client in [client for client in weights if weights[client] > most]:
                log.warning("client %s claims %g samples: taken for %g", client, weights[client], most)
                self._heard[client] = most
            return {client: self._heard[client] for client in weights}
        sizes = {client: min(max(total(self.reports[client].counts), 1.0), MOST_SAMPLES) for client in weights}
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
        return np.asarray(np.maximum(self._beliefs.get(client, self.reports[client].counts), 0.0))

    def capped(self) -> list[ClientId]:
        """Clients that claim more than `size_cap` allows, ordered by client id."""
        return sorted(self._capped, key=id_order)

    def size_of(self, client: ClientId) -> float:
        """How many samples the selector believes a client to have."""
        return self._heard.get(client, 1.0) if self.nobody_reports else super().size_of(client)

    def weighed_size(self, client: ClientId) -> float:
        """How many samples a client's weight in the average is held against: at most its counts' total with the noise
        below 0, of which nodes make their weights. Without that, many classes of noise would belie the small ones."""
        size = self.size_of(client)
        return size if self.nobody_reports else min(size, float(self.reports[client].counts.sum()))

    def claim(self, client: ClientId) -> tuple[np.ndarray, bool]:
        """What is believed of a client, where that is not what it reports."""
        return (self._beliefs[client], True) if client in self._beliefs else super().claim(client)

    def cap_sizes(self) -> list[ClientId]:
        """As every server does; who claims too much is named in the log."""
        new = super().cap_sizes()
        for client in new:
            log.warning(
                "client %s claims %g samples, more than %g times the median: taken for %g",
                *(client, self._sizes[client], self.size_cap, self._capped[client]),
            )
        return new

    def fit_buffer(self) -> int | None:
        """As every server does; a change is said in the log."""
        room = super().fit_buffer()
        if room is not None:
            log.warning(
                "buffer of %d instead of %d: %d clients are known, %d train each round",
                *(room, self.buffer_size, len(self.reports), self.selector.cohort_size),
            )
        return room

    def select(self, available: Sequence[ClientId], losses: Mapping[ClientId, float] | None = None) -> Cohort:
        """The next cohort among these clients; `losses` are what the selector's candidates answered."""
        cohort = super().select(available, losses)
        if self.selector.falls_short(cohort, len(available)):
            log.warning("cohort of %d instead of %d clients", len(cohort.clients), self.selector.cohort_size)
        if cohort.released:
            log.info("released from the buffer early, since others are away: %s", cohort.released)
        return cohort

    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on identically, beside reports and arrays of selector and watch. JSON-serialisable."""
        state = super().state_dict()
        if self.watch is not None:
            state["audit"] = self.watch.state_dict()
        if self._heard:
            state["samples"] = [[client, number] for client, number in self._heard.items()]
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], reports: Sequence[Report], arrays: Mapping[str, np.ndarray] | None = None,
        watched: Mapping[str, np.ndarray] | None = None,
    ) -> None:  # fmt: skip
        """Go on from `state_dict()` with these clients, in the order they were let in; other settings are refused.
        `arrays` are the selector's, `watched` the watch's."""
        self.check_saved(state, ("buffer_size",), ("seed", "target", "release"), "checkpoint")
        self.forget(list(self.reports))  # of a run before, where this one is continued by the same object
        for report in reports:
            self.reports[report.client] = report
            self.note_size(report.client, report.counts)
        self.register(reports)
        self._heard = dict(state.get("samples", ()))
        self.cap_sizes()
        if self.watch is not None:
            self.watch.take(reports)
            self.watch.load_state_dict(state.get("audit"), watched)
            self.believe(self.watch.beliefs(self.reports))
        self.load_memory(state, arrays)


def takes_no_reports(selector: Selector) -> bool:
    """Whether a selector reads labels from last layers alone."""
    return bool(getattr(selector, "labels_from_heads", False)) and not getattr(selector, "reads_label_counts", True)
