"""The page `docs/RESULTS.md`: what was run, what the paper claims and ours says, every table, the figures.

Everything on it comes from exported results; what a person has to add lies beside them in `remarks.md` and is taken
over as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedentopt.errors import InputError
from fedentopt.files import make_folder, write_text
from fedentopt.paper import names, provenance
from fedentopt.paper.cells import Cell, Identity
from fedentopt.paper.comparison import DONE, PARTLY, Comparison
from fedentopt.paper.figures import write_figures
from fedentopt.paper.findings import FAR, NOT_YET, agreement, ahead, far, findings
from fedentopt.paper.formats import Table, folded, grid, markdown
from fedentopt.paper.names import row_names
from fedentopt.paper.tables import tables

if TYPE_CHECKING:
    from fedentopt.paper.reproduction import Reproduction

REMARKS = "remarks.md"
INTRODUCTION = """# Results

Our figures beside those printed in *Optimizing Federated Learning by Entropy-Based Client Selection* (A. Lutz,
G. Steidl, K. Müller, W. Samek, arXiv:2411.01240). "CIFAR-100" is CIFAR-100 with its 20 superclasses for labels, and C=2
means two classes per client. An interval is Student's 95 % interval of the mean of the differences seed by seed; where
it lies on one side of zero, the difference is called clear.
"""
HOW = """## How this page is made

By one command, from the files in `results/paper`, which hold a row for every cell and seed:

```console
fedentopt reproduce all --results results/paper --results-page docs/RESULTS.md
```

How to run the cells oneself, what every setting is and what the paper leaves open:
[Reproducing the paper](reproducing.md).
"""
OWN_INTRODUCTION = """# Results

The cells of a file of one's own, made by `fedentopt reproduce --cells FILE --results-page PAGE`.
"""


def write_results_page(
    path: Path, request: Reproduction, source: Path, text: Callable[..., str] | None = None, *, own: bool = False
) -> list[Path]:
    """Write the page and, in a folder beside it, its figures; `source` holds the log of commands and the remarks.

    `text` makes the text of another page than `page` from the same. With `own` the cells are a user's, of which the
    paper claims nothing, whatever their tables are called.
    Refused, before anything is written: a log or remarks that cannot be read.
    """
    commands, remarks = provenance.read(source), read_remarks(source / REMARKS)
    entries = request.compare(request.plan)
    folder = path.parent / "results"
    make_folder(path.parent)
    drawn = [file for file in write_figures(folder, entries, request.results) if file.suffix == ".svg"]
    figures = {file.stem: f"{folder.name}/{file.name}" for file in drawn}
    text = text or partial(page, own=own)
    write_text(path, text(entries, commands=commands, remarks=remarks, figures=figures))
    return [path, *drawn]


def read_remarks(path: Path) -> str:
    """What a person has written beside exported results; empty where nobody has."""
    if not path.exists():
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not text in UTF-8 ({error.reason}); accepted: Markdown in UTF-8") from None


def page(
    entries: Sequence[Comparison],
    commands: Sequence[dict[str, Any]],
    remarks: str,
    figures: dict[str, str],
    *,
    own: bool = False,
) -> str:
    """The page as text: what was found first. Tables without any result are named, not shown, and tables beyond the
    paper's that are mostly empty, or hold nothing but runs of the paper's tables, are folded."""
    parts = [OWN_INTRODUCTION] if own else [INTRODUCTION, _in_short(entries), _ahead(entries), HOW]
    if not own or any(entry.cell.paper is not None for entry in entries):
        parts.append(_far(entries))
    if remarks.strip():
        parts.append(remarks.strip() + "\n")
    parts.append(what_was_run(entries))
    known = {entry.cell.table for entry in entries if entry.ours is not None}
    for table in tables([entry for entry in entries if entry.cell.table in known]):
        parts.append(_shown(table, entries, figures))
    parts.append(commands_behind(commands))
    return "\n".join(parts)


def _in_short(entries: Sequence[Comparison]) -> str:
    rows = [(found.claim, found.place, found.ours) for found in findings(entries)]
    table = grid(("the paper says", "where", "ours"), rows)
    return "\n".join(["## What was found", "", agreement(entries), "", table])


def _ahead(entries: Sequence[Comparison]) -> str:
    """The methods that beat FedEntOpt, where they do."""
    found = ahead(entries)
    lines = ["## Where another method is ahead of FedEntOpt", ""]
    if not found:
        return "\n".join([*lines, NOT_YET if found is None else "Nowhere among the settings that were run.", ""])
    about = "Tables 1 and 4, farthest ahead first, over the seeds that both have. FedEntOpt is the one without noise."
    rows = [
        (
            names.heading(one.entry.cell), names.method(one.entry.cell.method), names.ours(one.entry),
            names.ours(one.fedentopt), names.difference(one.interval, [one.lead]), str(len(one.entry.values)),
        )
        for one in found
    ]  # fmt: skip
    columns = ("setting", "method", "its accuracy", "FedEntOpt's", "difference, 95 % interval", "seeds")
    return "\n".join([*lines, about, "", grid(columns, rows, words=2)])


def _far(entries: Sequence[Comparison]) -> str:
    apart = far(entries)
    lines = ["## Where we differ", ""]
    if not apart:
        near = f"No cell with results is more than {FAR:g} points from the printed figure."
        return "\n".join([*lines, near if any(entry.difference is not None for entry in entries) else NOT_YET, ""])
    lines += [f"Cells more than {FAR:g} points from the printed figure, farthest first.", ""]
    methods = _told_apart(apart)
    rows = [
        (
            entry.cell.table.removeprefix("table"), names.heading(entry.cell), methods[entry.cell.identity],
            names.ours(entry), names.paper(entry), names.gap(entry),
        )
        for entry in apart
    ]  # fmt: skip
    return "\n".join([*lines, grid(("table", "setting", "method", "ours", "paper", "difference"), rows, words=3)])


def _told_apart(entries: Sequence[Comparison]) -> dict[Identity, str]:
    """The method of every cell, and what tells it from others of the same table and setting."""

    def plain(cell: Cell) -> str:
        method = names.method(cell.method)
        return f"{method}, Q={cell.buffer:g} %" if cell.table == "table6" and cell.buffer is not None else method

    told: dict[Identity, str] = {}
    for place in dict.fromkeys((entry.cell.table, names.heading(entry.cell)) for entry in entries):
        cells = [entry.cell for entry in entries if (entry.cell.table, names.heading(entry.cell)) == place]
        told |= {cell.identity: name for cell, name in zip(cells, row_names(cells, plain), strict=True)}
    return told


def what_was_run(entries: Sequence[Comparison]) -> str:
    """How many cells of every table have results, by model and data set where not all do."""
    rows = []
    for name in dict.fromkeys(entry.cell.table for entry in entries):
        own = [entry.state for entry in entries if entry.cell.table == name]
        done, partly = own.count(DONE), own.count(PARTLY)
        rows.append((names.table(name), *map(str, (len(own), done, partly, len(own) - done - partly))))
    table = grid(("table", "cells", "all seeds", "some seeds", "none"), rows, words=1)
    return "\n".join(["## What was run", "", table])


def _shown(table: Table, entries: Sequence[Comparison], figures: dict[str, str]) -> str:
    """A table without its empty sections, and the figure that goes with it."""
    name = "table1" if table.name == "rounds-to-target" else table.name
    known = {names.heading(e.cell) for e in entries if e.cell.table == name and e.ours is not None}
    sections = tuple(s for s in table.sections if not s.heading or s.summary or s.heading in known)
    own = [entry for entry in entries if entry.cell.table == name]
    with_results = sum(entry.ours is not None for entry in own)
    papers = {entry.cell.config for entry in entries if not entry.cell.extra}
    news = any(entry.ours is not None and entry.cell.config not in papers for entry in own)
    if all(entry.cell.extra for entry in own) and (2 * with_results < len(own) or not news):
        sections = tuple(dataclasses.replace(s, rows=tuple(row for row in s.rows if not _empty(row))) for s in sections)
        inside = markdown(dataclasses.replace(table, sections=sections), level=2).partition("\n")[2]
        return folded(f"{table.title}: {with_results} of {len(own)} cells have results", inside)
    text = markdown(dataclasses.replace(table, sections=sections), level=2)
    picture = figures.get("accuracy" if table.name == "rounds-to-target" else table.name)
    return f"{text}\n![{table.title}]({picture})\n" if picture else text


def _empty(row: Sequence[str]) -> bool:
    """Whether a row says nothing but that there is nothing yet."""
    return set(row[1:-1]) <= {"–"} and row[-1].startswith("0 of")


def commands_behind(commands: Sequence[dict[str, Any]]) -> str:
    """The log of commands as a table."""
    lines = ["## Commands behind the results", ""]
    if not commands:
        return "\n".join([*lines, "None yet.", ""])
    table = [
        "| started | command | runs | minutes | device | torch | code |",
        "| --- | --- | ---: | ---: | --- | --- | --- |",
    ]
    for entry in commands:
        commit, plus, changes = str(entry.get("commit") or "").partition("+")
        commit = f"{commit[:12]}{plus}{changes}"
        code = f"{entry.get('fedentopt')}, {commit or 'sources ' + str(entry.get('sources'))[:12]}"
        table.append(
            f"| {entry.get('started')} | `{entry.get('command')}` | {entry.get('runs')} | "
            f"{float(entry.get('seconds') or 0) / 60:.1f} | {entry.get('device')} | {entry.get('torch')} | {code} |"
        )
    return "\n".join([*lines, folded(names.counted(len(commands), "command"), "\n".join(table))])
