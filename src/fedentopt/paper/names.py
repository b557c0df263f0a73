"""How tables and figures name things and put figures into words: methods, models, data sets and partitions as the paper
writes them, rows so that no two of them read alike, a cell's figures the same in every table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fedentopt.datasets import default_image_size
from fedentopt.paper.cells import Cell
from fedentopt.paper.comparison import PARTLY, Comparison
from fedentopt.paper.printed import DATASETS, MODELS, PARTITIONS
from fedentopt.results.statistics import Interval, mean
from fedentopt.results.summary import LAST, averaged_rounds
from fedentopt.simulation.config import LATER_OF_METHODS, PARTS, RunConfig, options

METHODS = {name: registry.label(name) for registry in PARTS.values() for name in registry.names}
"""How the paper writes the names of methods."""
TABLES = {
    "table1": "Table 1: baselines and FedEntOpt",
    "table2": "Table 2: combinations with FedEntOpt",
    "table3": "Table 3: dropout and straggling",
    "table4": "Table 4: medical images",
    "table5": "Table 5: communication",
    "table6": "Table 6: buffer size and selection diversity",
    "figure1": "Figure 1: entropy of the cohort's labels",
    "figure2": "Figure 2: participation",
    "grid-mu": "Grid: FedProx's proximal weight",
    "grid-weight-decay": "Grid: weight decay",
    "grid-buffer": "Grid: buffer size",
    "single-class": "Limit: clients with a single class",
    "mri-pretraining": "Brain-Tumor MRI: with and without pre-training",
    "bf16": "Arithmetic: bf16 beside TF32",
    "vgg11-open": "VGG-11 under Dir(0.1): what the paper leaves open",
    "lenet5-open": "LeNet-5 on CIFAR-10: what the paper leaves open",
    "inferred": "Selection without label reports",
    "liars": "Clients that lie about their labels",
    "selectors": "Every selector",
    "selectors-algorithms": "FedEntOpt with algorithms that re-weight or correct",
    "selectors-averaging": "Selectors with weights of their own, averaged by samples",
    "selectors-tuning": "Grid: one setting of every selector",
    "selectors-tuned": "Every selector, tuned on held-out data",
}


def method(name: str | None) -> str:
    """`fedprox+fedentopt-dp` as FedProx + FedEntOpt (DP); empty for none."""
    if name is None:
        return ""
    plain = name.removesuffix("-dp")
    written = " + ".join(METHODS.get(part, part) for part in plain.split("+"))
    return f"{written} (DP)" if plain != name else written


def model(name: str) -> str:
    """`lenet5` as LeNet-5."""
    others = {"EfficientNet-Lite0": "efficientnet-lite0", "VGG-11-BN": "vgg11-bn"}  # no models of the paper's
    return _written(MODELS | others, name)


def dataset(name: str) -> str:
    """`cifar10` as CIFAR-10."""
    return _written(DATASETS, name)


def partition(name: str | None) -> str:
    """`dir:0.1` as Dir(0.1), `classes:2` as C=2, `mixed:0.001,0.5` as mixed Dir(0.001, 0.5); empty for none."""
    if name is None:
        return ""
    if name.startswith("mixed:") and "+" not in name:
        return f"mixed Dir({name.removeprefix('mixed:').replace(',', ', ')})"
    if name.startswith("shards:"):
        return f"{name.removeprefix('shards:')} shards"
    if name.startswith("classes:"):
        return f"C={name.removeprefix('classes:')}"
    if name.startswith("dir:") and "+" not in name:
        return f"Dir({name.removeprefix('dir:')})"
    return _written(PARTITIONS, name)


def table(name: str) -> str:
    """A table's title."""
    return TABLES.get(name, name)


def _written(names: dict[str, str], name: str) -> str:
    return {ours: printed for printed, ours in names.items()}.get(name, name)


NAMED_BY_CELL = ("dataset", "model", "partition", "algorithm", "selector", "cohort", "buffer", "seed")
"""Settings of a run for which a cell has words of its own."""


def row_names(cells: Sequence[Cell], name: Callable[[Cell], str]) -> list[str]:
    """One name per cell, in their order: what `name` says, and where several say the same, how those differ."""
    plain = [name(cell) for cell in cells]
    alike: dict[str, list[int]] = {}
    for number, text in enumerate(plain):
        alike.setdefault(text, []).append(number)
    names = list(plain)
    for text, numbers in alike.items():
        if len(numbers) > 1:
            for number, words in zip(numbers, _differences([cells[number] for number in numbers]), strict=True):
                names[number] = ", ".join([text, *words])
    return names


def by_participation(entries: Iterable[Comparison]) -> list[list[Comparison]]:
    """Entries that differ in participation alone, together; in the order they first appear."""
    rows: dict[Any, list[Comparison]] = {}
    for entry in entries:
        settings = entry.cell.config.to_dict() if entry.cell.config else {}
        settings.pop("cohort", None)
        key = (dataclasses.replace(entry.cell, participation=None).identity, tuple(settings.items()))
        rows.setdefault(key, []).append(entry)
    return list(rows.values())


def _differences(cells: Sequence[Cell]) -> list[list[str]]:
    """For each of the cells, in words, everything in which not all of them are the same."""
    swept = list(dict.fromkeys(name for cell in cells for name, _ in cell.swept))
    known = dict.fromkeys((*RunConfig().to_dict(), *options()))
    fields = [name for name in known if name not in (*NAMED_BY_CELL, *swept)]
    wordings: list[Callable[[Cell], str]] = [
        *(lambda cell, name=name: f"{name} {_setting(cell, name)}" for name in (*swept, *fields)),
        *([] if "cohort" in swept else [lambda cell: f"participation {_number(cell.participation)} %"]),
        lambda cell: f"buffer {_number(cell.buffer)} %",
        *(lambda cell, name=name: f"{name} {getattr(cell, name)}"
          for name in ("method", "availability", "partition", "dataset", "model")),
    ]  # fmt: skip
    columns = [[words(cell) for cell in cells] for words in wordings]
    differing = [column for column in columns if len(set(column)) > 1]
    if not differing:  # the same runs, over other seeds
        differing = [[f"seeds {', '.join(map(str, cell.seeds))}" for cell in cells]]
    return [list(words) for words in zip(*differing, strict=True)]


def _setting(cell: Cell, name: str) -> Any:
    """A setting as the cell's block gives it, else as its run has it, some of which at their defaults are not told."""
    given = dict(cell.swept)
    if name in given or cell.config is None:
        return given.get(name)
    untold = {option: setting.default for option, setting in options().items()} | LATER_OF_METHODS
    return cell.config.to_dict().get(name, untold.get(name))


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    short = f"{value:g}"
    return short if float(short) == value else str(value)


NOTHING = "–"


def counted(number: int, what: str) -> str:
    """`1 run`, `3 runs`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def averaged(entries: Iterable[Comparison]) -> str:
    """Of which rounds these accuracies are the mean, in words."""
    rounds = {min(LAST, entry.cell.config.rounds) for entry in entries if entry.cell.config is not None}
    text = averaged_rounds({"rounds": number} for number in rounds)
    return text if len(rounds) < 2 else f"{text}, of all where there are fewer"


def ours(entry: Comparison | None, *, signed: bool = False) -> str:
    """Mean ± deviation; how many seeds diverged behind it."""
    if entry is None or entry.ours is None:
        return NOTHING
    text = _figure(entry.cell, entry.ours, signed)
    if entry.std is not None:
        text += f" ± {_figure(entry.cell, entry.std)}"
    return f"{text} ({entry.diverged} diverged)" if entry.diverged else text


def paper(entry: Comparison, *, signed: bool = False) -> str:
    """What is printed in the paper."""
    cell = entry.cell
    if cell.paper is None:
        return NOTHING
    text = _figure(cell, cell.paper, signed)
    return text if cell.paper_std is None else f"{text} ± {_figure(cell, cell.paper_std)}"


def gap(entry: Comparison) -> str:
    """Ours minus the paper's."""
    return NOTHING if entry.difference is None else _figure(entry.cell, entry.difference, signed=True)


def against(entry: Comparison) -> str:
    """Ours minus FedAvg's, bold where zero lies outside the interval; without one where a single seed is shared."""
    if entry.against is None:
        return NOTHING if entry.lead is None else _figure(entry.cell, entry.lead, signed=True)
    text = f"{_figure(entry.cell, entry.against.mean, signed=True)} {limits(entry.cell, entry.against)}"
    return f"**{text}**" if entry.against.clear else text


def interval(gap: Interval | None, single: Sequence[float] = ()) -> str:
    """A mean difference in points with its limits; without any, the single differences."""
    if gap is None:
        return ", ".join(f"{one:+.2f}" for one in single) or NOTHING
    return f"{gap.mean:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]"


def difference(gap: Interval | None, single: Sequence[float] = ()) -> str:
    """The same, bold where zero lies outside."""
    text = interval(gap, single)
    return f"**{text}**" if gap is not None and gap.clear else text


def limits(cell: Cell, interval: Interval) -> str:
    """The two ends of an interval."""
    return f"[{_figure(cell, interval.low, signed=True)}, {_figure(cell, interval.high, signed=True)}]"


def rounds_to(entry: Comparison, target: int) -> str:
    """First evaluated round with an accuracy, mean over the seeds that reach it; how many do, where not all."""
    rounds = [getattr(run, f"rounds_to_{target}") for run in entry.runs]
    reached = [number for number in rounds if number is not None]
    average = mean(reached)
    text = NOTHING if average is None else f"{average:.0f}"
    return text if len(reached) == len(rounds) else f"{text} ({len(reached)} of {len(rounds)})"


def in_others(entry: Comparison) -> str:
    """How many of a row's seeds are in another precision than its cell's own; nothing where none is."""
    said = [f"{len(own)} in {name}" for name, own in entry.stand_ins.items()]
    return f" ({', '.join(said)})" if said else ""


def fewer_seeds(line: Sequence[Comparison | None]) -> str:
    """How many of the wanted seeds stand behind each figure of a line that has no column for it; nothing where no
    figure lacks any."""
    there = [entry for entry in line if entry is not None]
    wanted = max((len(entry.cell.seeds) for entry in there), default=0)
    if all(len(entry.values) in (0, len(entry.cell.seeds)) for entry in there):
        return ""
    counts = [NOTHING if entry is None else str(len(entry.values)) for entry in line]
    return f" ({', '.join(counts if len(set(counts)) > 1 else counts[:1])} of {wanted} seeds)"


def seeds(entry: Comparison) -> str:
    """How many of the wanted seeds stand behind a row, how many in another precision, and whether their runs were cut
    short."""
    wanted, found = len(entry.cell.seeds), len(entry.values)
    text = str(found) if found == wanted else f"{found} of {wanted}"
    text += in_others(entry)
    if entry.cell.shortened and entry.state == PARTLY and entry.cell.config is not None:
        return f"{text}, cut to {counted(entry.cell.config.rounds, 'round')}"
    return text


def _figure(cell: Cell, value: float, signed: bool = False) -> str:
    digits = 2 if cell.metric.startswith(("accuracy", "validation")) else 3
    return f"{value:+.{digits}f}" if signed else f"{value:.{digits}f}"


def row_name(cell: Cell) -> str:
    """The method, and what else tells rows of one section apart."""
    parts = [method(cell.method)]
    if cell.extra:
        parts += [f"{name.rpartition('.')[2]} {value}" for name, value in cell.swept]  # selector.d is d to a reader
        parts += [f"participation {cell.participation:g} %"] if cell.table == "single-class" else []
        parts += [f"buffer {cell.buffer:g} %"] if cell.buffer is not None else []
    return ", ".join(parts)


def data(cell: Cell) -> str:
    """The data set, with what its runs make of it otherwise than usual: no two of these are one data set."""
    if cell.config is None:
        return dataset(cell.dataset)
    size = cell.config.image_size
    parts = ["100 classes"] if cell.config.fine_labels else []
    parts += [] if size in (None, default_image_size(cell.dataset)) else [f"{size} px"]
    return dataset(cell.dataset) + (f" ({', '.join(parts)})" if parts else "")


def heading(cell: Cell) -> str:
    """The setting that rows of one section share."""
    parts = [(cell.availability or "").capitalize(), model(cell.model), data(cell), partition(cell.partition)]
    return ", ".join(part for part in parts if part)
