"""What bf16 products cost: every run beside the same run in TF32, seed by seed, and a verdict from the differences.

Both runs of a pair share partition, start model and order of clients, so the differences are paired. A method and
partition by itself has few seeds; the verdict on a model therefore stands on all its differences together. Rounding
acts on every run anew, so they are taken for independent. A cost beyond `MARGIN` has to be ruled out (the lower end of
the interval of all differences together is above it), and no method and partition by itself may be clearly lower, after
Holm's correction; otherwise tables stay with TF32. Not having seen a cost is not enough, and neither are fewer runs
than `METHODS`, `PARTITIONS` and `SEEDS` ask for.

A run without accuracy has none to lose. Where TF32 ends at chance, because it diverged, which counts as chance, or
never learned, bf16 agrees without having shown anything, or is ahead by so many points that they would hide a cost
elsewhere. Such a pair is no evidence; it is named, left out of all differences, and a method or partition that has no
other is not one that the verdict stands on. A run that diverges in bf16 alone settles it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedentopt.datasets.catalog import ENTRIES
from fedentopt.paper import names
from fedentopt.paper.comparison import DONE, Comparison
from fedentopt.paper.formats import Section, Table
from fedentopt.results.statistics import (
    Interval,
    holm,
    mean_interval,
    paired_differences,
    paired_interval,
    paired_p_value,
)
from fedentopt.simulation.config import RunConfig

BF16 = "bf16"
MARGIN = 1.0
"""Points of accuracy: about the least by which the paper prints FedEntOpt above FedAvg on data that can be had here
(0.94, Table 1, VGG-11 on CIFAR-10 under C=2)."""
SURE = 0.05
FINE_LABELS = 100  # of CIFAR-100, where they are asked for
METHODS, PARTITIONS, SEEDS = 3, 2, 3
"""The least that a verdict on a model takes, however few cells were asked for."""


@dataclass(frozen=True)
class Pair:
    """A method in one setting, in both precisions."""

    tf32: Comparison
    bf16: Comparison

    @property
    def shared(self) -> set[int]:
        """Seeds that are there in both."""
        return self.bf16.values.keys() & self.tf32.values.keys()

    @property
    def over_shared(self) -> tuple[Comparison, Comparison]:
        """Both over the seeds that are there in both, so that their means compare; over all where there are none."""
        seeds = self.shared
        return (self.tf32.over(seeds), self.bf16.over(seeds)) if seeds else (self.tf32, self.bf16)

    @property
    def at_chance(self) -> set[int]:
        """Those whose run in TF32 diverged or ends at chance."""
        return (_diverged(self.tf32) | _at_chance(self.tf32)) & self.shared

    @property
    def telling(self) -> dict[int, float]:
        """The accuracies in bf16 of all others, by seed."""
        lost = self.at_chance
        return {seed: value for seed, value in self.bf16.values.items() if seed in self.shared - lost}

    @property
    def differences(self) -> list[float]:
        """bf16 minus TF32 where that says something, by seed."""
        return paired_differences(self.telling, self.tf32.values)

    @property
    def diverged_alone(self) -> int:
        """Seeds that diverged in bf16 and not in TF32."""
        return len((_diverged(self.bf16) - _diverged(self.tf32)) & self.tf32.values.keys())

    @property
    def interval(self) -> Interval | None:
        return paired_interval(self.telling, self.tf32.values)

    @property
    def name(self) -> str:
        cell = self.bf16.cell
        return f"{names.method(cell.method)} under {names.partition(cell.partition)}"


def pairs(entries: Sequence[Comparison]) -> list[Pair]:
    """The runs that differ in nothing but their precision, two and two."""
    found: dict[RunConfig, dict[str, Comparison]] = {}
    for entry in entries:
        config = entry.cell.config
        if config is not None:
            found.setdefault(config.replace(precision="fp32"), {})[config.precision] = entry
    return [Pair(both["fp32"], both["bf16"]) for both in found.values() if both.keys() >= {"fp32", "bf16"}]


def bf16_table(name: str, entries: Sequence[Comparison]) -> Table:
    """A row per method, a section per model and partition; the verdict is in the note."""
    made = pairs(entries)
    sections: dict[str, list[tuple[str, ...]]] = {}
    for pair in made:
        sections.setdefault(names.heading(pair.bf16.cell), []).append((
            names.method(pair.bf16.cell.method), *map(names.ours, pair.over_shared),
            names.difference(pair.interval, pair.differences),
            _compared(pair),
        ))  # fmt: skip
    columns = ("method", "TF32", "bf16", "bf16 minus TF32, 95 % interval", "seeds compared")
    note = (
        f"Test accuracy in per cent, {names.averaged(entries)}, with matrix products in TF32 and in bf16; weights, "
        "sums and the optimiser are in single precision in both. Means are over the seeds that both have. Bold where "
        "zero lies outside the interval. "
    )
    if any(pair.at_chance for pair in made):
        note += (
            f"Seeds whose run in TF32 ends at chance, at most {MARGIN:g} point above it, have no accuracy to lose and "
            "are not compared. "
        )
    of_models = [[pair for pair in made if pair.bf16.cell.model == model] for model in _models(made)]
    verdicts = " ".join(map(verdict, of_models))
    shown = [Section(heading, tuple(rows)) for heading, rows in sections.items()]
    shown += [section for of_model in of_models for section in by_method(of_model)]
    return Table(name, names.table(name), note + verdicts, columns, tuple(shown), found=verdicts)


def verdict(of_model: Sequence[Pair]) -> str:
    """What the differences of one model say, in words; nothing before all of its runs are there."""
    model = names.model(of_model[0].bf16.cell.model)
    differences = [one for pair in of_model for one in pair.differences]
    wanted = sum(len(pair.bf16.cell.seeds) for pair in of_model)
    complete = all(entry.state == DONE for pair in of_model for entry in (pair.tf32, pair.bf16))
    together = mean_interval(differences)
    if not complete:
        there = sum(len(pair.shared) for pair in of_model if not pair.bf16.cell.shortened)
        return f"{model}: {there} of {wanted} pairs of full-length runs are there, so nothing is said of bf16 yet."
    cells = [pair.bf16.cell for pair in of_model]
    takes = f"a verdict on bf16 takes {METHODS} methods under {PARTITIONS} partitions with {SEEDS} seeds each"
    if _too_few(of_model) or min(len(cell.seeds) for cell in cells) < SEEDS:
        return f"{model}: {takes}, and fewer were asked for, so nothing is said."
    lost = [pair for pair in of_model if pair.at_chance]
    where = " and ".join(f"{pair.name} ({len(pair.at_chance)})" for pair in lost)
    left_out = f" No evidence are pairs whose run in TF32 ends at chance: {where}." if lost else ""
    gap = "" if together is None else f" bf16 minus TF32 is {names.interval(together)} points"
    found = f"{model}:{gap} over {len(differences)} pairs of runs.{left_out}" if gap else f"{model}:{left_out}"
    alone = [pair for pair in of_model if pair.diverged_alone]
    if alone:
        where = " and ".join(f"{pair.name} ({pair.diverged_alone})" for pair in alone)
        return f"{found} Runs that TF32 brings to their end diverge with bf16: {where}; tables stay with TF32."
    if together is None or _too_few([pair for pair in of_model if pair.differences]):
        return f"{model}: {takes}, and fewer end above chance, so nothing is said.{left_out}"
    p_values = holm([paired_p_value(pair.telling, pair.tf32.values) for pair in of_model])
    lower = [
        pair.name for pair, p in zip(of_model, p_values, strict=True)
        if p is not None and p < SURE and sum(pair.differences) < 0
    ]  # fmt: skip
    if together.high < 0 or lower:
        where = f", clearly so with {' and '.join(lower)}" if lower else ""
        return f"{found} bf16 costs accuracy{where}; tables stay with TF32."
    if together.low < -MARGIN:
        return (
            f"{found} That shows no clear cost, but does not rule out one of more than {MARGIN:g} point; tables stay "
            "with TF32."
        )
    over_all = {method: mean_interval(own) for method, own in _by_method(of_model).items()}
    lost_there = [f"{method} is, by {-gap.mean:.2f}" for method, gap in over_all.items() if gap and gap.high < 0]
    but = f" (over all of them together {' and '.join(lost_there)})" if lost_there else ""
    return (
        f"{found} A cost of more than {MARGIN:g} point is ruled out, and no method under one partition is clearly "
        f"lower{but}; tables may use bf16."
    )


def by_method(of_model: Sequence[Pair]) -> list[Section]:
    """The differences of each method over all partitions together: a method that swings hides what others lose. Nothing
    before all runs are there."""
    if not all(entry.state == DONE for pair in of_model for entry in (pair.tf32, pair.bf16)):
        return []
    rows = [(method, names.NOTHING, names.NOTHING, names.difference(mean_interval(own)), f"{len(own)} pairs")
            for method, own in _by_method(of_model).items()]  # fmt: skip
    return [Section(f"{names.model(of_model[0].bf16.cell.model)}, all partitions together", tuple(rows), summary=True)]


def _by_method(of_model: Sequence[Pair]) -> dict[str, list[float]]:
    """Differences of each method, of all partitions."""
    differences: dict[str, list[float]] = {}
    for pair in of_model:
        differences.setdefault(names.method(pair.bf16.cell.method), []).extend(pair.differences)
    return differences


def _too_few(some: Sequence[Pair]) -> bool:
    """Whether these are of fewer methods or partitions than a verdict takes."""
    cells = [pair.bf16.cell for pair in some]
    return len({cell.method for cell in cells}) < METHODS or len({cell.partition for cell in cells}) < PARTITIONS


def _compared(pair: Pair) -> str:
    """How many seeds the difference stands on, of how many, and how many could not tell."""
    there, wanted, lost = len(pair.differences), len(pair.bf16.cell.seeds), len(pair.at_chance)
    text = str(there) if there == wanted else f"{there} of {wanted}"
    return f"{text} ({lost} at chance in TF32)" if lost else text


def _models(made: Sequence[Pair]) -> list[str]:
    return list(dict.fromkeys(pair.bf16.cell.model for pair in made))


def _diverged(entry: Comparison) -> set[int]:
    return {run.seed for run in entry.runs if run.diverged_round is not None}


def _at_chance(entry: Comparison) -> set[int]:
    """Seeds whose accuracy is no further above chance than the margin that a verdict is about."""
    config, known = entry.cell.config, ENTRIES.get(entry.cell.dataset)
    if known is None:  # a file of one's own, of which nobody has told the classes
        return set()
    classes = FINE_LABELS if config is not None and config.fine_labels else known.classes
    most = 100 / classes + MARGIN
    return {seed for seed, value in entry.values.items() if value <= most}
