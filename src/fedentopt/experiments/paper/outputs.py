"""Tables on disk, in the three forms people need them: to read, to compute with, to print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedentopt.experiments.atomic import make_folder, write_json, write_text
from fedentopt.experiments.paper.cells import Cell
from fedentopt.experiments.paper.comparison import Comparison
from fedentopt.experiments.paper.formats import latex, markdown
from fedentopt.experiments.paper.tables import summary_csv, tables

RULE_SETTINGS = (
    "dataset", "partition", "model", "clients", "cohort", "rounds", "lr", "weight_decay", "dropout", "stragglers",
    "epsilon",
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
        names = (*RULE_SETTINGS, "buffer") if cell.config.selector == "fedentopt" else RULE_SETTINGS
        settings = {name: getattr(cell.config, name) for name in names}
        rules.append({"method": cell.config.method, **settings, "figure": cell.paper})
    path = folder / "paper_figures.json"
    write_json(path, rules)
    return path
