"""Trying many choices one after the other, and remembering which selectors cannot be tried and why.

A selector that refuses the number of clients, lacks a package it needs or would take too long is no reason to fail:
it is listed with its reason. Random selection and FedEntOpt are always tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedentopt.errors import InputError
from fedentopt.plan.outcome import Choice, Federation, Outcome, try_choice
from fedentopt.plan.work import LARGE, LONGEST, LONGEST_NOISE, PATIENCE, may_be_left_out, seconds
from fedentopt.selection import EntropySelector, RandomSelector, Selector
from fedentopt.settings import settings_of

Progress = Callable[[int, int], None]
Starting = Callable[[str], None]


@dataclass(frozen=True)
class Skipped:
    """A selector that was not tried, and why."""

    selector: str
    label: str
    reason: str
    cohort: int | None = None


class Trying:
    """Trying choices one after the other, and remembering which selectors cannot."""

    def __init__(
        self,
        federation: Federation,
        rounds: int,
        seeds: range,
        progress: Progress,
        starting: Starting = lambda text: None,
    ) -> None:
        self.federation, self.rounds, self.seeds, self.progress = federation, rounds, seeds, progress
        self.starting = starting
        self.skipped: list[Skipped] = []
        self.done = self.total = 0

    def expect(self, choices: int) -> None:
        """How many choices there will be, for the progress."""
        self.total = choices * self.rounds * len(self.seeds)

    def all(self, choices: Sequence[Choice]) -> list[Outcome]:
        """Outcomes of those that can be tried, in their order; those with the same noise are tried one after another,
        since that is drawn and read once for them."""
        found: dict[int, Outcome] = {}
        for place in sorted(range(len(choices)), key=lambda at: choices[at].epsilon or 0.0, reverse=True):
            choice = choices[place]
            cls, settings = choice.selector, own_settings(choice.selector)
            start = self.done
            self.starting(_in_words(choice))
            try:
                found[place] = try_choice(
                    self.federation, choice, rounds=self.rounds, seeds=self._seeds_of(choice), settings=settings,
                    progress=self._advance,
                )  # fmt: skip
            except (InputError, ImportError, MemoryError) as error:
                if cls in (RandomSelector, EntropySelector):
                    raise
                self._skip(cls, str(error) or type(error).__name__, choice.cohort)
            self.done = start + self.rounds * len(self.seeds)
            self.progress(self.done, max(self.total, self.done))
        return [found[place] for place in sorted(found)]

    def can_serve(self, cls: type[Selector], choices: Sequence[Choice], *, everything: bool) -> bool:
        """Whether a selector can be tried on so many clients, with these choices in a time that can be waited for, if
        not `everything` is wanted whatever it takes."""
        clients = len(self.federation.clients)
        if cls in (RandomSelector, EntropySelector):
            return True
        if cls.largest is not None and clients > cls.largest:
            self._skip(cls, f"serves at most {cls.largest} clients")
            return False
        if everything or not may_be_left_out(self.federation, cls):
            return True
        expected = sum(seconds(self.federation, one, self.rounds) * len(self._seeds_of(one)) for one in choices)
        if expected > LONGEST:
            away = " with clients away" if any(one.away for one in choices) else ""
            self._skip(
                cls,
                f"would take about {expected:.0f} seconds{away}, estimated from the sizes of the table (at most "
                f"{LONGEST:.0f} without --all; fewer --cohort sizes or --rounds take less)",
            )
        return expected <= LONGEST

    def with_noise(self, choices: Sequence[Choice], size: int, *, everything: bool) -> Sequence[Choice]:
        """Those of choices of noise that can be tried: where all sizes of a large table take too long, this one's."""
        if everything or not choices or self.federation.counts.size <= LARGE:
            return choices
        expected = sum(seconds(self.federation, one, self.rounds) * len(self._seeds_of(one)) for one in choices)
        if expected <= LONGEST_NOISE:
            return choices
        self._skip(
            choices[0].selector,
            f"noise with other cohorts than {size} would take about {expected:.0f} seconds, estimated from the sizes "
            f"of the table (at most {LONGEST_NOISE:.0f} without --all; fewer --cohort sizes, --rounds or --epsilon "
            "budgets take less)",
        )
        return [one for one in choices if one.cohort == size]

    def _seeds_of(self, choice: Choice) -> range:
        """The repetitions of a choice: one alone where it takes long; with noise as many as without, to be compared."""
        known = choice.selector in (RandomSelector, EntropySelector)
        return (
            self.seeds
            if known or seconds(self.federation, replace(choice, epsilon=None), self.rounds) <= PATIENCE
            else self.seeds[:1]
        )

    def _advance(self, rounds: int) -> None:
        self.done += rounds
        self.progress(self.done, max(self.total, self.done))

    def _skip(self, cls: type[Selector], reason: str, cohort: int | None = None) -> None:
        if not any(one.selector == cls.name and reason == one.reason for one in self.skipped):
            self.skipped.append(Skipped(cls.name, cls.label or cls.name, reason, cohort))


def _in_words(choice: Choice) -> str:
    noise = "" if choice.epsilon is None else f", ε = {choice.epsilon:g}"
    away = ", clients away" if choice.away else ""
    buffer = "" if choice.buffer is None else f", Q = {choice.buffer}"
    return f"{choice.selector.label or choice.selector.name}, M = {choice.cohort}{buffer}{noise}{away}"


def own_settings(cls: type[Selector]) -> dict[str, Any]:
    """A selector's settings at their defaults, without the buffer, which is a size of the plan."""
    return {name: one.default for name, one in settings_of(cls).items() if name != "buffer"}
