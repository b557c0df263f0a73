"""`fedentopt bench`: samples per second of local training, and the time and memory of a cohort."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from fedentopt.cli.console import Commands, err, note, out, print_json, print_table


def engine(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="timed repetitions of each case; the best counts")] = 5,
    model: Annotated[
        list[str] | None, typer.Option(help="only these models (lenet5, vgg11, vgg11-bn, efficientnet-b0)")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
    selectors: Annotated[
        bool, typer.Option("--selectors", help="what selectors with feedback cost a stack of runs, beside random ones")
    ] = False,
) -> None:
    """Measure local training: samples per second by model and number of clients side by side."""
    from rich.table import Table

    from fedentopt.bench.engine import CPU_CASES, GPU_CASES, as_json, bench_engine
    from fedentopt.errors import InputError
    from fedentopt.simulation.trainers import resolve_device

    if selectors:
        _stack(device, min(repeats, 3), json, model)
        return
    cases = GPU_CASES if resolve_device(device).type == "cuda" else CPU_CASES
    known = sorted({case.model for case in cases})
    for name in model or []:
        if name not in known:
            raise InputError(f"model: {name!r} is not benchmarked; accepted: {', '.join(known)}")
    chosen = tuple(case for case in cases if not model or case.model in model)
    speeds = []
    for speed in bench_engine(device, cases=chosen, repeats=repeats):
        speeds.append(speed)
        clients = f"{speed.clients}{' uneven' if speed.uneven else ''}"
        note(
            f"{speed.model} x {clients} ({speed.precision}): {speed.samples_per_second:,.0f} samples/s, "
            f"first round {speed.first_round_s:.1f} s"
        )
    if json:
        print_json(as_json(speeds, device))
        return
    table = Table(title="local training, augmentation on, batch 64")
    for column, right in (("model", False), ("clients", True), ("precision", False), ("samples/s", True),
                          ("of the floor", True), ("what ran", False)):  # fmt: skip
        table.add_column(column, justify="right" if right else "left")
    for s in speeds:
        clients = f"{s.clients} uneven" if s.uneven else str(s.clients)
        table.add_row(
            s.model, clients, s.precision, f"{s.samples_per_second:,.0f}", f"{100 * s.floor_share:.1f} %", s.runs
        )
    out().print(table)


def selection(
    case: Annotated[
        list[str] | None,
        typer.Option(help="Only this case, may be repeated: paper, thousands, million, million-noisy, million-sparse."),
    ] = None,
    selector: Annotated[
        list[str] | None, typer.Option(help="Only this selector, may be repeated; with --case: these cases too.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure FedEntOpt from a hundred to a million clients, and a round of every selector; a few minutes in all."""
    from fedentopt.bench import selection as cases
    from fedentopt.bench import selectors as rounds
    from fedentopt.selection import SELECTORS

    for name in selector or []:
        SELECTORS.get(name)
    for name in case or []:
        cases.check_case(name)
    speeds = [_measured(name, cases.run_case) for name in case or (() if selector else cases.CASES)]
    others = [_measured(name, rounds.run_selector) for name in selector or (() if case else SELECTORS.names)]
    if json:
        measured = {"selection": [asdict(speed) for speed in speeds], "selectors": [asdict(speed) for speed in others]}
        print_json({name: found for name, found in measured.items() if found})
        return
    if speeds:
        _print_cases(speeds)
    if others:
        _print_rounds(others)


def _measured(name: str, measure: Callable[[str], Any]) -> Any:
    console = err()
    if not console.is_terminal:
        return measure(name)
    with console.status(f"measuring {name}"):
        return measure(name)


def _print_cases(speeds: list[Any]) -> None:
    from rich.table import Table

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
    print_table(out(), table)
    out().print(
        "\nfirst: with all preparation; next: best of several; naive: NumPy as the definition suggests, where it fits"
    )
    compared = [speed for speed in speeds if speed.same_cohort is not None]
    apart = [speed.case for speed in compared if not speed.same_cohort]
    if apart:
        out().print(f"NOT the same cohorts both ways: {', '.join(apart)}")
    elif compared:
        out().print("both ways found the same cohorts")


def _print_rounds(speeds: list[Any]) -> None:
    from rich.table import Table

    table = Table(title=f"one round of every selector, cohorts of {speeds[0].cohort}", box=None, padding=(0, 1, 0, 0))
    table.add_column("selector", no_wrap=True)
    for heading in ("clients", "first", "next", "ratio", "limit", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for speed in speeds:
        table.add_row(
            speed.selector,
            f"{speed.clients:,}",
            _time(speed.first_ms),
            _time(speed.next_ms),
            f"{speed.times:.2f} x" if speed.times < 10 else f"{speed.times:,.0f} x",
            "" if speed.largest is None else f"{speed.largest:,}{'*' if speed.all_pairs else ''}",
            "" if speed.peak_mb is None else f"{speed.peak_mb:,.0f} MB",
        )
    print_table(out(), table)
    out().print("\nfirst: with all preparation; next: best of several; ratio: over FedEntOpt's on the same counts;")
    out().print("limit: the most clients it serves; * since it works with all distances between two of them")


def _stack(device: str, repeats: int, json: bool, model: list[str] | None) -> None:
    from rich.table import Table

    from fedentopt.bench.stack import bench_stack, stack_json
    from fedentopt.errors import InputError

    if model:
        raise InputError(f"model: {', '.join(model)} with --selectors; accepted: none, it measures lenet5")
    speeds = []
    for speed in bench_stack(device, repeats=repeats):
        speeds.append(speed)
        note(f"{speed.selector}: {speed.samples_per_second:,.0f} samples/s, {100 * speed.share:.1f} % of random's")
    if json:
        print_json(stack_json(speeds, device))
        return
    table = Table(title="stacked runs of lenet5 by selector", box=None, padding=(0, 2, 0, 0))
    table.add_column("selector", no_wrap=True)
    for heading in ("samples/s", "of random's", "asked before, per sample"):
        table.add_column(heading, justify="right", no_wrap=True)
    for s in speeds:
        asked = f"{s.asked:.2f}" if s.asked else ""
        table.add_row(s.selector, f"{s.samples_per_second:,.0f}", f"{100 * s.share:.1f} %", asked)
    out().print(table)


def _time(milliseconds: float) -> str:
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.1f} s"
    return f"{milliseconds:.2f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"


bench = typer.Typer(cls=Commands, help="Measure our speed.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command group to the command line."""
    bench.command("selection")(selection)
    bench.command("engine")(engine)
    app.add_typer(bench, name="bench")
