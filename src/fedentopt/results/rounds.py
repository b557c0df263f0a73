"""`rounds.csv`: one row per round. Numbers are written so that they read back equal.

Rounds are kept as columns: a reproduction holds millions of picks.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedentopt.errors import InputError
from fedentopt.files import csv_text, read_csv
from fedentopt.results.records import RoundRecord

COLUMNS = (
    "round", "accuracy", "loss", "worst_class_accuracy", "class_accuracy", "entropy", "classes_covered", "clients",
    "trained", "bytes_up", "bytes_down", "seconds", "simulated_seconds",
)  # fmt: skip
LATER = ("simulated_seconds",)
"""Columns that files of older versions lack."""
FIGURES = (
    "validation_accuracy", "validation_loss", "believed_entropy", "estimate_error", "suspects", "suspicion_auc",
    "liars_chosen", "honest_suspects", "first_auc", "third_auc",
)  # fmt: skip
OPTIONAL = ("asked", *FIGURES)
"""Columns that are there only where some round has such a figure."""

ROUNDING = 1e-6  # how far a mean of per cents may be beyond them

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Cohorts:
    """Clients of every round, by their rows in the label table, kept flat."""

    def __init__(self, rounds: Iterable[Sequence[int]]) -> None:
        kept = list(rounds)
        self._ends = np.cumsum([0, *map(len, kept)])
        self._flat = np.fromiter(itertools.chain.from_iterable(kept), dtype=np.int32, count=int(self._ends[-1]))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, at: int) -> list[int]:
        cohort: list[int] = self._flat[self._ends[at] : self._ends[at + 1]].tolist()
        return cohort

    def __iter__(self) -> Iterator[list[int]]:
        return (self[at] for at in range(len(self)))

    def times(self, clients: int) -> Integers:
        """How often each of `clients` clients was chosen."""
        return np.bincount(self._flat, minlength=clients)


@dataclass(frozen=True, eq=False)
class RoundTable:
    """The rounds of a run as columns; NaN stands for "not evaluated" and for a class without test samples."""

    number: Integers
    accuracy: Floats
    loss: Floats
    class_accuracy: Floats  # (rounds, classes)
    entropy: Floats
    classes_covered: Integers
    clients: Cohorts
    trained: Cohorts
    bytes_up: Integers
    bytes_down: Integers
    seconds: Floats
    simulated_seconds: Floats
    asked: Integers
    validation_accuracy: Floats
    validation_loss: Floats
    believed_entropy: Floats
    estimate_error: Floats
    suspects: Floats
    suspicion_auc: Floats
    liars_chosen: Floats
    honest_suspects: Floats
    first_auc: Floats
    third_auc: Floats

    def __len__(self) -> int:
        return len(self.number)

    @classmethod
    def of(cls, records: Sequence[RoundRecord], num_classes: int) -> RoundTable:
        """The columns of a run in memory."""
        none = (math.nan,) * num_classes

        def floats(name: str) -> Floats:
            values = (getattr(record, name) for record in records)
            return np.array([math.nan if value is None else value for value in values], dtype=np.float64)

        def integers(name: str) -> Integers:
            return np.array([getattr(record, name) for record in records], dtype=np.int64)

        by_class = [none if record.class_accuracy is None else record.class_accuracy for record in records]
        return cls(
            number=integers("round"),
            accuracy=floats("accuracy"),
            loss=floats("loss"),
            class_accuracy=np.array(by_class, dtype=np.float64).reshape(len(records), num_classes),
            entropy=floats("entropy"),
            classes_covered=integers("classes_covered"),
            clients=Cohorts(record.clients for record in records),
            trained=Cohorts(record.trained for record in records),
            bytes_up=integers("bytes_up"),
            bytes_down=integers("bytes_down"),
            seconds=floats("seconds"),
            simulated_seconds=floats("simulated_seconds"),
            asked=integers("asked"),
            **{name: floats(name) for name in FIGURES},
        )

    def records(self) -> list[RoundRecord]:
        """The rounds one by one."""
        columns = zip(
            self.number.tolist(), self.clients, self.trained, self.entropy.tolist(), self.classes_covered.tolist(),
            self.bytes_up.tolist(), self.bytes_down.tolist(), self.seconds.tolist(), self.accuracy.tolist(),
            self.loss.tolist(), self.class_accuracy.tolist(), self.simulated_seconds.tolist(), self.asked.tolist(),
            zip(*(getattr(self, name).tolist() for name in FIGURES), strict=True), strict=True,
        )  # fmt: skip
        return [
            RoundRecord(
                round=number, clients=tuple(clients), trained=tuple(trained), entropy=entropy, classes_covered=covered,
                bytes_up=up, bytes_down=down, seconds=seconds, accuracy=_known(accuracy), loss=_known(loss),
                class_accuracy=None if all(map(math.isnan, by_class)) else tuple(by_class),
                simulated_seconds=simulated, asked=asked,
                **_figures(figures),
            )
            for number, clients, trained, entropy, covered, up, down, seconds, accuracy, loss, by_class, simulated,
            asked, figures
            in columns
        ]  # fmt: skip


def _figures(values: Sequence[float]) -> dict[str, Any]:
    return {name: _known(value) for name, value in zip(FIGURES, values, strict=True)}


def columns_of(records: Sequence[RoundRecord]) -> tuple[str, ...]:
    """The columns that these rounds have."""
    nothing = {"asked": 0}
    return (*COLUMNS, *(name for name in OPTIONAL if any(getattr(r, name) != nothing.get(name) for r in records)))


def rounds_csv(records: Sequence[RoundRecord], client_names: Sequence[str] = ()) -> str:
    """Text of `rounds.csv`. Cells of rounds without evaluation are empty; lists are JSON; clients go by their names
    where they have some, as in `label_counts.csv`."""
    columns = columns_of(records)
    rows: list[Iterable[object]] = [columns]

    def named(clients: Sequence[int]) -> str:
        return json.dumps([client_names[client] for client in clients] if client_names else list(clients))

    for r in records:
        more = {"asked": r.asked, **{name: _number(getattr(r, name)) for name in FIGURES}}
        rows.append(
            [
                r.round,
                _number(r.accuracy),
                _number(r.loss),
                _number(r.worst_class_accuracy),
                "" if r.class_accuracy is None else _numbers(r.class_accuracy),
                _number(r.entropy),
                r.classes_covered,
                named(r.clients),
                named(r.trained),
                r.bytes_up,
                r.bytes_down,
                _number(r.seconds),
                _number(r.simulated_seconds),
                *(more[name] for name in columns[len(COLUMNS) :]),
            ]
        )
    return csv_text(rows)


def read_rounds(path: Path, clients: Sequence[str], num_classes: int) -> RoundTable:
    """Read `rounds.csv` of a run with these clients and this many classes.

    Refused, naming the file, the round and the column: a file that is no table, a missing column, a cell that is empty
    or of the wrong kind, a client that is not among `clients`, accuracies of more or fewer classes.
    """
    header, *lines = read_csv(path) or [[]]
    for column in COLUMNS:
        if column not in header and column not in LATER:
            raise InputError(f"{path}: column {column!r} is missing; expected {','.join(COLUMNS)}")
    cells = _Cells(path, header, lines)
    return RoundTable(
        number=cells.integers("round"),
        accuracy=cells.per_cents("accuracy"),
        loss=cells.floats("loss", empty=True),
        class_accuracy=cells.by_class("class_accuracy", num_classes),
        entropy=cells.floats("entropy", finite=True),
        classes_covered=cells.integers("classes_covered"),
        clients=cells.cohorts("clients", clients),
        trained=cells.cohorts("trained", clients),
        bytes_up=cells.integers("bytes_up"),
        bytes_down=cells.integers("bytes_down"),
        seconds=cells.floats("seconds"),
        simulated_seconds=cells.floats("simulated_seconds") if "simulated_seconds" in header else np.zeros(len(lines)),
        asked=cells.integers("asked") if "asked" in header else np.zeros(len(lines), dtype=np.int64),
        **{name: cells.floats(name, empty=True) if name in header else np.full(len(lines), np.nan) for name in FIGURES},
    )


class _Cells:
    """The cells of the file, by column; one that cannot be used is refused with its place."""

    def __init__(self, path: Path, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
        self._path = path
        self._columns = {name: [line[place] for line in lines] for place, name in enumerate(header)}

    def integers(self, column: str) -> Integers:
        values = [self._read(column, at, _whole_number, "a whole number") for at in self._places(column)]
        return np.array(values, dtype=np.int64)

    def floats(self, column: str, *, empty: bool = False, finite: bool = False) -> Floats:
        """`empty` cells are NaN where they are accepted; with `finite`, so is everything that is not finite."""
        texts = self._columns[column]
        values = np.array(
            [
                math.nan if empty and not texts[at] else self._read(column, at, float, "a number")
                for at in self._places(column)
            ],
            dtype=np.float64,
        )
        return np.where(np.isfinite(values), values, np.nan) if finite else values

    def per_cents(self, column: str) -> Floats:
        """Empty cells are NaN, and so is everything that is not finite."""
        values = self.floats(column, empty=True, finite=True)
        beyond = np.flatnonzero((values < -ROUNDING) | (values > 100 + ROUNDING))  # NaN is neither
        if beyond.size:
            at = int(beyond[0])
            raise self._refusal(column, at, f"{self._columns[column][at]!r} is not a number from 0 to 100")
        return values

    def by_class(self, column: str, num_classes: int) -> Floats:
        rows = np.full((len(self._columns[column]), num_classes), np.nan)
        for at, text in enumerate(self._columns[column]):
            if not text:
                continue
            values = self._read(column, at, _json_list, "a JSON list")
            if len(values) != num_classes:
                raise self._refusal(column, at, f"{len(values)} values for {num_classes} classes")
            try:
                rows[at] = [math.nan if value is None else float(value) for value in values]
            except (TypeError, ValueError):
                raise self._refusal(column, at, f"{text!r} is not a list of numbers") from None
        return np.where(np.isfinite(rows), rows, np.nan)

    def cohorts(self, column: str, clients: Sequence[str]) -> Cohorts:
        row_of = {name: row for row, name in enumerate(clients)}
        numbered = all(name == str(row) for name, row in row_of.items())

        def cohort(at: int) -> list[int]:
            named: list[Any] = self._read(column, at, _json_list, "a JSON list")
            if numbered and set(map(type, named)) == {int} and min(named) >= 0 and max(named) < len(row_of):
                return named  # which is nearly always so, and there are millions
            try:
                return [row_of[str(client)] for client in named]
            except KeyError as stranger:
                problem = f"client {stranger} has no row in label_counts.csv"
                raise self._refusal(column, at, problem) from None

        return Cohorts(cohort(at) for at in self._places(column))

    def _places(self, column: str) -> range:
        return range(len(self._columns[column]))

    def _read(self, column: str, at: int, convert: Callable[[str], Any], expected: str) -> Any:
        text = self._columns[column][at]
        try:
            return convert(text)
        except ValueError:
            problem = f"{text!r} is not {expected}" if text else f"is empty; accepted: {expected}"
            raise self._refusal(column, at, problem) from None

    def _refusal(self, column: str, at: int, problem: str) -> InputError:
        number = self._columns["round"][at]
        where = f"round {number}" if number.isdecimal() else f"line {at + 2}"
        return InputError(f"{self._path}: {where}, column {column}: {problem}")


def _whole_number(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError
    return value


def _json_list(text: str) -> list[Any]:
    value = json.loads(text)
    if not isinstance(value, list):
        raise ValueError
    return value


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _number(value: float | None) -> str:
    return "" if value is None else repr(float(value))


def _numbers(values: Iterable[float]) -> str:
    # JSON has no NaN; a class without test samples has no accuracy, which is null.
    return json.dumps([None if math.isnan(v) else float(v) for v in values])
