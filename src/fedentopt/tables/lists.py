"""Smaller files beside a table of counts: a label prior (`class,weight`), and who is available, one client per line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedentopt.errors import InputError
from fedentopt.tables.counts import CountsFile
from fedentopt.tables.numbers import decimal_mark, read_number
from fedentopt.tables.rows import read_sheet


def read_target(path: Path | str, classes: Sequence[str]) -> np.ndarray:
    """A label prior from a file with the header `class,weight` and every class once, in any order."""
    sheet = read_sheet(Path(path))
    number, header = sheet.rows[0] if sheet.rows else (1, [])
    if [name.strip().lower() for name in header] != ["class", "weight"]:
        raise InputError(f"{sheet.at(number)}: the header is {','.join(header)!r}; accepted: class,weight")
    mark = decimal_mark(sheet, ["weight"], [1], rounded=True)
    weights: dict[str, float] = {}
    for line, cells in sheet.rows[1:]:
        if len(cells) != 2:
            raise InputError(f"{sheet.at(line)}: {len(cells)} cells; accepted: 2, a class and its weight")
        name = cells[0].strip()
        if name not in classes:
            raise InputError(f"{sheet.at(line)}, column 'class': {name!r}; accepted: {', '.join(classes)}")
        if name in weights:
            raise InputError(f"{sheet.at(line)}, column 'class': {name!r} is there twice; accepted: every class once")
        weights[name] = read_number(sheet, line, "weight", cells[1], mark)
        if not 0 <= weights[name] < np.inf:
            raise InputError(f"{sheet.at(line)}, column 'weight': {cells[1]!r}; accepted: finite numbers, 0 or more")
    missing = [name for name in classes if name not in weights]
    if missing:
        raise InputError(f"{path}: no weight for class {missing[0]!r}; accepted: every class of the counts, 0 or more")
    if not any(weights.values()):
        raise InputError(f"{path}: all weights are 0; accepted: at least one above 0")
    return np.array([weights[name] for name in classes])


def read_available(path: Path | str, table: CountsFile) -> tuple[str, ...]:
    """Clients of the table that are available: the first cell of every line, or the whole line; a first line may be
    the heading of the column of clients. Clients that the table left out for having no sample are passed over.
    """
    sheet = read_sheet(Path(path))
    known, passed_over = set(table.clients), set(table.left_out)
    found: dict[str, None] = {}
    for place, (line, cells) in enumerate(sheet.rows):
        whole = (sheet.separator or ",").join(cells)
        name = next((text for text in (cells[0], whole, cells[0].strip(), whole.strip()) if text in known), None)
        if name is not None:
            found[name] = None
        elif place == 0 and cells[0].strip().lower() in (table.heading.lower(), "client"):
            continue
        elif cells[0].strip() not in passed_over and whole.strip() not in passed_over:
            raise InputError(f"{sheet.at(line)}: {cells[0]!r} is not in the table of counts; accepted: its clients")
    if not found:
        raise InputError(f"{path}: names no client of the table; accepted: one client per line")
    return tuple(found)
