"""What the rows of one section, and the lines of one plot, are called: so that no two of them read alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fedentopt.experiments.paper.cells import Cell
from fedentopt.experiments.paper.comparison import Comparison
from fedentopt.simulation.config import RunConfig

NAMED_BY_CELL = ("dataset", "model", "partition", "algorithm", "selector", "cohort", "buffer", "seed")
"""Settings of a run for which a cell has words of its own."""


def row_names(cells: Sequence[Cell], name: Callable[[Cell], str]) -> list[str]:
    """One name a cell, in their order: what `name` says, and where several say the same, how those differ."""
    plain = [name(cell) for cell in cells]
    alike: dict[str, list[int]] = {}
    for number, text in enumerate(plain):
        alike.setdefault(text, []).append(number)
    names = list(plain)
    for text, numbers in alike.items():
        if len(numbers) > 1:
            for number, words in zip(numbers, _differences([cells[number] for number in numbers]), strict=True):
                names[number] = ", ".join([text, *words])
    return names


def by_participation(entries: Iterable[Comparison]) -> list[list[Comparison]]:
    """Entries that differ in participation alone, together; in the order they first appear."""
    rows: dict[Any, list[Comparison]] = {}
    for entry in entries:
        settings = entry.cell.config.to_dict() if entry.cell.config else {}
        settings.pop("cohort", None)
        key = (dataclasses.replace(entry.cell, participation=None).identity, tuple(settings.items()))
        rows.setdefault(key, []).append(entry)
    return list(rows.values())


def _differences(cells: Sequence[Cell]) -> list[list[str]]:
    """For each of the cells, in words, everything in which not all of them are the same."""
    swept = list(dict.fromkeys(name for cell in cells for name, _ in cell.swept))
    fields = [field.name for field in dataclasses.fields(RunConfig) if field.name not in (*NAMED_BY_CELL, *swept)]
    wordings: list[Callable[[Cell], str]] = [
        *(lambda cell, name=name: f"{name} {_setting(cell, name)}" for name in (*swept, *fields)),
        *([] if "cohort" in swept else [lambda cell: f"participation {_number(cell.participation)} %"]),
        lambda cell: f"buffer {_number(cell.buffer)} %",
        *(lambda cell, name=name: f"{name} {getattr(cell, name)}"
          for name in ("method", "availability", "partition", "dataset", "model")),
    ]  # fmt: skip
    columns = [[words(cell) for cell in cells] for words in wordings]
    differing = [column for column in columns if len(set(column)) > 1]
    if not differing:  # the same runs, over other seeds
        differing = [[f"seeds {', '.join(map(str, cell.seeds))}" for cell in cells]]
    return [list(words) for words in zip(*differing, strict=True)]


def _setting(cell: Cell, name: str) -> Any:
    """A setting as the cell's block gives it, else as its run has it."""
    given = dict(cell.swept)
    return given[name] if name in given else getattr(cell.config, name, None)


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    short = f"{value:g}"
    return short if float(short) == value else str(value)
