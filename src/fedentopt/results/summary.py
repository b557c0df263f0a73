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

from fedentopt.results.records import Outcome, RoundRecord
from fedentopt.results.statistics import finite, mean
from fedentopt.selection.measures import selection_entropy

LAST = 10
"""Rounds at the end whose mean accuracy is reported."""

NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
TARGETS = (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0)
"""Accuracies in per cent whose first round is always written down."""
LAST_KNOWN = ("estimate_error", "suspects", "honest_suspects", "suspicion_auc", "first_auc", "third_auc")
TRUST = ("believed_entropy", "liars_chosen", *LAST_KNOWN)
"""What a run's server believed, in a few figures: means over the rounds, and what it knew in the last one."""


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
    client_accuracy: Sequence[float] | None = None,
    client_accuracy_of: str = "",
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
        **_where_known("selection_seconds", (r.selection_seconds for r in records)),
        **_where_known("asked", (r.asked for r in records)),
        **_validation(records, rounds, num_classes, diverged_round),
        **_client_accuracy(client_accuracy, client_accuracy_of),
        **_trust(records),
        "finished": True,
        "chance": 100 / num_classes,
    }


def summarise_outcome(outcome: Outcome, targets: Iterable[float]) -> dict[str, Any]:
    """The content of `summary.json` for a run that the engine has finished."""
    return summarise(
        outcome.records,
        rounds=outcome.rounds,
        num_classes=outcome.num_classes,
        clients=outcome.clients,
        diverged_round=outcome.diverged_round,
        targets=targets,
        client_accuracy=outcome.client_accuracy,
        client_accuracy_of=outcome.client_accuracy_of,
    )


def _where_known(name: str, values: Iterable[float]) -> dict[str, float]:
    """The sum under this name; nothing where it is zero, as for runs of versions that did not count it."""
    total = sum(values)
    return {name: total} if total else {}


def _validation(
    records: Sequence[RoundRecord], rounds: int, num_classes: int, diverged_round: int | None
) -> dict[str, Any]:
    """Accuracy on what the clients hold out, as `accuracy` is on the test split; nothing where there is no such."""
    known = {r.round: r.validation_accuracy for r in records if r.validation_accuracy is not None}
    if not known:
        return {}
    curve = with_chance(known, rounds=rounds, num_classes=num_classes, diverged_round=diverged_round)
    return {"validation_accuracy": _mean(value for number, value in curve.items() if number > rounds - LAST)}


def _client_accuracy(accuracies: Sequence[float] | None, of: str) -> dict[str, Any]:
    """Mean over the clients, and over the tenth of them (rounded up) for whom the model is worst."""
    if accuracies is None:
        return {}
    known = sorted(value for value in accuracies if not math.isnan(value))
    worst = known[: -(-len(known) // 10)]
    return {
        "client_accuracy": {"mean": _mean(known), "worst_tenth": _mean(worst), "clients": len(known), "measured_on": of}
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


def _trust(records: Sequence[RoundRecord]) -> dict[str, float]:
    """Those of `TRUST` that the rounds have: the mean entropy believed, all choices of liars, and what was known last.
    Empty for a run without reason to doubt reports."""
    found: dict[str, float] = {}
    believed = mean([r.believed_entropy for r in records if r.believed_entropy is not None])
    if believed is not None:
        found["believed_entropy"] = believed
    chosen = [r.liars_chosen for r in records if r.liars_chosen is not None]
    if chosen:
        found["liars_chosen"] = sum(chosen)
    for name in LAST_KNOWN:
        known = [value for r in records if (value := getattr(r, name)) is not None]
        if known:
            found[name] = known[-1]
    return found


def _least(values: Iterable[float]) -> float | None:
    return min((value for value in values if not math.isnan(value)), default=None)


def _mean(values: Iterable[float]) -> float | None:
    return finite(mean(list(values)))
