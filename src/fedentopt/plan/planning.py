"""From label counts to a plan: every selector that needs nothing else, over cohort sizes, buffers, noise and absence.

First every selector is tried with every size, on the counts as they are (or with the only noise asked for), and a
recommendation made. Then the recommended selector, or FedEntOpt where that one reads no label counts, is tried with
every privacy budget and size, and all selectors at the recommended size with clients away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError
from fedentopt.labels import validate_report
from fedentopt.plan.carrying_out import command, flower, python
from fedentopt.plan.costs import absence_words, privacy_words, with_every_budget
from fedentopt.plan.outcome import Choice, Federation, Outcome
from fedentopt.plan.recommendation import Recommendation, recommend
from fedentopt.plan.sizes import (
    Given,
    amount_of_work,
    as_words,
    away_share,
    buffer_sizes,
    cohort_sizes,
    epsilons,
    that_differ,
)
from fedentopt.plan.trying import Progress, Skipped, Starting, Trying
from fedentopt.selection import EntropySelector, RandomSelector, Selector
from fedentopt.selection.selector import check_int
from fedentopt.selection.trial import counts_only, has_buffer


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

    def noised(self, size: int) -> list[Outcome]:
        """Outcomes that differ in their privacy budget alone, with cohorts of this size: the smallest first, true
        counts last; none where no noise was tried."""
        tried = next((o.choice for o in self.by_noise if o.choice.cohort == size), None)
        if tried is None:
            return []
        return with_every_budget((*self.by_size, *self.by_noise), tried)

    @property
    def samples(self) -> float:
        """Samples per client, the median."""
        return self.federation.samples

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
        names, figures = self.federation.clients, chosen.row(self.federation)
        outcomes = (*self.by_size, *self.by_noise, *self.by_absence)
        return {
            "settings": dict(self.settings),
            "rows": [outcome.row(self.federation) for outcome in outcomes],
            "skipped": [
                {"selector": one.selector, "cohort": one.cohort, "reason": one.reason} for one in self.skipped
            ],
            "recommendation": {
                **{name: figures[name] for name in ("selector", "cohort", "buffer", "settings", "epsilon")},
                "reason": self.recommendation.reason,
                "trade": self.recommendation.trade,
                "privacy": self.privacy,
                "availability": self.availability,
                "command": self.command(),
                "python": self.python(),
                "flower": self.flower(),
                "figures": figures,
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
    cohorts: Given = None,
    buffers: Given = None,
    epsilon: Given = None,
    away: str | float = "20%",
    rounds: int | None = None,
    repetitions: int | None = None,
    seed: int = 0,
    noisy: bool = False,
    source: str = "counts.csv",
    drop: Sequence[str] = (),
    everything: bool = False,
    progress: Progress = lambda done, total: None,
    starting: Starting = lambda text: None,
) -> Plan:
    """Try every selector that needs label counts alone on (clients, classes) counts, and recommend one.

    `clients` and `classes` are their names, by default those of a data frame's rows and columns, else 0, 1, ...
    `cohorts` and `buffers` are numbers of clients or per cents of them, `epsilon` privacy budgets or "none", each one
    or several; `away` is the share of the clients that is away in a round. `noisy` counts hold noise already, and get
    no more. `source` and `drop` are for the command that carries the plan out. Without `rounds` and `repetitions` there
    are 100 and 3, or fewer for large tables; `settings["sampled"]` says so. Of large tables, selectors that would take
    long, by an estimate from sizes alone, are left out unless `everything` is wanted; `skipped` says so. `progress` is
    told the rounds done and all of them, `starting` in words what is tried next.
    """
    federation = _federation(counts, clients, classes, noisy)
    if noisy and epsilon is not None:
        raise InputError("--epsilon: adds noise to true counts, but --noisy says they are noisy; accepted: one")
    check_int("seed", seed, 0)
    for name, number in (("rounds", rounds), ("repetitions", repetitions)):
        if number is not None:
            check_int(name, number, 1)
    budgets: list[float | None] = [None] if noisy else epsilons(as_words("--epsilon", epsilon))
    absent = away_share(str(away))
    sizes, wanted = cohort_sizes(federation, as_words("--cohort", cohorts)), as_words("--buffer", buffers)
    tried_buffers = {size: buffer_sizes(size, len(federation.clients), wanted) for size in sizes}
    selectors = sorted(counts_only(), key=lambda cls: cls is not RandomSelector)
    noises = [budget for budget in dict.fromkeys([*([] if noisy else [None]), *budgets]) if budget != budgets[0]]
    most_buffers = max(map(len, tried_buffers.values()))
    about = sum(most_buffers if has_buffer(cls) else 1 for cls in selectors) + len(noises)
    used_rounds, used_repetitions, sampled = amount_of_work(federation, sizes, about, rounds, repetitions)
    tried_buffers = {size: that_differ(found, size, used_rounds) for size, found in tried_buffers.items()}
    trying = Trying(federation, used_rounds, range(seed, seed + used_repetitions), progress, starting)
    every = [
        Choice(cls, size, buffer, budgets[0])
        for size in sizes
        for cls in selectors
        for buffer in (tried_buffers[size] if has_buffer(cls) else [None])
    ]
    kept = _kept(trying, every, everything)
    base = [choice for choice in every if choice.selector in kept]
    trying.expect(len(base) + len(noises) * len(sizes) + (len(kept) if absent else 0))
    by_size = trying.all(base)
    recommendation = recommend(federation, by_size)
    noised = _with_noise(by_size, recommendation, noises, tried_buffers)
    by_noise = trying.all(trying.with_noise(noised, recommendation.chosen.choice.cohort, everything=everything))
    by_absence = []
    if absent:
        choices = _with_absence(by_size, recommendation, absent)
        there = {*_kept(trying, choices, everything), recommendation.chosen.choice.selector}
        by_absence = trying.all([choice for choice in choices if choice.selector in there])
    settings = {
        "file": source,
        "clients": len(federation.clients),
        "classes": list(federation.classes),
        "classes_held": int(federation.held.sum()),
        "label_counts": federation.counts.sum(axis=0).tolist(),
        "samples_per_client": federation.samples,
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
        privacy_words(federation, recommendation, by_size, by_noise, noisy),
        absence_words(recommendation, by_absence, absent),
    )  # fmt: skip


def _federation(
    counts: ArrayLike, clients: Sequence[str] | None, classes: Sequence[str] | None, noisy: bool
) -> Federation:
    try:
        table = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"counts: {error}; accepted: a (clients, classes) array of numbers") from error
    if table.ndim != 2 or not table.size:
        raise InputError(f"counts: an array of shape {table.shape}; accepted: (clients, classes)")
    frame: Any = counts
    if hasattr(frame, "columns"):  # it has names of its own
        clients = list(frame.index) if clients is None else clients
        classes = list(frame.columns) if classes is None else classes
    names = tuple(map(str, range(len(table)) if clients is None else clients))
    labels = tuple(map(str, range(table.shape[1]) if classes is None else classes))
    if (len(names), len(labels)) != table.shape or len(set(names)) < len(names) or len(set(labels)) < len(labels):
        raise InputError(
            f"clients, classes: do not name a table of {table.shape}; accepted: a name for each, each once"
        )
    for name, row in zip(names, table, strict=True):
        if not np.isfinite(row).all() or (not noisy and (row.min() < 0 or not row.any())):
            validate_report(name, row, table.shape[1], noisy)  # says what is wrong with it
    return Federation(names, labels, table, noisy)


def _kept(trying: Trying, choices: Sequence[Choice], everything: bool) -> list[type[Selector]]:
    """The selectors of these choices that can be tried with all of theirs."""
    of: dict[type[Selector], list[Choice]] = {}
    for choice in choices:
        of.setdefault(choice.selector, []).append(choice)
    return [cls for cls, its in of.items() if trying.can_serve(cls, its, everything=everything)]


def _with_noise(
    by_size: Sequence[Outcome],
    recommendation: Recommendation,
    budgets: Sequence[float | None],
    buffers: Mapping[int, Sequence[int]],
) -> list[Choice]:
    """The recommended selector, or FedEntOpt where it reads no label counts, with every budget and size."""
    chosen = recommendation.chosen.choice
    cls = chosen.selector if chosen.selector.reads_label_counts else EntropySelector
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
