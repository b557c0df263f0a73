"""Runs that differ in nothing but their seed, taken together as one method's result."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedentopt.results.clients import Verdicts, verdicts
from fedentopt.results.reading import RunResult
from fedentopt.results.statistics import Spread, finite, mean_interval, paired_differences
from fedentopt.results.summary import rounds_to


@dataclass(frozen=True)
class MethodResult:
    """One method over its seeds. `label` is its name, with settings behind it where the name alone is ambiguous."""

    label: str
    runs: tuple[RunResult, ...]

    def spread(self, figure: str) -> Spread | None:
        """Mean and sample standard deviation of one figure of `summary.json`; None where a run lacks it. One inside
        another is named with a dot: `client_accuracy.mean`."""
        values = [_figure(run.summary, figure) for run in self.runs]
        known = [value for value in values if value is not None]
        return Spread.of(known) if len(known) == len(values) else None

    def rounds_to(self, target: float) -> list[int | None]:
        """First round of each run with at least `target` per cent."""
        return [rounds_to(run.curve, target) for run in self.runs]

    @property
    def diverged(self) -> dict[int, int]:
        """Round by seed, for the runs that diverged."""
        rounds = {run.seed: run.summary["diverged_round"] for run in self.runs}
        return {seed: number for seed, number in rounds.items() if number is not None}

    @property
    def curve(self) -> dict[int, Spread]:
        """Accuracy over the seeds in every round that all of them evaluated."""
        shared = set.intersection(*(set(run.curve) for run in self.runs))
        return {number: Spread.of([run.curve[number] for run in self.runs]) for number in sorted(shared)}

    @property
    def simulated_seconds(self) -> float:
        """Simulated time of a run, mean over the seeds; 0 in files that do not know it."""
        return Spread.of(run.summary.get("simulated_seconds", 0.0) for run in self.runs).mean

    @property
    def has_speeds(self) -> bool:
        """Whether clients differ in speed, so that simulated time says something of its own."""
        return any(run.config.get("speed_spread") for run in self.runs)

    @property
    def verdicts(self) -> Verdicts | None:
        """Who was suspected at the end of its runs, all seeds together; None where no audit ran."""
        return verdicts(client for run in self.runs for client in run.clients or ())

    def to_dict(self, targets: Iterable[float] = ()) -> dict[str, Any]:
        """JSON form. Rounds to a target have a mean only where every seed reached it."""
        figures = ("accuracy", "final_accuracy", "best_accuracy", "worst_class_accuracy", "h_norm", "mean_entropy")
        spreads = {name: self.spread(name) for name in figures}
        held_out, suspected = self.spread("validation_accuracy"), self.verdicts
        of_clients = {name: self.spread(f"client_accuracy.{name}") for name in ("mean", "worst_tenth")}
        return {
            "method": self.label,
            "seeds": [run.seed for run in self.runs],
            **{name: spread and spread.to_dict() for name, spread in spreads.items()},
            **({} if held_out is None else {"validation_accuracy": held_out.to_dict()}),
            **(
                {}
                if None in of_clients.values()
                else {
                    "client_accuracy": {
                        name: spread.to_dict() for name, spread in of_clients.items() if spread is not None
                    }
                }
            ),
            "rounds_to": {f"{t:g}": self._rounds_to(t) for t in targets},
            "bytes_up": sum(run.summary["bytes_up"] for run in self.runs) / len(self.runs),
            "bytes_down": sum(run.summary["bytes_down"] for run in self.runs) / len(self.runs),
            "simulated_seconds": self.simulated_seconds,
            "diverged": {str(seed): number for seed, number in self.diverged.items()},
            "chance": self.runs[0].summary["chance"],
            **({} if suspected is None else {"suspected": suspected.to_dict()}),
        }

    def _rounds_to(self, target: float) -> dict[str, Any]:
        rounds = self.rounds_to(target)
        reached = [number for number in rounds if number is not None]
        mean = sum(reached) / len(reached) if reached and len(reached) == len(rounds) else None
        return {"mean": mean, "reached": len(reached), "runs": rounds}


def by_method(runs: Iterable[RunResult]) -> list[MethodResult]:
    """Group runs that differ in their seed only, in order of first appearance, each with a label of its own."""
    groups: dict[str, list[RunResult]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_settings(run), sort_keys=True), []).append(run)
    members = list(groups.values())
    labels = _labels([group[0] for group in members])
    return [MethodResult(label, tuple(group)) for label, group in zip(labels, members, strict=True)]


@dataclass(frozen=True)
class Difference:
    """How much more accurate a method is than another, seed by seed over the seeds both have.

    `low` and `high` are the ends of the 95 % interval, None for fewer than two such seeds.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int

    def to_dict(self) -> dict[str, float | int | None]:
        """JSON form."""
        return {"mean": finite(self.mean), "low": self.low, "high": self.high, "seeds": self.seeds}


def difference(ours: MethodResult, theirs: MethodResult) -> Difference:
    """Accuracy of `ours` minus that of `theirs`."""
    pairs = paired_differences(accuracies(ours.runs), accuracies(theirs.runs))
    interval = mean_interval(pairs)
    low, high = (None, None) if interval is None else (interval.low, interval.high)
    return Difference(Spread.of(pairs).mean, low, high, len(pairs))


def accuracies(runs: Iterable[RunResult]) -> dict[int, float]:
    """The accuracies of finished runs by seed, of those that have one."""
    values = {run.seed: run.summary["accuracy"] for run in runs}
    return {seed: value for seed, value in values.items() if value is not None}


def reached_by_all(methods: Sequence[MethodResult]) -> float | None:
    """The highest multiple of five per cent that every run reached: a target that says something about each.

    None where that is no more than guessing reaches.
    """
    runs = [run for method in methods for run in method.runs]
    best = min((run.summary["best_accuracy"] or 0 for run in runs), default=0) // 5 * 5
    chance = max((run.summary["chance"] for run in runs), default=0)
    return float(best) if best > chance else None


def _figure(summary: Mapping[str, Any], name: str) -> Any:
    outer, dot, inner = name.partition(".")
    found = summary.get(outer)
    return (found or {}).get(inner) if dot else found


def _settings(run: RunResult) -> dict[str, Any]:
    return {name: value for name, value in run.config.items() if name != "seed"}


def _labels(firsts: Sequence[RunResult]) -> list[str]:
    """Method names; where several groups share one, the settings in which those differ stand behind it."""
    labels = []
    for run in firsts:
        twins = [_settings(other) for other in firsts if other.method == run.method]
        names = dict.fromkeys(name for twin in twins for name in twin)
        differing = [name for name in names if len({json.dumps(twin.get(name)) for twin in twins}) > 1]
        # A setting that came later is not written down where it has its default.
        mine = ", ".join(f"{name}={run.config[name]}" for name in differing if name in run.config)
        labels.append(f"{run.method} ({mine})" if mine else run.method)
    return labels
