"""Result folders, read back: one `RunResult` for every `DIR/<run>/` that holds a `run.json`.

Only files are read, with the standard library and NumPy, so the page can be made on a machine without torch.
A file that is there but cannot be used is refused with its name, the place in it and what was expected; a run
that has not finished a round yet is left out and named in `ResultFolder.skipped`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedentopt.errors import InputError

COLUMNS = (
    "round", "accuracy", "loss", "worst_class_accuracy", "class_accuracy", "entropy", "classes_covered",
    "clients", "trained", "bytes_up", "bytes_down", "seconds",
)  # fmt: skip

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Cohorts:
    """The clients of every round as row numbers, kept flat: a reproduction holds millions of picks."""

    def __init__(self, rounds: Iterable[Sequence[int]]) -> None:
        kept = list(rounds)
        self._ends = np.cumsum([0, *map(len, kept)])
        self._flat = np.fromiter((client for cohort in kept for client in cohort), dtype=np.int32)

    def __getitem__(self, at: int) -> list[int]:
        cohort: list[int] = self._flat[self._ends[at] : self._ends[at + 1]].tolist()
        return cohort

    def times(self, clients: int) -> Integers:
        """How often each of `clients` clients was chosen."""
        return np.bincount(self._flat, minlength=clients)


@dataclass(frozen=True)
class RunResult:
    """One run as it lies on disk. Clients are row numbers of `labels`; NaN stands for "not evaluated"."""

    run_id: str
    method: str
    config: dict[str, Any]
    environment: dict[str, Any]
    classes: tuple[str, ...]
    clients: tuple[str, ...]
    labels: Floats | None  # (K, C), true label counts, or the reported ones, or none where neither is on disk
    labels_are_noisy: bool
    rounds: Integers
    accuracy: Floats
    class_accuracy: Floats  # (R, C)
    entropy: Floats
    covered: Integers
    picks: Cohorts
    trained: Cohorts
    bytes_up: Integers
    bytes_down: Integers
    summary: dict[str, Any] | None  # None while the run is unfinished

    @property
    def seed(self) -> int:
        """Seed of the run, 0 where the config names none."""
        return int(self.config.get("seed", 0))

    @property
    def times_selected(self) -> Integers:
        """How often each client was chosen, in label-table order."""
        return self.picks.times(len(self.clients))


@dataclass(frozen=True)
class ResultFolder:
    """Everything a page is made from. `paper` is what `paper_figures.json` says (see `paper.py`)."""

    path: Path
    runs: tuple[RunResult, ...]
    skipped: tuple[str, ...]
    paper: Any


def read_folder(directory: Path) -> ResultFolder:
    """Read every run of `directory`, or the one run that `directory` itself is.

    Refused: a path that is no folder, a folder without a run that has finished a round, a malformed file.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: not a folder; accepted: a folder with results of `fedentopt run` or `compare`")
    if (directory / "run.json").is_file():
        folders = [directory]
    else:
        # A name with a dot in front is a folder that is being put in place, or never was: its run is not there yet.
        found = (path.parent for path in directory.glob("*/run.json"))
        folders = sorted(folder for folder in found if not folder.name.startswith("."))
    if not folders:
        raise InputError(f"{directory}: no results in it; expected <run>/run.json as `fedentopt run --out` writes them")
    runs: list[RunResult] = []
    skipped: list[str] = []
    for folder in folders:
        run = _read_run(folder)
        if run is None:
            skipped.append(folder.name)
        else:
            runs.append(run)
    if not runs:
        raise InputError(f"{directory}: {len(folders)} run(s) in it, none has finished a round yet")
    paper = directory / "paper_figures.json"
    return ResultFolder(
        path=directory,
        runs=tuple(runs),
        skipped=tuple(skipped),
        paper=_read_json(paper) if paper.is_file() else None,
    )


def _read_run(folder: Path) -> RunResult | None:
    info = _read_object(folder / "run.json")
    config = info.get("config")
    if not isinstance(config, dict):
        raise InputError(f"{folder / 'run.json'}: field 'config' is missing or no object")
    rounds_file = folder / "rounds.csv"
    rows = _read_rounds(rounds_file) if rounds_file.is_file() else []
    if not rows:
        return None
    clients, classes, labels, noisy = _read_labels(folder) or _without_labels(folder, info, config)
    row_of = {name: row for row, name in enumerate(clients)}

    def cohort(row: dict[str, str], column: str) -> list[int]:
        where = f"{rounds_file}: round {row['round']}, column {column}"
        named = _json_list(row[column], where)
        try:
            return [row_of[str(client)] for client in named]
        except KeyError as stranger:
            raise InputError(f"{where}: client {stranger} has no row in label_counts.csv") from None

    def floats(column: str) -> Floats:
        return np.array([_number(row[column], f"{rounds_file}: round {row['round']}, {column}") for row in rows])

    def integers(column: str) -> Integers:
        values = floats(column)
        if not np.all(np.isfinite(values)):
            raise InputError(f"{rounds_file}: column {column} has an empty or non-finite cell; accepted: whole numbers")
        return values.astype(np.int64)

    class_accuracy = np.full((len(rows), len(classes)), np.nan)
    for index, row in enumerate(rows):
        where = f"{rounds_file}: round {row['round']}, column class_accuracy"
        values = _json_list(row["class_accuracy"], where)
        if values and len(values) != len(classes):
            raise InputError(f"{where}: {len(values)} values for {len(classes)} classes")
        if values:
            class_accuracy[index] = [_number("" if v is None else str(v), where) for v in values]

    summary_file = folder / "summary.json"
    summary = _read_object(summary_file) if summary_file.is_file() else None
    return RunResult(
        run_id=str(info.get("run_id", folder.name)),
        method=str(info.get("method", config.get("algorithm", folder.name))),
        config=config,
        environment={key: value for key, value in info.items() if key not in {"config", "method", "run_id"}},
        classes=classes,
        clients=clients,
        labels=labels,
        labels_are_noisy=noisy,
        rounds=integers("round"),
        accuracy=floats("accuracy"),
        class_accuracy=class_accuracy,
        entropy=floats("entropy"),
        covered=integers("classes_covered"),
        picks=Cohorts(cohort(row, "clients") for row in rows),
        trained=Cohorts(cohort(row, "trained") for row in rows),
        bytes_up=integers("bytes_up"),
        bytes_down=integers("bytes_down"),
        summary=summary if summary is not None and summary.get("finished", True) else None,
    )


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{file}: cannot be read as JSON ({error})") from error


def _read_object(file: Path) -> dict[str, Any]:
    value = _read_json(file)
    if not isinstance(value, dict):
        raise InputError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _read_rows(file: Path) -> list[list[str]]:
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            return [row for row in csv.reader(stream) if row]
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise InputError(f"{file}: cannot be read as CSV ({error})") from error


def _read_rounds(file: Path) -> list[dict[str, str]]:
    lines = _read_rows(file)
    if not lines:
        raise InputError(f"{file}: empty; expected the header {','.join(COLUMNS)}")
    header = lines[0]
    for column in COLUMNS:
        if column not in header:
            raise InputError(f"{file}: column {column!r} is missing; expected {','.join(COLUMNS)}")
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != len(header):
            raise InputError(f"{file}: line {number} has {len(line)} cells, the header has {len(header)}")
    return [dict(zip(header, line, strict=True)) for line in lines[1:]]


_Labels = tuple[tuple[str, ...], tuple[str, ...], Floats | None, bool]


def _read_labels(folder: Path) -> _Labels | None:
    """Client names, class names, counts, and whether these are noisy; a server may have seen no other."""
    file, noisy = folder / "label_counts.csv", False
    if not file.is_file() and (folder / "reported_counts.csv").is_file():
        file, noisy = folder / "reported_counts.csv", True
    if not file.is_file():
        return None
    lines = _read_rows(file)
    if len(lines) < 2 or len(lines[0]) < 2:
        raise InputError(f"{file}: expected a header `client,<class>,...` and one line a client")
    width = len(lines[0])
    counts = np.zeros((len(lines) - 1, width - 1))
    for number, line in enumerate(lines[1:], start=2):
        if len(line) != width:
            raise InputError(f"{file}: line {number} has {len(line)} cells, the header has {width}")
        counts[number - 2] = [_number(cell, f"{file}: line {number}") for cell in line[1:]]
    if not np.all(np.isfinite(counts)):
        raise InputError(f"{file}: holds an empty or non-finite count; accepted: numbers")
    clients = tuple(line[0] for line in lines[1:])
    if len(set(clients)) != len(clients):
        raise InputError(f"{file}: a client is listed twice; accepted: one line a client")
    # Noise takes counts below zero; the server reads those as zero, and so does the page.
    return clients, tuple(lines[0][1:]), np.maximum(counts, 0), noisy


def _without_labels(folder: Path, info: dict[str, Any], config: dict[str, Any]) -> _Labels:
    """Clients by number and the data set's classes: what run.json still says when the counts are lost."""
    dataset = info.get("dataset")
    classes = dataset.get("classes") if isinstance(dataset, dict) else None
    clients = config.get("clients")
    if not isinstance(classes, list) or not classes or not isinstance(clients, int):
        raise InputError(
            f"{folder / 'label_counts.csv'}: missing, and run.json names no classes or number of clients to do without"
        )
    return tuple(map(str, range(clients))), tuple(map(str, classes)), None, False


def _number(text: str, where: str) -> float:
    if not text.strip():
        return math.nan
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{where}: {text!r} is not a number") from None
    return value if math.isfinite(value) else math.nan


def _json_list(text: str, where: str) -> list[Any]:
    if not text.strip():
        return []
    try:
        value = json.loads(text)
    except ValueError:
        raise InputError(f"{where}: {text!r} is not a JSON list") from None
    if not isinstance(value, list):
        raise InputError(f"{where}: {text!r} is not a JSON list")
    return value
