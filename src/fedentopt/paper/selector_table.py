"""The benchmark of selectors as tables: every selector in every setting, beside random selection.

A setting is a data set, a partition and a participation. In it every selector is compared with random selection and
with FedEntOpt, seed by seed; p values are those of Student's paired test, adjusted by Holm's correction over the
comparisons of the setting. Full participation is the ceiling: a row of its own, compared with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedentopt.paper import names
from fedentopt.paper.comparison import Comparison
from fedentopt.paper.formats import Section, Table
from fedentopt.paper.measures import LOWER_TARGETS, TARGETS, Measured
from fedentopt.results.statistics import Interval, holm, mean, paired_interval, paired_p_value
from fedentopt.selection import SELECTORS as REGISTRY

SELECTORS = "selectors"
GRID, TUNED = "selectors-tuning", "selectors-tuned"
SELECTOR_TABLES = (SELECTORS, "selectors-algorithms", GRID, TUNED)
RANDOM, OURS = "random", "fedentopt"
EVERYBODY = 100.0
SURE = 0.05
"""Adjusted p values below this count as more than luck."""
EVERY_TARGET = (*LOWER_TARGETS, *TARGETS)
COLUMNS = (
    "selector", "accuracy", "against random, 95 % interval", "p (Holm)", "worst class", "rounds to lower target",
    "rounds to higher target", "cohort entropy, mean", "worst round", "H_norm", "never chosen", "asked per round",
    "MB per round", "selection (ms per round)", "simulated minutes", "seeds",
)  # fmt: skip


@dataclass(frozen=True)
class Against:
    """A comparison with another method in the same setting."""

    interval: Interval | None
    p: float | None

    @property
    def clear(self) -> bool:
        """Whether the difference is more than luck, after Holm's correction."""
        return self.p is not None and self.p < SURE

    def text(self) -> str:
        """Difference and interval, bold where it is clear."""
        if self.interval is None:
            return names.NOTHING
        text = f"{self.interval.mean:+.2f} [{self.interval.low:+.2f}, {self.interval.high:+.2f}]"
        return f"**{text}**" if self.clear else text

    def p_text(self) -> str:
        """The adjusted p value."""
        return names.NOTHING if self.p is None else "< 0.001" if self.p < 0.001 else f"{self.p:.3f}"


@dataclass(frozen=True)
class BenchSetting:
    """All selectors on one data set, partition and participation; `ceiling` is everybody's accuracy there."""

    heading: str
    participation: float
    entries: tuple[Comparison, ...]
    ceiling: Comparison | None = None

    @cached_property
    def by_method(self) -> dict[str, Comparison]:
        """Those with results."""
        return {entry.cell.method or "": entry for entry in self.entries if entry.ours is not None}

    @property
    def title(self) -> str:
        return f"{self.heading}, {self.participation:g} % per round"

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
        theirs = self.by_method[other].values
        methods = [method for method in self.by_method if method != other]
        values = [self.by_method[method].values for method in methods]
        adjusted = holm([paired_p_value(own, theirs) for own in values])
        return {
            method: Against(paired_interval(own, theirs), p)
            for method, own, p in zip(methods, values, adjusted, strict=True)
        }

    @cached_property
    def targets(self) -> tuple[int, int]:
        """The highest accuracy that all seeds of random selection reach, and the next higher one."""
        runs = self.by_method[RANDOM].runs if RANDOM in self.by_method else ()
        reached = [t for t in EVERY_TARGET if runs and all(_rounds_to(run, t) is not None for run in runs)]
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
    return [
        BenchSetting(heading, share, tuple(group), ceilings.get(heading)) for (heading, share), group in groups.items()
    ]


def selector_table(name: str, entries: Sequence[Comparison]) -> Table:
    """A section per setting, a row per selector, the most accurate first."""
    sections = []
    for setting in bench_settings(entries):
        low, high = setting.targets
        rows = [_row(setting, entry) for entry in sorted(setting.entries, key=_falling)]
        if setting.ceiling is not None:
            rows.append(("all clients (ceiling)", names.ours(setting.ceiling), *[names.NOTHING] * (len(COLUMNS) - 3),
                         names.seeds(setting.ceiling)))  # fmt: skip
        sections.append(Section(f"{setting.title} (targets {low} % and {high} %)", tuple(rows)))
    note = (
        "Test accuracy in per cent, mean of the last ten rounds, mean ± sample standard deviation over seeds. Against "
        "random: differences seed by seed with Student's 95 % interval; p values by Holm's correction over the "
        f"selectors of a setting, bold below {SURE:g}. Rounds to a target: first evaluated round, mean over the seeds "
        "that reach it. Entropy in bits of the labels of a round's clients. Asked: clients that had to tell their loss "
        "before the round. MB: all that travels, models included. Selection: time of the selector on the machine."
    )
    return Table(name, names.table(name), note, COLUMNS, tuple(sections))


def _falling(entry: Comparison) -> float:
    return float("inf") if entry.ours is None else -entry.ours


def _row(setting: BenchSetting, entry: Comparison) -> tuple[str, ...]:
    method = entry.cell.method or ""
    against = setting.against_random.get(method, Against(None, None))
    rounds = entry.cell.config.rounds if entry.cell.config else 1

    def shown(value: Callable[[Measured], float | None], digits: int, factor: float = 1.0) -> str:
        known = [found for found in map(value, entry.runs) if found is not None]
        average = mean(known)
        return names.NOTHING if average is None else f"{average * factor:.{digits}f}"

    def travels(run: Measured) -> float | None:
        return None if run.bytes_up is None or run.bytes_down is None else float(run.bytes_up + run.bytes_down)

    return (
        names.method(method),
        names.ours(entry),
        against.text(),
        against.p_text(),
        shown(lambda run: run.worst_class_accuracy, 1),
        *(_rounds_text(entry, target) for target in setting.targets),
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


def _rounds_to(run: Measured, target: int) -> int | None:
    found: int | None = getattr(run, f"rounds_to_{target}")
    return found


def _rounds_text(entry: Comparison, target: int) -> str:
    found = [_rounds_to(run, target) for run in entry.runs]
    reached = [number for number in found if number is not None]
    average = mean(reached)
    text = names.NOTHING if average is None else f"{average:.0f}"
    return text if len(reached) == len(found) else f"{text} ({len(reached)} of {len(found)})"


@dataclass(frozen=True)
class Ask:
    """What a selector asks of a client beside training: how much of a burden it is (a place in `KINDS`), in words, in
    bytes."""

    burden: int
    words: str
    size: str


KINDS = (
    "nothing", "its size, once", "its label counts, once", "a loss, each time it trains", "a loss, on request",
    "its own update, in the clear",
)  # fmt: skip
"""What is asked, from little to much: the last forbids secure aggregation, which hides who sent what."""


def ask(method: str) -> Ask:
    """What the selector of that name asks for, from its declarations."""
    cls = REGISTRY.get(method)
    sizes, counts = bool(getattr(cls, "sizes_only", False)), cls.reads_label_counts
    told: list[tuple[str, str]] = []
    if counts:
        told.append(("its number of samples, once", "4") if sizes else ("its label counts, once", "4 C"))
    burden = 0 if not counts else 1 if sizes else 2
    for need, level, words, size in (
        ("loss", 3, "its mean training loss, each time it trains", "8 per training"),
        ("candidate_loss", 4, "the loss of the current model, whenever asked", "4 and a model, per question"),
        ("head", 5, "the change of its last layer, in the clear", "in its model"),
        ("update", 5, "its whole update, in the clear", "in its model"),
    ):
        if need in cls.needs:
            burden = max(burden, level)
            told.append((words, size))
    if cls(1).census() is not None:
        told.append(("the change of its last bias in a census, once, before round 1", "4 C and a model, once"))
    if "seconds" in cls.needs:
        told.append(("how long it trained", "seen by the server"))
    words = "; ".join(text for text, _ in told) or "nothing"
    return Ask(burden, words, "; ".join(size for _, size in told) or "0")


def gains(settings: Sequence[BenchSetting]) -> Mapping[str, dict[str, float]]:
    """Points above random selection by method and setting, where both are known."""
    found: dict[str, dict[str, float]] = {}
    for setting in settings:
        for method, against in setting.against_random.items():
            if against.interval is not None:
                found.setdefault(method, {})[setting.title] = against.interval.mean
    return found
