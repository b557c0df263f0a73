"""Accuracy against what it costs a client: every selector's points above random selection, on a ladder of what it asks.

A rung holds the selectors that ask for the same, from nothing at the top to a client's own update at the bottom; a
panel is a participation, both on one scale. Small dots are single settings, the large one their mean; the dashed line
is what training everybody every round would bring. FedEntOpt and the selectors made here are stars. Random
selection, which everything is counted from, stands on the rung that asks for nothing.

The panels are narrow and the text is large for them: a phone shows the figure at three quarters of its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedentopt.paper import names
from fedentopt.paper.comparison import Comparison
from fedentopt.paper.selector_asks import KINDS, MADE_HERE, OURS, RANDOM, ask
from fedentopt.paper.selector_table import BenchSetting, bench_settings, gains
from fedentopt.results.statistics import mean

BLUE, RED, GREY = "#0072B2", "#D55E00", "#777777"
MINE = (OURS, *MADE_HERE)
TEXT = 9  # points
RUNG = 1.5  # rows between the last selector of a rung and the first of the next, where the rung's name stands


def selector_figure(entries: Sequence[Comparison]) -> Any:
    """The figure as Matplotlib's; None where no setting has random selection and another selector."""
    settings = [setting for setting in bench_settings(entries) if setting.against_random]
    places, rungs = _ladder(settings)
    if not places:
        return None
    from matplotlib.figure import Figure

    shares = sorted({setting.participation for setting in settings})
    lowest = max(places.values()) + 0.8
    figure = Figure(figsize=(1.9 + 2.0 * len(shares), 1.2 + 0.24 * lowest), layout="constrained")
    axes = figure.subplots(1, len(shares), squeeze=False, sharey=True, sharex=True)[0]
    for axis, share in zip(axes, shares, strict=True):
        _panel(axis, [setting for setting in settings if setting.participation == share], places, share)
        for y, _ in rungs:
            axis.axhline(y - 0.65, color=GREY, linewidth=0.5, alpha=0.5)
    first = axes[0]
    first.set_ylim(lowest, -0.75)
    first.set_yticks(list(places.values()), [names.method(method) for method in places])
    for label, method in zip(first.get_yticklabels(), places, strict=True):
        label.set_color(RED if method in MINE else "black")
        label.set_fontsize(TEXT)
    for y, kind in rungs:
        first.annotate(
            kind, (0, y), xycoords=("axes fraction", "data"), xytext=(-4, 0), textcoords="offset points", ha="right",
            va="center", fontsize=TEXT, fontweight="bold", color=GREY, annotation_clip=False,
        )  # fmt: skip
    figure.suptitle("What a selector gains, by what it asks of a client beside its model", fontsize=TEXT)
    return figure


def _ladder(settings: Sequence[BenchSetting]) -> tuple[dict[str, float], list[tuple[float, str]]]:
    """Row of every selector that can be shown, and row and name of every rung; the best of a rung comes first."""
    found = {method: mean(list(own.values())) or 0.0 for method, own in gains(settings).items() if own}
    found |= {RANDOM: 0.0} if found else {}
    places: dict[str, float] = {}
    rungs = []
    y = 0.0
    for burden, kind in enumerate(KINDS):
        mine = sorted((method for method in found if ask(method).burden == burden), key=lambda m: -found[m])
        if mine:
            rungs.append((y, kind))
            for method in mine:
                y += 1
                places[method] = y
            y += RUNG
    return places, rungs


def _panel(axis: Any, settings: Sequence[BenchSetting], places: dict[str, float], share: float) -> None:
    from matplotlib.ticker import AutoMinorLocator

    for method, own in gains(settings).items():
        values, y, mine = list(own.values()), places[method], method in MINE
        colour = RED if mine else BLUE
        axis.plot(values, [y] * len(values), ".", color=colour, alpha=0.3, markersize=5, zorder=2)
        axis.plot(mean(values), y, "*" if mine else "o", color=colour, markersize=9 if mine else 5.5, zorder=3)
    axis.plot(0, places[RANDOM], "o", color=GREY, markersize=6, zorder=3)
    axis.axvline(0, color=GREY, linewidth=0.9)
    ceiling = _ceiling(settings)
    if ceiling is not None:
        axis.axvline(ceiling, color=GREY, linewidth=1.1, linestyle="--")
        axis.annotate(
            "all clients", (ceiling, 0), xytext=(3, 0), textcoords="offset points", ha="left", va="center",
            fontsize=TEXT - 1, color=GREY,
        )  # fmt: skip
    axis.xaxis.set_minor_locator(AutoMinorLocator(2))
    axis.grid(visible=True, which="both", axis="x")
    axis.grid(visible=False, axis="y")
    axis.tick_params(axis="x", labelsize=TEXT)
    axis.tick_params(axis="y", length=0)
    axis.margins(x=0.08)
    number = len(settings)
    axis.set_title(f"{share:g} % of the clients\nper round, {number} setting{'s' if number > 1 else ''}", fontsize=TEXT)
    axis.set_xlabel("Points above\nrandom selection", fontsize=TEXT)


def _ceiling(settings: Sequence[BenchSetting]) -> float | None:
    """Full participation minus random selection in the seeds that both have, mean of the settings with such."""
    return mean([setting.ceiling_gain for setting in settings if setting.ceiling_gain is not None])
