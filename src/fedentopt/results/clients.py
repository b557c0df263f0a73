"""`clients.csv`: what the server of a run knows of each client, where it has reason to doubt reports; a row per client.

Truths are `yes` or `no`, and empty where nobody knows: who lies, say, outside a simulation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError
from fedentopt.files import csv_text, read_csv
from fedentopt.results.records import ClientRecord

CLIENTS = "clients.csv"
COLUMNS = tuple(field.name for field in dataclasses.fields(ClientRecord))
TRUTHS = ("liar", "suspected")
NUMBERS = ("suspicion", "distance", "agreement", "estimate_error", "reported_size", "true_size")
WORDS = {True: "yes", False: "no", None: ""}


def clients_csv(clients: Sequence[ClientRecord], client_names: Sequence[str] = ()) -> str:
    """Text of the file; clients go by their names where they have some, as in `label_counts.csv`."""
    rows: list[Iterable[object]] = [COLUMNS]
    for client in clients:
        cells = dataclasses.asdict(client)
        cells["client"] = client_names[client.client] if client_names else client.client
        cells |= {name: WORDS[cells[name]] for name in TRUTHS}
        cells |= {name: "" if cells[name] is None else repr(float(cells[name])) for name in NUMBERS}
        rows.append(cells.values())
    return csv_text(rows)


def read_clients(path: Path, clients: Sequence[str]) -> tuple[ClientRecord, ...]:
    """Read the file of a run with these clients, in their order.

    Refused, naming the file, the client and the column: a missing column, a cell of the wrong kind, a client twice, one
    that is not among `clients`, one that is missing.
    """
    header, *lines = read_csv(path) or [[]]
    for column in COLUMNS:
        if column not in header:
            raise InputError(f"{path}: column {column!r} is missing; expected {','.join(COLUMNS)}")
    row_of = {name: row for row, name in enumerate(clients)}
    found: dict[int, ClientRecord] = {}
    for line in lines:
        cells = dict(zip(header, line, strict=True))
        name = cells["client"]
        if name not in row_of:
            raise InputError(f"{path}: client {name!r} has no row in label_counts.csv")
        if row_of[name] in found:
            raise InputError(f"{path}: client {name!r} is listed twice; accepted: one line per client")
        found[row_of[name]] = ClientRecord(client=row_of[name], **_values(path, cells))
    missing = next((name for name, row in row_of.items() if row not in found), None)
    if missing is not None:
        raise InputError(f"{path}: client {missing!r} has no line; accepted: one line per client")
    return tuple(found[row] for row in range(len(clients)))


@dataclass(frozen=True)
class Verdicts:
    """How many clients are suspected, of how many: by who lies, and of those of whom that is not known."""

    liars: tuple[int, int]
    honest: tuple[int, int]
    unknown: tuple[int, int]

    def __str__(self) -> str:
        parts = [
            f"{suspected} of {number} {name}"
            for (suspected, number), name in ((self.liars, "liars"), (self.honest, "honest"), (self.unknown, "clients"))
            if number
        ]
        return ", ".join([f"{parts[0]} suspected", *parts[1:]])

    def to_dict(self) -> dict[str, dict[str, int]]:
        """JSON form."""
        return {
            name: {"suspected": suspected, "of": number}
            for name, (suspected, number) in dataclasses.asdict(self).items()
            if number
        }


def verdicts(clients: Iterable[ClientRecord]) -> Verdicts | None:
    """Those of an audit; None where none ran."""
    judged = [client for client in clients if client.suspected is not None]
    if not judged:
        return None

    def of(liar: bool | None) -> tuple[int, int]:
        suspected = [client.suspected for client in judged if client.liar is liar]
        return sum(map(bool, suspected)), len(suspected)

    return Verdicts(of(True), of(False), of(None))


def _values(path: Path, cells: dict[str, str]) -> dict[str, Any]:
    def read(column: str, convert: Callable[[str], Any], accepted: str) -> Any:
        try:
            return convert(cells[column])
        except ValueError:
            where = f"{path}: client {cells['client']!r}, column {column}"
            raise InputError(f"{where}: {cells[column]!r} cannot be used; accepted: {accepted}") from None

    return {
        "chosen": read("chosen", _times, "a whole number from 0 on"),
        "observed": read("observed", _or_none(_times), "a whole number from 0 on, or nothing"),
        **{name: read(name, _truth, "yes, no, or nothing") for name in TRUTHS},
        **{name: read(name, _or_none(_number), "a number, or nothing") for name in NUMBERS},
    }


def _or_none(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: convert(text) if text else None


def _times(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _truth(text: str) -> bool | None:
    known = {word: value for value, word in WORDS.items()}
    if text not in known:
        raise ValueError
    return known[text]
