"""What a run, and a method over several seeds, comes to.

A run's accuracy is its mean test accuracy over its last ten rounds (FedConcat's are rounds of its second stage).
From the round in which its model stopped being finite, a run counts as chance, 100/C per cent. A method's figure
is the mean over seeds and their sample standard deviation (one seed: none).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedentopt.results.records import RoundRecord
from fedentopt.results.statistics import finite, mean
from fedentopt.selection.measures import selection_entropy

LAST = 10
"""Rounds at the end whose mean accuracy is reported."""

NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
TARGETS = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0)
"""Accuracies in per cent whose first round is always written down."""


def accuracy_curve(
    records: Iterable[RoundRecord], *, rounds: int, num_classes: int, diverged_round: int | None = None
) -> dict[int, float]:
    """Accuracy by evaluated round; chance in every round from `diverged_round` to the last."""
    evaluated = {r.round: r.accuracy for r in records if r.accuracy is not None}
    return with_chance(evaluated, rounds=rounds, num_classes=num_classes, diverged_round=diverged_round)


def with_chance(
    accuracy: Mapping[int, float], *, rounds: int, num_classes: int, diverged_round: int | None
) -> dict[int, float]:
    """Accuracy by round, with chance in every round from `diverged_round` to the last."""
    end = rounds + 1 if diverged_round is None else diverged_round
    kept = {number: value for number, value in accuracy.items() if number < end}
    return kept | dict.fromkeys(range(end, rounds + 1), 100 / num_classes)


def rounds_to(curve: Mapping[int, float], target: float) -> int | None:
    """First evaluated round with at least `target` per cent, or None."""
    return next((number for number in sorted(curve) if curve[number] >= target), None)


def averaged_rounds(summaries: Iterable[Mapping[str, Any]]) -> str:
    """What a run's accuracy is the mean of, in words: its last ten rounds, or all of them where there are fewer."""
    most = max((min(LAST, summary["rounds"]) for summary in summaries if summary.get("rounds")), default=LAST)
    return "of the last round" if most == 1 else f"mean of the last {NUMBERS[most - 2]} rounds"


def summarise(
    records: Sequence[RoundRecord],
    *,
    rounds: int,
    num_classes: int,
    clients: int,
    diverged_round: int | None = None,
    targets: Iterable[float] = (),
) -> dict[str, Any]:
    """The content of `summary.json` for a finished run of `rounds` rounds."""
    curve = accuracy_curve(records, rounds=rounds, num_classes=num_classes, diverged_round=diverged_round)
    last = {number: value for number, value in curve.items() if number > rounds - LAST}
    classes = _class_accuracy(records, last, num_classes, diverged_round)
    selected = np.bincount([c for r in records for c in r.clients], minlength=clients)
    entropies = [r.entropy for r in records]
    return {
        "accuracy": _mean(last.values()),
        "final_accuracy": finite(curve.get(rounds)),
        "best_accuracy": max(curve.values(), default=None),
        "class_accuracy": [finite(value) for value in classes],
        "worst_class_accuracy": finite(_least(classes)),
        "h_norm": finite(float(selection_entropy(selected))) if selected.any() else None,
        "never_selected": int((selected == 0).sum()),
        "mean_entropy": _mean(entropies),
        "min_entropy": min(entropies, default=None),
        "rounds_to": {f"{t:g}": rounds_to(curve, t) for t in sorted({*TARGETS, *targets})},
        "bytes_up": sum(r.bytes_up for r in records),
        "bytes_down": sum(r.bytes_down for r in records),
        "diverged_round": diverged_round,
        "rounds": rounds,
        "seconds": sum(r.seconds for r in records),
        "simulated_seconds": sum(r.simulated_seconds for r in records),
        "finished": True,
        "chance": 100 / num_classes,
    }


def _class_accuracy(
    records: Sequence[RoundRecord], last: Mapping[int, float], num_classes: int, diverged_round: int | None
) -> list[float]:
    """Accuracy of each class, mean of the rounds in `last`; NaN for a class without test samples."""
    end = math.inf if diverged_round is None else diverged_round
    rows = [r.class_accuracy for r in records if r.round in last and r.round < end and r.class_accuracy is not None]
    chance = (100 / num_classes,) * num_classes
    rows += [chance for number in last if number >= end]
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)] if rows else [math.nan] * num_classes


def _least(values: Iterable[float]) -> float | None:
    return min((value for value in values if not math.isnan(value)), default=None)


def _mean(values: Iterable[float]) -> float | None:
    return finite(mean(list(values)))
