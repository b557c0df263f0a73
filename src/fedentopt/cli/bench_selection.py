"""`fedentopt bench selection`: time and memory of a cohort, against naive NumPy in the same run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fedentopt.cli.console import err, out, print_json


def selection(
    case: Annotated[
        list[str] | None,
        typer.Option(help="Only this case, may be repeated: paper, thousands, million, million-sparse."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure selection from a hundred to a million clients; all cases take about a minute."""
    from rich.table import Table

    from fedentopt.selection.benchmark import CASES, run_case

    speeds = []
    console = err()
    for name in case or CASES:
        if console.is_terminal:
            with console.status(f"measuring {name}"):
                speeds.append(run_case(name))
        else:
            speeds.append(run_case(name))
    if json:
        print_json({"selection": [asdict(speed) for speed in speeds]})
        return
    table = Table("case", title="one cohort of FedEntOpt", box=None, pad_edge=False)
    for heading in ("clients", "classes", "cohort", "first", "next", "naive NumPy", "faster", "same", "peak memory"):
        table.add_column(heading, justify="right")
    for speed in speeds:
        table.add_row(
            speed.case,
            f"{speed.clients:,}",
            f"{speed.classes:,}",
            str(speed.cohort),
            _time(speed.first_ms),
            _time(speed.ours_ms),
            "does not fit" if speed.naive_ms is None else _time(speed.naive_ms),
            "" if speed.times is None else f"{speed.times:.1f} x",
            "" if speed.same_cohort is None else "yes" if speed.same_cohort else "NO",
            "" if speed.peak_mb is None else f"{speed.peak_mb:,.0f} MB",
        )
    out().print(table)
    out().print("first: with all preparation; next: best of several; same: the naive way found the same cohort")


def _time(milliseconds: float) -> str:
    return f"{milliseconds:.2f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.2f} s"
