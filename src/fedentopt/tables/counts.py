"""Tables of label counts: wide (`client,<class>,...`, one row per client) or long (`client,class,count`).

Client ids are taken as written. The first column names the clients, whatever it is called. Every refusal names the
file, the line, the column and the value; `CountsFile.notes` say what was found out and what was left out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedentopt.errors import InputError
from fedentopt.labels import check_counts
from fedentopt.tables.numbers import decimal_mark, is_number, read_number, read_numbers
from fedentopt.tables.rows import TRIED, Sheet, read_sheet

KEEP_ALL = "none"  # `drop` with this keeps a column that looks like a total
_CLASS = {"class", "label", "category", "target", "klasse", "class_id", "label_id"}
_COUNT = {"count", "counts", "n", "number", "samples", "num_samples", "size", "anzahl"}
_CLIENT = {"client", "client_id", "site", "id", "node", "name", "hospital", "device", "user", "partition", "party"}
_TOTAL = {"total", "totals", "sum", "gesamt", "summe", "grand total", "subtotal", "overall", "gesamtergebnis"}
_TOTAL |= {"total general", "total général", "insgesamt", "somme", "suma", "somma", "totale", "totaal"}
_MAYBE_TOTAL = _TOTAL | {"all", "n", "samples", "num_samples", "size", "count", "ensemble", "σ"}  # if it adds up
_MOST_CELLS = 1 << 28  # of the table that a long file becomes, which may be far larger than the file
_MOST_NAMED = 20  # columns or classes in a message
_ROW_NUMBERS = {"", "index", "unnamed: 0"}  # what pandas and R write above row numbers


@dataclass(frozen=True, eq=False)
class CountsFile:
    """What such a file says: ids and classes as written, counts as (clients, classes) float64.

    `left_out` are clients that hold no sample. `notes` are lines for people.
    """

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    counts: np.ndarray
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    heading: str = "client"


@dataclass(frozen=True)
class _Table:
    """Counts by client and class, with the row of each client."""

    clients: list[str]
    numbers: list[int]
    classes: tuple[str, ...]
    counts: np.ndarray


def read_counts(path: Path | str, noisy: bool = False, drop: str | Sequence[str] = ()) -> CountsFile:
    """Read label counts; `noisy` ones may be negative, or all 0 for a client. Columns named in `drop`, one or several,
    are left out.

    A client that holds no sample is left out, with a note. A column that equals the sum of the others in every row, or
    is called a total, is refused as a class, unless `drop` names it, or says "none"; so is such a row, unless that.
    """
    path = Path(path)
    drop = [drop] if isinstance(drop, str) else drop
    sheet = read_sheet(path)
    if not sheet.rows:
        raise InputError(f"{path}: the file is empty; accepted: a header client,<class>,... and one row per client")
    dropped = [name for name in drop if name != KEEP_ALL or name in _names(sheet)]
    sheet, unused = _without(sheet, dropped)
    sheet = _without_row_numbers(sheet)
    long = _long_columns(sheet)
    if long is None:
        if unused:
            raise InputError(f"--drop: {path} has no column {unused[0]!r}; accepted: {_some(_names(sheet)[1:])}")
        table = _read_wide(sheet, noisy)
    else:
        table = _read_long(sheet, long, unused, noisy)
    where = [f"{sheet.at(number)}" for number in table.numbers]
    _refuse_blanks_apart(table.clients, where)
    width = len(table.classes)
    check_counts(
        table.counts.ravel(), noisy, lambda at: f"{where[at // width]}, column {table.classes[at % width]!r}: the count"
    )
    if KEEP_ALL not in drop:
        _refuse_totals(sheet, table)
    heading = _names(sheet)[0 if long is None else long[0]]
    notes = [*sheet.notes]
    if heading.lower() != "client":
        notes.append(f"{path}: clients are those of the column {heading!r}")
    if long is not None:
        notes.append(f"{path}: long format, {len(table.clients)} clients with {width} classes")
    empty = np.flatnonzero(~np.asarray(table.counts.any(axis=1))).tolist()
    left_out: tuple[str, ...] = ()
    if empty and not noisy:
        left_out = tuple(table.clients[row] for row in empty)
        if len(left_out) == len(table.clients):
            raise InputError(
                f"{path}: all label counts are 0; accepted: at least one sample (only counts marked noisy may be all 0)"
            )
        shown = ", ".join(map(repr, left_out[:5])) + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else "")
        notes.append(f"{path}: left out, no samples: {shown}")
        gone = set(empty)
        kept = [client for row, client in enumerate(table.clients) if row not in gone]
        table = replace(table, clients=kept, counts=np.delete(table.counts, empty, axis=0))
    return CountsFile(tuple(table.clients), table.classes, table.counts, left_out, tuple(notes), heading)


def counts_lines(clients: Sequence[object], classes: Sequence[object], counts: np.ndarray) -> Iterator[list[object]]:
    """The rows of such a file, for a CSV writer."""
    yield ["client", *classes]
    for client, row in zip(clients, counts.tolist(), strict=True):
        yield [client, *row]


def _names(sheet: Sheet) -> list[str]:
    return [name.strip() for name in sheet.rows[0][1]]


def _some(names: Sequence[str]) -> str:
    """Names in a message: the first of them, since a table may have thousands."""
    more = len(names) - _MOST_NAMED
    return (", ".join(names[:_MOST_NAMED]) or "none") + (f" and {more} more" if more > 0 else "")


def _without(sheet: Sheet, drop: Sequence[str]) -> tuple[Sheet, list[str]]:
    """The sheet without these columns, nor columns that are blank from top to bottom; and names that are no column."""
    names = _names(sheet)
    blank = {
        place
        for place in range(1, len(names))
        if not names[place] and all(len(c) <= place or not c[place].strip() for _, c in sheet.rows)
    }
    gone = {place for place, name in enumerate(names) if name in drop}
    if 0 in gone:
        raise InputError(f"--drop: {names[0]!r} is the column of clients; accepted: {_some(names[1:])}")
    unused = [name for name in drop if name not in names]
    places = [place for place in range(len(names)) if place not in blank | gone]
    if len(places) == len(names):
        return sheet, unused
    rows = []
    for number, cells in sheet.rows:
        short = len(cells) < len(names) and set(range(len(cells), len(names))) - blank
        if short or len(cells) > len(names):
            raise _wrong_width(sheet, number, cells)  # cells that belong to no column cannot be left out of one
        rows.append((number, [cells[place] for place in places if place < len(cells)]))
    return replace(sheet, rows=rows), unused


def _without_row_numbers(sheet: Sheet) -> Sheet:
    """The sheet without a first column of row numbers that has no name of its own, where the next one names clients."""
    names = [name.lower() for name in _names(sheet)]
    if len(names) < 3 or names[0] not in _ROW_NUMBERS or names[1] not in _CLIENT:
        return sheet
    rows = [cells for _, cells in sheet.rows[1:] if len(cells) == len(names)]
    numbers, ids = [cells[0].strip() for cells in rows], [cells[1] for cells in rows]
    counted = any(numbers == [str(start + row) for row in range(len(rows))] for start in (0, 1))
    # A class may be called `device`: counts repeat, and what names clients does not, except in a long table.
    long = len(names) == 4 and not _CLASS.isdisjoint(names) and not _COUNT.isdisjoint(names)
    if not rows or not counted or (all(map(is_number, ids)) and len(set(ids)) < len(ids) and not long):
        return sheet
    note = f"{sheet.path}: left out, row numbers: the first column"
    return replace(sheet, rows=[(number, cells[1:]) for number, cells in sheet.rows], notes=(*sheet.notes, note))


def _wrong_width(sheet: Sheet, number: int, cells: Sequence[str]) -> InputError:
    names = _names(sheet)
    if len(cells) < len(names):
        return InputError(
            f"{sheet.at(number)}, column {names[len(cells)]!r}: the cell is missing, the row has {len(cells)} cells; "
            f"accepted: {len(names)}, as in the header"
        )
    return InputError(
        f"{sheet.at(number)}: {cells[len(names)]!r} and what follows belongs to no column, the row has {len(cells)} "
        f"cells; accepted: {len(names)}, as in the header"
    )


def _read_wide(sheet: Sheet, noisy: bool) -> _Table:
    number, header = sheet.rows[0]
    classes = tuple(name.strip() for name in header[1:])
    if not classes:
        tried = f" in {header[0].strip()!r} ({TRIED})" if sheet.separator else ""
        raise InputError(f"{sheet.at(number)}: there is no class column{tried}; accepted: client,<class>,...")
    _refuse_missing_header(sheet, header)
    if header[0].strip().lower() in _CLASS:
        raise InputError(
            f"{sheet.at(number)}: the first column, {header[0].strip()!r}, holds classes; accepted: one row per client "
            "and one column per class, so exchange rows and columns, or another name if these are clients"
        )
    _all_different(classes, lambda i: f"{sheet.at(number)}, column {i + 2}", "class name")
    rows = sheet.rows[1:]
    for line, cells in rows:
        if len(cells) != len(header):
            raise _wrong_width(sheet, line, cells)
        if cells == header:  # as where files were put one behind the other; class numbers would be counts
            raise InputError(f"{sheet.at(line)}: the header is there again; accepted: once, so remove it")
    if not rows:
        raise InputError(f"{sheet.path}: there is no client; accepted: one row per client below the header")
    mark = decimal_mark(sheet, classes, range(1, len(header)), rounded=noisy)
    values = [read_numbers(sheet, line, classes, cells[1:], mark) for line, cells in rows]
    clients, lines = [cells[0] for _, cells in rows], [line for line, _ in rows]
    hint = ", or the header client,class,count for a row per client and class" if len(header) == 3 else ""
    _all_different(clients, lambda i: f"{sheet.at(lines[i])}, column {header[0].strip()!r}", "client", hint)
    return _Table(clients, lines, classes, np.array(values))


def _refuse_missing_header(sheet: Sheet, header: Sequence[str]) -> None:
    """A first row of numbers is a header only where they can be class numbers and the first cell is no client."""
    first, rest = header[0].strip(), [name.strip() for name in header[1:]]
    if first.lower() in _CLIENT or not first or not all(is_number(name) for name in rest):
        return
    consecutive = all(name.isdigit() for name in rest) and all(
        int(right) == int(left) + 1 for left, right in itertools.pairwise(rest)
    )
    alike = re.sub(r"\d+", "0", first)  # site-1 is like site-2
    numbered = alike != first or "0" in first
    is_client = is_number(first) or (
        numbered and any(re.sub(r"\d+", "0", row[0].strip()) == alike for _, row in sheet.rows[1:])
    )
    if is_client or not consecutive:
        raise InputError(
            f"{sheet.at(sheet.rows[0][0])}: {','.join(header)[:60]!r} is a row of counts, not a header; accepted: a "
            "first line client,<class>,... that names the columns"
        )


def _long_columns(sheet: Sheet) -> tuple[int, int, int] | None:
    """Places of client, class and count in a long table; None for a wide one."""
    names = [name.lower() for name in _names(sheet)]
    of = {
        kind: [i for i, n in enumerate(names) if n in words] for kind, words in (("class", _CLASS), ("count", _COUNT))
    }
    if len(names) != 3:
        _refuse_long_with_more(sheet, of["class"], of["count"])
        return None
    if len(of["class"]) == 1 and len(of["count"]) == 1:
        (client,) = {0, 1, 2} - {of["class"][0], of["count"][0]}
        return client, of["class"][0], of["count"][0]
    rows = [cells for _, cells in sheet.rows[1:] if len(cells) == 3]
    repeated = len({cells[0] for cells in rows}) < len(rows)
    if repeated and not any(is_number(cells[1]) for cells in rows) and all(is_number(cells[2]) for cells in rows):
        return (1, 0, 2) if of["class"] == [0] else (0, 1, 2)
    return None


def _refuse_long_with_more(sheet: Sheet, labels: Sequence[int], counts: Sequence[int]) -> None:
    """A column of class names beside one of counts is no wide table: more columns than three are in the way."""
    named = [cells[labels[0]] for _, cells in sheet.rows[1:] if labels and len(cells) > labels[0]]
    if not (len(labels) == len(counts) == 1 and 0 not in labels) or not named or any(is_number(text) for text in named):
        return
    names = _names(sheet)
    more = [name for place, name in enumerate(names) if place and place not in (*labels, *counts)]
    raise InputError(
        f"{sheet.path}: has a column of classes, {names[labels[0]]!r}, and more than client, class and count; "
        f"accepted: these three, so {' '.join('--drop ' + _quoted(name) for name in more)}"
    )


def _read_long(sheet: Sheet, places: tuple[int, int, int], drop: Sequence[str], noisy: bool) -> _Table:
    names = _names(sheet)
    at_client, at_class, at_count = places
    for line, cells in sheet.rows[1:]:
        if len(cells) != 3:
            raise _wrong_width(sheet, line, cells)
    if len(sheet.rows) < 2:
        raise InputError(f"{sheet.path}: there is no client; accepted: a row for each client and class it holds")
    mark = decimal_mark(sheet, [names[at_count]], [at_count], rounded=noisy)
    clients: dict[str, int] = {}
    seen: dict[tuple[str, str], int] = {}
    values: dict[tuple[str, str], float] = {}
    for line, cells in sheet.rows[1:]:
        client, label = cells[at_client], cells[at_class].strip()
        for what, place, text in (("client", at_client, client), ("class", at_class, label)):
            if not text.strip():
                raise InputError(f"{sheet.at(line)}, column {names[place]!r}: the {what} is empty; accepted: any text")
        if (client, label) in seen:
            raise InputError(
                f"{sheet.at(line)}: client {client!r} with class {label!r} is there twice, first in {sheet.unit} "
                f"{seen[client, label]}; accepted: every client and class once"
            )
        seen[client, label] = line
        clients.setdefault(client, line)
        values[client, label] = read_number(sheet, line, names[at_count], cells[at_count], mark)
    classes = list(dict.fromkeys(label for _, label in values))
    if all(label.isdigit() for label in classes):
        classes.sort(key=lambda label: (int(label), label))
    for name in drop:
        if name not in classes:
            raise InputError(f"--drop: {sheet.path} has no class {name!r}; accepted: {_some(classes)}")
    classes = [label for label in classes if label not in drop]
    if not classes:
        raise InputError(f"--drop: no class is left of {sheet.path}; accepted: at least one")
    if len(clients) * len(classes) > _MOST_CELLS:
        raise InputError(
            f"{sheet.path}: {len(clients)} clients with {len(classes)} classes; accepted: at most 2**28 pairs of both "
            "(a selector itself takes more, as {client: {class number: count}})"
        )
    counts = np.zeros((len(clients), len(classes)))
    row_of, column_of = {c: i for i, c in enumerate(clients)}, {c: i for i, c in enumerate(classes)}
    for (client, label), value in values.items():
        if label in column_of:
            counts[row_of[client], column_of[label]] = value
    return _Table(list(clients), list(clients.values()), tuple(classes), counts)


def _refuse_totals(sheet: Sheet, table: _Table) -> None:
    """Refuse a column or row that is the sum of the others, or called so: as a class it would be the commonest."""
    counts = table.counts
    totals = counts.sum(axis=1)
    several = (counts > 0).sum(axis=0) > 0
    for place, name in enumerate(table.classes):
        equal = bool(totals.any()) and np.allclose(2 * counts[:, place], totals)
        # Two even classes, or a client or two by chance, are no total unless called so.
        many = equal and np.delete(several, place).sum() >= 2 and len(np.unique(counts[totals > 0], axis=0)) >= 3
        if words := _as_total(name, equal, bool(many)):
            raise InputError(
                f"{sheet.path}, column {name!r}: {words} the sum of the other classes for every client; accepted: "
                f"--drop {_quoted(name)}, or --drop {KEEP_ALL} if it is a class"
            )
    sums, ends = counts.sum(axis=0), (0, len(counts) - 1)
    for row, client in enumerate(table.clients):
        if row not in ends and _plain(client) not in _MAYBE_TOTAL:
            continue
        equal = len(counts) > 2 and np.allclose(2 * counts[row], sums)
        many = False
        if equal and row in ends:  # by chance, or by design, one client may hold what two others do
            rest = np.delete(counts, row, axis=0)
            many = ((rest > 0).sum(axis=0) > 1).sum() >= 2 and len(np.unique(rest[rest.any(axis=1)], axis=0)) >= 3
        if words := _as_total(client, equal, bool(many)):
            raise InputError(
                f"{sheet.at(table.numbers[row])}: {client!r} {words} the sum of all other rows; accepted: one row per "
                f"client, so remove it, or --drop {KEEP_ALL} if it is a client"
            )


def _as_total(name: str, equal: bool, many: bool) -> str:
    """How what is called so is a total, or "" if it is none; `many`: it is `equal` to the sum beyond any chance."""
    if equal:
        return "equals" if many or _plain(name) in _MAYBE_TOTAL else ""
    return "is called a total, and is not" if _plain(name) in _TOTAL else ""


def _plain(name: str) -> str:
    return name.strip().rstrip(":").lower()


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[\w.-]+", name) else "'" + name.replace("'", "'\\''") + "'"


def _refuse_blanks_apart(clients: Sequence[str], where: Sequence[str]) -> None:
    """Names that differ in blanks around them alone are one client, whose counts would count as two clients'."""
    seen: dict[str, str] = {}
    for client, at in zip(clients, where, strict=True):
        other = seen.setdefault(client.strip(), client)
        if other != client:
            raise InputError(f"{at}: client {client!r} differs from {other!r} in blanks alone; accepted: one spelling")


def _all_different(names: Sequence[str], where: Callable[[int], str], what: str, hint: str = "") -> None:
    seen: set[str] = set()
    for i, name in enumerate(names):
        if not name.strip():
            raise InputError(f"{where(i)}: the {what} is empty; accepted: any text")
        if name in seen:
            raise InputError(f"{where(i)}: {what} {name!r} is there twice; accepted: every {what} once{hint}")
        seen.add(name)
