"""Accuracy against what it costs a client: every selector's points above random selection, by what it asks for.

A panel per participation. Small dots are single settings, the large one their mean; the dashed line is what training
everybody every round would bring. Ours are red stars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedentopt.paper import names
from fedentopt.paper.comparison import Comparison
from fedentopt.paper.selector_table import KINDS, OURS, RANDOM, BenchSetting, ask, bench_settings, gains
from fedentopt.results.statistics import mean

BLUE, RED, GREY = "#0072B2", "#D55E00", "#777777"
MINE = (OURS, "fedentopt-swap", "cycle")


def selector_figure(entries: Sequence[Comparison]) -> Any:
    """The figure as Matplotlib's; None where no setting has random selection and another selector."""
    settings = [setting for setting in bench_settings(entries) if setting.against_random]
    shares = sorted({setting.participation for setting in settings})
    if not any(gains(settings).values()):
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 3.9 * len(shares)), layout="constrained")
    axes = figure.subplots(len(shares), 1, squeeze=False)
    for axis, share in zip(axes[:, 0], shares, strict=True):
        _panel(axis, [setting for setting in settings if setting.participation == share], share)
    return figure


def _panel(axis: Any, settings: Sequence[BenchSetting], share: float) -> None:
    found = {method: own for method, own in gains(settings).items() if own}
    columns: dict[int, list[str]] = {}
    for method in found:
        columns.setdefault(ask(method).burden, []).append(method)
    marks: list[tuple[float, float, str, str]] = []
    for burden, methods in columns.items():
        ordered = sorted(methods, key=lambda method: mean(list(found[method].values())) or 0.0)
        for place, method in enumerate(ordered):
            # Side by side, the lowest first, so that names climb and do not lie on one another.
            x = burden + (place + 1) / (len(ordered) + 1) * 0.9 - 0.45
            values = list(found[method].values())
            colour = RED if method in MINE else BLUE
            axis.plot([x] * len(values), values, ".", color=colour, alpha=0.25, markersize=5, zorder=2)
            marks.append((x, mean(values) or 0.0, colour, method))
    for x, y, colour, method in marks:
        axis.plot(x, y, "*" if method in MINE else "o", color=colour, markersize=11 if method in MINE else 7, zorder=3)
        axis.annotate(
            names.method(method), (x, y), xytext=(0, 7), textcoords="offset points", ha="center", va="bottom",
            rotation=32, rotation_mode="anchor", color=colour, fontsize=7.5, zorder=4,
        )  # fmt: skip
    axis.axhline(0, color=GREY, linewidth=0.9)
    axis.annotate("random", (1.0, 0), xycoords=("axes fraction", "data"), xytext=(3, 0), textcoords="offset points",
                  va="center", color=GREY)  # fmt: skip
    ceiling = _ceiling(settings)
    if ceiling is not None:
        axis.axhline(ceiling, color=GREY, linewidth=1.1, linestyle="--")
        axis.annotate("all clients\nevery round", (1.0, ceiling), xycoords=("axes fraction", "data"), xytext=(3, 0),
                      textcoords="offset points", va="center", color=GREY)  # fmt: skip
    axis.set_xlim(-0.5, len(KINDS) - 0.5)
    axis.set_xticks(range(len(KINDS)), KINDS)
    for edge in range(1, len(KINDS)):
        axis.axvline(edge - 0.5, color=GREY, linewidth=0.4, alpha=0.4)
    axis.grid(visible=False, axis="x")
    axis.margins(y=0.16)
    number = len(settings)
    axis.set_title(f"{share:g} % of the clients a round, {number} setting{'s' if number > 1 else ''}")
    axis.set_ylabel("Points above random selection")
    axis.set_xlabel("What a client has to give beside its model, from little to much")


def _ceiling(settings: Sequence[BenchSetting]) -> float | None:
    """Full participation minus random selection, mean of the settings that have both."""
    found = []
    for setting in settings:
        random = setting.by_method.get(RANDOM)
        if setting.ceiling is None or setting.ceiling.ours is None or random is None or random.ours is None:
            continue
        found.append(setting.ceiling.ours - random.ours)
    return mean(found)
