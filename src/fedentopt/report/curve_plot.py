"""Accuracy over rounds: one line a method, the mean over its seeds, with a band of one standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from fedentopt.files import write_aside
from fedentopt.results.aggregate import MethodResult

# Okabe and Ito's colours, which people with colour-blindness tell apart; line styles for print without colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
STYLES = ("-", "--", "-.", ":")


def plot_accuracy(methods: Sequence[MethodResult], folder: Path, title: str) -> list[Path]:
    """Write `accuracy.png` and `accuracy.svg` into `folder` and return their paths."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A fixed salt and no date: the same runs give the same bytes.
    with rc_context({"svg.hashsalt": "fedentopt", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
        axes = figure.subplots()
        for number, method in enumerate(methods):
            colour = COLOURS[number % len(COLOURS)]
            style = STYLES[number // len(COLOURS) % len(STYLES)]
            rounds = list(method.curve)
            means = [spread.mean for spread in method.curve.values()]
            stds = [spread.std or 0.0 for spread in method.curve.values()]
            axes.plot(rounds, means, style, color=colour, linewidth=1.6, label=method.label)
            low = [mean - std for mean, std in zip(means, stds, strict=True)]
            high = [mean + std for mean, std in zip(means, stds, strict=True)]
            axes.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set(xlabel="round", ylabel="test accuracy (%)", title=title)
        axes.grid(alpha=0.3, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right")
        paths = []
        for kind in ("png", "svg"):
            path = folder / f"accuracy.{kind}"
            about = {"Date": None} if kind == "svg" else {"Software": None}
            write_aside(path, partial(figure.savefig, format=kind, metadata=about))
            paths.append(path)
    return paths
