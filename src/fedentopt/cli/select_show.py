"""What `fedentopt select` prints: tables and a chart for people, documents for machines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedentopt.cli.console import out
from fedentopt.cli.counts_file import CountsFile
from fedentopt.selection.trial import SweepRow, Trial, classes_held

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def chart(values: Sequence[float], top: float, *, width: int = 60, height: int = 6, plain: bool = False) -> list[str]:
    """Lines of text that show `values` in order, from a round number below the least up to `top`.

    With more values than columns, a column shows the mean of its share of them. `plain` uses ASCII only.
    """
    columns = min(width, len(values))
    shares = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    means = [sum(share) / len(share) for share in shares]
    bottom = max(min(int(min(means) * 4) / 4, top - 0.25), 0.0)
    span = max(top - bottom, 1e-12)
    filled = [min(max((mean - bottom) / span, 0.0), 1.0) * height for mean in means]
    lines = []
    for level in reversed(range(height)):
        label = f"{bottom + span * (level + 1) / height:6.2f}"
        if plain:
            cells = "".join("#" if part > level + 0.5 else " " for part in filled)
        else:
            cells = "".join(_EIGHTHS[round(min(max(part - level, 0.0), 1.0) * 8)] for part in filled)
        lines.append(f"{label} {'|' if plain else '┤'}{cells}")
    lines.append(f"{bottom:6.2f} {('+' if plain else '└') + ('-' if plain else '─') * columns}")
    return lines


_FIRST, _LAST = 10, 5  # rounds shown of many


def trial_json(trial: Trial) -> dict[str, Any]:
    """All rounds; `reported_entropy` only where noise was added, `divergence` only where a target was set."""
    rounds = [asdict(result) for result in trial.rounds]
    return {
        "rounds": [{key: value for key, value in entry.items() if value is not None} for entry in rounds],
        "selection_entropy": trial.selection_entropy,
        "never_selected": trial.never_selected,
    }


def sweep_json(rows: Sequence[SweepRow]) -> dict[str, Any]:
    """One entry for every choice of sizes."""
    return {"sweep": [asdict(row) for row in rows]}


def show_trial(trial: Trial, counts: CountsFile, about: Mapping[str, Any], seed: int) -> None:
    """The first and last rounds, a chart of the entropy, and what it comes to."""
    console = out()
    held = classes_held(counts.counts)
    top = math.log2(max(held, 1))
    noise = trial.rounds[0].reported_entropy is not None
    kept_out = "" if about["buffer"] is None else f", buffer of {about['buffer']}"
    console.print(
        f"{about['selector']}: {len(counts.clients)} clients, {_classes(counts)}, cohorts of "
        f"{about['cohort']}{kept_out}, seed {seed}"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("round", justify="right")
    table.add_column("entropy", justify="right")
    if noise:
        table.add_column("reported", justify="right")
    table.add_column("classes", justify="right")
    table.add_column("clients", no_wrap=True, overflow="ellipsis")
    shown = list(trial.rounds)
    hidden = len(shown) - _FIRST - _LAST
    if hidden > 1:
        shown = [*shown[:_FIRST], *shown[-_LAST:]]
    for place, result in enumerate(shown):
        if hidden > 1 and place == _FIRST:
            table.add_row("...", *[""] * (3 if noise else 2), f"({hidden} more; --json has all)")
        entropies = [f"{result.entropy:.3f}"]
        if result.reported_entropy is not None:
            entropies.append(f"{result.reported_entropy:.3f}")
        names = " ".join(escape(_one_line(client)) for client in result.clients)
        table.add_row(str(result.round), *entropies, f"{result.classes_covered}/{held}", names)
    console.print(table)

    entropies_of_rounds = [result.entropy for result in trial.rounds]
    if len(entropies_of_rounds) > 1:
        console.print(f"\nentropy of the cohort's labels by round, in bits (at most {top:.2f})")
        plain = not console.encoding.lower().startswith("utf")
        for line in chart(entropies_of_rounds, top, width=min(60, max(console.width - 10, 10)), plain=plain):
            console.print(line, markup=False, no_wrap=True, crop=True)
    # No cohort can cover a class that nobody holds, so it is left out where there is one.
    which = "" if held == len(counts.classes) else " that any client holds"
    covered = sum(result.classes_covered >= held for result in trial.rounds)
    mean = sum(entropies_of_rounds) / len(entropies_of_rounds)
    apart = [result.divergence for result in trial.rounds if result.divergence is not None]
    aim = (
        f"\nKL divergence to the target: mean {sum(apart) / len(apart):.3f}, worst {max(apart):.3f} bits"
        if apart
        else ""
    )
    console.print(
        f"\nentropy: mean {mean:.3f}, worst {min(entropies_of_rounds):.3f} of {top:.3f} bits{aim}"
        f"\nall classes{which} covered: {covered} of {len(trial.rounds)} rounds"
        f"\nselection entropy H_norm: {trial.selection_entropy:.3f} (1: all clients equally often)"
        f"\nclients never selected: {trial.never_selected} of {len(counts.clients)}"
    )


def show_sweep(rows: Sequence[SweepRow], counts: CountsFile, rounds: int) -> None:
    """One line for every choice of sizes."""
    console = out()
    top = math.log2(max(classes_held(counts.counts), 1))
    console.print(f"fedentopt: {len(counts.clients)} clients, {_classes(counts)}, {rounds} rounds each")
    table = Table(box=None, pad_edge=False)
    for heading in ("cohort", "buffer", "mean entropy", "worst", "all classes", "H_norm", "never selected"):
        table.add_column(heading, justify="right")
    previous = None
    for row in rows:
        if previous not in (None, row.cohort):
            table.add_row()
        previous = row.cohort
        table.add_row(
            str(row.cohort),
            str(row.buffer),
            f"{row.mean_entropy:.3f}",
            f"{row.worst_entropy:.3f}",
            f"{100 * row.coverage:.0f} %",
            f"{row.selection_entropy:.3f}",
            str(row.never_selected),
        )
    console.print(table)
    console.print(
        f"\nEntropy of the cohort's labels in bits, at most {top:.3f}; all classes: rounds whose cohort held every "
        "class that any client holds; H_norm: how evenly clients were selected, 1 is best. A larger buffer spreads "
        "the selection over more clients; a larger cohort balances the labels better and costs more communication."
    )


def _classes(counts: CountsFile) -> str:
    missing = len(counts.classes) - classes_held(counts.counts)
    return f"{len(counts.classes)} classes" + (f" ({missing} held by nobody)" if missing else "")


def _one_line(client: object) -> str:
    return " ".join(str(client).split())
