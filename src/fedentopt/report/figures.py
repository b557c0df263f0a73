"""The numbers of the page: what a method reached, over its seeds.

Spread is the sample standard deviation (n - 1). Figures come from `summary.json` of finished runs; a method
without a finished run shows what its unfinished runs have so far, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from fedentopt.report.grouping import Method
from fedentopt.results.reading import RunResult
from fedentopt.results.rounds import Floats
from fedentopt.results.statistics import Spread
from fedentopt.results.summary import LAST
from fedentopt.selection.measures import selection_entropy

TIE = 1e-9

T = TypeVar("T")


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
    simulated_seconds: Spread
    finished: int
    unfinished: int
    validation: Spread
    clients: Spread  # accuracy of the final model per client, mean
    worst_tenth: Spread  # of the clients
    diverged: tuple[tuple[int, int], ...]  # (seed, round)


Rows = list[tuple[Method, Figures]]


def figures(method: Method) -> Figures:
    """Figures of one method over its finished seeds (over all of them where none is finished)."""
    runs = method.finished or method.runs
    full = [100 * float(np.mean(run.rounds.classes_covered == len(run.labels.classes))) for run in runs]

    def spread(key: str, otherwise: Callable[[RunResult], float]) -> Spread:
        return Spread.of([_summary_value(run, key, otherwise) for run in runs])

    return Figures(
        accuracy=spread("accuracy", lambda run: _mean_of_last(run.rounds.accuracy)),
        worst_class=spread("worst_class_accuracy", lambda run: float(np.min(_class_accuracy(run)))),
        class_accuracy=_mean_ignoring_nan(np.stack([_class_accuracy(run) for run in runs])),
        h_norm=spread("h_norm", lambda run: selection_entropy(run.times_selected)),
        never_selected=spread("never_selected", lambda run: float(np.sum(run.times_selected == 0))),
        entropy=spread("mean_entropy", lambda run: float(np.nanmean(run.rounds.entropy))),
        full_cover=Spread.of(full),
        bytes_sent=Spread.of([float(np.sum(run.rounds.bytes_up) + np.sum(run.rounds.bytes_down)) for run in runs]),
        simulated_seconds=Spread.of([float(np.sum(run.rounds.simulated_seconds)) for run in runs]),
        finished=len(method.finished),
        unfinished=len(method.runs) - len(method.finished),
        validation=spread("validation_accuracy", lambda run: _mean_of_last(run.rounds.validation_accuracy)),
        clients=Spread.of([_of_clients(run, "mean") for run in runs]),
        worst_tenth=Spread.of([_of_clients(run, "worst_tenth") for run in runs]),
        diverged=tuple(
            (run.seed, int(run.summary["diverged_round"]))
            for run in method.finished
            if run.summary.get("diverged_round") is not None
        ),
    )


def comparable(rows: Rows) -> Rows:
    """Those that can be compared: with a finished run, where any has one. What others have so far is of fewer
    rounds."""
    return [row for row in rows if row[1].finished] or rows


def most_accurate(rows: Rows) -> tuple[Rows, Rows]:
    """Those that can be compared by accuracy, and the best of them: several where they tie, all where there is nothing
    to prefer them to."""
    scored = [row for row in comparable(rows) if math.isfinite(row[1].accuracy.mean)]
    return scored, [scored[i] for i in best_of([values.accuracy.mean for _, values in scored])] or scored


def best_of(means: Sequence[float]) -> tuple[int, ...]:
    """Positions of the highest mean, several where they tie; none where there is nothing to prefer it to."""
    known = [mean for mean in means if math.isfinite(mean)]
    if len(known) < 2 or max(known) - min(known) < TIE:
        return ()
    return tuple(i for i, mean in enumerate(means) if math.isfinite(mean) and mean > max(known) - TIE)


def _summary_value(run: RunResult, key: str, otherwise: Callable[[RunResult], float]) -> float:
    value = run.summary.get(key)
    return float(value) if isinstance(value, (int, float)) else otherwise(run)


def _of_clients(run: RunResult, figure: str) -> float:
    """NaN where it was not asked for, or the run is unfinished: it is of the final model."""
    value = (run.summary.get("client_accuracy") or {}).get(figure)
    return math.nan if value is None else float(value)


def _mean_of_last(values: Floats) -> float:
    """Mean of the last ten evaluated rounds, NaN where nothing was evaluated."""
    evaluated = values[np.isfinite(values)][-LAST:]
    return float(np.mean(evaluated)) if evaluated.size else math.nan


def _class_accuracy(run: RunResult) -> Floats:
    """Accuracy of every class, mean of the last ten evaluated rounds."""
    stored = run.summary.get("class_accuracy")
    if isinstance(stored, list) and len(stored) == len(run.labels.classes) and None not in stored:
        return np.asarray(stored, dtype=np.float64)
    evaluated = run.rounds.class_accuracy[np.isfinite(run.rounds.class_accuracy).any(axis=1)][-LAST:]
    return _mean_ignoring_nan(evaluated) if len(evaluated) else np.full(len(run.labels.classes), np.nan)


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
        for number, value in zip(run.rounds.number.tolist(), values(run).tolist(), strict=True):
            if math.isfinite(value):
                seen.setdefault(number, []).append(value)
    numbers = thin(sorted(seen), points)
    spreads = [Spread.of(seen[number]) for number in numbers]
    return Curve(
        rounds=numbers,
        mean=[spread.mean for spread in spreads],
        std=[spread.std if spread.count > 1 else 0.0 for spread in spreads],
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
        rounds = run.rounds
        sent = np.cumsum(rounds.bytes_up + rounds.bytes_down)
        best = np.maximum.accumulate(np.where(np.isfinite(rounds.accuracy), rounds.accuracy, -np.inf))
        for index, target in enumerate(targets):
            first = int(np.searchsorted(best, target))
            if first < len(best):
                found[index].append((int(rounds.number[first]), int(sent[first])))
    return [
        Cost(Spread.of(r for r, _ in hits).mean, Spread.of(b for _, b in hits).mean, len(hits)) if hits else None
        for hits in found
    ]
