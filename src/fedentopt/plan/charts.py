"""Charts of a plan as SVG text: no library and no script, so a page of them opens anywhere and prints.

Every chart is drawn twice, for a wide page and for a phone, and the style sheet shows the one that fits: text that is
scaled down with its chart cannot be read. Colours are those of the page, by class, so that light and dark need one
drawing. Series differ in colour, dash and mark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

WIDE, NARROW = 1000, 350
_MARKS = ("circle", "square", "diamond", "triangle")
_DASHES = ("", "7 4", "2 4", "9 3 2 3")


@dataclass(frozen=True)
class Series:
    """One line: its name, its style (0: random, 1: the recommended one, others after) and its points."""

    name: str
    style: int
    points: Sequence[tuple[float, float]]
    spread: Sequence[float] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Level:
    """A horizontal line with a name, such as the largest possible value."""

    value: float
    name: str


@dataclass(frozen=True)
class Axis:
    """Title, and ticks as (value, text); without any they are found."""

    title: str
    ticks: Sequence[tuple[float, str]] = field(default=())
    low: float | None = None


def line_chart(
    series: Sequence[Series],
    *,
    label: str,
    x: Axis,
    y: Axis,
    levels: Sequence[Level] = (),
    marks: bool = True,
    steps: bool = False,
) -> str:
    """Lines over a common x axis, for both widths. `label` says in words what is shown."""
    return _both(label, lambda width: _lines(series, x, y, levels, marks, steps, width, 340 if width == WIDE else 300))


def bar_chart(
    rows: Sequence[str], series: Sequence[tuple[str, int, Sequence[float]]], *, label: str, title: str
) -> str:
    """Horizontal bars, one group per row and one bar per series: name, style, values from 0 to 1 shown in per cent."""
    return _both(label, lambda width: _bars(rows, series, title, width))


def legend(series: Sequence[tuple[str, int]]) -> str:
    """Names beside their line and mark, as a list."""
    items = []
    for name, style in series:
        sample = f'<path class="line {_class(style)}" {_dash(style)}d="M1 6H27"/>{_mark(style, 14, 6)}'
        items.append(f'<li><svg width="28" height="12" aria-hidden="true">{sample}</svg>{escape(name)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from at or above `low` to at or below `high`, at most about `most` of them."""
    span = max(high - low, 1e-9)
    raw = span / max(most - 1, 1)
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _both(label: str, draw: Callable[[int], tuple[str, int]]) -> str:
    parts = []
    for width, name in ((WIDE, "wide"), (NARROW, "narrow")):
        inside, height = draw(width)
        parts.append(
            f'<svg class="plot {name}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
            f"{inside}</svg>"
        )
    return f'<div class="plots">{"".join(parts)}</div>'


def _lines(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    levels: Sequence[Level],
    marks: bool,
    steps: bool,
    width: int,
    height: int,
) -> tuple[str, int]:
    left, right, top, bottom = 46, 14, 16, 44 + 13 * max((text.count("\n") for _, text in x.ticks), default=0)
    xs = [px for one in series for px, _ in one.points] or [0.0, 1.0]
    ys = [py + sign * extra for one in series for (_, py), extra in zip(one.points, one.spread or [0.0] * len(one.points), strict=True) for sign in (-1, 1)]  # noqa: E501  # fmt: skip
    ys += [level.value for level in levels]
    x_low, x_high = _range(min(xs), max(xs))
    if marks:  # room for the marks at both ends
        x_low, x_high = x_low - 0.02 * (x_high - x_low), x_high + 0.02 * (x_high - x_low)
    low, high = min(ys, default=0.0) if y.low is None else y.low, max(ys, default=1.0)
    pad = 0.06 * max(high - low, 0.02)
    y_low, y_high = (low - pad if y.low is None else low), high + pad

    def at_x(value: float) -> float:
        return left + (value - x_low) / (x_high - x_low) * (width - left - right)

    def at_y(value: float) -> float:
        return height - bottom - (value - y_low) / max(y_high - y_low, 1e-12) * (height - top - bottom)

    parts = []
    for value in nice_ticks(y_low, y_high):
        parts.append(f'<path class="grid" d="M{left} {at_y(value):.1f}H{width - right}"/>')
        parts.append(f'<text class="tick" x="{left - 6}" y="{at_y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    ticks = x.ticks or [(value, f"{value:g}") for value in nice_ticks(x_low, x_high, 8 if width == WIDE else 5)]
    for place, (value, text) in enumerate(_spaced(ticks, at_x)):
        anchor = "end" if at_x(value) > width - 30 else "start" if at_x(value) < left + 4 and place == 0 else "middle"
        for row, part in enumerate(text.split("\n")):
            parts.append(
                f'<text class="tick" x="{at_x(value):.1f}" y="{height - bottom + 16 + 13 * row}" '
                f'text-anchor="{anchor}">{escape(part)}</text>'
            )
    parts.append(f'<path class="axis" d="M{left} {height - bottom}H{width - right}"/>')
    parts.append(f'<text class="title" x="{left}" y="{top - 4}">{escape(y.title)}</text>')
    parts.append(f'<text class="title" x="{width - right}" y="{height - 4}" text-anchor="end">{escape(x.title)}</text>')
    for level in levels:
        parts.append(f'<path class="level" d="M{left} {at_y(level.value):.1f}H{width - right}"/>')
    for one in sorted(series, key=lambda one: one.style == 1):  # the recommended one on top
        parts.append(_one_line(one, at_x, at_y, marks, steps))
    for level in levels:
        parts.append(
            f'<text class="tick over" x="{width - right}" y="{at_y(level.value) - 4:.1f}" text-anchor="end">'
            f"{escape(level.name)}</text>"
        )
    return "".join(parts), height


def _one_line(
    one: Series, at_x: Callable[[float], float], at_y: Callable[[float], float], marks: bool, steps: bool
) -> str:
    if not one.points:
        return ""
    places = [(at_x(px), at_y(py)) for px, py in one.points]
    path = f"M{places[0][0]:.1f} {places[0][1]:.1f}"
    for px, py in places[1:]:
        path += f"H{px:.1f}V{py:.1f}" if steps else f"L{px:.1f} {py:.1f}"
    inside = [f'<path class="line {_class(one.style)}" {_dash(one.style)}d="{path}"/>']
    for i, (px, py) in enumerate(places):
        if one.spread and one.spread[i] > 0:
            reach = abs(at_y(one.points[i][1] + one.spread[i]) - py)
            inside.append(
                f'<path class="line thin {_class(one.style)}" d="M{px:.1f} {py - reach:.1f}v{2 * reach:.1f}"/>'
            )
        if marks or len(places) == 1:
            said = one.notes[i] if one.notes else f"{one.name}: {one.points[i][1]:.3g}"
            inside.append(f"<g>{_mark(one.style, px, py)}<title>{escape(said)}</title></g>")
    return f'<g data-series="{escape(one.name)}">{"".join(inside)}</g>'


def _bars(
    rows: Sequence[str], series: Sequence[tuple[str, int, Sequence[float]]], title: str, width: int
) -> tuple[str, int]:
    most = 26 if width == WIDE else 13
    names = [name if len(name) <= most else f"{name[: most - 1]}…" for name in rows]
    left, right, top, thick = 12 + 7 * max(map(len, names), default=4), 52, 22, 11
    group = thick * len(series) + 9
    height = top + group * len(rows) + 8
    high = max((value for _, _, values in series for value in values), default=0.0)
    scale = (width - left - right) / max(high, 0.01)
    parts = [f'<text class="title" x="{left}" y="{top - 8}">{escape(title)}</text>']
    for row, name in enumerate(names):
        start = top + row * group
        middle = start + thick * len(series) / 2 + 4
        parts.append(f'<text class="tick" x="{left - 6}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>')
        for place, (who, style, values) in enumerate(series):
            y, value = start + place * thick, values[row]
            said = f"{rows[row]}, {who}: {100 * value:.1f} %"
            parts.append(
                f'<g data-series="{escape(who)}" data-value="{value:.6g}"><rect class="bar {_class(style)}" x="{left}" '
                f'y="{y}" width="{max(value * scale, 1):.1f}" height="{thick - 2}"/><title>{escape(said)}</title></g>'
                f'<text class="tick small" x="{left + value * scale + 5:.1f}" y="{y + thick - 3}">'
                f"{_per_cent(value)}</text>"
            )
    parts.append(f'<path class="axis" d="M{left} {top}V{height - 8}"/>')
    return "".join(parts), height


def _per_cent(value: float) -> str:
    return f"{100 * value:.1f} %" if 0 < value < 0.1 else f"{100 * value:.0f} %"


def _spaced(ticks: Sequence[tuple[float, str]], at_x: Callable[[float], float]) -> list[tuple[float, str]]:
    """The ticks whose texts do not run into each other."""
    kept: list[tuple[float, str]] = []
    end = -math.inf
    for value, text in ticks:
        half = 3.6 * max(len(part) for part in text.split("\n"))
        if at_x(value) - half >= end:
            kept.append((value, text))
            end = at_x(value) + half + 6
    return kept


def _range(low: float, high: float) -> tuple[float, float]:
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _class(style: int) -> str:
    return f"s{min(style, 1) if style < 2 else 2 + (style - 2) % 6}"


def _dash(style: int) -> str:
    dash = _DASHES[0 if style < 2 else (style - 2) // 6 + 1 if style < 20 else 3]
    return f'stroke-dasharray="{dash}" ' if dash else ""


def _mark(style: int, x: float, y: float) -> str:
    kind, css = _MARKS[style % len(_MARKS)], _class(style)
    if kind == "circle":
        return f'<circle class="mark {css}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    shapes = {
        "square": f"M{x - 3.6:.1f} {y - 3.6:.1f}h7.2v7.2h-7.2z",
        "diamond": f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
        "triangle": f"M{x:.1f} {y - 4.8:.1f}l4.8 8.6h-9.6z",
    }
    return f'<path class="mark {css}" d="{shapes[kind]}"/>'
