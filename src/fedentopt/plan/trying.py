"""Trying many choices one after the other, and remembering which selectors cannot be tried and why.

A selector that refuses the number of clients, lacks a package it needs or would take too long is no reason to fail:
it is listed with its reason. Random selection and FedEntOpt are always tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.plan.outcome import Choice, Federation, Outcome, try_choice
from fedentopt.selection import EntropySelector, RandomSelector, Selector
from fedentopt.selection.trial import has_buffer
from fedentopt.settings import settings_of

Progress = Callable[[int, int], None]
PROBED = (1000, 4000)  # clients; from more than five thousand on, a selector is first timed with these
LONGEST = 60.0  # seconds that one selector may take, judged by that


@dataclass(frozen=True)
class Skipped:
    """A selector that was not tried, and why."""

    selector: str
    label: str
    reason: str
    cohort: int | None = None


class Trying:
    """Trying choices one after the other, and remembering which selectors cannot."""

    def __init__(self, federation: Federation, rounds: int, seeds: range, progress: Progress) -> None:
        self.federation, self.rounds, self.seeds, self.progress = federation, rounds, seeds, progress
        self.skipped: list[Skipped] = []
        self.done = self.total = 0

    def expect(self, choices: int) -> None:
        """How many choices there will be, for the progress."""
        self.total = choices * self.rounds * len(self.seeds)

    def all(self, choices: Sequence[Choice]) -> list[Outcome]:
        """Outcomes of those that can be tried."""
        found = []
        for choice in choices:
            cls, settings = choice.selector, own_settings(choice.selector)
            start = self.done
            try:
                found.append(
                    try_choice(
                        self.federation, choice, rounds=self.rounds, seeds=self.seeds, settings=settings,
                        progress=self._advance,
                    )
                )  # fmt: skip
            except (InputError, ImportError, MemoryError) as error:
                if cls in (RandomSelector, EntropySelector):
                    raise
                self._skip(cls, str(error) or type(error).__name__, choice.cohort)
            self.done = start + self.rounds * len(self.seeds)
            self.progress(self.done, max(self.total, self.done))
        return found

    def can_serve(self, cls: type[Selector], sizes: Sequence[int], rounds: int) -> bool:
        """Whether a selector can be tried on so many clients, in a time that can be waited for."""
        clients = len(self.federation.clients)
        if cls in (RandomSelector, EntropySelector):
            return True
        if cls.largest is not None and clients > cls.largest:
            self._skip(cls, f"serves at most {cls.largest} clients")
            return False
        if clients <= 5 * PROBED[0]:
            return True
        try:
            seconds = [self._seconds(cls, sizes[0], count) for count in PROBED]
        except (InputError, ImportError, MemoryError) as error:
            self._skip(cls, str(error) or type(error).__name__)
            return False
        growth = float(np.log(max(seconds[1] / max(seconds[0], 1e-9), 1e-9)) / np.log(PROBED[1] / PROBED[0]))
        expected = rounds * seconds[1] * (clients / PROBED[1]) ** max(growth, 0.0)
        if expected > LONGEST:
            self._skip(cls, f"would take about {expected:.0f} seconds for {clients} clients, judged by {PROBED[1]}")
        return bool(expected <= LONGEST)

    def _seconds(self, cls: type[Selector], cohort: int, clients: int) -> float:
        """Of one round, the best of two."""
        names = self.federation.clients[:clients]
        small = Federation(names, self.federation.classes, self.federation.counts[:clients], self.federation.noisy)
        taken = []
        for seed in (0, 1):
            started = time.monotonic()
            choice = Choice(cls, min(cohort, clients), buffer=0 if has_buffer(cls) else None)
            try_choice(small, choice, rounds=1, seeds=[seed], settings=own_settings(cls))
            taken.append(time.monotonic() - started)
        return min(taken)

    def _advance(self, rounds: int) -> None:
        self.done += rounds
        self.progress(self.done, max(self.total, self.done))

    def _skip(self, cls: type[Selector], reason: str, cohort: int | None = None) -> None:
        if not any(one.selector == cls.name and reason == one.reason for one in self.skipped):
            self.skipped.append(Skipped(cls.name, cls.label or cls.name, reason, cohort))


def own_settings(cls: type[Selector]) -> dict[str, Any]:
    """A selector's settings at their defaults, without the buffer, which is a size of the plan."""
    return {name: one.default for name, one in settings_of(cls).items() if name != "buffer"}
