"""The numbers of the page: what a method reached, over its seeds.

Spread is the sample standard deviation (n - 1). Figures come from `summary.json` of finished runs; a method
without a finished run shows what its unfinished runs have so far, and says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fedentopt.report.grouping import Method
from fedentopt.report.reading import Floats, RunResult
from fedentopt.selection.measures import selection_entropy

LAST_ROUNDS = 10
TIE = 1e-9

T = TypeVar("T")


@dataclass(frozen=True)
class Spread:
    """Mean of some seeds and their sample standard deviation; the latter is NaN for one seed."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Leaves NaN out; no value at all gives a NaN mean."""
        kept = [value for value in values if math.isfinite(value)]
        if not kept:
            return cls(math.nan, math.nan, 0)
        return cls(statistics.fmean(kept), statistics.stdev(kept) if len(kept) > 1 else math.nan, len(kept))


@dataclass(frozen=True)
class Figures:
    """A row of the summary table."""

    accuracy: Spread
    worst_class: Spread
    class_accuracy: Floats
    h_norm: Spread
    never_selected: Spread
    entropy: Spread
    full_cover: Spread  # per cent of the rounds whose cohort held every class
    bytes_sent: Spread
    finished: int
    unfinished: int
    diverged: tuple[tuple[int, int], ...]  # (seed, round)


def figures(method: Method) -> Figures:
    """Figures of one method over its finished seeds (over all of them where none is finished)."""
    runs = method.finished or method.runs
    full = [100 * float(np.mean(run.covered == len(run.classes))) for run in runs]

    def spread(key: str, otherwise: Callable[[RunResult], float]) -> Spread:
        return Spread.of([_summary_value(run, key, otherwise) for run in runs])

    return Figures(
        accuracy=spread("accuracy", lambda run: _mean_of_last(run.accuracy)),
        worst_class=spread("worst_class_accuracy", lambda run: float(np.min(_class_accuracy(run)))),
        class_accuracy=_mean_ignoring_nan(np.stack([_class_accuracy(run) for run in runs])),
        h_norm=spread("h_norm", lambda run: selection_entropy(run.times_selected)),
        never_selected=spread("never_selected", lambda run: float(np.sum(run.times_selected == 0))),
        entropy=spread("mean_entropy", lambda run: float(np.nanmean(run.entropy))),
        full_cover=Spread.of(full),
        bytes_sent=Spread.of([float(np.sum(run.bytes_up) + np.sum(run.bytes_down)) for run in runs]),
        finished=len(method.finished),
        unfinished=len(method.runs) - len(method.finished),
        diverged=tuple(
            (run.seed, int(run.summary["diverged_round"]))
            for run in method.finished
            if run.summary is not None and run.summary.get("diverged_round") is not None
        ),
    )


def best_of(means: Sequence[float]) -> tuple[int, ...]:
    """Positions of the highest mean, several where they tie; none where there is nothing to prefer it to."""
    known = [mean for mean in means if math.isfinite(mean)]
    if len(known) < 2 or max(known) - min(known) < TIE:
        return ()
    return tuple(i for i, mean in enumerate(means) if math.isfinite(mean) and mean > max(known) - TIE)


def _summary_value(run: RunResult, key: str, otherwise: Callable[[RunResult], float]) -> float:
    value = (run.summary or {}).get(key)
    return float(value) if isinstance(value, (int, float)) else otherwise(run)


def _mean_of_last(values: Floats) -> float:
    """Mean of the last ten evaluated rounds, NaN where nothing was evaluated."""
    evaluated = values[np.isfinite(values)][-LAST_ROUNDS:]
    return float(np.mean(evaluated)) if evaluated.size else math.nan


def _class_accuracy(run: RunResult) -> Floats:
    """Accuracy of every class, mean of the last ten evaluated rounds."""
    stored = (run.summary or {}).get("class_accuracy")
    if isinstance(stored, list) and len(stored) == len(run.classes) and None not in stored:
        return np.asarray(stored, dtype=np.float64)
    evaluated = run.class_accuracy[np.isfinite(run.class_accuracy).any(axis=1)][-LAST_ROUNDS:]
    return _mean_ignoring_nan(evaluated) if len(evaluated) else np.full(len(run.classes), np.nan)


def _mean_ignoring_nan(rows: Floats) -> Floats:
    seen = np.isfinite(rows)
    count = seen.sum(axis=0)
    total = np.where(seen, rows, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


@dataclass(frozen=True)
class Curve:
    """Mean and standard deviation over seeds, round by round (0 spread where one seed is there)."""

    rounds: list[int]
    mean: list[float]
    std: list[float]


def curve(runs: Sequence[RunResult], values: Callable[[RunResult], Floats], points: int) -> Curve:
    """A curve over the rounds that have a value, thinned to `points` evenly spaced ones; the ends stay."""
    seen: dict[int, list[float]] = {}
    for run in runs:
        for number, value in zip(run.rounds.tolist(), values(run).tolist(), strict=True):
            if math.isfinite(value):
                seen.setdefault(number, []).append(value)
    numbers = thin(sorted(seen), points)
    return Curve(
        rounds=numbers,
        mean=[float(np.mean(seen[number])) for number in numbers],
        std=[float(np.std(seen[number], ddof=1)) if len(seen[number]) > 1 else 0.0 for number in numbers],
    )


def thin(items: Sequence[T], most: int) -> list[T]:
    """At most `most` items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    if most < 2:
        return list(items[:most])
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


@dataclass(frozen=True)
class Cost:
    """What it took to reach an accuracy the first time: mean over the seeds that did."""

    rounds: float
    bytes_sent: float
    reached: int


def costs(method: Method, targets: Sequence[float]) -> list[Cost | None]:
    """Rounds and bytes (both ways, all clients) to first reach each target; None where no seed does."""
    found: list[list[tuple[int, int]]] = [[] for _ in targets]
    for run in method.finished or method.runs:
        sent = np.cumsum(run.bytes_up + run.bytes_down)
        best = np.maximum.accumulate(np.where(np.isfinite(run.accuracy), run.accuracy, -np.inf))
        for index, target in enumerate(targets):
            first = int(np.searchsorted(best, target))
            if first < len(best):
                found[index].append((int(run.rounds[first]), int(sent[first])))
    return [
        Cost(statistics.fmean(r for r, _ in hits), statistics.fmean(b for _, b in hits), len(hits)) if hits else None
        for hits in found
    ]
