"""`fedentopt bench engine`: samples a second, the share of the floor, and what ran."""

from __future__ import annotations

from typing import Annotated

import typer

from fedentopt.cli.console import note, out, print_json


def engine(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="timed repetitions of each case; the best counts")] = 5,
    model: Annotated[list[str] | None, typer.Option(help="only these models (lenet5, vgg11, efficientnet-b0)")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON instead of a table")] = False,
) -> None:
    """Measure local training: samples a second by model and number of clients side by side."""
    from rich.table import Table

    from fedentopt.errors import InputError
    from fedentopt.experiments.engine_bench import CPU_CASES, GPU_CASES, as_json, bench_engine
    from fedentopt.simulation.trainer import resolve_device

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
