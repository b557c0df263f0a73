"""From a file to rows of cells, whatever program wrote it: text with a separator, an Excel sheet, a Parquet file.

Text may be UTF-8, UTF-16 or UTF-32 (with a byte-order mark, or UTF-16 without), or Latin-1 as Windows writes it; its
cells may be separated by comma, semicolon or tab. The separator is the one by which most rows have as many cells as
the header, and the header the most. Excel and Parquet are read by pandas, where that is installed.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}
TRIED = "tried as separators: comma, semicolon and tab"
ACCEPTED = "accepted: a CSV file, .xlsx or .parquet"
_SAMPLE = 200  # rows looked at to find the separator
_EXCEL, _PARQUET, _UNREAD = (".xlsx", ".xlsm"), (".parquet", ".pq"), (".xls", ".ods")
NOT_CSV = (*_EXCEL, *_PARQUET, *_UNREAD)  # endings under which a CSV file would not be read back
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f]")


class Number(str):
    """The text of a cell that held a number, in a file whose cells have types: its point is a decimal mark."""

    __slots__ = ()


@dataclass(frozen=True)
class Sheet:
    """Rows that are not blank, each with its number in the file; `unit` is what the number counts: line or row.

    `separator` is None where cells were typed, as in Excel and Parquet. `notes` say what was found out.
    """

    path: Path
    rows: list[tuple[int, list[str]]]
    separator: str | None = None
    unit: str = "line"
    notes: tuple[str, ...] = ()
    page: str | None = None  # which sheet it is, in words, where a workbook has several

    def at(self, number: int) -> str:
        """Where a row is, for messages."""
        page = "" if self.page is None else f", sheet {self.page}"
        return f"{self.path}{page}, {self.unit} {number}"


def read_sheet(path: Path) -> Sheet:
    """The rows of a file; refused, naming it: one that cannot be read, and what is no table."""
    suffix = path.suffix.lower()
    if suffix in _EXCEL or suffix in _PARQUET:
        return _typed(path, suffix)
    if suffix in _UNREAD:
        raise InputError(f"{path}: files of this kind are not read; accepted: .xlsx, .parquet, or a CSV file")
    text, encoding = _text(path)
    if re.match(r"\s*[\[{]\s*([\[{\"]|$)", text):
        raise InputError(f"{path}: looks like JSON; {ACCEPTED}")
    separator, text, skipped = _separator(text)
    notes = []
    if separator != "," or encoding != "UTF-8":
        notes.append(f"{path}: read as {encoding}, separated by {SEPARATORS[separator]}")
    return Sheet(path, list(_rows(path, text, separator, skipped)), separator, notes=tuple(notes))


def _rows(path: Path, text: str, separator: str, skipped: int) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every row that is not blank."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    line = 1 + skipped  # a row may span lines (quoted ids): its number is that of its first line
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield line, cells
            line = reader.line_num + 1 + skipped
    except csv.Error as error:
        raise InputError(
            f"{path}, line {line}: {error} ({TRIED}; read with {SEPARATORS[separator]}); accepted: cells separated by "
            "one of them, with every quote closed"
        ) from error


def _separator(text: str) -> tuple[str, str, int]:
    """The separator, the text without a first line that only names it (`sep=;`, as Excel writes), and lines skipped."""
    named = re.match(r"sep=([,;\t])\r?\n", text)
    if named:
        return named[1], text[named.end() :], 1
    scores = {}
    for separator in SEPARATORS:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator)
        widths: list[int] = []
        try:
            for cells in itertools.islice(reader, _SAMPLE):
                if any(cell.strip() for cell in cells):
                    widths.append(len(cells))
        except csv.Error:
            pass  # told, with its line, when the file is read
        if widths and widths[0] > 1:
            fitting = sum(width == widths[0] for width in widths[1:]) / max(len(widths) - 1, 1)
            scores[separator] = (fitting, widths[0])
    return max(scores, key=lambda separator: scores[separator], default=","), text, 0


def _text(path: Path) -> tuple[str, str]:
    """The text and its encoding's name."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}; {ACCEPTED} that can be read") from error
    for start, kind in ((b"PK\x03\x04", ".xlsx"), (b"PAR1", ".parquet")):
        if raw.startswith(start):
            raise InputError(
                f"{path}: holds no text; accepted: a CSV file, or {kind} as the end of its name if it is one"
            )
    for mark, encoding in ((b"\xff\xfe\x00\x00", "UTF-32"), (b"\x00\x00\xfe\xff", "UTF-32"), (b"\xff\xfe", "UTF-16"),
                           (b"\xfe\xff", "UTF-16")):  # fmt: skip
        if raw.startswith(mark):
            return _decoded(path, raw, encoding), encoding
    half = len(raw[:400]) // 2
    for places, encoding in ((raw[1:400:2], "UTF-16-LE"), (raw[0:400:2], "UTF-16-BE")):
        if half and places.count(0) > 0.7 * half:
            return _decoded(path, raw, encoding), "UTF-16"
    try:
        return _without_controls(path, raw.decode("utf-8-sig")), "UTF-8"
    except UnicodeDecodeError as error:
        line = len((raw[: error.start] + b".").splitlines())
        lenient = raw.decode("utf-8", errors="replace")
        if any(ord(letter) > 0x7F and letter != "\ufffd" for letter in lenient):  # UTF-8, and damaged
            raise InputError(
                f"{path}, line {line}: the byte {raw[error.start]:#04x} is not UTF-8 text, as other letters are; "
                "accepted: UTF-8, UTF-16 or Latin-1 throughout"
            ) from error
    try:
        return _without_controls(path, raw.decode("cp1252")), "Latin-1"
    except UnicodeDecodeError:  # the five bytes that Windows leaves open
        return _without_controls(path, raw.decode("latin-1")), "Latin-1"


def _decoded(path: Path, raw: bytes, encoding: str) -> str:
    try:
        return _without_controls(path, raw.decode(encoding).lstrip("\ufeff"))
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: begins as {encoding} text and is none ({error.reason} at byte {error.start}); "
            "accepted: UTF-8, UTF-16 or Latin-1"
        ) from error


def _without_controls(path: Path, text: str) -> str:
    found = _CONTROL.search(text)
    if found:
        line = len((text[: found.start()] + ".").splitlines())
        raise InputError(f"{path}, line {line}: the character {found[0]!r} is not text; {ACCEPTED}")
    return text


def _typed(path: Path, suffix: str) -> Sheet:
    """An Excel or Parquet file, by pandas."""
    kind, engine = ("Excel", "openpyxl") if suffix in _EXCEL else ("Parquet", "pyarrow")
    if not path.exists():
        raise InputError(f"{path}: No such file or directory; {ACCEPTED} that can be read")
    try:
        import pandas

        __import__(engine)
    except ModuleNotFoundError as error:
        raise InputError(
            f"{path}: reading {kind} files needs {error.name}; pip install 'fedentopt[tables]' brings it, or save the "
            "table as CSV"
        ) from error
    notes: tuple[str, ...] = ()
    page = None
    try:
        if suffix in _EXCEL:
            with pandas.ExcelFile(path, engine=engine) as book:
                names = book.sheet_names
                # The first that a person sees: a hidden one before it may hold lists to choose from.
                shown = [one.title for one in book.book.worksheets if one.sheet_state == "visible"] or names
                # Text such as NA, None or null is a name as good as any; pandas would read an empty cell.
                frame = pandas.read_excel(
                    book, sheet_name=shown[0], header=None, dtype=object, keep_default_na=False, na_values=[""]
                )
            if len(names) > 1:
                name = str(shown[0])
                which = "" if name == names[0] else " that is not hidden"
                page = f"{name!r} (the first{which})"
                notes = (f"{path}: read the first of {len(names)} sheets{which}, {name!r}",)
            table = frame.to_numpy(dtype=object).tolist()
        else:
            frame = pandas.read_parquet(path, engine=engine)
            if frame.index.name is not None or not isinstance(frame.index, pandas.RangeIndex):
                frame = frame.reset_index()
            table = [list(frame.columns), *frame.astype(object).to_numpy(dtype=object).tolist()]
    except Exception as error:  # what each library raises for a file that is none of its own is not settled
        raise InputError(f"{path}: cannot be read as {kind} ({error}); {ACCEPTED}") from error
    rows = [(number, [_word(cell) for cell in cells]) for number, cells in enumerate(table, start=1)]
    kept = [(number, cells) for number, cells in rows if any(cell.strip() for cell in cells)]
    return Sheet(path, kept, unit="row", notes=notes, page=page)


def _word(value: Any) -> str:
    """A typed cell as the text that CSV would hold."""
    if value is None or (isinstance(value, float) and value != value):
        return ""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, bytes):  # text in a Parquet file whose writer did not mark it as such
        return value.decode("utf-8", errors="backslashreplace")
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a number of NumPy's
        return _word(value.item())
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**63:
        return str(int(value))
    if isinstance(value, int | float | Decimal):
        return Number(value)
    text = str(value)
    return "" if text in ("NaT", "<NA>") else text
