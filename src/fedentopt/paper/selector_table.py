"""The benchmark of selectors as tables: every selector in every setting, beside random selection.

A setting is a data set, a partition and a participation. In it every selector is compared with random selection and
with FedEntOpt, seed by seed; p values are those of Student's paired test, adjusted by Holm's correction over the
comparisons of the setting. Full participation is the ceiling: a row of its own, compared with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedentopt.datasets.catalog import ENTRIES
from fedentopt.paper import names
from fedentopt.paper.cells import Cell
from fedentopt.paper.comparison import Comparison
from fedentopt.paper.formats import Section, Table
from fedentopt.paper.measures import LOWER_TARGETS, TARGETS, Measured
from fedentopt.paper.selector_asks import OURS, RANDOM
from fedentopt.results.statistics import Interval, holm, mean, paired_differences, paired_interval, paired_p_value

SELECTORS = "selectors"
GRID, TUNED = "selectors-tuning", "selectors-tuned"
SELECTOR_TABLES = (SELECTORS, "selectors-algorithms", "selectors-averaging", GRID, TUNED)
EVERYBODY = 100.0
SURE = 0.05
"""Adjusted p values below this count as more than luck."""
EVERY_TARGET = (*LOWER_TARGETS, *TARGETS)
COLUMNS = (
    "selector", "accuracy", "against random, 95 % interval", "p (Holm)", "worst class", "rounds to lower target",
    "rounds to higher target", "cohort entropy, mean", "cohort entropy, worst round", "H_norm", "never chosen",
    "asked per round", "MB per round", "selection (ms per round)", "simulated minutes", "seeds",
)  # fmt: skip


@dataclass(frozen=True)
class Against:
    """A comparison with another method in the same setting, over the seeds that both have: mean difference, its 95 %
    interval and the adjusted p value, which one seed does not give."""

    difference: float | None = None
    interval: Interval | None = None
    p: float | None = None

    @property
    def clear(self) -> bool:
        """Whether the difference is more than luck, after Holm's correction."""
        return self.p is not None and self.p < SURE

    @property
    def better(self) -> bool:
        """Whether it is clear and above zero."""
        return self.clear and self.difference is not None and self.difference > 0

    @property
    def worse(self) -> bool:
        """Whether it is clear and below zero."""
        return self.clear and not self.better

    def text(self) -> str:
        """Difference and interval, bold where it is clear; from one seed the difference alone."""
        text = names.interval(self.interval, [] if self.difference is None else [self.difference])
        return f"**{text}**" if self.clear else text


def p_text(p: float | None) -> str:
    """A p value as tables write it."""
    return names.NOTHING if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def compared(pairs: Sequence[tuple[Comparison, Comparison | None]]) -> list[Against]:
    """The first of every pair minus its second, seed by seed, p values adjusted over all pairs."""
    adjusted = holm([None if other is None else paired_p_value(own.values, other.values) for own, other in pairs])
    return [
        Against() if other is None else
        Against(mean(paired_differences(own.values, other.values)), paired_interval(own.values, other.values), p)
        for (own, other), p in zip(pairs, adjusted, strict=True)
    ]  # fmt: skip


@dataclass(frozen=True)
class BenchSetting:
    """All selectors on one data set, partition and participation; `ceiling` is everybody's accuracy there, `short` the
    heading without what all settings share."""

    heading: str
    participation: float
    entries: tuple[Comparison, ...]
    ceiling: Comparison | None = None
    short: str = ""

    @cached_property
    def by_method(self) -> dict[str, Comparison]:
        """Those with results."""
        return {entry.cell.method or "": entry for entry in self.entries if entry.ours is not None}

    @property
    def title(self) -> str:
        return f"{self.heading}, {self.participation:g} % per round"

    @property
    def place(self) -> str:
        """The title in short."""
        return f"{self.short}, {self.participation:g} %"

    @cached_property
    def against_random(self) -> dict[str, Against]:
        return self.against(RANDOM)

    @cached_property
    def against_ours(self) -> dict[str, Against]:
        return self.against(OURS)

    def against(self, other: str) -> dict[str, Against]:
        """Every other method minus this one, adjusted over all of them."""
        if other not in self.by_method:
            return {}
        theirs = self.by_method[other]
        methods = [method for method in self.by_method if method != other]
        return dict(zip(methods, compared([(self.by_method[method], theirs) for method in methods]), strict=True))

    @cached_property
    def best(self) -> str:
        """The selector with the highest mean accuracy. Where FedEntOpt has results, the others stand as far from it as
        in the seeds they share with it: seeds that only some have finished favour nobody."""
        if OURS not in self.by_method:
            return max(self.by_method, key=lambda method: self.by_method[method].ours or 0.0)
        gaps = {method: found.difference for method, found in self.against_ours.items()}
        known = {OURS: 0.0} | {method: gap for method, gap in gaps.items() if gap is not None}
        return max(known, key=lambda method: known[method])

    @cached_property
    def ceiling_gain(self) -> float | None:
        """Full participation minus random selection, in the seeds that both have."""
        random = self.by_method.get(RANDOM)
        if self.ceiling is None or random is None:
            return None
        return mean(paired_differences(self.ceiling.values, random.values))

    @cached_property
    def targets(self) -> tuple[int, int]:
        """The highest accuracy that all seeds of random selection reach, and the next higher one."""
        runs = self.by_method[RANDOM].runs if RANDOM in self.by_method else ()
        reached = [t for t in EVERY_TARGET if runs and all(getattr(run, f"rounds_to_{t}") is not None for run in runs)]
        at = min(EVERY_TARGET.index(max(reached, default=EVERY_TARGET[0])), len(EVERY_TARGET) - 2)
        return EVERY_TARGET[at], EVERY_TARGET[at + 1]


def bench_settings(entries: Sequence[Comparison]) -> list[BenchSetting]:
    """The settings of the benchmark among these cells, in their order."""
    own = [entry for entry in entries if entry.cell.table == SELECTORS and entry.cell.metric == "accuracy"]
    ceilings = {names.heading(e.cell): e for e in own if e.cell.participation == EVERYBODY and e.ours is not None}
    groups: dict[tuple[str, float], list[Comparison]] = {}
    for entry in own:
        if entry.cell.participation != EVERYBODY:
            groups.setdefault((names.heading(entry.cell), entry.cell.participation or 0.0), []).append(entry)
    short = _short_headings([entry.cell for entry in own])
    return [
        BenchSetting(heading, share, tuple(group), ceilings.get(heading), short[heading])
        for (heading, share), group in groups.items()
    ]


def _short_headings(cells: Sequence[Cell]) -> dict[str, str]:
    """Headings of cells without the model that all have, and without the numbers of the only mixed partition."""
    fine = {cell.dataset for cell in cells if cell.config is not None and cell.config.fine_labels}
    one_model = len({cell.model for cell in cells}) == 1
    mixed = {cell.partition for cell in cells if (cell.partition or "").startswith("mixed:")}
    found = {}
    for cell in cells:
        heading = names.heading(cell)
        if one_model:
            heading = heading.replace(f"{names.model(cell.model)}, ", "", 1)
        if cell.dataset in fine and cell.config is not None and not cell.config.fine_labels:
            data = names.dataset(cell.dataset)
            heading = heading.replace(data, f"{data} ({ENTRIES[cell.dataset].classes} classes)", 1)
        if cell.partition is not None and mixed == {cell.partition}:
            heading = heading.replace(names.partition(cell.partition), "mixed Dirichlet", 1)
        found[names.heading(cell)] = heading
    return found


def selector_table(name: str, entries: Sequence[Comparison]) -> Table:
    """A section per setting, a row per selector, the most accurate first."""
    sections = []
    for setting in bench_settings(entries):
        low, high = setting.targets
        rows = [_row(setting, entry) for entry in sorted(setting.entries, key=falling)]
        if setting.ceiling is not None:
            rows.append(("all clients (ceiling)", names.ours(setting.ceiling), *[names.NOTHING] * (len(COLUMNS) - 3),
                         names.seeds(setting.ceiling)))  # fmt: skip
        sections.append(Section(f"{setting.title} (targets {low} % and {high} %)", tuple(rows)))
    note = (
        f"Test accuracy in per cent, {names.averaged(entries)}, mean ± sample standard deviation over seeds. Against "
        "random: differences seed by seed with Student's 95 % interval; p values by Holm's correction over the "
        f"selectors of a setting, bold below {SURE:g}. Rounds to a target: first evaluated round, mean over the seeds "
        "that reach it. Entropy in bits of all labels that a round's clients hold; KL trains on part of them. Asked: "
        "clients that had to tell their loss before the round. MB: all that travels, models included. Selection: time "
        "of the selector on the machine. "
        "Simulated minutes: local training of the slowest in each round; questions before it are not in them."
    )
    return Table(name, names.table(name), note, COLUMNS, tuple(sections))


def falling(entry: Comparison) -> float:
    """A key that sorts by accuracy, the highest first and those without results last."""
    return float("inf") if entry.ours is None else -entry.ours


def _row(setting: BenchSetting, entry: Comparison) -> tuple[str, ...]:
    method = entry.cell.method or ""
    against = setting.against_random.get(method, Against())
    rounds = entry.cell.config.rounds if entry.cell.config else 1

    def shown(value: Callable[[Measured], float | None], digits: int, factor: float = 1.0) -> str:
        known = [found for found in map(value, entry.runs) if found is not None]
        average = mean(known)
        return names.NOTHING if average is None else f"{average * factor:.{digits}f}"

    return (
        names.method(method),
        names.ours(entry),
        against.text(),
        p_text(against.p),
        shown(lambda run: run.worst_class_accuracy, 1),
        *(names.rounds_to(entry, target) for target in setting.targets),
        shown(lambda run: run.mean_entropy, 3),
        shown(lambda run: run.min_entropy, 3),
        shown(lambda run: run.h_norm, 3),
        shown(lambda run: run.never_selected, 1),
        shown(lambda run: run.asked, 1, 1 / rounds),
        shown(travels, 2, 1e-6 / rounds),
        shown(lambda run: run.selection_seconds, 2, 1e3 / rounds),
        shown(lambda run: run.simulated_seconds, 2, 1 / 60),
        names.seeds(entry),
    )


def travels(run: Measured) -> float | None:
    """Bytes in both directions, models included."""
    return None if run.bytes_up is None or run.bytes_down is None else float(run.bytes_up + run.bytes_down)


def gains(settings: Sequence[BenchSetting]) -> Mapping[str, dict[str, float]]:
    """Points above random selection by method and setting, where both are known."""
    found: dict[str, dict[str, float]] = {}
    for setting in settings:
        for method, against in setting.against_random.items():
            if against.difference is not None:
                found.setdefault(method, {})[setting.title] = against.difference
    return found
