"""Results of runs as a table for people and as JSON for machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from fedentopt.cli.console import note, out

if TYPE_CHECKING:
    from fedentopt.results.aggregate import MethodResult
    from fedentopt.results.reading import RunResult
    from fedentopt.results.statistics import Spread

CLIENTS = {"client_accuracy.mean": "clients %", "client_accuracy.worst_tenth": "worst tenth %"}
MEASURED_ON = {"test": "by the test split's classes", "validation": "on what it holds out"}


def print_methods(methods: Sequence[MethodResult], targets: Sequence[float]) -> None:
    """One row per method: mean ± sample standard deviation over its seeds, then what the columns mean. Without targets
    the accuracy that all reach is one."""
    from fedentopt.results.aggregate import reached_by_all

    if not targets and (best := reached_by_all(methods)):
        targets = [best]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("method", no_wrap=True)
    validated = any(method.spread("validation_accuracy") for method in methods)
    of_clients = [figure for figure in CLIENTS if any(method.spread(figure) for method in methods)]
    heads = [
        *(["validation %"] if validated else []),
        "accuracy %",
        "worst class %",
        *(CLIENTS[figure] for figure in of_clients),
        *(f"to {t:g} %" for t in targets),
        "entropy",
        "up",
        "down",
    ]
    timed = any(method.has_speeds for method in methods)
    heads += ["simulated"] if timed else []
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for method in methods:
        figures = method.to_dict()
        entropy = figures["mean_entropy"]
        table.add_row(
            escape(method.label),
            *([_spread(method.spread("validation_accuracy"))] if validated else []),
            _spread(method.spread("accuracy")),
            _spread(method.spread("worst_class_accuracy")),
            *(_spread(method.spread(figure)) for figure in of_clients),
            *(_rounds(method.rounds_to(target)) for target in targets),
            "–" if entropy is None else f"{entropy['mean']:.2f}",
            size(figures["bytes_up"]),
            size(figures["bytes_down"]),
            *([f"{method.simulated_seconds:,.0f} s"] if timed else []),
        )
    console = _wide_enough(table)
    console.print(table, soft_wrap=True)
    console.print(_legend(methods, targets), style="dim")
    if len(methods) > 1:
        _print_differences(methods)
    _print_suspects(methods)
    for method in methods:
        for seed, number in method.diverged.items():
            chance = method.runs[0].summary["chance"]
            note(
                f"{method.label}, seed {seed}: diverged in round {number}; "
                f"it counts as chance ({chance:.1f} %) from there on"
            )


def _wide_enough(table: Table) -> Console:
    """Folded numbers and names cannot be read: a line too long for the terminal is the lesser evil."""
    console = out()
    console.width = max(console.width, Measurement.get(console, console.options.update(max_width=1000), table).maximum)
    return console


def _print_differences(methods: Sequence[MethodResult]) -> None:
    """How much more accurate each method is than the first, seed by seed."""
    from fedentopt.results.aggregate import difference

    first = methods[0]
    found = [(method, difference(method, first)) for method in methods[1:]]
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for method, one in found:
        if not one.seeds:
            cells = ("–", "", "no seed in common")
        elif one.low is None or one.high is None:
            cells = (f"{one.mean:+.1f}", "", "one seed: no interval")
        else:
            unclear = "" if one.low > 0 or one.high < 0 else "may be chance"
            cells = (f"{one.mean:+.1f}", f"{one.low:+.1f} to {one.high:+.1f}", unclear)
        table.add_row(escape(method.label), *cells)
    console = _wide_enough(table)
    console.print(f"\naccuracy beside {first.label}, in points", style="bold", markup=False)
    console.print(table, soft_wrap=True)
    if any(one.low is not None for _, one in found):
        console.print("mean of the differences seed by seed, and its 95 % interval (Student)", style="dim")


def _print_suspects(methods: Sequence[MethodResult]) -> None:
    """Whom the audits suspect at the end, a line per method that has one."""
    found = [(method, suspected) for method in methods if (suspected := method.verdicts) is not None]
    if not found:
        return
    seeds = max(len(method.runs) for method, _ in found)
    console = out()
    console.print(f"\naudit at the end{f', {seeds} seeds together' if seeds > 1 else ''}", style="bold")
    widest = max(len(method.label) for method, _ in found)
    for method, suspected in found:
        console.print(f"{method.label:<{widest}}  {suspected}", soft_wrap=True, markup=False)


def _legend(methods: Sequence[MethodResult], targets: Sequence[float]) -> str:
    from fedentopt.results.summary import averaged_rounds

    seeds = max(len(method.runs) for method in methods)
    classes = len(methods[0].runs[0].summary["class_accuracy"])
    parts = [f"accuracy: test accuracy, {averaged_rounds(run.summary for method in methods for run in method.runs)}"]
    if seeds > 1:
        parts.append(f"±: sample standard deviation over {seeds} seeds")
    if targets:
        parts.append("to …: rounds to reach that accuracy" + (", mean over seeds" if seeds > 1 else ""))
    if any(method.spread("validation_accuracy") for method in methods):
        parts.append("validation: the same on what the clients hold out, to choose settings by")
    measured = {run.summary.get("client_accuracy", {}).get("measured_on") for m in methods for run in m.runs} - {None}
    if measured:
        on = " or ".join(MEASURED_ON[one] for one in sorted(measured))
        parts.append(f"clients, worst tenth: means of the final model's accuracy per client {on}")
    parts.append(f"entropy: bits of all labels that the selected clients hold, at most {math.log2(classes):.2f}")
    parts.append("up, down: sent by and to all clients in one run")
    if any(method.has_speeds for method in methods):
        parts.append("simulated: time of one run by the clients' simulated speed")
    return "\n".join(parts)


def as_json(runs: Sequence[RunResult], methods: Sequence[MethodResult], targets: Sequence[float]) -> dict[str, Any]:
    """All figures of all runs, of the methods over their seeds, and how each method differs from the first."""
    return {
        "runs": [
            {
                "run_id": run.run_id,
                "path": str(run.path),
                "method": run.method,
                "seed": run.seed,
                **run.summary,
                "rounds_to": run.summary["rounds_to"] | _targets(run, targets),
            }
            for run in runs
        ],
        "methods": [{**method.to_dict(targets), "difference": _difference(method, methods[0])} for method in methods],
    }


def _difference(method: MethodResult, first: MethodResult) -> dict[str, Any] | None:
    from fedentopt.results.aggregate import difference

    return None if method is first else {"to": first.label, **difference(method, first).to_dict()}


def size(count: float) -> str:
    """Bytes for people, in powers of ten."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:.0f} {unit}"
    return f"{count:.0f} B"


def _targets(run: RunResult, targets: Sequence[float]) -> dict[str, int | None]:
    from fedentopt.results.summary import rounds_to

    # From the rounds: a run finished long ago was not asked for these targets.
    return {f"{target:g}": rounds_to(run.curve, target) for target in targets}


def _spread(spread: Spread | None, digits: int = 1) -> str:
    if spread is None:
        return "–"
    tail = f" ± {spread.std:.{digits}f}" if spread.count > 1 else ""
    return f"{spread.mean:.{digits}f}{tail}"


def _rounds(rounds: Sequence[int | None]) -> str:
    reached = [number for number in rounds if number is not None]
    if len(reached) == len(rounds):
        return f"{sum(reached) / len(reached):.0f}"
    return "never" if not reached else f"{len(reached)} of {len(rounds)} seeds"
