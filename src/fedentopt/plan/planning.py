"""From label counts to a plan: every selector that needs nothing else, over cohort sizes, buffers, noise and absence.

First every selector is tried with every size, on the counts as they are (or with the only noise asked for), and a
recommendation made. Then the recommended selector and FedEntOpt are tried with every privacy budget and size, and all
selectors at the recommended size with clients away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError
from fedentopt.labels import validate_report
from fedentopt.plan.carrying_out import command, flower, python
from fedentopt.plan.outcome import Choice, Federation, Outcome, try_choice
from fedentopt.plan.recommendation import KEPT_GAIN, NEAR, Recommendation, gain, recommend, share
from fedentopt.plan.sizes import amount_of_work, away_share, buffer_sizes, cohort_sizes, epsilons, that_differ
from fedentopt.selection import EntropySelector, RandomSelector, Selector
from fedentopt.selection.trial import counts_only, has_buffer
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


@dataclass(frozen=True, eq=False)
class Plan:
    """What a plan found: `outcomes` of the sizes, of noise and of absence, and the recommendation."""

    federation: Federation
    settings: Mapping[str, Any]
    by_size: tuple[Outcome, ...]
    by_noise: tuple[Outcome, ...]
    by_absence: tuple[Outcome, ...]
    skipped: tuple[Skipped, ...]
    recommendation: Recommendation
    privacy: str
    availability: str

    @property
    def samples(self) -> float:
        """Samples per client, the median."""
        return float(np.median(np.maximum(self.federation.counts, 0).sum(axis=1)))

    def command(self) -> str:
        """The `fedentopt select` that carries the recommendation out."""
        asked = self.settings
        return command(
            asked["file"], self.recommendation.chosen, rounds=asked["rounds"], seed=asked["seed"],
            noisy=asked["noisy"], drop=asked["drop"],
        )  # fmt: skip

    def python(self) -> str:
        """The same in Python."""
        asked = self.settings
        return python(
            asked["file"], self.recommendation.chosen, seed=asked["seed"], noisy=asked["noisy"], drop=asked["drop"]
        )

    def flower(self) -> str:
        """The same as a Flower strategy."""
        return flower(self.federation, self.recommendation.chosen, self.settings["seed"])

    def to_json(self) -> dict[str, Any]:
        """Settings, a row for every choice that was tried, the recommendation."""
        chosen, random = self.recommendation.chosen, self.recommendation.random
        names = self.federation.clients
        outcomes = (*self.by_size, *self.by_noise, *self.by_absence)
        return {
            "settings": dict(self.settings),
            "rows": [outcome.row(self.federation) for outcome in outcomes],
            "skipped": [
                {"selector": one.selector, "cohort": one.cohort, "reason": one.reason} for one in self.skipped
            ],
            "recommendation": {
                **{key: chosen.row(self.federation)[key] for key in ("selector", "cohort", "buffer", "settings", "epsilon")},
                "reason": self.recommendation.reason,
                "trade": self.recommendation.trade,
                "privacy": self.privacy,
                "availability": self.availability,
                "command": self.command(),
                "python": self.python(),
                "flower": self.flower(),
                "figures": chosen.row(self.federation),
                "random": random.row(self.federation),
                "first_repetition": chosen.first(),
                "asked": {name: round(float(times), 2) for name, times in zip(names, chosen.times, strict=True)},
            },
        }  # fmt: skip


def make_plan(
    counts: ArrayLike,
    *,
    clients: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    cohorts: Sequence[str] | None = None,
    buffers: Sequence[str] | None = None,
    epsilon: Sequence[str] | None = None,
    away: str = "20%",
    rounds: int | None = None,
    repetitions: int | None = None,
    seed: int = 0,
    noisy: bool = False,
    source: str = "counts.csv",
    drop: Sequence[str] = (),
    progress: Progress = lambda done, total: None,
) -> Plan:
    """Try every selector that needs label counts alone on (clients, classes) counts, and recommend one.

    `cohorts` and `buffers` are numbers of clients or per cents of them, `epsilon` privacy budgets or "none", `away`
    the share of the clients that is away in a round. `noisy` counts hold noise already, and get no more. `source` and
    `drop` are for the command that carries the plan out. Without `rounds` and `repetitions` there are 100 and 3, or
    fewer for large tables; `settings["sampled"]` says so.
    """
    federation = _federation(counts, clients, classes, noisy)
    budgets: list[float | None] = [None] if noisy else epsilons(epsilon)
    absent = away_share(away)
    sizes = cohort_sizes(federation, cohorts)
    tried_buffers = {size: buffer_sizes(size, len(federation.clients), buffers) for size in sizes}
    selectors = sorted(counts_only(), key=lambda cls: cls is not RandomSelector)
    noises = [budget for budget in dict.fromkeys([*([] if noisy else [None]), *budgets]) if budget != budgets[0]]
    most_buffers = max(map(len, tried_buffers.values()))
    about = sum(most_buffers if has_buffer(cls) else 1 for cls in selectors) + len(noises)
    used_rounds, used_repetitions, sampled = amount_of_work(federation, sizes, about, rounds, repetitions)
    tried_buffers = {size: that_differ(found, size, used_rounds) for size, found in tried_buffers.items()}
    trying = _Trying(federation, used_rounds, range(seed, seed + used_repetitions), progress)
    kept = [cls for cls in selectors if trying.can_serve(cls, sizes, len(sizes) * used_rounds * used_repetitions)]
    base = [
        Choice(cls, size, buffer, budgets[0])
        for size in sizes
        for cls in kept
        for buffer in (tried_buffers[size] if has_buffer(cls) else [None])
    ]
    trying.expect(len(base) + len(noises) * len(sizes) + (len(kept) if absent else 0))
    by_size = trying.all(base)
    recommendation = recommend(federation, by_size)
    by_noise = trying.all(_with_noise(by_size, recommendation, noises, tried_buffers))
    by_absence = trying.all(_with_absence(by_size, recommendation, absent)) if absent else []
    settings = {
        "file": source,
        "clients": len(federation.clients),
        "classes": list(federation.classes),
        "classes_held": int(federation.held.sum()),
        "label_counts": federation.counts.sum(axis=0).tolist(),
        "samples_per_client": float(np.median(np.maximum(federation.counts, 0).sum(axis=1))),
        "cohorts": sizes,
        "buffers": sorted({size for found in tried_buffers.values() for size in found}),
        "epsilons": budgets,
        "away": absent,
        "rounds": used_rounds,
        "repetitions": used_repetitions,
        "seed": seed,
        "noisy": noisy,
        "drop": list(drop),
        "sampled": sampled,
    }
    return Plan(
        federation, settings, tuple(by_size), tuple(by_noise), tuple(by_absence), tuple(trying.skipped), recommendation,
        _privacy_words(federation, recommendation, by_size, by_noise, noisy),
        _absence_words(recommendation, by_absence, absent),
    )  # fmt: skip


class _Trying:
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
        return expected <= LONGEST

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


def _federation(
    counts: ArrayLike, clients: Sequence[str] | None, classes: Sequence[str] | None, noisy: bool
) -> Federation:
    try:
        table = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"counts: {error}; accepted: a (clients, classes) array of numbers") from error
    if table.ndim != 2 or not table.size:
        raise InputError(f"counts: an array of shape {table.shape}; accepted: (clients, classes)")
    names = tuple(map(str, range(len(table)) if clients is None else clients))
    labels = tuple(map(str, range(table.shape[1]) if classes is None else classes))
    if (len(names), len(labels)) != table.shape or len(set(names)) < len(names) or len(set(labels)) < len(labels):
        raise InputError(f"clients, classes: do not name a table of {table.shape}; accepted: a name for each, each once")
    for name, row in zip(names, table, strict=True):
        if not np.isfinite(row).all() or (not noisy and (row.min() < 0 or not row.any())):
            validate_report(name, row, table.shape[1], noisy)  # says what is wrong with it
    return Federation(names, labels, table, noisy)


def _with_noise(
    by_size: Sequence[Outcome],
    recommendation: Recommendation,
    budgets: Sequence[float | None],
    buffers: Mapping[int, Sequence[int]],
) -> list[Choice]:
    """The recommended selector, or FedEntOpt where random selection is recommended, with every budget and size."""
    chosen = recommendation.chosen.choice
    cls = EntropySelector if recommendation.is_random else chosen.selector
    found = []
    for size in sorted({outcome.choice.cohort for outcome in by_size}):
        buffer = None
        if has_buffer(cls):
            wanted = chosen.buffer if chosen.buffer is not None else buffers[size][len(buffers[size]) // 2]
            buffer = min(wanted, max(buffers[size]))
        found += [Choice(cls, size, buffer, budget) for budget in budgets]
    return found


def _with_absence(by_size: Sequence[Outcome], recommendation: Recommendation, away: float) -> list[Choice]:
    """Every selector at the recommended size, with the recommended buffer, clients away."""
    chosen = recommendation.chosen.choice
    found: dict[type[Selector], Choice] = {}
    for outcome in by_size:
        choice = outcome.choice
        if choice.cohort == chosen.cohort and (choice.selector not in found or choice.buffer == chosen.buffer):
            found[choice.selector] = replace(choice, away=away)
    return list(found.values())


def _privacy_words(
    federation: Federation,
    recommendation: Recommendation,
    by_size: Sequence[Outcome],
    by_noise: Sequence[Outcome],
    noisy: bool,
) -> str:
    """What noise costs at these sizes, with epsilon times samples per client."""
    if noisy:
        return "The counts hold noise already: all figures are of the counts as reported, and no more noise was tried."
    size, random = recommendation.chosen.choice.cohort, recommendation.random
    if not federation.top or not by_noise:
        return ""
    tried = next(o.choice for o in by_noise if o.choice.cohort == size)
    alike = [o for o in (*by_size, *by_noise) if replace(o.choice, epsilon=None) == replace(tried, epsilon=None)]
    (clean,) = [o for o in alike if o.choice.epsilon is None]
    noised = sorted((o for o in alike if o is not clean), key=lambda o: -(o.choice.epsilon or 0))
    samples = float(np.median(federation.counts.sum(axis=1)))
    buffer = "" if tried.buffer is None else f"a buffer of {tried.buffer}, "
    parts = [
        f"by {o.entropy - clean.entropy:+.3f} bits with ε = {o.choice.epsilon:g} (ε·n = {round_number(o.choice.epsilon * samples)})"
        for o in noised
        if o.choice.epsilon is not None
    ]
    text = (
        f"Noise moves the mean entropy of {clean.name} ({buffer}cohorts of {size}; n = {samples:g} samples per client at "
        f"the median) {', '.join(parts)}."
    )
    whole = gain(federation, clean, random)
    if whole <= NEAR:
        return text
    fine = [o.choice.epsilon for o in noised if o.choice.epsilon and gain(federation, o, random) >= KEPT_GAIN * whole]
    if fine:
        return f"{text} Down to ε = {min(fine):g} at least {share(KEPT_GAIN)} of the gain over random selection stays."
    return f"{text} None of these budgets keeps {share(KEPT_GAIN)} of the gain over random selection."


def round_number(value: float) -> str:
    """Three digits of a number, whole from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _absence_words(recommendation: Recommendation, by_absence: Sequence[Outcome], away: float) -> str:
    """What clients that are away cost."""
    chosen = recommendation.chosen
    for outcome in by_absence:
        if outcome.choice == replace(chosen.choice, away=away):
            random = next(o for o in by_absence if o.choice.selector is RandomSelector)
            beside = "" if outcome is random else f", random {random.entropy:.2f}"
            name = "random selection" if outcome is random else chosen.name
            return (
                f"With {share(away)} of the clients away in every round, {name} reaches {outcome.entropy:.2f} "
                f"instead of {chosen.entropy:.2f} bits{beside}, and {share(float(1 - outcome.covered.mean()))} of rounds "
                "miss a class."
            )
    return ""
