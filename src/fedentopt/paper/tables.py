"""The paper's tables with our figures in them: to read, to compute with (one CSV for all that a table leaves out), to
print."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from fedentopt.files import csv_text, make_folder, write_json, write_text
from fedentopt.paper import layouts
from fedentopt.paper.audit_table import INFERRED, LIARS, inferred_table, liars_table
from fedentopt.paper.bf16_table import BF16, bf16_table
from fedentopt.paper.cells import Cell
from fedentopt.paper.comparison import MISSING_DATA, NOT_RUN, Comparison
from fedentopt.paper.formats import Table, latex, markdown
from fedentopt.paper.open_choices import OPEN_CHOICES, open_choices_table
from fedentopt.paper.pretraining_table import PRETRAINING, pretraining_table
from fedentopt.paper.selector_table import SELECTORS, TUNED, selector_table
from fedentopt.paper.selector_tuned import tuned_table

Layout = Callable[[str, Sequence[Comparison]], Table]
LAYOUTS: dict[str, tuple[Layout, str]] = {
    "h_norm": (layouts.diversity, "selection diversity"),
    "accuracy_change": (layouts.changes, "change in test accuracy"),
    "model_mb": (layouts.communication, "communication"),
    "entropy": (layouts.entropy, "label entropy"),
    "validation_accuracy": (layouts.validation, "accuracy on held-out data"),
}
"""By metric: the layout that shows it, and what a title calls it where a table has several."""

BY_NAME: dict[str, Layout] = {
    SELECTORS: selector_table,
    TUNED: tuned_table,
    LIARS: liars_table,
    INFERRED: inferred_table,
    BF16: bf16_table,
    **dict.fromkeys(OPEN_CHOICES, open_choices_table),
    PRETRAINING: pretraining_table,
}
"""Tables whose accuracies have a layout of their own."""


IN_ANOTHER = (
    "Seeds in bf16 had bf16's matrix products instead of TF32's, which cost VGG-11 and LeNet-5 less than a point on "
    "CIFAR-10 by the table of arithmetic; they are compared with runs in either."
)


def tables(comparisons: Sequence[Comparison]) -> list[Table]:
    """Every table or figure among the cells; Table 1 brings the rounds to a target with it.

    Cells of one table whose metrics do not fit into the same columns make several, all with the table's name.
    """
    made = []
    for name in dict.fromkeys(entry.cell.table for entry in comparisons):
        own = [entry for entry in comparisons if entry.cell.table == name]
        made += _parts(name, own)
        accuracies = [entry for entry in own if entry.cell.metric == "accuracy"]
        if name == "table1" and accuracies:
            made.append(_noted(layouts.rounds_to_target(accuracies), accuracies))
    return made


def summary_csv(comparisons: Iterable[Comparison]) -> str:
    """One row per cell: everything `--list` says, and the differences with their intervals."""
    cell_columns = ("table", "model", "dataset", "partition", "method", "availability", "participation", "buffer")
    measures = ("ours", "std", "paper", "paper_std", "difference", "against_fedavg", "low", "high", "shared_seeds")
    entries = list(comparisons)
    others = list(dict.fromkeys(name for entry in entries for name in entry.stand_ins))  # mostly none
    columns = ("diverged", "never_selected", "seeds", *(f"seeds_{name}" for name in others), "state")
    rows: list[Iterable[object]] = [[*cell_columns, "swept", "metric", *measures, *columns]]
    for entry in entries:
        cell, gap = entry.cell, entry.against
        rows.append(
            [
                *(getattr(cell, name) for name in cell_columns),
                " ".join(f"{name}={value}" for name, value in cell.swept),
                cell.metric,
                *(_exact(value) for value in (entry.ours, entry.std, cell.paper, cell.paper_std, entry.difference)),
                *(_exact(value) for value in (entry.lead, *((gap.low, gap.high) if gap else (None, None)))),
                gap.seeds if gap else None if entry.lead is None else 1,
                entry.diverged,
                " ".join(str(run.never_selected) for run in entry.runs if run.never_selected is not None),
                " ".join(map(str, sorted(entry.values))),
                *(" ".join(map(str, sorted(entry.stand_ins.get(name, [])))) for name in others),
                NOT_RUN if entry.state == MISSING_DATA else entry.state,  # the same on machines with other data
            ]
        )
    return csv_text(rows)


def _parts(name: str, entries: Sequence[Comparison]) -> list[Table]:
    """A table for each kind of figure, H_norm standing beside the accuracy of the same runs."""
    metrics = {entry.cell.metric for entry in entries}
    kinds: dict[str, list[Comparison]] = {}
    for entry in entries:
        beside = entry.cell.metric == "accuracy" and "h_norm" in metrics
        kinds.setdefault("h_norm" if beside else entry.cell.metric, []).append(entry)
    parts = []
    for kind, own in kinds.items():
        layout, title = LAYOUTS[kind] if kind in LAYOUTS else (_accuracy_layout(own), "test accuracy")
        if kind == "accuracy":
            layout = BY_NAME.get(name, layout)
        table = _noted(layout(name, own), own)
        if len(kinds) > 1:
            table = dataclasses.replace(table, title=f"{table.title}, {title}", part=kind)
        parts.append(table)
    return parts


def _noted(table: Table, entries: Sequence[Comparison]) -> Table:
    """The table with a word on runs in another precision, where there are any."""
    said = any(entry.stand_ins for entry in entries)
    return dataclasses.replace(table, note=f"{table.note} {IN_ANOTHER}") if said else table


def _accuracy_layout(entries: Sequence[Comparison]) -> Layout:
    """Columns by participation have no room for a printed figure."""
    shares = {entry.cell.participation for entry in entries if not entry.cell.extra}
    printed = any(entry.cell.paper is not None for entry in entries)
    return layouts.participation if len(shares) > 1 and not printed else layouts.plain


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


RULE_SETTINGS = (
    "dataset", "fine_labels", "image_size", "partition", "model", "clients", "cohort", "rounds", "lr", "weight_decay",
    "dropout", "stragglers", "epsilon",
)  # fmt: skip


def write_tables(folder: Path, comparisons: Sequence[Comparison]) -> list[Path]:
    """Write every table as Markdown, LaTeX and CSV into `folder`; gives the files written."""
    make_folder(folder)
    written = []
    made = tables(comparisons)
    for name in dict.fromkeys(table.name for table in made):
        parts = [table for table in made if table.name == name]
        for suffix, form in (("md", markdown), ("tex", latex)):
            written.append(folder / f"{name}.{suffix}")
            write_text(written[-1], "\n".join(form(part) for part in parts))
    for name in dict.fromkeys(entry.cell.table for entry in comparisons):
        written.append(folder / f"{name}.csv")
        write_text(written[-1], summary_csv(entry for entry in comparisons if entry.cell.table == name))
    return written


def write_paper_figures(folder: Path, cells: Sequence[Cell]) -> Path:
    """Write the printed accuracies where the page of `folder` finds them (see `fedentopt.report.paper`)."""
    rules: list[dict[str, Any]] = []
    for cell in cells:
        if cell.config is None or cell.metric != "accuracy" or cell.paper is None or cell.shortened:
            continue
        known = cell.config.to_dict()
        asked = (*RULE_SETTINGS, *cell.config.of("selector"))
        settings = {name: known[name] for name in asked if name in known}  # later ones are not there at their defaults
        rules.append({"method": cell.config.method, **settings, "figure": cell.paper})
    path = folder / "paper_figures.json"
    write_json(path, rules)
    return path
