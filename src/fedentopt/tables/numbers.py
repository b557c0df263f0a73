"""Numbers in cells: a decimal point, or a decimal comma where the separator leaves no doubt about it.

In a file separated by semicolon or tab `12,5` is 12.5. But `1,234` may be 1234 as well: it is taken as 1.234 only
where another cell shows that the comma is the decimal mark. So may `1.234`, also between commas and as the text of a
cell in Excel, where a comma is no decimal mark; unless it is a noisy count or a weight there, and all others have a
point, too. Thousands separators are refused, since no rule tells them from decimals in every file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fedentopt.errors import InputError
from fedentopt.tables.rows import SEPARATORS, Number, Sheet

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)
_WITH_COMMA = re.compile(r"[+-]?(\d+,\d*|,\d+)([eE][+-]?\d+)?", re.ASCII)
_WITH_POINT = re.compile(r"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}([.,' \u00a0\u202f’]\d{3})+([.,]\d+)?", re.ASCII)


def decimal_mark(sheet: Sheet, columns: Sequence[str], places: Sequence[int], rounded: bool) -> str:
    """The decimal mark of the cells in these places of all rows but the first, "." or ","; refused where in doubt.

    `rounded`: that every number has three decimals is no doubt, since numbers of that kind are written so by `%.3f`.
    """
    by_point = sheet.separator in (None, ",")  # cells with a comma are refused there when they are read
    shown: dict[str, tuple[int, str, str] | None] = {",": None, ".": None}  # first cell that proves the mark
    doubtful: tuple[int, str, str] | None = None
    for number, cells in sheet.rows[1:]:
        text = "".join(cells)
        if "." not in text and (by_point or "," not in text):
            continue
        if by_point and shown["."]:
            break
        for column, place in zip(columns, places, strict=True):
            raw = cells[place] if place < len(cells) else ""
            if isinstance(raw, Number) or not ("." in raw or "," in raw) or (by_point and "," in raw):
                continue
            cell = raw.strip()
            pattern, mark = (_WITH_COMMA, ",") if "," in cell else (_WITH_POINT, ".")
            if not pattern.fullmatch(cell):
                continue  # whole numbers, and what is refused when the cell is read
            here = (number, column, cell)
            if not _GROUPED.fullmatch(cell):
                shown[mark] = shown[mark] or here
            elif doubtful is None:
                doubtful = here
    comma, point = shown[","], shown["."]
    if comma and point:
        raise InputError(
            f"{sheet.at(max(comma, point)[0])}, column {max(comma, point)[1]!r}: {max(comma, point)[2]!r}, and "
            f"{min(comma, point)[2]!r} in {sheet.unit} {min(comma, point)[0]}; accepted: one decimal mark in the file"
        )
    if rounded and doubtful and by_point:
        rows = [cells for _, cells in sheet.rows[1:]]
        doubtful = None if all("." in cells[p] for cells in rows for p in places if p < len(cells)) else doubtful
    if doubtful and not (comma or point):
        number, column, cell = doubtful
        whole, as_decimal = re.sub(r"[.,]", "", cell), cell.replace(",", ".")
        others = "no other text in a cell of numbers"
        if sheet.separator is not None:
            others = f"nothing else in the file (separated by {SEPARATORS[sheet.separator]})"
        raise InputError(
            f"{sheet.at(number)}, column {column!r}: {cell!r} may be {whole} or {as_decimal}, and {others} tells "
            f"which; accepted: counts without a thousands separator, or {cell}0 where it is {as_decimal}"
        )
    return "," if comma else "."


def read_numbers(sheet: Sheet, number: int, columns: Sequence[str], cells: Sequence[str], mark: str) -> list[float]:
    """The numbers of one row."""
    text = "".join(cells)
    if mark == "." and text.isascii() and "_" not in text:  # what else float() takes as a number is one in a table, too
        try:
            return [float(cell) for cell in cells]
        except ValueError:
            pass  # told cell by cell below
    return [read_number(sheet, number, column, cell, mark) for column, cell in zip(columns, cells, strict=True)]


def read_number(sheet: Sheet, number: int, column: str, cell: str, mark: str = ".") -> float:
    """One number; refused, naming the cell, where it is none."""
    text = cell.strip()
    where = f"{sheet.at(number)}, column {column!r}"
    if mark == "," and _WITH_COMMA.fullmatch(text):
        return float(text.replace(",", "."))
    if _NUMBER.fullmatch(text) and not (mark == "," and "." in text):
        return float(text)
    if not text:
        raise InputError(f"{where}: the cell is empty; accepted: a count such as 12, or 0")
    if _GROUPED.fullmatch(text):
        plain = re.sub(r"\D", "", re.sub(r"[.,]\d{1,2}$", "", text))
        raise InputError(
            f"{where}: {cell!r} is not a number: thousands are separated in it; accepted: {plain}, or 12.5"
        )
    hint = ""
    if "," in text and sheet.separator == ",":
        hint = " (a decimal comma needs a file separated by semicolon or tab)"
    raise InputError(f"{where}: {cell!r} is not a number; accepted: a count such as 12{hint}")


def is_number(text: str) -> bool:
    """Whether a cell holds a number in any of the forms above."""
    text = text.strip()
    return bool(_NUMBER.fullmatch(text) or _WITH_COMMA.fullmatch(text))
