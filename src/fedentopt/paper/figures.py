"""Figures 1 and 2, and accuracy over rounds, as one puts them into a paper: SVG and PNG.

Lines are means over seeds, bands one standard deviation to either side. Colours are Okabe and Ito's, which people
with colour-blindness can tell apart; methods differ in marker or line style as well, for print without colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError
from fedentopt.files import make_folder, write_aside
from fedentopt.paper import names
from fedentopt.paper.cells import Cell
from fedentopt.paper.comparison import Comparison
from fedentopt.paper.measures import Results
from fedentopt.paper.names import by_participation, row_names
from fedentopt.paper.selector_figure import selector_figure
from fedentopt.paper.selector_table import SELECTORS
from fedentopt.paper.sizes import shapes
from fedentopt.results.statistics import Spread

BLACK, ORANGE, SKY, GREEN, BLUE, VERMILLION, PURPLE, GREY = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#999999",
)  # fmt: skip
LEGEND = 0.6  # inches below the panels
LEGEND_LINE = 0.17  # and for each further line
LEGEND_MOST = 1.2  # of the panels' width
STYLES: Mapping[str, tuple[str, str, str]] = {
    "fedavg": (BLACK, "-", "o"),
    "fedprox": (SKY, "-", "s"),
    "fednova": (BLUE, "-", "v"),
    "scaffold": (GREEN, "-", "^"),
    "fedconcat": (PURPLE, "-", "D"),
    "fedlc": (ORANGE, "-", "P"),
    "fedrs": (PURPLE, "--", "X"),
    "kl": (GREY, "-", "h"),
    "fedentropy": (BLUE, "-.", "v"),
    "fedentopt": (VERMILLION, "-", "*"),
    "fedentopt-dp": (VERMILLION, "--", "p"),
}
REPEATED = [(colour, style) for style in (":", "--", "-.") for colour in (BLACK, SKY, GREEN, ORANGE, BLUE, PURPLE)]
"""For further lines of a method that has its own style already."""

LOOK: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "legend.frameon": False,
    "savefig.bbox": "tight",
    "savefig.dpi": 200,
    "svg.hashsalt": "fedentopt",  # the same figure gives the same file
    "svg.fonttype": "none",
}
Points = list[tuple[float, float, float]]
"""Position, mean, standard deviation (0 for one seed)."""


def write_figures(folder: Path, comparisons: Sequence[Comparison], results: Results) -> list[Path]:
    """Draw every figure for which there are results; gives the files written.

    Refused where Matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise InputError(
            "figures: Matplotlib is not installed; pip install 'fedentopt[sim]' or leave them out"
        ) from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn: list[tuple[str, Any]] = []
    with mpl.rc_context(LOOK):
        for name in dict.fromkeys(entry.cell.table for entry in comparisons):
            entries = [entry for entry in comparisons if entry.cell.table == name and entry.values]
            metrics = {entry.cell.metric for entry in entries}
            if name == SELECTORS:
                figure = selector_figure(entries)
                drawn += [(name, figure)] if figure is not None else []
            elif metrics == {"entropy"}:
                drawn.append((name, _entropy(entries, results)))
            elif metrics == {"accuracy"} and len({entry.cell.participation for entry in entries}) > 1:
                drawn.append((name, _participation(entries)))
            elif metrics == {"accuracy"} and name == "table1":
                drawn.append(("accuracy", _accuracy(entries, results)))
        written = []
        for name, figure in drawn:
            make_folder(folder)
            FigureCanvasAgg(figure)  # no window system, no global figure list
            for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
                path = folder / f"{name}.{kind}"
                write_aside(path, partial(figure.savefig, format=kind, metadata=metadata))
                written.append(path)
    return written


def _entropy(entries: Sequence[Comparison], results: Results) -> Any:
    """Figure 1: entropy of the cohort's labels in every round."""
    figure, axes = _panels(1, 1, width=3.5, height=2.2)
    for entry, label in zip(entries, _labels(entries), strict=True):
        _line(axes[0][0], entry.cell, label, _curve(entry, results, column=2), markers=False)
    known = {shapes().get(entry.cell.dataset, (None, None))[0] for entry in entries}
    most = known.pop() if len(known) == 1 else None
    if most is not None:
        for classes, text in ((most, f"log₂ {most}"), (most - 1, f"log₂ {most - 1}")):
            axes[0][0].axhline(math.log2(classes), color=GREY, linewidth=0.8, linestyle=":")
            axes[0][0].annotate(text, (1.0, math.log2(classes)), xycoords=("axes fraction", "data"), va="center")
    axes[0][0].set_xlabel("Communication round")
    axes[0][0].locator_params(axis="x", integer=True)
    axes[0][0].set_ylabel("Label entropy of the cohort (bits)")
    _legend(figure, axes)
    return figure


def _participation(entries: Sequence[Comparison]) -> Any:
    """Figure 2: accuracy by the share of the clients that train each round."""
    shares = sorted({entry.cell.participation or 0.0 for entry in entries})

    def draw(axis: Any, here: Sequence[Comparison]) -> None:
        lines = by_participation(here)
        for line, label in zip(lines, _labels([line[0] for line in lines]), strict=True):
            points = [(entry.cell.participation or 0.0, entry.ours or 0.0, entry.std or 0.0) for entry in line]
            _line(axis, line[0].cell, label, sorted(points))
        axis.set_xlabel("Participation (%)")
        axis.set_xticks(shares)

    return _by_setting(entries, draw)


def _accuracy(entries: Sequence[Comparison], results: Results) -> Any:
    """Test accuracy over rounds on the cells of Table 1."""

    def draw(axis: Any, here: Sequence[Comparison]) -> None:
        for entry, label in zip(here, _labels(here), strict=True):
            _line(axis, entry.cell, label, _curve(entry, results, column=1), markers=False)
        axis.set_xlabel("Communication round")
        axis.locator_params(axis="x", integer=True)

    return _by_setting(entries, draw)


def _by_setting(entries: Sequence[Comparison], draw: Callable[[Any, Sequence[Comparison]], None]) -> Any:
    """A panel of accuracies for every setting: a row a model, from large to small as the paper shows them, a column a
    data set and partition."""
    models = list(dict.fromkeys(entry.cell.model for entry in entries))[::-1]
    columns = list(dict.fromkeys(_column(entry.cell) for entry in entries))
    figure, axes = _panels(len(models), len(columns))
    for row, model in zip(axes, models, strict=True):
        for axis, column in zip(row, columns, strict=True):
            draw(axis, [entry for entry in entries if (entry.cell.model, *_column(entry.cell)) == (model, *column)])
            _title(axis, model, column)
        row[0].set_ylabel("Test accuracy (%)")
    _legend(figure, axes)
    return figure


def _curve(entry: Comparison, results: Results, column: int) -> Points:
    """Mean and deviation over the seeds in every round that all of them have."""
    if entry.cell.config is None:
        return []
    curves = []
    for seed in entry.values:
        curve = results.curve_of(entry.cell, entry.cell.config, seed)
        curves.append({point[0]: point[column] for point in curve if point[column] is not None})
    shared = set.intersection(*(set(own) for own in curves)) if curves else set()
    points: Points = []
    for number in sorted(shared):
        spread = Spread.of(float(own[number] or 0.0) for own in curves)
        points.append((number, spread.mean, spread.std if spread.count > 1 else 0.0))
    return points


def _line(axis: Any, cell: Cell, label: str, points: Points, *, markers: bool = True) -> None:
    if not points:
        return
    colour, style, marker = STYLES.get(cell.method or "", (BLACK, ":", "."))
    drawn = [line for line in axis.lines if line.get_color() == colour and line.get_linestyle() == style]
    if drawn:  # the same method with other settings
        colour, style = REPEATED[len(axis.lines) % len(REPEATED)]
    x = [point[0] for point in points]
    front = 3 if (cell.method or "").startswith("fedentopt") else 2
    axis.plot(
        x, [point[1] for point in points], style, color=colour, marker=marker if markers else None,
        label=label, zorder=front,
    )  # fmt: skip
    low, high = [point[1] - point[2] for point in points], [point[1] + point[2] for point in points]
    axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0, zorder=1)


def _labels(entries: Sequence[Comparison]) -> list[str]:
    """What the lines of one panel are called."""
    return [_literal(name) for name in row_names([entry.cell for entry in entries], _label)]


def _label(cell: Cell) -> str:
    label = "Random (FedAvg)" if cell.metric == "entropy" and cell.method == "fedavg" else names.method(cell.method)
    return f"{label}, Q={cell.buffer:g} %" if cell.extra and cell.buffer is not None else label


def _column(cell: Cell) -> tuple[str, str]:
    return names.data(cell), cell.partition or ""


def _panels(rows: int, columns: int, *, width: float = 2.1, height: float = 1.9) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows + LEGEND), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _title(axis: Any, model: str, column: tuple[str, str]) -> None:
    axis.set_title(_literal(f"{names.model(model)}, {column[0]}, {names.partition(column[1])}"))
    if not axis.lines:
        axis.set(xticks=[], yticks=[])
        axis.text(0.5, 0.5, "not run", ha="center", va="center", transform=axis.transAxes, color=GREY)


def _literal(text: str) -> str:
    """Text that Matplotlib shows as it is: dollar signs in a user's name begin no formula."""
    return text.replace("$", "\\$")


def _legend(figure: Any, axes: Any) -> None:
    handles = {label: handle for row in axes for axis in row
               for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}  # fmt: skip
    if not handles:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    renderer, most = canvas.get_renderer(), min(5, len(handles))
    for columns in range(most, 0, -1):  # names of settings may be longer than the panels are wide
        legend = figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)
        if columns == 1 or legend.get_window_extent(renderer).width <= LEGEND_MOST * figure.bbox.width:
            break
        legend.remove()
    more_lines = math.ceil(len(handles) / columns) - math.ceil(len(handles) / most)
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * more_lines)
