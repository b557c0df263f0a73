"""What `fedentopt reproduce` prints: lists, estimates and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedentopt.cli.console import out, print_table
from fedentopt.cli.reproduce_progress import duration

if TYPE_CHECKING:
    from fedentopt.paper.comparison import Comparison
    from fedentopt.paper.estimate import Estimate


def print_list(listed: Sequence[dict[str, Any]]) -> None:
    """One line per cell, and how many are in which state."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in listed:
        groups.setdefault(f"{cell['table']}, {cell['model']}, {cell['dataset']}", []).append(cell)
    for title, cells in groups.items():
        # What all cells of a group share goes into its heading, so that lines fit a narrow terminal.
        shared = [name for name in ("metric", "participation") if len({cell[name] for cell in cells}) == 1]
        heading = [title, *(text for text in (_word(cells[0], name) for name in shared) if text)]
        _out().print(Text(", ".join(heading), style="bold"))
        table = _table(("cell",), ("paper", "ours", "seeds", "state"))
        for cell in cells:
            figures = ("" if cell[name] is None else f"{cell[name]:.4g}" for name in ("paper", "ours"))
            seeds = str(len(cell["seeds"])) if cell["metric"] != "model_mb" else ""
            others = {name.removeprefix("seeds_"): own for name, own in cell.items() if name.startswith("seeds_")}
            seeds += "".join(f", {len(own)} in {name}" for name, own in others.items())
            table.add_row(Text(_setting(cell, shared) or cell["model"]), *figures, seeds, cell["state"])
        print_table(_out(), table)
    _print_states(cell["state"] for cell in listed)


def print_estimate(lines: Sequence[Estimate], cells: int, wanted: int, begun: int, machine: str) -> None:
    """What is to do, by model and data set, at what speed, and where that comes from; `begun` runs have done a part."""
    from fedentopt.paper.estimate import total

    table = _table(("model", "data set"), ("runs", "samples", "samples/s", "speed", "time"))
    for line in lines:
        rate = "unknown" if line.samples_per_second is None else f"{line.samples_per_second:,.0f}"
        table.add_row(
            Text(line.model), Text(line.dataset), str(line.runs), _count(line.samples), rate, line.speed or "",
            _time(line.seconds),
        )  # fmt: skip
    runs, samples, seconds = total(lines)
    if len(lines) != 1:
        table.add_row("all", "", str(runs), _count(samples), "", "", _time(seconds))
    print_table(_out(), table)
    need = f"{_counted(cells, 'cell needs', 'cells need')} {_counted(wanted, 'run', 'runs')}"
    rest = f"{runs} still to be done" + (f", {begun} of them from a checkpoint" if begun else "")
    _out().print(f"{need}, {rest}{_speeds(lines, machine)}")


def _counted(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def _speeds(lines: Sequence[Estimate], machine: str) -> str:
    """Which speeds were measured and which are guesses, in words."""
    from fedentopt.paper.estimate import ESTIMATED, GIVEN, MEASURED

    models: dict[str, dict[str, None]] = {}  # by source, in order and once
    for line in lines:
        models.setdefault(line.speed or "", {})[line.model] = None
    if GIVEN in models:
        return "; time at the speed that was given"
    said = [f"{source} for {', '.join(models[source])}" for source in (MEASURED, ESTIMATED) if source in models]
    known = f"; speeds of {machine}: {'; '.join(said)}" if said else ""
    if "" not in models:
        return known
    return f"{known}; no speed is known for {', '.join(models[''])} (--samples-per-second gives one)"


def print_tables(entries: Sequence[Comparison], written: Sequence[Path]) -> None:
    """The tables of the cells; sections without any result are left out, and columns without any figure are only named,
    as those for the paper's where a file of one's own has none: they would take the room of others."""
    from fedentopt.paper.names import NOTHING, heading
    from fedentopt.paper.tables import tables

    known = {(entry.cell.table, heading(entry.cell)) for entry in entries if entry.ours is not None}
    console = _out()
    for printed in tables(entries):
        name = "table1" if printed.name == "rounds-to-target" else printed.name
        # The benchmark of selectors says more than the heading of its cells.
        mine = tuple(heading for table, heading in known if table == name)
        sections = [s for s in printed.sections if not s.heading or s.summary or s.heading.startswith(mine)]
        if sections:
            console.print(Text(printed.title, style="bold"))
        rows = [row for section in sections for row in section.rows]
        used = [place for place in range(1, len(printed.columns)) if any(row[place] != NOTHING for row in rows)]
        empty = [name for place, name in enumerate(printed.columns) if place and place not in used]
        if rows and empty:
            console.print(Text(f"without figures: {'; '.join(empty)}", style="dim"))
        for section in sections:
            if section.heading:
                console.print(Text(section.heading, style="italic"))
            table = _table(printed.columns[:1], [printed.columns[place] for place in used])
            for row in section.rows:
                shown = [row[place] for place in (0, *used)]
                table.add_row(*(Text(cell.strip("*"), style="bold" if cell.startswith("**") else "") for cell in shown))
            print_table(console, table)
            console.print()
        if sections and printed.found:
            console.print(Text(printed.found))
            console.print()
    _print_states(entry.state for entry in entries)
    for place in dict.fromkeys(path.parent for path in written):
        console.print(Text(f"written: {place}"), soft_wrap=True)


def _out() -> Console:
    """Standard output; where it is no terminal, wide enough that no table is folded."""
    console = out()
    if not console.is_terminal:
        console.width = max(console.width, 280)
    return console


def _print_states(states: Iterable[str]) -> None:
    counted = Counter(states)
    parts = ", ".join(f"{count} {state}" for state, count in counted.most_common())
    _out().print(f"{sum(counted.values())} cells: {parts}")


def _setting(cell: dict[str, Any], shared: Sequence[str]) -> str:
    """What tells a cell from others of its group."""
    own = [
        name
        for name in ("partition", "method", "availability", "participation", "buffer", "metric")
        if name not in shared
    ]
    parts = [_word(cell, name) for name in own]
    parts += [f"{name} {value}" for name, value in cell.get("settings", {}).items()]
    return ", ".join(part for part in parts if part)


def _word(cell: dict[str, Any], name: str) -> str:
    value = cell[name]
    if value is None:
        return ""
    if name == "participation":
        return f"{value:g} % of clients"
    return f"Q {value:g} %" if name == "buffer" else str(value)


def _table(left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in left:
        table.add_column(name)
    for name in right:
        # The last column must never be cut: it says whether a cell is done.
        table.add_column(name, justify="right", no_wrap=name in ("state", "seeds"))
    return table


def _count(value: int | None) -> str:
    if value is None:
        return "unknown"
    return f"{value / 1e6:,.1f} M" if value >= 1e6 else f"{value:,}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return "below 1 s" if 0 < seconds < 1 else duration(seconds)
