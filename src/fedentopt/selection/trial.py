"""Trying a selector on label counts: rounds without training, and what they say about a choice of settings."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError
from fedentopt.selection.cohort import ClientId, CohortWarning
from fedentopt.selection.entropy import ZERO_WEIGHT_BITS, EntropySelector
from fedentopt.selection.measures import classes_covered, entropy, row_scores, selection_entropy
from fedentopt.selection.random import RandomSelector
from fedentopt.selection.selector import SELECTORS, Selector
from fedentopt.settings import settings_of


def counts_only() -> tuple[type[Selector], ...]:
    """Selectors that need label counts, or nothing at all, and nothing of a training run: FedEntOpt first."""
    known = [cls for cls in SELECTORS if not cls.needs]
    return tuple(sorted(known, key=lambda cls: cls.name != EntropySelector.name))


def has_buffer(cls: type[Selector]) -> bool:
    """Whether clients that were just chosen can be kept out."""
    return "buffer" in settings_of(cls)


def takes_target(cls: type[Selector]) -> bool:
    """Whether it can aim for a label distribution of one's own."""
    return "target" in inspect.signature(cls.__init__).parameters


def make_selector(
    cls: type[Selector],
    *,
    cohort_size: int,
    clients: int,
    seed: int,
    buffer: int | None = None,
    target: ArrayLike | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Selector:
    """A selector for so many clients, from the settings by which it is asked for; those it cannot have are refused.

    `buffer` is a number of clients, for selectors that have one, and `target` for those that take one.
    """
    given = dict(settings or {})
    if buffer is not None and has_buffer(cls):
        given["buffer"] = str(buffer)
    cls.check_run(cohort_size=cohort_size, clients=clients, **given)
    if target is None:
        return cls.for_run(cohort_size=cohort_size, clients=clients, seed=seed, **given)
    given.pop("buffer", None)
    more: dict[str, Any] = {"buffer_size": buffer or 0} if has_buffer(cls) else {}
    return cls(cohort_size, seed=seed, target=target, **more, **given)


def classes_held(counts: np.ndarray) -> int:
    """How many classes any client holds, of (clients, classes) counts: the most that a cohort can cover."""
    return classes_covered(np.maximum(counts, 0).sum(axis=0))


@dataclass(frozen=True)
class TrialRound:
    """One cohort. `entropy`, `classes_covered`, `label_counts` and `divergence`, which is KL(cohort || target) where
    the selector has a target, are of the true counts where known, else of the reported ones; `reported_entropy` is
    there only where both are known and may differ; `weights`, and `sample_limits`, how many samples of each class a
    client may use, both in the order of `clients`, only where the selector defines them.
    """

    round: int
    clients: tuple[ClientId, ...]
    entropy: float
    classes_covered: int
    label_counts: tuple[float, ...]
    reported_entropy: float | None = None
    divergence: float | None = None
    weights: tuple[float, ...] | None = None
    sample_limits: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Trial:
    """Rounds, how evenly clients were selected over them (H_norm), and how many clients never were.

    `times` says how often each client was, in the order of registration.
    """

    rounds: tuple[TrialRound, ...]
    selection_entropy: float
    never_selected: int
    times: tuple[int, ...] = ()


def try_rounds(
    selector: Selector,
    rounds: int,
    true_counts: np.ndarray | None = None,
    progress: Callable[[], None] = lambda: None,
    available: Callable[[int], Iterable[ClientId] | None] = lambda number: None,
    target: np.ndarray | None = None,
    *,
    keep_limits: bool = False,
) -> Trial:
    """Select `rounds` times among all registered clients, or those that `available(round)` names.

    `true_counts`, by order of registration, are given where the selector was told noisy ones. Divergence is from
    `target`, by default the selector's own. Rounds are numbered from 1, or on from where the selector's state left off.
    A cohort that is smaller because too few are available is no matter for a warning here. `keep_limits`: rounds say
    how many samples clients may use, a number per client and class.
    """
    times = np.zeros(len(selector.clients), dtype=np.int64)
    target = getattr(selector, "target", None) if target is None else EntropySelector(1, target=target).target
    done = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CohortWarning)
        for _ in range(rounds):
            cohort = selector.select(available(selector.round + 1))
            picked = selector.numbers_of(cohort.clients)
            np.add.at(times, picked, 1)
            limits = cohort.sample_limits if keep_limits else None
            labels = cohort.label_counts if true_counts is None else np.maximum(true_counts[picked], 0).sum(axis=0)
            result = TrialRound(
                round=selector.round,
                clients=cohort.clients,
                entropy=entropy(labels),
                classes_covered=classes_covered(labels),
                label_counts=tuple(labels.tolist()),
                reported_entropy=None if true_counts is None else cohort.entropy,
                divergence=None if target is None else _divergence(labels, target),
                weights=cohort.weights,
                sample_limits=None if limits is None else tuple(tuple(limits[c].tolist()) for c in cohort.clients),
            )
            done.append(result)
            progress()
    return Trial(tuple(done), selection_entropy(times), int(np.count_nonzero(times == 0)), tuple(times.tolist()))


def _divergence(labels: np.ndarray, target: np.ndarray) -> float:
    """KL(labels || target) in bits; a weight of 0 counts as in the selector."""
    floor = 2.0**-ZERO_WEIGHT_BITS
    return max(-float(row_scores(labels[None, :].astype(np.float64), np.log2(np.maximum(target, floor)))[0]), 0.0)


@dataclass(frozen=True)
class SweepRow:
    """What one choice of cohort and buffer size gives; without a buffer it is random selection.

    `coverage` is the share of rounds whose cohort held every class that any client holds; the divergences are from a
    target, where there is one.
    """

    cohort: int
    buffer: int | None
    mean_entropy: float
    worst_entropy: float
    coverage: float
    selection_entropy: float
    never_selected: int
    mean_divergence: float | None = None
    worst_divergence: float | None = None


def sweep(
    counts: np.ndarray,
    settings: Sequence[tuple[int, int | None]],
    rounds: int,
    seed: int,
    *,
    ids: Sequence[ClientId] | None = None,
    reported: np.ndarray | None = None,
    noisy: bool = False,
    target: np.ndarray | None = None,
    available: Sequence[ClientId] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[SweepRow]:
    """Try FedEntOpt with several (cohort size, buffer size) pairs on the same (clients, classes) counts; None for the
    buffer tries random selection.

    `reported`, where given, is what the selector is told, while the results are of `counts`. With a target, rows come
    by their mean divergence from it, the least first; else in the order given.
    """
    if available is not None and ids is None:
        raise InputError("available: without ids there is nobody to name; accepted: both")
    held = classes_held(counts)
    rows = []
    for cohort, buffer in settings:
        selector: Selector = RandomSelector(cohort, seed=seed)
        if buffer is not None:
            selector = EntropySelector(cohort, buffer_size=buffer, seed=seed, target=target)
        selector.register(counts if reported is None else reported, noisy=noisy or reported is not None, ids=ids)
        true_counts = None if reported is None else counts
        trial = try_rounds(selector, rounds, true_counts, progress, lambda number: available, target)
        entropies = [result.entropy for result in trial.rounds]
        covered = [result.classes_covered >= held for result in trial.rounds]
        apart = [result.divergence for result in trial.rounds if result.divergence is not None]
        rows.append(
            SweepRow(
                cohort=cohort,
                buffer=buffer,
                mean_entropy=float(np.mean(entropies)),
                worst_entropy=min(entropies),
                coverage=float(np.mean(covered)),
                selection_entropy=trial.selection_entropy,
                never_selected=trial.never_selected,
                mean_divergence=float(np.mean(apart)) if apart else None,
                worst_divergence=max(apart) if apart else None,
            )
        )
    return sorted(rows, key=lambda row: row.mean_divergence or 0.0) if target is not None else rows
