"""A selector kept in step with a federation whose clients come late, change their counts and come back.

Selectors break ties by order of registration. Here that order is the order of client ids, however late a client
joined, so that the same clients with the same history give the same cohort.

FedEntOpt's buffer may hold at most K - M of K clients. A federation knows K only as its nodes report, so the buffer
is kept at that limit, with a warning, for as long as too few clients are known.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from fedentopt.errors import InputError
from fedentopt.flower.report import ClientId, Report, id_order
from fedentopt.selection import Cohort, CohortWarning, EntropySelector, Selector

log = logging.getLogger("flwr")


class Roster:
    """The clients a selector knows, in order of their ids."""

    def __init__(self, selector: Selector) -> None:
        self.selector = selector
        self.buffer_size = selector.buffer_size if isinstance(selector, EntropySelector) else None
        self._reports: dict[ClientId, Report] = {}

    def take(self, reports: Sequence[Report]) -> None:
        """Learn new clients and new counts of known ones."""
        new = [report for report in reports if report.client not in self._reports]
        for report in reports:
            if report.client in self._reports:
                self.selector.update({report.client: report.counts}, noisy=report.noisy)
        last = next(reversed(self._reports), None)
        self._reports.update({report.client: report for report in reports})
        self._reports = dict(sorted(self._reports.items(), key=lambda entry: id_order(entry[0])))
        if not new:
            return
        if last is None or all(id_order(report.client) > id_order(last) for report in new):
            self._register(sorted(new, key=lambda report: id_order(report.client)))
            return
        state = self.selector.state_dict()
        self.selector.remove([client for client in self._reports if client not in {report.client for report in new}])
        self._register(list(self._reports.values()))
        self.selector.load_state_dict(state)

    def select(self, available: Sequence[ClientId]) -> Cohort:
        """The next cohort among these clients."""
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
            cohort = self.selector.select(available=available)
        if len(cohort.clients) < self.selector.cohort_size:
            log.warning("cohort of %d instead of %d clients", len(cohort.clients), self.selector.cohort_size)
        if cohort.released:
            log.info("released from the buffer early, since others are away: %s", cohort.released)
        return cohort

    def state_dict(self) -> dict[str, Any]:
        """What is needed, beside the reports, to go on identically; JSON-serialisable."""
        buffer_now = self.selector.buffer_size if isinstance(self.selector, EntropySelector) else None
        return {
            "buffer_size": self.buffer_size,
            "buffer_size_now": buffer_now,
            "selector": self.selector.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], reports: Sequence[Report]) -> None:
        """Go on from `state_dict()` with these clients; other settings are refused."""
        own, saved = self.selector.state_dict(), state["selector"]
        settings = {name: (own.get(name), saved.get(name)) for name in ("seed", "target")}
        for name, (here, there) in ({"buffer_size": (self.buffer_size, state["buffer_size"])} | settings).items():
            if here != there:
                raise InputError(f"{name}: {here!r}, but the checkpoint was written with {there!r}")
        self.take(reports)
        if isinstance(self.selector, EntropySelector):
            self.selector.buffer_size = state["buffer_size_now"]
        self.selector.load_state_dict(state["selector"])

    def _register(self, reports: Sequence[Report]) -> None:
        for noisy, batch in groupby(reports, key=lambda report: report.noisy):
            self.selector.register({report.client: report.counts for report in batch}, noisy=noisy)
