"""Tables of label counts as CSV files: header `client,<class>,...`, then one row a client.

UTF-8, with or without a byte-order mark, any line ending, quoted cells allowed, blank lines skipped. Client ids are
taken as written. Every refusal names the file, the line, the column and the value.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedentopt.errors import InputError
from fedentopt.labels import check_counts, no_samples

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class CountsFile:
    """What such a file says: ids and classes as written, counts as (clients, classes) float64."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    counts: np.ndarray


def read_counts(path: Path, noisy: bool) -> CountsFile:
    """Read label counts; `noisy` ones may be negative, or all 0 for a client."""
    rows = _lines(path)
    number, header = next(rows, (1, []))
    if not header:
        raise InputError(f"{path}: the file is empty; accepted: a header client,<class>,... and one row a client")
    if header[0].strip().lower() != "client":
        raise InputError(
            f"{path}, line {number}: the first column is {header[0]!r}; accepted: 'client', then one column a class"
        )
    classes = tuple(name.strip() for name in header[1:])
    if not classes:
        raise InputError(f"{path}, line {number}: there is no class column; accepted: client,<class>,...")
    _all_different(classes, lambda i: f"{path}, line {number}, column {i + 2}", "class name")

    clients: list[str] = []
    lines: list[int] = []
    values: list[list[float]] = []
    for line, cells in rows:
        if len(cells) < len(header):
            raise InputError(
                f"{path}, line {line}, column {header[len(cells)].strip()!r}: the cell is missing, the row has "
                f"{len(cells)} cells; accepted: {len(header)}, as in the header"
            )
        if len(cells) > len(header):
            raise InputError(
                f"{path}, line {line}: {cells[len(header)]!r} and what follows belongs to no column, the row has "
                f"{len(cells)} cells; accepted: {len(header)}, as in the header"
            )
        clients.append(cells[0])
        lines.append(line)
        values.append(_numbers(path, line, classes, cells[1:]))
    if not clients:
        raise InputError(f"{path}: there is no client; accepted: one row a client below the header")
    _all_different(clients, lambda i: f"{path}, line {lines[i]}, column 'client'", "client")

    counts = np.array(values)
    check_counts(
        counts.ravel(),
        noisy,
        lambda at: f"{path}, line {lines[at // len(classes)]}, column {classes[at % len(classes)]!r}: the count",
    )
    empty = ~counts.any(axis=1)
    if empty.any() and not noisy:
        at = int(np.argmax(empty))
        raise no_samples(f"{path}, line {lines[at]}, client {clients[at]!r}")
    return CountsFile(tuple(clients), classes, counts)


def read_target(path: Path, classes: Sequence[str]) -> np.ndarray:
    """A label prior from a CSV file with the header `class,weight` and every class once, in any order."""
    rows = _lines(path)
    number, header = next(rows, (1, []))
    if [name.strip().lower() for name in header] != ["class", "weight"]:
        raise InputError(f"{path}, line {number}: the header is {','.join(header)!r}; accepted: class,weight")
    weights: dict[str, float] = {}
    for line, cells in rows:
        if len(cells) != 2:
            raise InputError(f"{path}, line {line}: {len(cells)} cells; accepted: 2, a class and its weight")
        name = cells[0].strip()
        if name not in classes:
            raise InputError(f"{path}, line {line}, column 'class': {name!r}; accepted: {', '.join(classes)}")
        if name in weights:
            raise InputError(
                f"{path}, line {line}, column 'class': {name!r} is there twice; accepted: every class once"
            )
        weights[name] = _number(path, line, "weight", cells[1])
        if not 0 <= weights[name] < np.inf:
            raise InputError(f"{path}, line {line}, column 'weight': {cells[1]!r}; accepted: finite numbers, 0 or more")
    missing = [name for name in classes if name not in weights]
    if missing:
        raise InputError(f"{path}: no weight for class {missing[0]!r}; accepted: every class of the counts, 0 or more")
    if not any(weights.values()):
        raise InputError(f"{path}: all weights are 0; accepted: at least one above 0")
    return np.array([weights[name] for name in classes])


def counts_lines(clients: Sequence[object], classes: Sequence[object], counts: np.ndarray) -> Iterator[list[object]]:
    """The rows of such a file, for a CSV writer."""
    yield ["client", *classes]
    for client, row in zip(clients, counts.tolist(), strict=True):
        yield [client, *row]


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every row that is not blank."""
    reader = csv.reader(io.StringIO(_text(path), newline=""), strict=True)
    line = 1  # a row may span lines (quoted ids): its number is that of its first line
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise InputError(f"{path}, line {line}: {error}; accepted: comma-separated cells") from error


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; accepted: a CSV file that can be read") from error
    except UnicodeDecodeError as error:
        line = len((error.object[: error.start] + b".").splitlines())
        raise InputError(
            f"{path}, line {line}: the byte {error.object[error.start]:#04x} is not UTF-8 text; accepted: a CSV file "
            "in UTF-8"
        ) from error


def _numbers(path: Path, line: int, columns: Sequence[str], cells: Sequence[str]) -> list[float]:
    text = "".join(cells)
    if text.isascii() and "_" not in text:  # what else float() takes as a number is one in a table, too
        try:
            return [float(cell) for cell in cells]
        except ValueError:
            pass  # told cell by cell below
    return [_number(path, line, column, cell) for column, cell in zip(columns, cells, strict=True)]


def _number(path: Path, line: int, column: str, cell: str) -> float:
    text = cell.strip()
    if not _NUMBER.fullmatch(text):
        what = f"{cell!r} is not a number" if text else "the cell is empty"
        raise InputError(f"{path}, line {line}, column {column!r}: {what}; accepted: a count such as 12")
    return float(text)


def _all_different(names: Sequence[str], where: Callable[[int], str], what: str) -> None:
    seen: set[str] = set()
    for i, name in enumerate(names):
        if not name.strip():
            raise InputError(f"{where(i)}: the {what} is empty; accepted: any text")
        if name in seen:
            raise InputError(f"{where(i)}: {what} {name!r} is there twice; accepted: every {what} once")
        seen.add(name)
