"""`label_counts.csv` and `reported_counts.csv`: one row per client, one column per class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedentopt.errors import InputError
from fedentopt.files import csv_text, read_csv

COUNTS, REPORTED = "label_counts.csv", "reported_counts.csv"
CLIENT_ACCURACY = "client_accuracy.csv"


@dataclass(frozen=True, eq=False)
class LabelTable:
    """Who took part and which classes there are. `counts` (clients, classes) are the true label counts, or, where
    `noisy`, the reported ones, or None where neither is known."""

    clients: tuple[str, ...]
    classes: tuple[str, ...]
    counts: NDArray[np.float64] | None
    noisy: bool = False

    @classmethod
    def of(cls, counts: np.ndarray, class_names: Sequence[str], client_names: Sequence[str] = ()) -> LabelTable:
        """Of a run in memory, whose clients are numbered unless they have names."""
        clients = tuple(client_names) or tuple(map(str, range(len(counts))))
        return cls(clients, tuple(class_names), np.maximum(counts, 0).astype(np.float64))


def counts_csv(counts: np.ndarray, class_names: Sequence[str], client_names: Sequence[str]) -> str:
    """Text of either file: `client` (its number, or its name where it has one), then the classes."""
    rows = [
        [client_names[client] if client_names else client, *map(repr, row)]
        for client, row in enumerate(counts.tolist())  # tolist: Python numbers, whose repr reads back equal
    ]
    return csv_text([["client", *class_names], *rows])


def client_accuracy_csv(accuracies: Sequence[float], client_names: Sequence[str]) -> str:
    """Text of `client_accuracy.csv`: a row per client, empty where its accuracy cannot be told."""
    rows = [
        [client_names[client] if client_names else client, "" if math.isnan(accuracy) else repr(accuracy)]
        for client, accuracy in enumerate(accuracies)
    ]
    return csv_text([["client", "accuracy"], *rows])


def read_labels(folder: Path, about: Mapping[str, Any]) -> LabelTable:
    """The label counts of a run's folder: the true ones, else the reported ones, since a server may have seen no other.

    Where both are lost, the names come from `about`, the content of `run.json`, and there are no counts. Refused,
    naming file and place: a file that is no table of counts, a client twice, names that `run.json` lacks too.
    """
    for name in (COUNTS, REPORTED):
        if (folder / name).is_file():
            return _read_counts(folder / name, noisy=name == REPORTED)
    dataset = about.get("dataset")
    classes = dataset.get("classes") if isinstance(dataset, dict) else None
    clients = about["config"].get("clients")
    if not isinstance(classes, list) or not classes or not isinstance(clients, int):
        raise InputError(
            f"{folder / COUNTS}: missing, and run.json names no classes or number of clients to do without"
        )
    return LabelTable(tuple(map(str, range(clients))), tuple(map(str, classes)), None)


def _read_counts(file: Path, *, noisy: bool) -> LabelTable:
    header, *lines = read_csv(file) or [[]]
    if not lines or len(header) < 2:
        raise InputError(f"{file}: expected a header `client,<class>,...` and one line per client")
    counts = np.array([_numbers(line[1:], f"{file}: line {row}") for row, line in enumerate(lines, start=2)])
    clients = tuple(line[0] for line in lines)
    if len(set(clients)) != len(clients):
        raise InputError(f"{file}: a client is listed twice; accepted: one line per client")
    # Noise takes counts below zero; the server reads those as zero, and so does everybody here.
    return LabelTable(clients, tuple(header[1:]), np.maximum(counts, 0), noisy)


def _numbers(cells: Sequence[str], where: str) -> list[float]:
    try:
        values = list(map(float, cells))
    except ValueError:
        values = [math.nan]
    if not all(map(math.isfinite, values)):
        wrong = next(cell for cell in cells if not _is_number(cell))
        raise InputError(f"{where}: {wrong!r} is not a number")
    return values


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
