"""One HTML file that shows runs, of a folder or in memory: no network, no second file, opened straight from disk.

The charting library (Plotly) and the data are gzip-compressed and base64-coded inside the page, which the
browser unpacks; that keeps a page with five megabytes of library near two. Base64 also means that nothing of
the data can end a script element. Tables are plain HTML, so they can be read without any script.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from fedentopt import __version__
from fedentopt.errors import InputError
from fedentopt.pages import RESULTS_PAGE, save_page
from fedentopt.report.belief import belief
from fedentopt.report.figures import figures
from fedentopt.report.findings import findings
from fedentopt.report.grouping import Group, group_runs
from fedentopt.report.paper import PaperFigures
from fedentopt.report.payload import LEVELS, Detail, group_payload
from fedentopt.report.tables import belief_table, overview_table, settings_tables, summary_table
from fedentopt.results.reading import RunResult, read_folder

LARGEST_PAGE = 6_000_000  # bytes
_SCRIPTS = (
    "unpack.js", "look.js", "tables.js", "curves.js", "cohorts.js", "classes.js", "belief.js", "suspects.js", "page.js"
)  # fmt: skip
_BELIEF_LINKS = '<a href="#belief">Beliefs</a> <a href="#suspects">Suspects</a>'


def write_report(directory: str | Path, *, out: Path | None = None) -> Path:
    """Make the page of a results folder and return its path (`directory/report.html` unless `out` is given).

    Refused: a folder without results, a malformed file in it, a missing Plotly, a place that cannot be written, a file
    there that is no page of fedentopt.
    """
    if not isinstance(directory, str | os.PathLike):
        raise InputError(f"report: {directory!r} cannot be used; accepted: a folder of results")
    directory = Path(directory)
    folder = read_folder(directory)
    text = render_runs(
        folder.runs,
        title=directory.resolve().name or "results",
        skipped=folder.skipped,
        doubles=folder.doubles,
        paper=PaperFigures.read(directory),
    )
    return save_page(text, out if out is not None else directory / RESULTS_PAGE)


def write_page(runs: Iterable[RunResult], path: str | Path, *, title: str = "results") -> Path:
    """Make the page of these runs, wherever they come from, and return its path."""
    return save_page(render_runs(runs, title=title), path)


def render_runs(
    runs: Iterable[RunResult],
    *,
    title: str = "results",
    skipped: Sequence[str] = (),
    doubles: Sequence[str] = (),
    paper: PaperFigures | None = None,
) -> str:
    """The page as text, at the finest level of detail that stays under `LARGEST_PAGE`.

    `skipped` are runs that have no round to show, `doubles` folders whose run is shown from another one; both are named
    as such. Refused: no runs, a run without a round.
    """
    if not isinstance(title, str):
        raise InputError(f"title: {title!r} cannot be used; accepted: text")
    runs, paper = list(runs), paper or PaperFigures(None)
    empty = [run.run_id for run in runs if not len(run.rounds)]
    if empty or not runs:
        what = f"{empty[0]} has finished no round yet" if empty else "there are no runs"
        raise InputError(f"report: {what}; accepted: runs with at least one round")
    groups = group_runs(runs)
    rows = [[(method, figures(method)) for method in group.methods] for group in groups]
    sections = []
    for number, (group, group_rows) in enumerate(zip(groups, rows, strict=True)):
        found = "".join(f"<li>{escape(sentence)}</li>" for sentence in findings(group, group_rows))
        sections.append(
            {
                "summary": _part(
                    number, f'<ul class="findings">{found}</ul>{summary_table(group_rows, paper, number)}'
                ),
                "settings": _part(number, settings_tables(group)),
                "belief": _belief(number, group),
            }
        )
    beliefs = "".join(section["belief"] for section in sections)
    several = len(groups) > 1
    values = {
        "title": escape(title),
        "version": escape(__version__),
        "runs": str(len(runs)),
        "skipped": _left_out("no round finished yet", skipped)
        + _left_out("another folder holds a run of the same settings, which counts once", doubles),
        "css": _asset("page.css"),
        "chooser": _chooser(groups) if several else "",
        "overview": f"<section><h2>All settings</h2>{overview_table(groups, rows)}</section>" if several else "",
        "summaries": "".join(section["summary"] for section in sections),
        "settings": "".join(section["settings"] for section in sections),
        "belief_links": _BELIEF_LINKS if beliefs else "",
        "belief": Template(_asset("belief.html")).substitute(tables=beliefs) if beliefs else "",
        "plotly": _plotly(),
        "scripts": "\n".join(_asset(name) for name in _SCRIPTS),
    }
    page = Template(_asset("page.html"))
    room = LARGEST_PAGE - len(page.substitute(values, data="").encode())
    for detail in LEVELS:
        data = _data(groups, detail, room if detail is not LEVELS[-1] else None)
        if data is not None:
            return page.substitute(values, data=data)
    raise AssertionError("the last level takes any room")


def _data(groups: tuple[Group, ...], detail: Detail, room: int | None) -> str | None:
    """The data elements of all settings, or None as soon as they need more than `room` bytes."""
    elements: list[str] = []
    used = 0
    for number, group in enumerate(groups):
        text = _packed(group_payload(group, detail))
        elements.append(f'<script type="text/plain" class="data" data-group="{number}">{text}</script>')
        used += len(elements[-1])
        if room is not None and used >= room:
            return None
    return "".join(elements)


def _belief(number: int, group: Group) -> str:
    """The table of what servers believed in one setting; nothing where no method has such figures."""
    rows = [(method, values) for method in group.methods if (values := belief(method)) is not None]
    return _part(number, belief_table(rows, number)) if rows else ""


def _part(number: int, content: str) -> str:
    """What belongs to one setting; the first one is shown, the script shows the others."""
    return f'<div class="of-group" data-group="{number}"{"" if number == 0 else " hidden"}>{content}</div>'


def _chooser(groups: tuple[Group, ...]) -> str:
    options = "".join(f'<option value="{number}">{escape(group.title)}</option>' for number, group in enumerate(groups))
    return f'<label class="chooser">Setting <select id="group">{options}</select></label>'


def _left_out(why: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    return f'<p class="warn">Not shown, {why}: {", ".join(map(escape, names))}</p>'


def _packed(value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    # No time stamp in the gzip header: the same results give the same page, byte for byte.
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


@cache
def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise InputError(
            "report: needs Plotly, which is not installed; accepted: pip install 'fedentopt[sim]'"
        ) from error
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


@cache
def _asset(name: str) -> str:
    return resources.files("fedentopt.report").joinpath("assets", name).read_text(encoding="utf-8")
