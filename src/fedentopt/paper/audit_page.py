"""The page `docs/AUDIT.md`: what lies cost, what the audit gives back, and what selection without reports costs; made
from exported results alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedentopt.files import make_folder, write_text
from fedentopt.paper import names, provenance
from fedentopt.paper.audit_table import INFERRED, LIARS, RANDOM, TRUE_COUNTS, find, named_lie
from fedentopt.paper.comparison import Comparison
from fedentopt.paper.formats import Table, grid, markdown
from fedentopt.paper.results_page import REMARKS, commands_behind, read_remarks, what_was_run
from fedentopt.paper.tables import tables
from fedentopt.results.statistics import paired_interval

if TYPE_CHECKING:
    from fedentopt.paper.reproduction import Reproduction

INTRODUCTION = """# Lying clients and no reports: results

How they come about: [Lying clients, and no reports at all](lying-clients.md). This page is made by one command from the
files in `results/audit`, which hold a row for every cell and seed:

```console
fedentopt reproduce liars --results results/audit --results-page docs/AUDIT.md
```

The cells are written down in `src/fedentopt/paper/audit.toml`. To run them (those that are done are not repeated):

```console
fedentopt reproduce inferred --device cuda --known results/audit --export results/audit
fedentopt reproduce liars --device cuda --known results/audit --export results/audit
```
"""


def write_audit_page(path: Path, request: Reproduction, source: Path) -> list[Path]:
    """Write the page; `source` holds the log of commands and the remarks."""
    commands, remarks = provenance.read(source), read_remarks(source / REMARKS)
    make_folder(path.parent)
    write_text(path, audit_page(request.compare(request.plan), commands=commands, remarks=remarks))
    return [path]


def audit_page(entries: Sequence[Comparison], *, commands: Sequence[dict[str, Any]], remarks: str) -> str:
    """The page as text."""
    known = [entry for entry in entries if entry.ours is not None]
    if not known:
        return "\n".join([INTRODUCTION, "There are no results yet.\n", what_was_run(entries)])
    parts = [INTRODUCTION, remarks.strip() and remarks.strip() + "\n", _without_reports(known), _with_liars(known)]
    parts += [markdown(_named(table, known), level=2) for table in tables(known)]
    return "\n".join([*(part for part in parts if part), what_was_run(entries), commands_behind(commands)])


def _without_reports(entries: Sequence[Comparison]) -> str:
    """How far selection without reports is from true counts and from random selection."""
    rows = []
    for entry in entries:
        if entry.cell.table != INFERRED or entry.cell.method != INFERRED:
            continue
        same = [other for other in entries if other.cell.table == INFERRED and _setting(other) == _setting(entry)]
        others = (find(same, method, entry.cell.participation) for method in (TRUE_COUNTS, RANDOM))
        gaps = [None if other is None else paired_interval(entry.values, other.values) for other in others]
        place = f"{names.heading(entry.cell)}, {entry.cell.participation:g} %"
        rows.append((place, names.ours(entry), *map(names.difference, gaps)))
    if not rows:
        return ""
    columns = ("setting", "inferred", "minus FedEntOpt on true counts", "minus random selection")
    return "\n".join(["## No reports, in short", "", grid(columns, rows, words=1)])


def _with_liars(entries: Sequence[Comparison]) -> str:
    """Against random selection: is selecting by reports worth it when some of them are lies?"""
    rows = []
    for entry in entries:
        config = entry.cell.config
        if entry.cell.table != LIARS or config is None or not config.number_of_liars:
            continue
        plain = [other for other in entries if other.cell.table == INFERRED and _setting(other) == _setting(entry)]
        gaps = []
        for method in (RANDOM, TRUE_COUNTS):
            other = find(plain, method, entry.cell.participation)
            gaps.append(names.difference(None if other is None else paired_interval(entry.values, other.values)))
        liars = f"{config.number_of_liars} {named_lie(config)}"
        rows.append((names.heading(entry.cell), liars, config.audit, names.ours(entry), *gaps))
    if not rows:
        return ""
    head = [
        "## Lies, in short", "",
        "Against random selection, which no report moves, and against FedEntOpt among honest clients; 95 % intervals "
        "of the differences seed by seed, bold where zero lies outside.", "",
    ]  # fmt: skip
    columns = ("setting", "liars", "audit", "accuracy", "minus random selection", "minus FedEntOpt without liars")
    return "\n".join([*head, grid(columns, rows, words=3)])


def _named(table: Table, entries: Sequence[Comparison]) -> Table:
    """Headings of the liars' table say what there is to compare with."""
    if table.name != LIARS:
        return table
    sections = []
    for section in table.sections:
        plain = [e for e in entries if e.cell.table == INFERRED and names.heading(e.cell) == section.heading]
        found = [(word, find(plain, method, 10)) for word, method in (("random", RANDOM), ("no liars", TRUE_COUNTS))]
        words = ", ".join(f"{word} {names.ours(entry)}" for word, entry in found if entry is not None)
        sections.append(
            dataclasses.replace(section, heading=f"{section.heading} ({words})" if words else section.heading)
        )
    return dataclasses.replace(table, sections=tuple(sections))


def _setting(entry: Comparison) -> tuple[str, str, str | None]:
    return entry.cell.model, names.data(entry.cell), entry.cell.partition
