"""The tables about clients that lie and about selection without reports."""

from __future__ import annotations

from collections.abc import Sequence

from fedentopt.paper import names
from fedentopt.paper.cells import Cell
from fedentopt.paper.comparison import Comparison, grouped
from fedentopt.paper.formats import Section, Table
from fedentopt.paper.measures import Measured
from fedentopt.results.statistics import mean, paired_interval
from fedentopt.simulation.config import RunConfig

LIARS, INFERRED = "liars", "inferred"
AUDIT_TABLES = (LIARS, INFERRED)
TRUE_COUNTS, RANDOM = "fedentopt", "fedavg"
POLICIES = ("off", "replace", "quarantine")


def inferred_table(name: str, entries: Sequence[Comparison]) -> Table:
    """A row per method and participation, beside FedEntOpt on true counts."""
    columns = (
        "method", "clients per round", "accuracy", "minus FedEntOpt on true counts, 95 % interval", "entropy, true",
        "entropy, believed", "error of estimates", "seeds",
    )  # fmt: skip
    sections = []
    for heading, group in grouped(entries, names.heading).items():
        rows = []
        for entry in sorted(group, key=lambda entry: entry.cell.participation or 0):
            best = find(group, TRUE_COUNTS, entry.cell.participation)
            gap = None if best is None or best is entry else paired_interval(entry.values, best.values)
            rows.append((
                _who(entry.cell), f"{entry.cell.participation:g} %", names.ours(entry), names.difference(gap),
                figure(entry, "mean_entropy", 3), figure(entry, "believed_entropy", 3),
                figure(entry, "estimate_error", 3), names.seeds(entry),
            ))  # fmt: skip
        sections.append(Section(heading, tuple(rows)))
    note = (
        f"Test accuracy in per cent, {names.averaged(entries)}, mean ± sample standard deviation over seeds. Entropy "
        "of the cohort's labels in bits, mean over rounds; what is believed is shown where it differs from what is "
        "known. Error of estimates: total variation to the true labels, mean over clients, in the last round."
    )
    return Table(name, names.table(name), note, columns, tuple(sections))


def liars_table(name: str, entries: Sequence[Comparison]) -> Table:
    """A row per lie and number of liars, with the policies of the audit side by side."""
    columns = (
        "lie", "liars", *(f"accuracy, {policy}" for policy in POLICIES),
        *(f"liars chosen, {policy}" for policy in POLICIES), "entropy, off: true (believed)", "AUC after 1, 3",
        "suspected: liars", "honest", "seeds",
    )  # fmt: skip
    sections = []
    for heading, group in grouped(entries, names.heading).items():
        rows = []
        for own in grouped(group, _kind).values():
            by_policy = {entry.cell.config.audit: entry for entry in own if entry.cell.config is not None}
            some = [by_policy.get(policy) for policy in POLICIES]
            off, replaced = by_policy.get("off"), by_policy.get("replace")
            watched = by_policy.get("quarantine") or replaced
            config = own[0].cell.config
            assert config is not None
            rows.append((
                named_lie(config), str(config.number_of_liars), *map(names.ours, some),
                *(over_selection(e) if e else names.NOTHING for e in some),
                f"{figure(off, 'mean_entropy', 2)} ({figure(off, 'believed_entropy', 2)})",
                f"{figure(replaced, 'first_auc', 2)}, {figure(replaced, 'third_auc', 2)}",
                _suspected(watched, config.number_of_liars),
                figure(watched, "honest_suspects" if config.number_of_liars else "suspects", 1),
                " / ".join(dict.fromkeys(names.seeds(entry) for entry in own)),
            ))  # fmt: skip
        sections.append(Section(heading, tuple(rows)))
    note = (
        f"Test accuracy in per cent, {names.averaged(entries)}. Liars chosen: how often a liar is chosen for every "
        "time that a client is chosen on average; 1 is fair. AUC: how well the distance between report and estimate "
        "tells liars from others, after every client's first observation and after its first three (under replace; "
        "quarantine keeps liars from being observed). Suspected: at the end, under quarantine (else replace)."
    )
    return Table(name, names.table(name), note, columns, tuple(sections))


def find(entries: Sequence[Comparison], method: str, participation: float | None) -> Comparison | None:
    """The plain cell of a method at this participation."""
    for entry in entries:
        if entry.cell.method == method and entry.cell.participation == participation and entry.values:
            return entry
    return None


def figure(entry: Comparison | None, name: str, digits: int) -> str:
    """The mean over seeds of one of `Measured`'s figures."""
    found = None if entry is None else mean(_known(entry.runs, name))
    return names.NOTHING if found is None else f"{found:.{digits}f}"


def over_selection(entry: Comparison) -> str:
    """Choices of liars against what their number is worth."""
    config = entry.cell.config
    chosen = mean(_known(entry.runs, "liars_chosen"))
    if config is None or chosen is None or not config.number_of_liars:
        return names.NOTHING
    fair = config.rounds * config.cohort_size * config.number_of_liars / config.clients
    return f"{chosen / fair:.2f}"


def _suspected(entry: Comparison | None, liars: int) -> str:
    found = [] if entry is None else [
        run.suspects - run.honest_suspects
        for run in entry.runs if run.suspects is not None and run.honest_suspects is not None
    ]  # fmt: skip
    average = mean(found)
    return names.NOTHING if average is None else f"{average:.1f} of {liars}"


def _known(runs: Sequence[Measured], name: str) -> list[float]:
    return [value for run in runs if (value := getattr(run, name)) is not None]


def _who(cell: Cell) -> str:
    noise = "" if cell.config is None or cell.config.epsilon is None else f", epsilon {cell.config.epsilon:g}"
    return names.method(cell.method) + noise


def named_lie(config: RunConfig) -> str:
    """What liars claim, and what the server has to see through it."""
    lie = config.lie if config.number_of_liars else "none"
    return f"{lie}, {config.server_images} server images per class" if config.server_images else lie


def _kind(cell: Cell) -> str:
    return "" if cell.config is None else f"{cell.config.liars} {named_lie(cell.config)}"
