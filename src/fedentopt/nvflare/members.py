"""The sites a selector knows: in order of their names, whenever they joined, and left out for a while when they fail.

Selectors break ties by order of registration. Here that is the order of names, so that the same sites with the same
history give the same cohort. FedEntOpt's buffer may hold at most K - M of K clients; a federation learns K only as its
sites report, so the buffer is kept at that limit for as long as too few are known.

A site's size is whatever it says, and beside a claim of 2^53 samples of each class those of honest sites would vanish.
Counts are scaled down, shares of the classes unchanged, where their sum exceeds `size_cap` times the median site's.

A site that fails n times running is left alone for 2^(n-1) rounds, at most 64, and then tried again. Failing at
training and failing to report are counted apart.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.labels import validate_report
from fedentopt.nvflare.report import Report
from fedentopt.own_code import is_import_path, make_own
from fedentopt.selection import SELECTORS, Cohort, CohortWarning, EntropySelector, Selector

LONGEST_PAUSE = 64


class Pauses:
    """Who failed how often running, and from which round on it is tried again."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, int]] = {}

    def failed(self, site: str, now: int) -> int:
        """Note a failure in round `now`; return the round from which the site is tried again.

        Failing again in the same round, as sites may that are asked every second until one is known, counts once.
        """
        times, until = self._failures.get(site, (0, 0))
        if times == 0 or until != _end(times, now):
            times, until = times + 1, _end(times + 1, now)
            self._failures[site] = (times, until)
        return until

    def worked(self, site: str) -> None:
        """Forget the failures of a site."""
        self._failures.pop(site, None)

    def over(self, site: str, now: int) -> bool:
        """Whether the site may be tried in round `now`."""
        return now >= self._failures.get(site, (0, now))[1]

    def has_failed(self, site: str) -> bool:
        """Whether its last try failed."""
        return site in self._failures

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        return {site: list(entry) for site, entry in self._failures.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse."""
        self._failures = {str(site): (int(times), int(until)) for site, (times, until) in state.items()}


def _end(times: int, now: int) -> int:
    return now + 1 + min(1 << min(times - 1, LONGEST_PAUSE), LONGEST_PAUSE)


class Members:
    """The sites whose label counts are known, and the selector that chooses among them. `size_cap` 0: no limit."""

    def __init__(self, selector: Selector, num_classes: int, size_cap: float = 0) -> None:
        self.selector = selector
        self.num_classes = num_classes
        self.size_cap = size_cap
        self._capped: dict[str, float] = {}  # most samples that a site's counts were scaled to
        self.buffer_size = selector.buffer_size if isinstance(selector, EntropySelector) else None
        self.reports: dict[str, Report] = {}

    def take(self, reports: Iterable[Report]) -> None:
        """Learn new sites and new counts of known ones."""
        new = {}
        for report in reports:
            if report.site in self.reports:
                self.selector.update({report.site: report.counts}, noisy=report.noisy)
                self.reports[report.site] = report
                self._capped.pop(report.site, None)
            else:
                new[report.site] = report
        self._let_in(new)
        self._cap_sizes()

    def _let_in(self, new: Mapping[str, Report]) -> None:
        if not new:
            return
        last = max(self.reports, default="")
        known = list(self.reports)
        self.reports = dict(sorted((self.reports | dict(new)).items()))
        if min(new) > last:
            self._register(sorted(new.values(), key=lambda report: report.site))
            return
        state = self.selector.state_dict()  # a late joiner stands before known ones: all are registered anew
        arrays = self.selector.arrays()
        self.selector.remove(known)
        self._capped = {}
        self._register(list(self.reports.values()))
        self.selector.load_state_dict(state)
        self.selector.load_arrays(arrays)

    def _cap_sizes(self) -> None:
        """Scale down the counts of sites that claim too much, and back up those that no longer do."""
        if not self.size_cap or not self.reports:
            return
        sizes = {site: _total(report) for site, report in self.reports.items()}
        most = self.size_cap * float(np.median(list(sizes.values())))
        if most <= 0:  # most sites report nothing but noise below 0
            return
        over = {site: most for site, size in sizes.items() if size > most}
        for site in sorted(self._capped.keys() | over.keys()):
            if self._capped.get(site) == over.get(site):
                continue
            report = self.reports[site]
            scaled = np.maximum(report.counts, 0.0) * (most / sizes[site]) if site in over else report.counts
            self.selector.update({site: scaled}, noisy=report.noisy)
        self._capped = over

    def select(self, available: Sequence[str]) -> Cohort:
        """The next cohort among these sites, of which at least one is needed."""
        if isinstance(self.selector, EntropySelector) and self.buffer_size is not None:
            room = max(0, len(self.reports) - self.selector.cohort_size)
            self.selector.buffer_size = min(self.buffer_size, room)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CohortWarning)  # told to NVFlare's log instead
            return self.selector.select(available=sorted(available))

    def size(self, site: str) -> int:
        """How many samples a site is taken for, at least 1."""
        return max(1, round(self._capped.get(site, _total(self.reports[site]))))

    def state_dict(self) -> dict[str, Any]:
        """Settings, counts and memory, JSON-serialisable; floats survive bit for bit."""
        now = self.selector.buffer_size if isinstance(self.selector, EntropySelector) else None
        return {
            "num_classes": self.num_classes,
            "size_cap": self.size_cap,
            "buffer_size": self.buffer_size,
            "buffer_size_now": now,
            "selector": self.selector.state_dict(),
            "sites": [
                {"site": report.site, "counts": report.counts.tolist(), "epsilon": report.epsilon}
                for report in self.reports.values()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from `state_dict()` and the selector's arrays; other settings are refused, naming the difference."""
        own, saved = self.selector.state_dict(), state["selector"]
        here = {"num_classes": self.num_classes, "size_cap": self.size_cap, "buffer_size": self.buffer_size}
        there = {name: state.get(name) for name in here}
        for name in ("selector", "cohort_size", "seed", "target"):
            here[name], there[name] = own.get(name), saved.get(name)
        for name, value in here.items():
            if value != there[name]:
                raise InputError(f"{name}: {value!r}, but the state was written with {there[name]!r}")
        self.take(
            Report(
                str(entry["site"]),
                validate_report(entry["site"], entry["counts"], self.num_classes, noisy=entry["epsilon"] is not None),
                entry["epsilon"],
            )
            for entry in state["sites"]
        )
        if isinstance(self.selector, EntropySelector):
            self.selector.buffer_size = state["buffer_size_now"]
        self.selector.load_state_dict(saved)
        self.selector.load_arrays(arrays)

    def _register(self, reports: Sequence[Report]) -> None:
        for noisy, batch in groupby(reports, key=lambda report: report.noisy):
            self.selector.register({report.site: report.counts for report in batch}, noisy=noisy)


def _total(report: Report) -> float:
    return float(np.maximum(report.counts, 0.0).sum())


def make_selector(
    cohort_size: int,
    num_classes: int,
    buffer_size: int,
    seed: int,
    target: Sequence[float] | None,
    selector: str | None,
    settings: Mapping[str, Any] | None,
) -> Selector:
    """FedEntOpt with these settings, or the selector of that name or import path with its own; others are refused."""
    if selector is None:
        if settings:
            raise InputError("selector_args: given without a selector; accepted: buffer_size, seed and target")
        made = EntropySelector(cohort_size, buffer_size, seed, target)
        if made.target is not None and made.target.size != num_classes:
            raise InputError(f"target: {made.target.size} weights; accepted: {num_classes}, one for each class")
        return made
    if buffer_size != 0 or target is not None:
        raise InputError("selector: give either a selector or buffer_size and target, which would build one")
    if not isinstance(selector, str):
        raise InputError(f"selector: {selector!r}; accepted: a name ({', '.join(SELECTORS.names)}) or module:Class")
    if is_import_path(selector):
        own = make_own("selector", selector, cohort_size, seed=seed, **(settings or {}))
    else:
        try:
            own = SELECTORS.get(selector)(cohort_size, seed=seed, **(settings or {}))
        except TypeError as error:
            raise InputError(f"selector_args: {error}") from error
    if not isinstance(own, Selector):
        raise InputError(f"selector: {selector} gives a {type(own).__name__}; accepted: a Selector")
    return own
