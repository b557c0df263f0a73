"""The tables of a run as CSV: one row a round, one row a client. Numbers are written so that they read back equal."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.results.records import RoundRecord

COLUMNS = (
    "round",
    "accuracy",
    "loss",
    "worst_class_accuracy",
    "class_accuracy",
    "entropy",
    "classes_covered",
    "clients",
    "trained",
    "bytes_up",
    "bytes_down",
    "seconds",
)


def rounds_csv(records: Iterable[RoundRecord]) -> str:
    """Text of `rounds.csv`. Cells of rounds without evaluation are empty; lists are JSON."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(COLUMNS)
    for r in records:
        rows.writerow(
            [
                r.round,
                _number(r.accuracy),
                _number(r.loss),
                _number(r.worst_class_accuracy),
                "" if r.class_accuracy is None else _numbers(r.class_accuracy),
                _number(r.entropy),
                r.classes_covered,
                json.dumps(list(r.clients)),
                json.dumps(list(r.trained)),
                r.bytes_up,
                r.bytes_down,
                _number(r.seconds),
            ]
        )
    return text.getvalue()


def read_rounds(path: Path) -> list[RoundRecord]:
    """Read `rounds.csv`; a missing file, column or an unreadable cell is an `InputError` naming file, row and cell."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    rows = list(csv.DictReader(io.StringIO(text)))
    records = []
    for number, row in enumerate(rows, start=2):
        cells = _Cells(f"{path}, line {number}", row)
        classes = cells.read("class_accuracy", json.loads)
        records.append(
            RoundRecord(
                round=cells.need("round", int),
                accuracy=cells.read("accuracy", float),
                loss=cells.read("loss", float),
                class_accuracy=None if classes is None else tuple(_nan_for_null(classes)),
                entropy=cells.need("entropy", float),
                classes_covered=cells.need("classes_covered", int),
                clients=tuple(cells.need("clients", json.loads)),
                trained=tuple(cells.need("trained", json.loads)),
                bytes_up=cells.need("bytes_up", int),
                bytes_down=cells.need("bytes_down", int),
                seconds=cells.need("seconds", float),
            )
        )
    return records


def counts_csv(counts: np.ndarray, class_names: Sequence[str]) -> str:
    """Text of `label_counts.csv` or `reported_counts.csv`: `client`, then one column a class, one row a client."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["client", *class_names])
    for client, row in enumerate(counts.tolist()):  # tolist: Python numbers, whose repr reads back equal
        rows.writerow([client, *(repr(value) for value in row)])
    return text.getvalue()


class _Cells:
    def __init__(self, where: str, row: dict[str, Any]) -> None:
        self.where, self.row = where, row

    def read(self, column: str, convert: Any) -> Any:
        """The cell's value; None where it is empty."""
        text = self.row.get(column)
        if text is None:
            raise InputError(f"{self.where}: column {column} is missing")
        try:
            return convert(text) if text else None
        except ValueError as error:
            raise InputError(f"{self.where}: {column} {text!r} cannot be read") from error

    def need(self, column: str, convert: Any) -> Any:
        value = self.read(column, convert)
        if value is None:
            raise InputError(f"{self.where}: {column} is empty")
        return value


def _number(value: float | None) -> str:
    return "" if value is None else repr(float(value))


def _numbers(values: Iterable[float]) -> str:
    # JSON has no NaN; a class without test samples has no accuracy, which is null.
    return json.dumps([None if math.isnan(v) else float(v) for v in values])


def _nan_for_null(values: Iterable[float | None]) -> Iterable[float]:
    return (math.nan if v is None else float(v) for v in values)
