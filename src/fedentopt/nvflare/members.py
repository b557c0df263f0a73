"""The sites a selector knows: in order of their names, whenever they joined.

Selectors break ties by order of registration. Here that is the order of names, so that the same sites with the same
history give the same cohort. How the buffer fits those known and how claimed sizes are capped is `server.members`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fedentopt.labels import validate_report
from fedentopt.selection import Selector
from fedentopt.server.members import Members, restore_selector
from fedentopt.server.report import Report


class Sites(Members[Report]):
    """The sites whose label counts are known, and the selector that chooses among them. `size_cap` 0: no limit."""

    def __init__(self, selector: Selector, num_classes: int, size_cap: float = 0) -> None:
        super().__init__(selector, size_cap)
        self.num_classes = num_classes

    def take(self, reports: Iterable[Report]) -> None:
        """Learn new sites and new counts of known ones."""
        told = {str(report.client): report for report in reports}
        known = {site: report for site, report in told.items() if site in self.reports}
        self.renew(known.values())
        for site, report in told.items():
            self.note_size(site, report.counts)
        self.reports.update(known)
        self._let_in({site: report for site, report in sorted(told.items()) if site not in known})
        self.cap_sizes()

    def _let_in(self, new: Mapping[str, Report]) -> None:
        """Let new sites, in the order of their names, in at their places among those known."""
        if not new:
            return
        known = [str(site) for site in self.reports]
        self.reports.update(new)
        if min(new) > max(known, default=""):
            self.register(new.values())
            return
        memory, arrays = self.selector.state_dict(), self.selector.arrays()
        self.selector.remove(known)  # a late joiner stands before known ones: all are registered anew
        self._capped = {}
        self.reports = {site: self.reports[site] for site in sorted([*known, *new])}
        self.register(self.reports.values())
        restore_selector(self.selector, memory, arrays)

    def size(self, site: str) -> int:
        """How many samples a site is taken for, at least 1."""
        return max(1, round(self.size_of(site)))

    def reported_size(self, site: str) -> float:
        """How many samples a site says it has, at least 1."""
        return max(1.0, self._sizes[site])

    def state_dict(self) -> dict[str, Any]:
        """Settings, counts and memory, JSON-serialisable; floats survive bit for bit."""
        return {
            "num_classes": self.num_classes,
            "size_cap": self.size_cap,
            **super().state_dict(),
            "sites": [
                {"site": report.client, "counts": report.counts.tolist(), "epsilon": report.epsilon}
                for report in self.reports.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from `state_dict()` and the selector's arrays; other settings are refused, naming the difference."""
        own = ("num_classes", "size_cap", "buffer_size")
        self.check_saved(state, own, ("selector", "cohort_size", "seed", "target"), "state")
        self.take(
            Report(
                str(entry["site"]),
                validate_report(entry["site"], entry["counts"], self.num_classes, noisy=entry["epsilon"] is not None),
                entry["epsilon"],
            )
            for entry in state["sites"]
        )
        self.load_memory(state, arrays)
