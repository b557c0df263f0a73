"""The paper's tables with our figures in them, and one CSV for all that a table leaves out."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence

from fedentopt.experiments.paper import names, wording
from fedentopt.experiments.paper.cells import Cell
from fedentopt.experiments.paper.comparison import MISSING_DATA, NOT_RUN, Comparison
from fedentopt.experiments.paper.formats import Section, Table
from fedentopt.experiments.paper.measures import TARGETS
from fedentopt.experiments.paper.printed import DATASETS, MODELS, table_rows
from fedentopt.experiments.paper.sizes import size
from fedentopt.experiments.paper.statistics import mean

AGAINST = "against FedAvg, 95 % interval"
READING = (
    "Ours: mean ± sample standard deviation over seeds. Against FedAvg: mean of the differences seed by seed "
    "(same partition, same start model) with Student's 95 % interval, bold where zero lies outside."
)


def tables(comparisons: Sequence[Comparison]) -> list[Table]:
    """One table for every table or figure among the cells; Table 1 brings the rounds to a target with it."""
    made = []
    for name in dict.fromkeys(entry.cell.table for entry in comparisons):
        own = [entry for entry in comparisons if entry.cell.table == name]
        made.append(_layout(own)(name, own))
        if name == "table1":
            made.append(rounds_to_target(own))
    return made


def summary_csv(comparisons: Iterable[Comparison]) -> str:
    """One row a cell: everything `--list` says, and the differences with their intervals."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    cell_columns = ("table", "model", "dataset", "partition", "method", "availability", "participation", "buffer")
    measures = ("ours", "std", "paper", "paper_std", "difference", "against_fedavg", "low", "high", "shared_seeds")
    writer.writerow([*cell_columns, "swept", "metric", *measures, "diverged", "never_selected", "seeds", "state"])
    for entry in comparisons:
        cell, gap = entry.cell, entry.against
        writer.writerow(
            [
                *(_blank(getattr(cell, name)) for name in cell_columns),
                " ".join(f"{name}={value}" for name, value in cell.swept),
                cell.metric,
                *(_exact(value) for value in (entry.ours, entry.std, cell.paper, cell.paper_std, entry.difference)),
                *(_exact(value) for value in ((gap.mean, gap.low, gap.high) if gap else (None,) * 3)),
                gap.seeds if gap else "",
                entry.diverged,
                " ".join(str(run.never_selected) for run in entry.runs if run.never_selected is not None),
                " ".join(map(str, sorted(entry.values))),
                NOT_RUN if entry.state == MISSING_DATA else entry.state,  # the same on machines with other data
            ]
        )
    return text.getvalue()


def _plain(name: str, entries: Sequence[Comparison]) -> Table:
    """Tables 1, 3, 4 and the grids: a section a setting, a row a method."""
    columns = ("method", "ours", "paper", "difference", AGAINST, "seeds")

    def row(entry: Comparison) -> tuple[str, ...]:
        return (
            wording.row_name(entry.cell),
            wording.ours(entry),
            wording.paper(entry),
            wording.gap(entry),
            wording.against(entry),
            wording.seeds(entry),
        )

    return Table(
        name,
        names.table(name),
        f"Test accuracy in per cent, mean of the last ten rounds. {READING}",
        columns,
        _sections(entries, row),
    )


def _changes(name: str, entries: Sequence[Comparison]) -> Table:
    """Table 2: the change is a difference seed by seed itself, so it has an interval of its own."""
    columns = ("method", "change, ours", "95 % interval", "paper", "difference", AGAINST, "seeds")

    def row(entry: Comparison) -> tuple[str, ...]:
        limits = wording.limits(entry.cell, entry.interval) if entry.interval else wording.NOTHING
        gap = wording.against(entry)
        return (
            wording.row_name(entry.cell),
            wording.ours(entry, signed=True),
            limits,
            wording.paper(entry, signed=True),
            wording.gap(entry),
            gap,
            wording.seeds(entry),
        )

    note = (
        "Change in test accuracy, in points, when FedEntOpt selects the clients of a baseline that selects at random; "
        f"seed by seed. {READING}"
    )
    return Table(name, names.table(name), note, columns, _sections(entries, row))


def _buffer(name: str, entries: Sequence[Comparison]) -> Table:
    """Table 6: accuracy and diversity side by side."""
    columns = (
        "buffer",
        "accuracy, ours",
        "paper",
        "difference",
        AGAINST,
        "H_norm, ours",
        "paper",
        "difference",
        "never selected, by seed",
        "seeds",
    )
    pairs = {_without_metric(entry.cell): entry for entry in entries if entry.cell.metric == "h_norm"}

    def row(entry: Comparison) -> tuple[str, ...]:
        h_norm = pairs[_without_metric(entry.cell)]
        never = ", ".join(str(run.never_selected) for run in entry.runs) or wording.NOTHING
        return (
            f"{entry.cell.buffer:g} %",
            wording.ours(entry),
            wording.paper(entry),
            wording.gap(entry),
            wording.against(entry),
            wording.ours(h_norm),
            wording.paper(h_norm),
            wording.gap(h_norm),
            never,
            wording.seeds(entry),
        )

    accuracy = [entry for entry in entries if entry.cell.metric == "accuracy"]
    return Table(
        name,
        names.table(name),
        "FedEntOpt by buffer size (per cent of the clients): accuracy, normalised "
        f"entropy of how often clients were selected, clients never selected. {READING}",
        columns,
        _sections(accuracy, row),
    )


def _communication(name: str, entries: Sequence[Comparison]) -> Table:
    """Table 5: sizes; no seeds, no spread."""
    columns = (
        "data set, model",
        "classes",
        "clients",
        "labels (MB)",
        "parameters, ours (MB)",
        "paper (MB)",
        "difference",
        "all that travels (MB)",
        "parameters / labels, ours",
        "paper",
    )
    printed = {(MODELS[row["model"]], DATASETS[row["dataset"]]): row for row in table_rows("table5")}

    def row(entry: Comparison) -> tuple[str, ...]:
        cell, found = entry.cell, size(entry.cell)
        title = f"{names.dataset(cell.dataset)}, {names.model(cell.model)}"
        theirs = printed.get((cell.model, cell.dataset))
        ratio = f"{float(theirs['model_over_labels']):,.5g}" if theirs else wording.NOTHING
        if found is None:
            return (title, *[wording.NOTHING] * 4, wording.paper(entry), *[wording.NOTHING] * 3, ratio)
        return (
            title,
            str(found.classes),
            str(found.clients),
            f"{found.labels / 1e6:.5f}",
            f"{found.parameters / 1e6:.3f}",
            wording.paper(entry),
            wording.gap(entry),
            f"{found.state / 1e6:.3f}",
            f"{found.parameters / found.labels:,.2f}",
            ratio,
        )

    note = (
        "Bytes of all clients' label counts, sent once, and of one model, sent by every selected client every round "
        "(1 MB is 10^6 bytes). All that travels: with the running statistics of normalisation layers."
    )
    return Table(name, names.table(name), note, columns, (Section("", tuple(row(entry) for entry in entries)),))


def _entropy(name: str, entries: Sequence[Comparison]) -> Table:
    """Figure 1 in numbers."""
    columns = ("method", "mean over rounds, ours", "lowest round", "against random selection, 95 % interval", "seeds")

    def row(entry: Comparison) -> tuple[str, ...]:
        least = [run.min_entropy for run in entry.runs if run.min_entropy is not None]
        return (
            wording.row_name(entry.cell),
            wording.ours(entry),
            f"{min(least):.3f}" if least else wording.NOTHING,
            wording.against(entry),
            wording.seeds(entry),
        )

    note = (
        "Entropy in bits of the labels of the clients whose models the round aggregates. Ten classes: at most 3.322; "
        "above 3.170 every class is there. FedAvg selects at random."
    )
    return Table(name, names.table(name), note, columns, _sections(entries, row))


def _participation(name: str, entries: Sequence[Comparison]) -> Table:
    """Figure 2 in numbers: a column a participation."""
    shares = sorted({entry.cell.participation or 0 for entry in entries})
    columns = ("method", *(f"{share:g} %" for share in shares))
    sections = []
    for heading, group in _grouped(entries, wording.heading).items():
        methods = dict.fromkeys(wording.row_name(entry.cell) for entry in group)
        rows = []
        for method in methods:
            found = {entry.cell.participation: entry for entry in group if wording.row_name(entry.cell) == method}
            rows.append(
                (method, *(wording.ours(found[share]) if share in found else wording.NOTHING for share in shares))
            )
        sections.append(Section(heading, tuple(rows)))
    note = (
        "Test accuracy in per cent by the share of the clients that train each round. The paper shows these as curves, "
        "without figures, and leaves CIFAR-100 with C=2 out."
    )
    return Table(name, names.table(name), note, columns, tuple(sections))


def rounds_to_target(entries: Sequence[Comparison]) -> Table:
    """The paper's claim that FedEntOpt reaches a given accuracy sooner, on the cells of Table 1."""
    columns = ("method", *(f"{target} %" for target in TARGETS), "seeds")

    def row(entry: Comparison) -> tuple[str, ...]:
        cells = []
        for target in TARGETS:
            rounds = [getattr(run, f"rounds_to_{target}") for run in entry.runs]
            reached = [number for number in rounds if number is not None]
            average = mean(reached)
            text = wording.NOTHING if average is None else f"{average:.0f}"
            cells.append(text if len(reached) == len(rounds) else f"{text} ({len(reached)} of {len(rounds)})")
        return (wording.row_name(entry.cell), *cells, wording.seeds(entry))

    note = (
        "First evaluated round with at least this test accuracy, mean over the seeds that reach it (how many do, "
        "where not all). FedConcat's joint model exists only after its first stage."
    )
    return Table("rounds-to-target", "Rounds to a target accuracy", note, columns, _sections(entries, row))


def _layout(entries: Sequence[Comparison]) -> Callable[[str, Sequence[Comparison]], Table]:
    """How the cells of one table are best laid out."""
    metrics = {entry.cell.metric for entry in entries}
    if "h_norm" in metrics:
        return _buffer
    for metric, layout in (("accuracy_change", _changes), ("model_mb", _communication), ("entropy", _entropy)):
        if metric in metrics:
            return layout
    shares = {entry.cell.participation for entry in entries if not entry.cell.extra}
    return _participation if len(shares) > 1 else _plain


def _sections(entries: Sequence[Comparison], row: Callable[[Comparison], tuple[str, ...]]) -> tuple[Section, ...]:
    groups = _grouped(entries, wording.heading)
    return tuple(Section(heading, tuple(row(entry) for entry in group)) for heading, group in groups.items())


def _grouped(entries: Sequence[Comparison], key: Callable[[Cell], str]) -> dict[str, list[Comparison]]:
    groups: dict[str, list[Comparison]] = {}
    for entry in entries:
        groups.setdefault(key(entry.cell), []).append(entry)
    return groups


def _without_metric(cell: Cell) -> tuple[object, ...]:
    return tuple(part for part in cell.identity if part != cell.metric)


def _blank(value: object) -> object:
    return "" if value is None else value


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"
