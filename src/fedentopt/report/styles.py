"""How a method is drawn: colour, line and mark, the same on the page and in the pictures beside it.

Okabe and Ito's colours, which readers with any common colour vision tell apart, and two more. The neutral one goes to
what the others are measured against, blue to entropy selection. From `MARKED` methods on every line carries marks
too, and past the last colour lines are broken; no two methods are alike in all three before the hundredth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from fedentopt.report.grouping import Group, group_runs
from fedentopt.results.reading import RunResult

MARKED = 8
COLOURS = (
    # on white, on black
    ("#000000", "#FFFFFF"), ("#0072B2", "#3D9BD6"), ("#E69F00", "#E69F00"), ("#009E73", "#00B886"),
    ("#CC79A7", "#DE93BD"), ("#D55E00", "#EE7A22"), ("#8F8300", "#F0E442"), ("#56B4E9", "#8CD0F7"),
    ("#7A3B00", "#C48A4A"), ("#6B4FA0", "#B79AE0"),
)  # fmt: skip
PLAIN, BALANCED = 0, 1  # places of the two colours that are given away first
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Plotly's names; Matplotlib's are in `MATPLOTLIB_LINES`."""
MARKS = (
    "circle", "square", "triangle-up", "diamond", "cross", "x", "star", "triangle-down", "pentagon", "hexagon", "bowtie"
)  # fmt: skip
MATPLOTLIB_LINES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 2))}
MATPLOTLIB_MARKS = dict(zip(MARKS, ("o", "s", "^", "D", "P", "X", "*", "v", "p", "h", "d"), strict=True))


@dataclass(frozen=True)
class Style:
    """Colours on white and on black, the kind of line, and the mark, if there is one."""

    light: str
    dark: str
    dash: str
    mark: str | None

    def to_dict(self) -> dict[str, str | None]:
        """JSON form, for the page."""
        return asdict(self)


def style(place: int, *, marked: bool) -> Style:
    """The style of a place in the order of colours; `marked` where there are many methods."""
    # The two colours that are given away first do not come again.
    turn, colour = divmod(place - 2, len(COLOURS) - 2) if place >= len(COLOURS) else (0, place - 2)
    light, dark = COLOURS[colour + 2]
    # Eleven marks and eight colours that come again: each time with another mark.
    mark = MARKS[place % len(MARKS)] if marked else None
    return Style(light, dark, DASHES[turn % len(DASHES)], mark)


def styles(group: Group) -> list[Style]:
    """A style for each method of a setting, in its order."""
    plain, balanced = group.plain(), group.balanced()
    special = {id(plain): PLAIN, id(balanced): BALANCED}
    others = iter(range(2, 2 + len(group.methods)))
    marked = len(group.methods) >= MARKED
    return [style(special[id(m)] if id(m) in special else next(others), marked=marked) for m in group.methods]


def styles_by_run(runs: Iterable[RunResult]) -> dict[str, Style]:
    """The style that the page of these runs gives to the method of each, by run id.

    Runs of several settings share no chart there; here they do, and are told apart by their places.
    """
    groups = group_runs(runs)
    if len(groups) == 1:
        [group] = groups
        chosen = list(zip(group.methods, styles(group), strict=True))
    else:
        methods = [method for group in groups for method in group.methods]
        chosen = [(method, style(place, marked=len(methods) >= MARKED)) for place, method in enumerate(methods)]
    return {run.run_id: made for method, made in chosen for run in method.runs}
