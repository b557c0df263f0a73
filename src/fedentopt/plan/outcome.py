"""Trying one selector with one choice of settings, over several seeds: what came of it.

A repetition is a sequence of rounds with a seed of its own: that of the plan, and the ones that follow it. Noise and
absence are functions of the seed, so every selector meets the same ones, and `fedentopt select` with the same seed
makes the same cohorts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from fedentopt.randomness import generator
from fedentopt.results.statistics import Spread
from fedentopt.selection import Selector
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.noise import keyed_laplace
from fedentopt.selection.table import CountTable
from fedentopt.selection.trial import Trial, classes_held, make_selector, try_rounds

MOST_KEPT = 3  # tables with noise, one per seed, that are kept for the next choice


@dataclass(frozen=True, eq=False)
class Federation:
    """Whose plan it is: names, classes and label counts (clients, classes); `noisy` counts hold noise already."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    counts: np.ndarray
    noisy: bool = False
    _with_noise: dict[tuple[float, int], CountTable] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def held(self) -> np.ndarray:
        """Which classes any client holds."""
        return np.asarray(np.maximum(self.counts, 0).sum(axis=0) > 0)

    @cached_property
    def held_cells(self) -> int:
        """How many label counts are above 0."""
        return int(np.count_nonzero(self.counts > 0))

    @cached_property
    def samples(self) -> float:
        """Samples per client, the median."""
        return float(np.median(np.maximum(self.counts, 0).sum(axis=1)))

    @cached_property
    def top(self) -> float:
        """The largest entropy a cohort can have, in bits."""
        return math.log2(max(classes_held(self.counts), 1))

    def reported(self, epsilon: float | None, seed: int) -> CountTable:
        """What clients report, read once for all trials with this noise, under their numbers in the place of names."""
        if epsilon is None:
            return self._reported
        kept = self._with_noise
        if (epsilon, seed) not in kept:
            if len(kept) >= MOST_KEPT or any(budget != epsilon for budget, _ in kept):
                kept.clear()
            kept[epsilon, seed] = _read(keyed_laplace(self.counts, epsilon, self.clients, seed), noisy=True)
        return kept[epsilon, seed]

    @cached_property
    def _reported(self) -> CountTable:
        return _read(self.counts, self.noisy)


@dataclass(frozen=True)
class Choice:
    """What is tried: a selector with its settings, and what clients do: report with noise, be away."""

    selector: type[Selector]
    cohort: int
    buffer: int | None = None
    epsilon: float | None = None
    away: float = 0.0


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a choice: an entry per repetition in every array, entropies (repetitions, rounds) of true counts.

    `covered` is the share of rounds whose cohort held every class that anybody holds, `missed` (repetitions, classes)
    the share of rounds without each such class. `times` says how often each client was asked, as the mean over
    repetitions.
    """

    choice: Choice
    settings: Mapping[str, Any]
    entropies: np.ndarray
    covered: np.ndarray
    missed: np.ndarray
    h_norm: np.ndarray
    never: np.ndarray
    times: np.ndarray
    cohort_clients: float

    @property
    def name(self) -> str:
        """The selector as tables write it."""
        return self.choice.selector.label or self.choice.selector.name

    @property
    def entropy(self) -> float:
        """Mean over all rounds."""
        return float(self.entropies.mean())

    def repetition(self, number: int) -> Outcome:
        """The outcome of one repetition alone, the last where there are fewer; `times` stay those of all."""
        first = min(number, len(self.entropies) - 1)
        one = slice(first, first + 1)
        return replace(
            self, entropies=self.entropies[one], covered=self.covered[one], missed=self.missed[one],
            h_norm=self.h_norm[one], never=self.never[one],
        )  # fmt: skip

    def row(self, federation: Federation) -> dict[str, Any]:
        """The outcome as JSON."""
        choice = self.choice
        missed = self.missed.mean(axis=0)
        return {
            "selector": choice.selector.name,
            "label": self.name,
            "cohort": choice.cohort,
            "buffer": choice.buffer,
            "settings": dict(self.settings),
            "epsilon": choice.epsilon,
            "away": choice.away,
            "rounds": int(self.entropies.shape[1]),
            "repetitions": int(self.entropies.shape[0]),
            "mean_entropy": Spread.of(self.entropies.mean(axis=1).tolist()).to_dict(),
            "worst_entropy": {
                **Spread.of(self.entropies.min(axis=1).tolist()).to_dict(),
                "least": self.entropies.min(),
            },
            "rounds_missing_a_class": Spread.of((1 - self.covered).tolist()).to_dict(),
            "missed": {
                federation.classes[c]: float(missed[c]) for c in np.argsort(-missed, kind="stable") if missed[c]
            },
            "h_norm": Spread.of(self.h_norm.tolist()).to_dict(),
            "never_selected": Spread.of(self.never.tolist()).to_dict(),
            "asked": {
                "least": float(self.times.min()),
                "median": float(np.median(self.times)),
                "most": float(self.times.max()),
            },
            "clients_per_round": self.cohort_clients,
        }

    def first(self) -> dict[str, float]:
        """Figures of the first repetition alone, as `fedentopt select --json` names them."""
        return {
            "mean_entropy": float(self.entropies[0].mean()),
            "worst_entropy": float(self.entropies[0].min()),
            "coverage": float(self.covered[0]),
            "selection_entropy": float(self.h_norm[0]),
            "never_selected": int(self.never[0]),
        }


def try_choice(
    federation: Federation,
    choice: Choice,
    *,
    rounds: int,
    seeds: Sequence[int],
    settings: Mapping[str, Any] | None = None,
    progress: Callable[[int], None] = lambda rounds: None,
) -> Outcome:
    """Try a choice with every seed. Refused: what the selector refuses."""
    trials = []
    for seed in seeds:
        trials.append(_trial(federation, choice, rounds, seed, settings or {}))
        progress(rounds)
    held = federation.held
    labels = np.array([[result.label_counts for result in trial.rounds] for trial in trials])
    gaps = (labels <= 0) & held
    return Outcome(
        choice=choice,
        settings=settings or {},
        entropies=np.array([[result.entropy for result in trial.rounds] for trial in trials]),
        covered=1 - gaps.any(axis=2).mean(axis=1),
        missed=gaps.mean(axis=1),
        h_norm=np.array([trial.selection_entropy for trial in trials]),
        never=np.array([trial.never_selected for trial in trials]),
        times=np.mean([trial.times for trial in trials], axis=0).astype(np.float32),
        cohort_clients=float(np.mean([len(result.clients) for trial in trials for result in trial.rounds])),
    )


def _trial(federation: Federation, choice: Choice, rounds: int, seed: int, settings: Mapping[str, Any]) -> Trial:
    selector = make_selector(
        choice.selector,
        cohort_size=choice.cohort,
        clients=len(federation.clients),
        seed=seed,
        buffer=choice.buffer,
        settings=settings,
    )
    true_counts = None if choice.epsilon is None else federation.counts
    names = None
    if choice.selector.__module__.startswith("fedentopt."):  # these pick by number alone, whatever a client is called
        selector.register(federation.reported(choice.epsilon, seed))
    else:
        names = np.array(federation.clients, dtype=object)
        counts = federation.counts
        if choice.epsilon is not None:
            counts = keyed_laplace(counts, choice.epsilon, federation.clients, seed)
        noisy = federation.noisy or choice.epsilon is not None
        selector.register(counts, noisy=noisy, ids=federation.clients)
    available = _available(len(federation.clients), names, choice.away, seed)
    return try_rounds(selector, rounds, true_counts, available=available)


def _read(counts: np.ndarray, noisy: bool) -> CountTable:
    table = CountTable()
    table.register(counts, None, noisy, None)
    return table


def _available(
    clients: int, names: np.ndarray | None, away: float, seed: int
) -> Callable[[int], Iterable[ClientId] | None]:
    """Who is there in a round, by name or else by number: everybody, or all but those that a coin keeps away; at least
    one client."""
    if not away:
        return lambda number: None

    def here(number: int) -> Iterable[ClientId]:
        draws = generator(seed, "away", number).random(clients)
        present = np.flatnonzero((draws >= away) | (draws == draws.max()))
        named: Iterable[ClientId] = present if names is None else names[present].tolist()
        return named

    return here
