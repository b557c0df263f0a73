"""Trying a selector on label counts: rounds without training, and what they say about a choice of settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.selection.cohort import ClientId
from fedentopt.selection.entropy import EntropySelector
from fedentopt.selection.measures import classes_covered, entropy, selection_entropy
from fedentopt.selection.selector import Selector


def classes_held(counts: np.ndarray) -> int:
    """How many classes any client holds, of (clients, classes) counts: the most that a cohort can cover."""
    return classes_covered(np.maximum(counts, 0).sum(axis=0))


@dataclass(frozen=True)
class TrialRound:
    """One cohort. `entropy` and `classes_covered` are of the true counts where known, else of the reported ones;
    `reported_entropy` is there only where both are known and may differ. `divergence` is KL(cohort || target) of the
    reported counts, where the selector has a target.
    """

    round: int
    clients: tuple[ClientId, ...]
    entropy: float
    classes_covered: int
    reported_entropy: float | None = None
    divergence: float | None = None


@dataclass(frozen=True)
class Trial:
    """Rounds, how evenly clients were selected over them (H_norm), and how many clients never were."""

    rounds: tuple[TrialRound, ...]
    selection_entropy: float
    never_selected: int


def try_rounds(
    selector: Selector,
    rounds: int,
    true_counts: np.ndarray | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Trial:
    """Select `rounds` times among all registered clients.

    `true_counts`, by order of registration, are given where the selector was told noisy ones. Rounds are
    numbered from 1, or on from where the selector's state left off.
    """
    number = {client: i for i, client in enumerate(selector.clients)}
    times = np.zeros(len(number), dtype=np.int64)
    done = []
    for _ in range(rounds):
        cohort = selector.select()
        picked = [number[client] for client in cohort.clients]
        times[picked] += 1
        labels = cohort.label_counts if true_counts is None else true_counts[picked].sum(axis=0)
        result = TrialRound(
            round=selector.round,
            clients=cohort.clients,
            entropy=entropy(labels),
            classes_covered=classes_covered(labels),
            reported_entropy=None if true_counts is None else cohort.entropy,
            divergence=cohort.divergence,
        )
        done.append(result)
        progress()
    return Trial(tuple(done), selection_entropy(times), int(np.count_nonzero(times == 0)))


@dataclass(frozen=True)
class SweepRow:
    """What one choice of cohort and buffer size gives. `coverage` is the share of rounds whose cohort held every
    class that any client holds.
    """

    cohort: int
    buffer: int
    mean_entropy: float
    worst_entropy: float
    coverage: float
    selection_entropy: float
    never_selected: int


def sweep(
    counts: np.ndarray,
    settings: Sequence[tuple[int, int]],
    rounds: int,
    seed: int,
    *,
    reported: np.ndarray | None = None,
    noisy: bool = False,
    target: ArrayLike | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[SweepRow]:
    """Try FedEntOpt with several (cohort size, buffer size) pairs on the same (clients, classes) counts.

    `reported`, where given, is what the selector is told, while the results are of `counts`.
    """
    held = classes_held(counts)
    rows = []
    for cohort, buffer in settings:
        selector = EntropySelector(cohort, buffer_size=buffer, seed=seed, target=target)
        selector.register(counts if reported is None else reported, noisy=noisy or reported is not None)
        trial = try_rounds(selector, rounds, None if reported is None else counts, progress)
        entropies = [result.entropy for result in trial.rounds]
        covered = [result.classes_covered >= held for result in trial.rounds]
        rows.append(
            SweepRow(
                cohort=cohort,
                buffer=buffer,
                mean_entropy=float(np.mean(entropies)),
                worst_entropy=min(entropies),
                coverage=float(np.mean(covered)),
                selection_entropy=trial.selection_entropy,
                never_selected=trial.never_selected,
            )
        )
    return rows
