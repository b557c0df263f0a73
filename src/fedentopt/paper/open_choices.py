"""VGG-11 under Dir(0.1) and LeNet-5, of which some methods end far from the printed figures: one choice that the paper
leaves open is changed at a time, everything else stays as in Table 1.

Two seeds have no interval worth printing, so differences stand seed by seed; of a single one nothing is said. A change
could be what the paper did only if it brings all methods near their printed figures, those among them that were near
before: FedEntOpt is run for that. Nothing here decides a setting of the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedentopt.paper import names
from fedentopt.paper.comparison import DONE, Comparison
from fedentopt.paper.findings import FAR
from fedentopt.paper.formats import Section, Table
from fedentopt.paper.printed import printed_accuracy
from fedentopt.results.statistics import paired_differences

OPEN_CHOICES = {"vgg11-open": "vgg11", "lenet5-open": "lenet5"}
"""The studies, each with the model of Table 1 that it begins from."""
AS_CHOSEN = "as in Table 1"
SEEDS = 2
"""The least that a change is judged by, also where fewer are asked for."""
WORDS: dict[tuple[str, Any], str] = {
    ("model", "vgg11-bn"): "BatchNorm after every convolution",
    ("initialisation", "layers"): "start weights by torch's defaults",
    ("lr_decay", 0.998): "learning rate × 0.998 per round",
    ("scaffold_start", "random"): "control variates start as a random network",
    ("scaffold_divisor", "cohort"): "server's control variate over the cohort alone",
    ("scaffold_variant", "gradient"): "correction inside the gradient",
    ("fednova_normaliser", "steps"): "normalised by numbers of steps",
}
"""How the changes read, by setting and value."""


def change(entry: Comparison) -> str:
    """What is other than in Table 1, in words."""
    cell = entry.cell
    changed = [*cell.swept, *([] if cell.model == OPEN_CHOICES[cell.table] else [("model", cell.model)])]
    return " and ".join(WORDS.get((name, value), f"{name} {value}") for name, value in changed) or AS_CHOSEN


def open_choices_table(name: str, entries: Sequence[Comparison]) -> Table:
    """A row per method and change; in words behind it, how far each change leaves its methods from the paper."""
    sections: dict[str, list[tuple[str, ...]]] = {}
    for method in dict.fromkeys(entry.cell.method for entry in entries):
        own = [entry for entry in entries if entry.cell.method == method]
        for entry in own:
            base = _as_chosen(entry, own)
            figure = _printed(entry)
            gap = None if figure is None or entry.ours is None else entry.ours - figure
            moved = [] if base is None or base is entry else paired_differences(entry.values, base.values)
            heading = names.heading((base or entry).cell)
            sections.setdefault(heading, []).append((
                f"{names.method(method)}, {change(entry)}", names.ours(entry),
                names.interval(None, moved),
                names.NOTHING if figure is None else f"{figure:.2f}",
                names.NOTHING if gap is None else f"{gap:+.2f}", names.seeds(entry),
            ))  # fmt: skip
    columns = (
        "method, change", "accuracy", "minus Table 1's choice, seed by seed", "paper", "minus the paper's", "seeds",
    )  # fmt: skip
    note = (
        f"Test accuracy in per cent, {names.averaged(entries)}. Every row but the first of a method changes one "
        "choice that the paper leaves open. "
    )
    made = tuple(Section(heading, tuple(rows)) for heading, rows in sections.items())
    said = found(entries)
    return Table(name, names.table(name), note + said, columns, made, found=said)


def found(entries: Sequence[Comparison]) -> str:
    """For every change whose runs are all there: which methods it leaves near their printed figures, which far."""
    several = len({entry.cell.partition for entry in entries}) > 1
    sentences, waiting = [], []
    for what in dict.fromkeys(map(change, entries)):
        own = [entry for entry in entries if change(entry) == what]
        if any(entry.state != DONE or len(entry.values) < SEEDS for entry in own):
            waiting.append(what)
            continue
        gaps = [
            (entry, entry.ours - figure)
            for entry in own
            if (figure := _printed(entry)) is not None and entry.ours is not None
        ]
        if not gaps:  # no cells of the paper's
            continue
        near = [_apart(entry, gap, several) for entry, gap in gaps if abs(gap) <= FAR]
        away = [_apart(entry, gap, several) for entry, gap in gaps if abs(gap) > FAR]
        parts = [f"{word} {', '.join(some)}" for word, some in (("near with", near), ("far with", away)) if some]
        sentences.append(f"{what[0].upper() + what[1:]}: {'; '.join(parts)}.")
    if sentences:
        sentences.insert(0, f"Within {FAR:g} points of the printed figure counts as near, all else as far.")
    if waiting:
        sentences.append(f"Nothing is said yet, for want of runs, of: {', '.join(waiting)}.")
    return " ".join(sentences)


def _apart(entry: Comparison, gap: float, several: bool) -> str:
    """A method, with its partition beside several, how far it is from its printed figure, and how many of its seeds
    count as chance behind that."""
    diverged = f", {entry.diverged} of {len(entry.values)} diverged" if entry.diverged else ""
    where = f" under {names.partition(entry.cell.partition)}" if several else ""
    return f"{names.method(entry.cell.method)}{where} ({gap:+.1f}{diverged})"


def _as_chosen(entry: Comparison, of_method: Sequence[Comparison]) -> Comparison | None:
    for other in of_method:
        if change(other) == AS_CHOSEN and other.cell.partition == entry.cell.partition:
            return other
    return None


def _printed(entry: Comparison) -> float | None:
    cell = entry.cell
    return printed_accuracy("table1", OPEN_CHOICES[cell.table], cell.dataset, cell.partition, cell.method)
