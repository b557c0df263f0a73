"""Trying one selector with one choice of settings, over several seeds: what came of it.

A repetition is a sequence of rounds with a seed of its own: that of the plan, and the ones that follow it. Noise and
absence are functions of the seed, so every selector meets the same ones, and `fedentopt select` with the same seed
makes the same cohorts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedentopt.randomness import generator
from fedentopt.results.statistics import Spread
from fedentopt.selection import EntropySelector, RandomSelector, Selector
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.noise import keyed_laplace
from fedentopt.selection.trial import Trial, classes_held, make_selector, try_rounds

PATIENCE = 4.0  # seconds; a selector that takes longer for one repetition is not asked for more of them


@dataclass(frozen=True, eq=False)
class Federation:
    """Whose plan it is: names, classes and label counts (clients, classes); `noisy` counts hold noise already."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    counts: np.ndarray
    noisy: bool = False

    @property
    def held(self) -> np.ndarray:
        """Which classes any client holds."""
        return np.asarray(np.maximum(self.counts, 0).sum(axis=0) > 0)

    @property
    def samples(self) -> float:
        """Samples per client, the median."""
        return float(np.median(np.maximum(self.counts, 0).sum(axis=1)))

    @property
    def top(self) -> float:
        """The largest entropy a cohort can have, in bits."""
        return math.log2(max(classes_held(self.counts), 1))


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
    """Try a choice with every seed. Refused: what the selector refuses.

    Random selection and FedEntOpt, whose time is known beforehand, always have all repetitions; of others a clock may
    leave some out, and their rows say how many there are.
    """
    trials = []
    known = choice.selector in (RandomSelector, EntropySelector)
    started = time.monotonic()
    for place, seed in enumerate(seeds):
        trials.append(_trial(federation, choice, rounds, seed, settings or {}))
        progress(rounds)
        if not known and time.monotonic() - started > PATIENCE * (place + 1):
            break
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
    counts, true_counts = federation.counts, None
    if choice.epsilon is not None:
        true_counts = counts
        counts = keyed_laplace(counts, choice.epsilon, federation.clients, seed)
    # These two pick by place alone; numbers for names save them most of the time that a large table takes.
    names = None if choice.selector in (RandomSelector, EntropySelector) else federation.clients
    selector.register(counts, noisy=federation.noisy or choice.epsilon is not None, ids=names)
    ids = np.arange(len(federation.clients)) if names is None else np.array(names, dtype=object)
    return try_rounds(selector, rounds, true_counts, available=_available(ids, choice.away, seed))


def _available(ids: np.ndarray, away: float, seed: int) -> Callable[[int], Sequence[ClientId] | None]:
    """Who is there in a round: everybody, or all but those that a coin keeps away; at least one client."""
    if not away:
        return lambda number: None

    def here(number: int) -> Sequence[ClientId]:
        draws = generator(seed, "away", number).random(len(ids))
        present: list[ClientId] = ids[(draws >= away) | (draws == draws.max())].tolist()
        return present

    return here
