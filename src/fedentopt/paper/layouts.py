"""How the figures of one table are laid out: one layout for each kind of figure.

Every layout takes the table's name and its cells with their results, and shows all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from fedentopt.paper import names
from fedentopt.paper.cells import Cell
from fedentopt.paper.comparison import Comparison, grouped
from fedentopt.paper.formats import Section, Table
from fedentopt.paper.measures import TARGETS
from fedentopt.paper.names import by_participation, row_names
from fedentopt.paper.printed import DATASETS, MODELS, table_rows
from fedentopt.paper.sizes import shapes, size

AGAINST = "against FedAvg, 95 % interval"
SPREAD = "Ours: mean ± sample standard deviation over seeds."
READING = (
    f"{SPREAD} Against FedAvg: mean of the differences seed by seed "
    "(same partition, same start model) with Student's 95 % interval, bold where zero lies outside; one seed has none."
)


def plain(name: str, entries: Sequence[Comparison]) -> Table:
    """Tables 1, 3, 4 and the grids: a section per setting, a row per method."""
    columns = ("method", "ours", "paper", "difference", AGAINST, "seeds")

    def row(label: str, entry: Comparison) -> tuple[str, ...]:
        return (
            label,
            names.ours(entry),
            names.paper(entry),
            names.gap(entry),
            names.against(entry),
            names.seeds(entry),
        )

    return Table(
        name,
        names.table(name),
        f"Test accuracy in per cent, {names.averaged(entries)}. {READING}",
        columns,
        _sections(entries, row),
    )


def validation(name: str, entries: Sequence[Comparison]) -> Table:
    """Grids that are judged on what the clients hold out."""
    columns = ("method", "ours", AGAINST, "seeds")

    def row(label: str, entry: Comparison) -> tuple[str, ...]:
        return (label, names.ours(entry), names.against(entry), names.seeds(entry))

    note = f"Accuracy in per cent on what the clients hold out, {names.averaged(entries)}. {READING}"
    return Table(name, names.table(name), note, columns, _sections(entries, row))


def changes(name: str, entries: Sequence[Comparison]) -> Table:
    """Table 2: the change is a difference seed by seed itself, so it has an interval of its own."""
    columns = ("method", "change, ours", "95 % interval", "paper", "difference", AGAINST, "seeds")

    def row(label: str, entry: Comparison) -> tuple[str, ...]:
        limits = names.limits(entry.cell, entry.interval) if entry.interval else names.NOTHING
        gap = names.against(entry)
        return (
            label,
            names.ours(entry, signed=True),
            limits,
            names.paper(entry, signed=True),
            names.gap(entry),
            gap,
            names.seeds(entry),
        )

    note = (
        "Change in test accuracy, in points, when FedEntOpt selects the clients of a baseline that selects at random; "
        f"seed by seed. {READING}"
    )
    return Table(name, names.table(name), note, columns, _sections(entries, row))


def diversity(name: str, entries: Sequence[Comparison]) -> Table:
    """Table 6: accuracy and diversity of the same runs side by side; without columns for accuracy where there is none.

    Where only one method is there, with several buffers, the buffers name the rows.
    """
    with_accuracy = any(entry.cell.metric == "accuracy" for entry in entries)
    methods, buffers = ({getattr(entry.cell, field) for entry in entries} for field in ("method", "buffer"))
    by_buffer = len(methods) == 1 and len(buffers) > 1  # only a method without a buffer has None there
    columns = (
        "buffer" if by_buffer else "method",
        *(("accuracy, ours", "paper", "difference", AGAINST) if with_accuracy else ()),
        "H_norm, ours",
        "paper",
        "difference",
        "never selected, by seed",
        "seeds",
    )

    def row(label: str, pair: Mapping[str, Comparison]) -> tuple[str, ...]:
        accuracy, h_norm, any_of_them = pair.get("accuracy"), pair.get("h_norm"), next(iter(pair.values()))
        never = ", ".join(
            names.NOTHING if run.never_selected is None else str(run.never_selected) for run in any_of_them.runs
        )
        said = (names.ours, names.paper, names.gap, names.against) if with_accuracy else ()
        return (
            label,
            *(text(accuracy) if accuracy else names.NOTHING for text in said),
            *(text(h_norm) if h_norm else names.NOTHING for text in (names.ours, names.paper, names.gap)),
            never or names.NOTHING,
            " / ".join(dict.fromkeys(names.seeds(entry) for entry in pair.values())),
        )

    def label(cell: Cell) -> str:
        return f"{cell.buffer:g} %" if by_buffer else names.row_name(cell)

    sections = []
    for heading, group in grouped(entries, names.heading).items():
        pairs = _pairs(group)
        labels = row_names([next(iter(pair.values())).cell for pair in pairs], label)
        sections.append(Section(heading, tuple(map(row, labels, pairs))))
    subject = f"{names.method(entries[0].cell.method)} by buffer size (per cent of the clients): "
    measured = f"{'accuracy, ' if with_accuracy else ''}normalised entropy of how often clients were selected"
    note = f"{measured}, clients never selected. {READING if with_accuracy else SPREAD}"
    note = subject + note if by_buffer else note[0].upper() + note[1:]
    return Table(name, names.table(name), note, columns, tuple(sections))


def _pairs(entries: Sequence[Comparison]) -> list[dict[str, Comparison]]:
    """Entries by metric, those of the same runs together."""
    pairs: dict[object, dict[str, Comparison]] = {}
    for entry in entries:
        key = (dataclasses.replace(entry.cell, metric="").identity, entry.cell.config, entry.cell.seeds)
        pairs.setdefault(key, {})[entry.cell.metric] = entry
    return list(pairs.values())


def communication(name: str, entries: Sequence[Comparison]) -> Table:
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

    def row(label: str, entry: Comparison) -> tuple[str, ...]:
        found, theirs = size(entry.cell), printed.get((entry.cell.model, entry.cell.dataset))
        ratio = f"{float(theirs['model_over_labels']):,.5g}" if theirs else names.NOTHING
        if found is None:
            return (label, *[names.NOTHING] * 4, names.paper(entry), *[names.NOTHING] * 3, ratio)
        return (
            label,
            str(found.classes),
            str(found.clients),
            f"{found.labels / 1e6:.5f}",
            f"{found.parameters / 1e6:.3f}",
            names.paper(entry),
            names.gap(entry),
            f"{found.state / 1e6:.3f}",
            f"{found.parameters / found.labels:,.2f}",
            ratio,
        )

    note = (
        "Bytes of all clients' label counts, sent once, and of one model, sent by every selected client every round "
        "(1 MB is 10^6 bytes). All that travels: with the running statistics of normalisation layers."
    )
    labels = row_names([entry.cell for entry in entries], _data_and_model)
    return Table(name, names.table(name), note, columns, (Section("", tuple(map(row, labels, entries))),))


def _data_and_model(cell: Cell) -> str:
    return f"{names.dataset(cell.dataset)}, {names.model(cell.model)}"


def entropy(name: str, entries: Sequence[Comparison]) -> Table:
    """Figure 1 in numbers; beside printed ones where a file of one's own gives any."""
    printed = any(entry.cell.paper is not None for entry in entries)
    columns = (
        "method",
        "mean over rounds, ours",
        *(("paper", "difference") if printed else ()),
        "lowest round",
        "against random selection, 95 % interval",
        "seeds",
    )

    def row(label: str, entry: Comparison) -> tuple[str, ...]:
        least = [run.min_entropy for run in entry.runs if run.min_entropy is not None]
        return (
            label,
            names.ours(entry),
            *((names.paper(entry), names.gap(entry)) if printed else ()),
            f"{min(least):.3f}" if least else names.NOTHING,
            names.against(entry),
            names.seeds(entry),
        )

    classes = {shapes().get(entry.cell.dataset, (0, 0))[0] for entry in entries}
    scale = "Ten classes: at most 3.322; above 3.170 every class is there. " if classes == {10} else ""
    note = (
        "Entropy in bits of the labels of the clients whose models the round aggregates. "
        f"{scale}{SPREAD} FedAvg selects at random."
    )
    return Table(name, names.table(name), note, columns, _sections(entries, row))


def participation(name: str, entries: Sequence[Comparison]) -> Table:
    """Figure 2 in numbers: a column a participation."""
    shares = sorted({entry.cell.participation or 0 for entry in entries})
    columns = ("method", *(f"{share:g} %" for share in shares))
    sections = []
    for heading, group in grouped(entries, names.heading).items():
        lines = by_participation(group)
        rows = []
        for label, line in zip(row_names([line[0].cell for line in lines], names.row_name), lines, strict=True):
            by_share = {entry.cell.participation or 0: entry for entry in line}
            found = {share: names.ours(entry) + names.in_others(entry) for share, entry in by_share.items()}
            label += names.fewer_seeds([by_share.get(share) for share in shares])
            rows.append((label, *(found.get(share, names.NOTHING) for share in shares)))
        sections.append(Section(heading, tuple(rows)))
    note = (
        f"Test accuracy in per cent, {names.averaged(entries)}, by the share of the clients that train each round. "
        f"{SPREAD}"
    )
    cut = {entry.cell.config.rounds for entry in entries if entry.cell.config and entry.cell.shortened}
    if cut:
        note += f" A trial: runs are cut to {names.counted(max(cut), 'round')}."
    if name == "figure2":
        note += " The paper shows these as curves, without figures, and leaves CIFAR-100 with C=2 out."
    return Table(name, names.table(name), note, columns, tuple(sections))


def rounds_to_target(entries: Sequence[Comparison]) -> Table:
    """The paper's claim that FedEntOpt reaches a given accuracy sooner, on the cells of Table 1."""
    columns = ("method", *(f"{target} %" for target in TARGETS), "seeds")

    def row(label: str, entry: Comparison) -> tuple[str, ...]:
        return (label, *(names.rounds_to(entry, target) for target in TARGETS), names.seeds(entry))

    note = (
        "First evaluated round with at least this test accuracy, mean over the seeds that reach it (how many do, "
        "where not all). FedConcat's joint model exists only after its first stage."
    )
    return Table("rounds-to-target", "Rounds to a target accuracy", note, columns, _sections(entries, row))


def _sections(entries: Sequence[Comparison], row: Callable[[str, Comparison], tuple[str, ...]]) -> tuple[Section, ...]:
    sections = []
    for heading, group in grouped(entries, names.heading).items():
        labels = row_names([entry.cell for entry in group], names.row_name)
        sections.append(Section(heading, tuple(map(row, labels, group))))
    return tuple(sections)
