"""Accuracy over rounds: one line per method, the mean over its seeds, with a band of one standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedentopt.files import write_aside
from fedentopt.report.styles import MARKED, MATPLOTLIB_LINES, MATPLOTLIB_MARKS, styles_by_run
from fedentopt.results.aggregate import MethodResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def accuracy_figure(methods: Sequence[MethodResult], title: str) -> Figure:
    """The figure, which belongs to nobody else: pyplot does not know it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5 + 2.5 * (len(methods) >= MARKED), 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    by_run = styles_by_run(run for method in methods for run in method.runs)
    for method in methods:
        look = by_run[method.runs[0].run_id]
        colour = look.light
        curve = method.curve
        rounds, spreads = list(curve), list(curve.values())
        axes.plot(
            rounds,
            [s.mean for s in spreads],
            linestyle=MATPLOTLIB_LINES[look.dash],
            marker=None if look.mark is None else MATPLOTLIB_MARKS[look.mark],
            markevery=max(1, len(rounds) // 8),
            markersize=5,
            color=colour,
            linewidth=1.6,
            label=_literal(method.label),
        )
        half = [s.std if s.count > 1 else 0.0 for s in spreads]
        low = [s.mean - std for s, std in zip(spreads, half, strict=True)]
        high = [s.mean + std for s, std in zip(spreads, half, strict=True)]
        axes.fill_between(rounds, low, high, color=colour, alpha=0.15 / max(1, len(methods) / 4), linewidth=0)
    axes.set(xlabel="round", ylabel="test accuracy (%)", title=_literal(title))
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    # Many names would cover the lines.
    beside = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "fontsize": "small"}
    axes.legend(frameon=False, **(beside if len(methods) >= MARKED else {"loc": "lower right"}))
    return figure


def plot_accuracy(methods: Sequence[MethodResult], folder: Path, title: str) -> list[Path]:
    """Write `accuracy.png` and `accuracy.svg` into `folder` and return their paths."""
    from matplotlib import rc_context

    figure = accuracy_figure(methods, title)
    paths = []
    # A fixed salt and no date: the same runs give the same bytes.
    with rc_context({"svg.hashsalt": "fedentopt", "svg.fonttype": "none"}):
        for kind, about in (("png", {"Software": None}), ("svg", {"Date": None})):
            paths.append(folder / f"accuracy.{kind}")
            write_aside(paths[-1], partial(figure.savefig, format=kind, metadata=about))
    return paths


def _literal(text: str) -> str:
    """Text that Matplotlib shows as it is: dollar signs in a user's name begin no formula."""
    return text.replace("$", "\\$")
