"""What `fedentopt select` prints: tables and a chart for people, documents for machines.

Lines fit the terminal, or 80 columns where there is none: the round, its entropy and its classes always stand, and
names of clients fill what is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.cells import cell_len
from rich.table import Table

from fedentopt.cli.console import out, print_table
from fedentopt.cli.select_state import History
from fedentopt.selection.trial import SweepRow, Trial, classes_held
from fedentopt.tables import CountsFile

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_FIRST, _LAST = 10, 5  # rounds shown of many


def chart(
    values: Sequence[float], top: float, *, first: int = 1, width: int = 60, height: int = 6, plain: bool = False
) -> list[str]:
    """Lines of text that show `values` in order, from a round number below the least of them up to `top`, and below
    them the rounds, which are numbered from `first`.

    With more values than columns, a column shows the mean of its share of them. `plain` uses ASCII only.
    """
    columns = min(width, len(values))
    shares = [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]
    means = [sum(share) / len(share) for share in shares]
    least, top = min(values), max(top, *values)
    bottom = math.floor(least * 4) / 4
    bottom = max(bottom - 0.25 if least - bottom < 0.05 or bottom >= top else bottom, 0.0)
    span = max(top - bottom, 1e-12)
    filled = [min(max((mean - bottom) / span, 0.0), 1.0) * height for mean in means]
    lines = []
    for level in reversed(range(height)):
        label = f"{bottom + span * (level + 1) / height:6.2f}"
        least_mark = 1 if level == 0 else 0  # a value at the very bottom is seen too
        if plain:
            cells = "".join("#" if part > level + 0.5 or least_mark else " " for part in filled)
        else:
            cells = "".join(_EIGHTHS[max(round(min(max(part - level, 0.0), 1.0) * 8), least_mark)] for part in filled)
        lines.append(f"{label} {'|' if plain else '┤'}{cells}")
    lines.append(f"{bottom:6.2f} {('+' if plain else '└') + ('-' if plain else '─') * columns}")
    return [*lines, " " * 8 + _ticks(first, len(values), columns)]


def _ticks(first: int, rounds: int, columns: int) -> str:
    """The numbers of the first, the last and, with room for it, the middle round, each under its column."""
    ends = str(first), str(first + rounds - 1)
    if columns < len(ends[0]) + len(ends[1]) + 1:
        return ends[0] if rounds == 1 else f"{ends[0]}-{ends[1]}"
    line = list(ends[0].ljust(columns - len(ends[1])) + ends[1])
    middle = str(first + rounds // 2)
    at = columns // 2 - len(middle) // 2
    if at > len(ends[0]) + 2 and at + len(middle) + 2 < columns - len(ends[1]):
        line[at : at + len(middle)] = middle
    return "".join(line)


def names_within(names: Iterable[object], room: int, weights: Sequence[float] | None = None) -> str:
    """As many names as fit, with commas between them and how many more there are; names with a comma are quoted.

    Weights stand behind the names, unless all are equal.
    """
    shown = [_one_name(name) for name in names]
    if weights is not None and not _all_equal(weights):
        shown = [f"{name} ({weight:.0%})" for name, weight in zip(shown, weights, strict=True)]
    whole = ", ".join(shown)
    if cell_len(whole) <= room:
        return whole
    for kept in range(len(shown) - 1, 0, -1):
        text = f"{', '.join(shown[:kept])}, +{len(shown) - kept}"
        if cell_len(text) <= room:
            return text
    more = f", +{len(shown) - 1}" if len(shown) > 1 else ""
    name = shown[0]
    while name and cell_len(name) + 1 + len(more) > room:
        name = name[:-1]
    return f"{name}…{more}"


def trial_json(
    trial: Trial,
    settings: Mapping[str, Any],
    past: Mapping[str, History],
    counts: CountsFile,
    baseline: Trial | None,
) -> dict[str, Any]:
    """All rounds of this call, and figures over all rounds so far; `reported_entropy` only where noise was added,
    divergences only where a target was set, `weights` of the average only where the selector defines them.
    """
    rounds = [asdict(result) for result in trial.rounds]
    document = {
        "settings": dict(settings),
        "rounds": [{key: value for key, value in entry.items() if value is not None} for entry in rounds],
        **past["chosen"].figures(counts.clients),
    }
    if baseline is not None:
        document["baseline"] = {
            "selector": "random",
            "entropies": [result.entropy for result in baseline.rounds],
            **past["random"].figures(counts.clients),
        }
    return document


def sweep_json(rows: Sequence[SweepRow], settings: Mapping[str, Any], counts: CountsFile) -> dict[str, Any]:
    """One entry for every choice of sizes, and one of random selection for every size of a cohort."""
    entries = [{key: value for key, value in asdict(row).items() if value is not None} for row in rows]
    return {
        "settings": {**settings, "label_counts": counts.counts.sum(axis=0).tolist()},
        "sweep": [entry for entry in entries if "buffer" in entry],
        "baseline": [{"selector": "random", **entry} for entry in entries if "buffer" not in entry],
    }


def show_trial(
    trial: Trial,
    counts: CountsFile,
    about: Mapping[str, Any],
    past: Mapping[str, History],
    baseline: Trial | None,
) -> None:
    """The first and last rounds beside random selection, a chart of the entropy, and what it comes to."""
    console = out()
    held = classes_held(counts.counts)
    top = math.log2(max(held, 1))
    kept_out = "" if about["buffer"] is None else f", buffer of {about['buffer']}"
    console.print(
        f"{about['selector']}: {len(counts.clients)} clients, {_classes(counts)}, cohorts of "
        f"{about['cohort']}{kept_out}, seed {about['seed']}",
        markup=False,
    )
    for line in _round_lines(trial, held, baseline, console.width):
        console.print(line, markup=False, no_wrap=True, crop=False, overflow="ignore")

    entropies = [result.entropy for result in trial.rounds]
    if len(entropies) > 1:
        columns = min(60, max(console.width - 10, 10))
        each = "" if len(entropies) <= columns else ", several rounds to a column"
        console.print(f"\nentropy of all labels in the cohort by round, in bits (at most {top:.2f}){each}")
        plain = not console.encoding.lower().startswith("utf")
        for line in chart(entropies, top, first=trial.rounds[0].round, width=columns, plain=plain):
            console.print(line, markup=False, no_wrap=True, crop=True)
    _show_figures(counts, held, past, baseline is not None)


def _round_lines(trial: Trial, held: int, baseline: Trial | None, width: int) -> list[str]:
    """A line per round: round, entropy, reported entropy, random's entropy, classes, clients."""
    heads = ["round", "entropy"]
    if trial.rounds[0].reported_entropy is not None:
        heads.append("reported")
    if baseline is not None:
        heads.append("random")
    heads.append("classes")
    rows = []
    for place, result in enumerate(trial.rounds):
        cells = [str(result.round), f"{result.entropy:.3f}"]
        if result.reported_entropy is not None:
            cells.append(f"{result.reported_entropy:.3f}")
        if baseline is not None:
            cells.append(f"{baseline.rounds[place].entropy:.3f}")
        rows.append([*cells, f"{result.classes_covered}/{held}"])
    widths = [max(len(head), *(len(row[i]) for row in rows)) for i, head in enumerate(heads)]
    room = max(width - sum(widths) - 2 * len(widths), 0)

    def line(cells: Sequence[str], rest: str) -> str:
        return "  ".join([*(cell.rjust(size) for cell, size in zip(cells, widths, strict=True)), rest]).rstrip()

    hidden = len(rows) - _FIRST - _LAST
    weighed = any(result.weights is not None and not _all_equal(result.weights) for result in trial.rounds)
    lines = [line(heads, "clients (part in the average)" if weighed else "clients")]
    for place, (cells, result) in enumerate(zip(rows, trial.rounds, strict=True)):
        if hidden > 1 and _FIRST <= place < len(rows) - _LAST:
            if place == _FIRST:
                lines.append(line(["...", *[""] * (len(heads) - 1)], f"({hidden} more; --json has all)"))
            continue
        lines.append(line(cells, names_within(result.clients, room, result.weights)))
    return lines


def _all_equal(weights: Sequence[float]) -> bool:
    return len(set(weights)) == 1


def _show_figures(counts: CountsFile, held: int, past: Mapping[str, History], with_random: bool) -> None:
    """What all rounds so far come to, and random selection's in brackets."""
    top = math.log2(max(held, 1))
    ours = past["chosen"].figures(counts.clients)
    theirs = past["random"].figures(counts.clients) if with_random else None
    rounds = past["chosen"].rounds
    # No cohort can cover a class that nobody holds, so it is left out where there is one.
    which = "" if held == len(counts.classes) else " that any client holds"

    def beside(*texts: str) -> str:
        return f" ({', '.join(texts)})" if theirs else ""

    known = theirs or ours
    span = f"rounds {ours['first_round']} to {ours['last_round']}" if rounds > 1 else f"round {ours['last_round']}"
    lines = [
        f"\n{span}" + (", random selection in brackets" if theirs else ""),
        f"entropy: mean {ours['mean_entropy']:.3f}, worst {ours['worst_entropy']:.3f} of {top:.3f} bits"
        + beside(f"{known['mean_entropy']:.3f}", f"{known['worst_entropy']:.3f}"),
    ]
    if "mean_divergence" in ours:
        apart = [f"{known[name]:.3f}" for name in ("mean_divergence", "worst_divergence") if name in known]
        mean, worst = ours["mean_divergence"], ours["worst_divergence"]
        lines.append(f"KL divergence to the target: mean {mean:.3f}, worst {worst:.3f} bits" + beside(*apart))
    lines += [
        f"all classes{which} covered: {past['chosen'].covered} of {rounds} rounds"
        + beside(f"{past['random'].covered}"),
        f"selection entropy H_norm: {ours['selection_entropy']:.3f}"
        + beside(f"{known['selection_entropy']:.3f}")
        + "; 1: all clients equally often",
        f"clients never selected: {ours['never_selected']} of {len(counts.clients)}"
        + beside(f"{known['never_selected']}"),
    ]
    console = out()
    for line in lines:
        console.print(line, markup=False)


def show_sweep(rows: Sequence[SweepRow], counts: CountsFile, rounds: int, *, ranked: bool) -> None:
    """One line for every choice of sizes, random selection among them; `ranked`: by their divergence from a target."""
    console = out()
    top = math.log2(max(classes_held(counts.counts), 1))
    console.print(f"fedentopt: {len(counts.clients)} clients, {_classes(counts)}, {rounds} rounds each")
    table = Table(box=None, pad_edge=False)
    heads = ["cohort", "buffer", *(["divergence", "worst"] if ranked else [])]
    heads += ["mean entropy", *([] if ranked else ["worst"]), "all classes", "H_norm", "never"]
    for heading in heads:
        table.add_column(heading, justify="right", no_wrap=True)
    previous = None
    # In the order of the sizes random selection follows FedEntOpt's buffers; a ranking stays as it is.
    listed = rows if ranked else sorted(rows, key=lambda row: (row.cohort, row.buffer is None))
    for row in listed:
        if not ranked and previous not in (None, row.cohort):
            table.add_row()
        previous = row.cohort
        cells = [str(row.cohort), "random" if row.buffer is None else str(row.buffer)]
        if ranked:
            cells += [f"{row.mean_divergence or 0.0:.3f}", f"{row.worst_divergence or 0.0:.3f}"]
        cells.append(f"{row.mean_entropy:.3f}")
        if not ranked:
            cells.append(f"{row.worst_entropy:.3f}")
        table.add_row(*cells, f"{100 * row.coverage:.0f} %", f"{row.selection_entropy:.3f}", str(row.never_selected))
    print_table(console, table)
    aim = "Ranked by the mean KL divergence to the target, in bits, 0 is best. " if ranked else ""
    console.print(
        f"\n{aim}Entropy of the cohort's labels in bits, at most {top:.3f}; all classes: rounds whose cohort held "
        "every class that any client holds; H_norm: how evenly clients were selected, 1 is best; never: clients never "
        "selected; random: uniform selection of as many. A larger buffer spreads the selection over more clients; a "
        "larger cohort balances the labels better and costs more communication."
    )


def _classes(counts: CountsFile) -> str:
    missing = len(counts.classes) - classes_held(counts.counts)
    return f"{len(counts.classes)} classes" + (f" ({missing} held by nobody)" if missing else "")


def _one_name(client: object) -> str:
    text = " ".join(str(client).split())
    return f'"{text}"' if "," in text else text
