"""Does pre-training explain Brain-Tumor MRI, where B0 from random weights ends far below the printed figures?

The paper does not say from which weights it starts. Published ones can be had here of EfficientNet-Lite0 alone, so what
pre-training is worth is the difference between the two starts of that network, seed by seed, and stands beside what B0
lacks. It is another network: the sentences say whether the one is as large as the other, not what B0 would have
reached. Of a single seed nothing is said.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedentopt.paper import names
from fedentopt.paper.comparison import Comparison
from fedentopt.paper.findings import FAR
from fedentopt.paper.formats import Section, Table
from fedentopt.paper.printed import printed_accuracy
from fedentopt.results.statistics import paired_differences, paired_interval

PRETRAINING = "mri-pretraining"
STARTS = {None: "random weights", "pretrained": "ImageNet's weights"}
"""How start weights read; others by their own name."""


def pretraining_table(name: str, entries: Sequence[Comparison]) -> Table:
    """A row per method and start, a section per network; in words behind it what pre-training changes, and whether
    that is as much as is missing."""
    sections: dict[str, list[tuple[str, ...]]] = {}
    for entry in entries:
        figure = _printed(entry)
        gap = None if figure is None or entry.ours is None else entry.ours - figure
        sections.setdefault(names.heading(entry.cell), []).append((
            f"{names.method(entry.cell.method)}, {_start(entry)}", names.ours(entry), _moved(entry, entries),
            names.against(entry), names.NOTHING if figure is None else f"{figure:.2f}",
            names.NOTHING if gap is None else f"{gap:+.2f}", names.seeds(entry),
        ))  # fmt: skip
    columns = (
        "method, start", "accuracy", "minus random weights, 95 % interval", "against FedAvg, 95 % interval", "paper",
        "minus the paper's", "seeds",
    )  # fmt: skip
    note = (
        f"Test accuracy in per cent, {names.averaged(entries)}, mean ± sample standard deviation over seeds. "
        "Differences are seed by seed (same partition, same order of clients), against FedAvg from the same start; "
        "bold where zero lies outside the interval. "
    )
    made = tuple(Section(heading, tuple(rows)) for heading, rows in sections.items())
    said = found(entries)
    return Table(name, names.table(name), note + said, columns, made, found=said)


def found(entries: Sequence[Comparison]) -> str:
    """A sentence per network with two starts and method: what pre-training changes, beside what the paper's lacks."""
    sentences, waiting = [], []
    for entry in entries:
        base = _random_start(entry, entries)
        if base is None:
            continue
        method, model = names.method(entry.cell.method), names.model(entry.cell.model)
        shared = len(paired_differences(entry.values, base.values))
        gap = paired_interval(entry.values, base.values)
        if gap is None or entry.cell.shortened:
            waiting.append(f"{method} with {model}")
            continue
        start = f"{method}: {_start(entry)} change {model} by {names.interval(gap)} points over {shared} seeds"
        diverged = [f"{which.diverged} from {_start(which)}" for which in (base, entry) if which.diverged]
        start += f" ({' and '.join(diverged)} diverged)" if diverged else ""
        missing = [
            (names.model(other.cell.model), other.ours - figure)
            for other in entries
            if other.cell.method == entry.cell.method and other.cell.partition == entry.cell.partition
            and _start(other) == STARTS[None] and not other.cell.shortened and other.ours is not None
            and (figure := _printed(other)) is not None
        ]  # fmt: skip
        if not missing:
            printed_too = any(_printed(other) is not None for other in entries)
            waits = "; the network that the paper prints has no results yet" if printed_too else ""
            sentences.append(f"{start}{waits}.")
        for network, lacks in missing:
            sentences.append(f"{start}; {network} from random weights {_compared(lacks, gap.low, gap.high)}.")
    if waiting:
        sentences.append(
            f"Nothing is said yet, for want of two seeds of both starts at full length, of: {', '.join(waiting)}."
        )
    return " ".join(sentences)


def _compared(lacks: float, low: float, high: float) -> str:
    """What is missing to the printed figure, and whether what pre-training changes is as much."""
    if lacks >= -FAR:
        return f"is {lacks:+.1f} points from the printed figure, so there is nothing to explain"
    said = f"lacks {-lacks:.1f} points to the printed figure: pre-training "
    if low >= -lacks:
        return f"{said}changes as much or more"
    if high < -lacks:
        return f"{said}changes less" if high > 0 else f"{said}does not help"
    return f"{said}may be worth that, but so few seeds do not tell" if low < 0 else f"{said}may be worth that"


def _start(entry: Comparison) -> str:
    weights = None if entry.cell.config is None else entry.cell.config.weights
    return STARTS.get(weights, str(weights))


def _random_start(entry: Comparison, entries: Sequence[Comparison]) -> Comparison | None:
    """The same runs from random weights; None for such a run itself."""
    config = entry.cell.config
    if config is None or config.weights is None:
        return None
    wanted = config.replace(weights=None)
    return next((other for other in entries if other.cell.config == wanted), None)


def _moved(entry: Comparison, entries: Sequence[Comparison]) -> str:
    base = _random_start(entry, entries)
    if base is None:
        return names.NOTHING
    both = entry.values, base.values
    return names.difference(paired_interval(*both), paired_differences(*both))


def _printed(entry: Comparison) -> float | None:
    cell = entry.cell
    return printed_accuracy("table4", cell.model, cell.dataset, cell.partition, cell.method)
