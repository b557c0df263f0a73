"""`fedentopt bench selection`: time and memory of a cohort, against naive NumPy in the same run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fedentopt.cli.console import err, out, print_json


def selection(
    case: Annotated[
        list[str] | None,
        typer.Option(help="Only this case, may be repeated: paper, thousands, million, million-noisy, million-sparse."),
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
    table = Table(title="one cohort of FedEntOpt", box=None, padding=(0, 1, 0, 0))
    table.add_column("case", no_wrap=True)
    for heading in ("clients", "classes", "cohort", "first", "next", "naive", "faster", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for speed in speeds:
        table.add_row(
            speed.case,
            f"{speed.clients:,}",
            f"{speed.classes:,}",
            str(speed.cohort),
            _time(speed.first_ms),
            _time(speed.ours_ms),
            "" if speed.naive_ms is None else _time(speed.naive_ms),
            "" if speed.times is None else f"{speed.times:.1f} x",
            "" if speed.peak_mb is None else f"{speed.peak_mb:,.0f} MB",
        )
    out().print(table)
    out().print(
        "\nfirst: with all preparation; next: best of several; naive: NumPy as the definition suggests, where it fits"
    )
    compared = [speed for speed in speeds if speed.same_cohort is not None]
    apart = [speed.case for speed in compared if not speed.same_cohort]
    if apart:
        out().print(f"NOT the same cohorts both ways: {', '.join(apart)}")
    elif compared:
        out().print("both ways found the same cohorts")


def _time(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.1f} s"
    return f"{milliseconds:.2f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
