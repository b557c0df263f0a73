"""Results small enough to commit: one CSV per table, a row per cell and seed, without the run folders.

    DIR/<table>.csv         cell, seed, its figure, and what else is known of the run
    DIR/<table>_curves.csv  thinned curves: settings, seed, round, accuracy, entropy
    DIR/provenance.json     which commands made them, with which code, on what

`settings` in both files is `measures.settings_key` of the run, by which rows find back to their cells: a row made
with other settings than the cell has now is not counted.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError
from fedentopt.files import csv_text, make_folder, write_text
from fedentopt.paper import names
from fedentopt.paper.cells import Cell
from fedentopt.paper.measures import LATER, OWN, Curve, Measured, Results
from fedentopt.simulation.config import RunConfig

CELL = ("table", "model", "dataset", "partition", "method", "availability", "participation", "buffer", "swept")
MEASURED = tuple(field.name for field in dataclasses.fields(Measured) if field.name not in ("settings", "seed", *LATER))
COLUMNS = (*CELL, "metric", "seed", "value", *MEASURED, "baseline", "baseline_accuracy", "settings")
CURVE_COLUMNS = ("settings", "seed", "round", "accuracy", "entropy")
POINTS = 20
"""About how many rounds of a run stay in its thinned curve."""

Key = tuple[str, int]


def read_exported(folder: Path, option: str = "results") -> Results:
    """Everything an exported folder holds; a file that cannot be used is an `InputError` naming file and line."""
    if not folder.is_dir():
        raise InputError(f"{option}: {folder} is not a folder; accepted: one that `reproduce --export` wrote")
    files = sorted(folder.glob("*.csv"))
    if option != "export" and not files and any(folder.glob("*/run.json")):
        raise InputError(f"{option}: {folder} holds runs; accepted: a folder that `reproduce --export` made of them")
    measured: dict[Key, Measured] = {}
    baselines: dict[Key, Measured] = {}
    rows = _OneOfEach(option)
    points: dict[Key, dict[int, tuple[int, float | None, float | None]]] = {}
    for path in files:
        if path.stem.endswith("_curves"):
            for row in _rows(path, CURVE_COLUMNS):
                number = row.need("round", int)
                point = (number, row.read("accuracy", float), row.read("entropy", float))
                # A run that several tables share has its curve in each of their files.
                points.setdefault((row.need("settings", str), row.need("seed", int)), {})[number] = point
            continue
        for row in _rows(path, COLUMNS):
            run = _read_measured(row)
            measured[run.settings, run.seed] = run
            rows.add(row)
            baseline = row.read("baseline", str)
            if baseline:
                baselines[baseline, run.seed] = Measured(
                    settings=baseline, seed=run.seed, rounds=run.rounds, accuracy=row.read("baseline_accuracy", float)
                )
    # A baseline is known by its accuracy alone unless it has a row of its own.
    curves: dict[Key, Curve] = {key: [curve[number] for number in sorted(curve)] for key, curve in points.items()}
    return Results(None, baselines | measured, curves)


def export(
    folder: Path, cells: Sequence[Cell], results: Results, say: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Write all that is known of `cells` into `folder`; rows of other seeds and cells that are there already stay.

    Gives the files written. Files of tables without any result are not made. Figures of a run that are there already
    are replaced where they are others, and `say` is told. Refused, before anything is written, where rows that stay
    have other figures of such a run.
    """
    known = read_exported(folder, "export") if folder.is_dir() else Results()
    make_folder(folder)
    contents: dict[Path, tuple[Sequence[str], list[list[str]]]] = {}
    replaced: dict[Key, str] = {}
    for table in dict.fromkeys(cell.table for cell in cells):
        rows, curves = [], []
        for cell in (cell for cell in cells if cell.table == table and not cell.shortened):
            if cell.config is None:
                continue
            there = {seed for of in (known, results) for run in cell.versions(cell.config) for seed in of.seeds(run)}
            for seed in sorted({*cell.seeds, *there}):
                new, old = (of.get(cell.config, seed) is not None for of in (results, known))
                # A run in the cell's own precision is not put aside for one that only stands in.
                source = known if results.value(cell, seed) is None or (old and not new) else results
                row = _row(cell, seed, source)
                if row is not None:
                    rows.append(row)
                    replaced |= _replaced(cell, seed, known, source)
                    curves += _curve_rows(cell, cell.config, seed, source)
        files: tuple[tuple[str, Sequence[str], list[Any], Sequence[str]], ...] = (
            (f"{table}.csv", (*COLUMNS, *LATER), rows, (*CELL, "metric", "seed", "settings")),
            (f"{table}_curves.csv", CURVE_COLUMNS, list(dict.fromkeys(curves)), ("settings", "seed")),
        )
        for name, columns, content, same in files:
            lines = _with_others(folder / name, columns, content, same)
            if lines:
                contents[folder / name] = (columns, lines)
    _check_one_of_each(folder, contents)
    for path, (columns, lines) in contents.items():
        kept, lines = _without_empty(columns, lines)
        write_text(path, csv_text([kept, *lines]))
    if replaced:
        runs = names.counted(len(replaced), "run")
        say(f"export: {folder} had other figures of {runs}, which are replaced: {next(iter(replaced.values()))}")
    return list(contents)


FIGURES = ("accuracy", "h_norm", "mean_entropy")
"""What is the same in all rows of one run, whatever made them; the time that it took is not."""


def _replaced(cell: Cell, seed: int, known: Results, source: Results) -> dict[Key, str]:
    """The cell's run in this seed where `known` has others of its figures, in words."""
    assert cell.config is not None
    now = source.run_of(cell, cell.config, seed)
    versions = (known.get(version, seed) for version in cell.versions(cell.config))
    was = next((run for run in versions if run and now and run.settings == now.settings), None)
    if now is None or was is None or all(getattr(now, name) == getattr(was, name) for name in FIGURES):
        return {}
    moved = f"accuracy {was.accuracy} became {now.accuracy}"
    return {(now.settings, seed): f"{cell.method} on {cell.dataset}, {cell.partition}, seed {seed}: {moved}"}


def _check_one_of_each(folder: Path, contents: Mapping[Path, tuple[Sequence[str], list[list[str]]]]) -> None:
    """Refuse files that would hold two sets of figures of one run."""
    rows = _OneOfEach("export")
    for path, (columns, lines) in contents.items():
        if not path.stem.endswith("_curves"):
            for number, line in enumerate(lines, 2):
                rows.add(_Row(f"{path} as it would become, line {number}", dict(zip(columns, line, strict=True))))
    for path in sorted(folder.glob("*.csv")):
        if path not in contents and not path.stem.endswith("_curves"):
            for row in _rows(path, COLUMNS):
                rows.add(row)


class _OneOfEach:
    """Rows of the runs of a folder. Refused: one with other figures than an earlier one of the same run, since a table
    made from both would show figures that its own file does not have."""

    def __init__(self, option: str) -> None:
        self._option = option
        self._known: dict[Key, _Row] = {}

    def add(self, row: _Row) -> None:
        key = row.need("settings", str), row.need("seed", int)
        other = self._known.setdefault(key, row)
        for name in FIGURES:
            one, two = other.read(name, float), row.read(name, float)
            if one != two:
                raise InputError(
                    f"{self._option}: {other.where} and {row.where} are of one run and have other figures of it "
                    f"({name} {one} and {two}); accepted: another folder, or the same figures in both"
                )


def _without_empty(columns: Sequence[str], lines: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Without the later columns that no line has anything in."""
    kept = [place for place, name in enumerate(columns) if name not in LATER or any(line[place] for line in lines)]
    return [columns[place] for place in kept], [[line[place] for place in kept] for line in lines]


def _with_others(
    path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]], same: Sequence[str]
) -> list[list[str]]:
    """Rows as text, and behind them the file's own that say something else: whose columns `same` are no new row's."""
    lines = [["" if value is None else str(value) for value in row] for row in rows]
    places = [columns.index(name) for name in same]
    new = {tuple(line[place] for place in places) for line in lines}
    there = [[row.text(name) for name in columns] for row in _rows(path, columns)] if path.exists() else []
    return lines + [line for line in there if tuple(line[place] for place in places) not in new]


def _row(cell: Cell, seed: int, results: Results) -> list[Any] | None:
    value = results.value(cell, seed)
    run = results.run_of(cell, cell.config, seed) if cell.config else None
    if value is None or run is None:
        return None
    baseline = results.run_of(cell, cell.baseline, seed) if cell.baseline else None
    fields: Mapping[str, Any] = {
        **{name: getattr(cell, name) for name in (*CELL, "metric")},
        "swept": " ".join(f"{name}={value}" for name, value in cell.swept),
        **dataclasses.asdict(run),
        "value": value,
        "baseline": baseline.settings if baseline else None,
        "baseline_accuracy": baseline.accuracy if baseline else None,
    }
    return [fields[name] for name in (*COLUMNS, *LATER)]


def _curve_rows(cell: Cell, config: RunConfig, seed: int, results: Results) -> list[tuple[Any, ...]]:
    """The curve of one run, thinned to about `POINTS` rounds; every round where the figure is the curve itself.

    Figure 2, the benchmark of selectors and the liars keep none: their hundreds of runs are points, not curves.
    """
    if cell.table in ("figure2", "selectors", "selectors-tuned", "liars"):
        return []
    run, curve = results.run_of(cell, config, seed), results.curve_of(cell, config, seed)
    if run is None:
        return []
    last = curve[-1][0] if curve else 0
    every = 1 if cell.metric == "entropy" else max(1, config.rounds // POINTS)
    return [
        (run.settings, seed, number, accuracy, None if entropy is None else round(entropy, 4))
        for number, accuracy, entropy in curve
        if number % every == 0 or number == last
    ]


def _read_measured(row: _Row) -> Measured:
    integers = {"rounds", "never_selected", "diverged_round", "bytes_up", "bytes_down", "asked"}
    fields: dict[str, Any] = {
        name: row.read(name, int if name in integers or name.startswith("rounds_to_") else float)
        for name in (*MEASURED, *LATER)
        if name not in OWN
    }
    fields |= {name: row.read(name, str) for name in OWN}
    return Measured(**fields | {"settings": row.need("settings", str), "seed": row.need("seed", int)})


class _Row:
    """A line of an exported file whose cells are read by name."""

    def __init__(self, where: str, cells: Mapping[str, str]) -> None:
        self.where, self._cells = where, cells

    def read(self, column: str, convert: type) -> Any:
        """The cell's value, None where it is empty."""
        text = self.text(column)
        if not text:
            return None
        try:
            value = convert(text)
        except ValueError:
            raise InputError(f"{self.where}: {column} {text!r} is not a number") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{self.where}: {column} {text!r} is not a finite number")
        return value

    def text(self, column: str) -> str:
        """The cell as it is written; empty in a column that came after the file."""
        return self._cells.get(column, "") if column in LATER else self._cells[column]

    def need(self, column: str, convert: type) -> Any:
        """The cell's value, which must be there."""
        value = self.read(column, convert)
        if value is None:
            raise InputError(f"{self.where}: {column} is empty")
        return value


def _rows(path: Path, columns: Sequence[str]) -> Iterable[_Row]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None
    # A quote that is never closed would swallow all rows behind it.
    lines = csv.reader(io.StringIO(text), strict=True)
    advice = "accepted: a file that `reproduce --export` wrote"
    try:
        header = next(lines, [])
        missing = [name for name in columns if name not in header and name not in LATER]
        if missing:
            raise InputError(f"{path}: column {missing[0]} is missing; {advice}")
        for cells in lines:
            if len(cells) not in (0, len(header)):
                raise InputError(
                    f"{path}, line {lines.line_num}: {len(cells)} cells, the header has {len(header)}; {advice}"
                )
            if cells:
                yield _Row(f"{path}, line {lines.line_num}", dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise InputError(f"{path}, line {lines.line_num}: cannot be read as CSV ({error}); {advice}") from None
