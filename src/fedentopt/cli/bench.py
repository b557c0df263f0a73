"""`fedentopt bench`: samples per second of local training, and the time and memory of a cohort."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fedentopt.cli.console import err, note, out, print_json


def engine(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="timed repetitions of each case; the best counts")] = 5,
    model: Annotated[list[str] | None, typer.Option(help="only these models (lenet5, vgg11, efficientnet-b0)")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measure local training: samples per second by model and number of clients side by side."""
    from rich.table import Table

    from fedentopt.bench.engine import CPU_CASES, GPU_CASES, as_json, bench_engine
    from fedentopt.errors import InputError
    from fedentopt.simulation.trainers import resolve_device

    cases = GPU_CASES if resolve_device(device).type == "cuda" else CPU_CASES
    known = sorted({case.model for case in cases})
    for name in model or []:
        if name not in known:
            raise InputError(f"model: {name!r} is not benchmarked; accepted: {', '.join(known)}")
    chosen = tuple(case for case in cases if not model or case.model in model)
    speeds = []
    for speed in bench_engine(device, cases=chosen, repeats=repeats):
        speeds.append(speed)
        note(f"{speed.model} x {speed.clients} ({speed.precision}): {speed.samples_per_second:,.0f} samples/s")
    if json:
        print_json(as_json(speeds, device))
        return
    table = Table(title="local training, augmentation on, batch 64")
    for column, right in (("model", False), ("clients", True), ("precision", False), ("samples/s", True),
                          ("of the floor", True), ("what ran", False)):  # fmt: skip
        table.add_column(column, justify="right" if right else "left")
    for s in speeds:
        table.add_row(
            s.model, str(s.clients), s.precision, f"{s.samples_per_second:,.0f}", f"{100 * s.floor_share:.1f} %", s.runs
        )
    out().print(table)


def selection(
    case: Annotated[
        list[str] | None,
        typer.Option(help="Only this case, may be repeated: paper, thousands, million, million-noisy, million-sparse."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure selection from a hundred to a million clients; all cases take about a minute."""
    from rich.table import Table

    from fedentopt.bench.selection import CASES, run_case

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


bench = typer.Typer(help="Measure our speed.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command group to the command line."""
    bench.command("selection")(selection)
    bench.command("engine")(engine)
    app.add_typer(bench, name="bench")
