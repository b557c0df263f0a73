"""How a cell's figures are put into words, the same in every table."""

from __future__ import annotations

from fedentopt.experiments.paper import names
from fedentopt.experiments.paper.cells import Cell
from fedentopt.experiments.paper.comparison import PARTLY, Comparison
from fedentopt.experiments.paper.statistics import Interval

NOTHING = "–"


def ours(entry: Comparison, *, signed: bool = False) -> str:
    """Mean ± deviation; how many seeds diverged behind it."""
    if entry.ours is None:
        return NOTHING
    text = _number(entry.cell, entry.ours, signed)
    if entry.std is not None:
        text += f" ± {_number(entry.cell, entry.std)}"
    return f"{text} ({entry.diverged} diverged)" if entry.diverged else text


def paper(entry: Comparison, *, signed: bool = False) -> str:
    """What is printed in the paper."""
    cell = entry.cell
    if cell.paper is None:
        return NOTHING
    text = _number(cell, cell.paper, signed)
    return text if cell.paper_std is None else f"{text} ± {_number(cell, cell.paper_std)}"


def gap(entry: Comparison) -> str:
    """Ours minus the paper's."""
    return NOTHING if entry.difference is None else _number(entry.cell, entry.difference, signed=True)


def against(entry: Comparison) -> str:
    """Ours minus FedAvg's, bold where zero lies outside the interval."""
    if entry.against is None:
        return NOTHING
    text = f"{_number(entry.cell, entry.against.mean, signed=True)} {limits(entry.cell, entry.against)}"
    return f"**{text}**" if entry.against.clear else text


def limits(cell: Cell, interval: Interval) -> str:
    """The two ends of an interval."""
    return f"[{_number(cell, interval.low, signed=True)}, {_number(cell, interval.high, signed=True)}]"


def seeds(entry: Comparison) -> str:
    """How many of the wanted seeds stand behind a row, and whether their runs were cut short."""
    wanted, found = len(entry.cell.seeds), len(entry.values)
    text = str(found) if found == wanted else f"{found} of {wanted}"
    if entry.cell.shortened and entry.state == PARTLY and entry.cell.config is not None:
        return f"{text}, cut to {entry.cell.config.rounds} rounds"
    return text


def _number(cell: Cell, value: float, signed: bool = False) -> str:
    digits = 2 if cell.metric in ("accuracy", "accuracy_change") else 3
    return f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"


def row_name(cell: Cell) -> str:
    """The method, and what else tells rows of one section apart."""
    parts = [names.method(cell.method or "")]
    if cell.extra:
        parts += [f"{name} {value}" for name, value in cell.swept]
        parts += [f"participation {cell.participation:g} %"] if cell.table == "single-class" else []
        parts += [f"buffer {cell.buffer:g} %"] if cell.buffer is not None else []
    return ", ".join(parts)


def heading(cell: Cell) -> str:
    """The setting that rows of one section share."""
    parts = [cell.availability and cell.availability.capitalize(), names.model(cell.model), names.dataset(cell.dataset)]
    return ", ".join(part for part in (*parts, cell.partition and names.partition(cell.partition)) if part)
