"""The page's tables as HTML. Every text that comes from results is escaped here, in `_cell` and `_text`.

A cell carries the number it is sorted by in `data-value`; the script of the page sorts by it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from fedentopt.pages import html_table
from fedentopt.report.belief import Belief
from fedentopt.report.figures import Figures, Rows, best_of, comparable, most_accurate
from fedentopt.report.findings import paired_gains, plus_minus
from fedentopt.report.grouping import BALANCED, PLAIN, SETTING, Group, Method
from fedentopt.report.paper import PaperFigures
from fedentopt.results.statistics import Spread
from fedentopt.selection import SELECTORS

FEWER = ("never_selected", "bytes_sent", "simulated_seconds")
WHERE_KNOWN = {"validation": "Validation %", "clients": "Mean of clients %", "worst_tenth": "Worst tenth of clients %"}
"""Columns for figures that only runs have which were asked for them."""
WHAT_IS_KNOWN = {
    "validation": "Validation: accuracy on what the clients hold out, to choose settings by.",
    "clients": "Mean of clients, worst tenth: accuracy of the final model per client.",
}
BETTER = ("accuracy", "worst_class", *WHERE_KNOWN, "entropy", "full_cover", "h_norm", *FEWER)
"""Figures that have a better direction: up, or down for the `FEWER`. The best of each column is marked."""


def summary_table(rows: Rows, paper: PaperFigures, number: int) -> str:
    """One row per method: mean ± standard deviation over seeds, the best marked, the paper's figure if known."""
    printed = [paper.of(method) for method, _ in rows]
    with_paper = any(figure is not None for figure in printed)
    heads = [("Method", "text"), ("Accuracy %", "number")]
    if with_paper:
        heads += [("Paper %", "number"), ("Difference", "number")]
    known = [field for field in WHERE_KNOWN if any(getattr(values, field).count for _, values in rows)]
    heads += [(WHERE_KNOWN[field], "number") for field in known]
    heads += [
        ("Worst class %", "number"), ("Cohort entropy (bits)", "number"), ("Rounds with every class %", "number"),
        ("H_norm", "number"), ("Never selected", "number"), ("Sent (MB)", "number"),
    ]  # fmt: skip
    with_time = any(method.config.get("speed_spread") for method, _ in rows)
    heads += [("Simulated time (s)", "number")] if with_time else []
    heads += [("Seeds", "number")]
    fair = comparable(rows)
    leading = {field: _best(fair, field) for field in BETTER}
    lines = []
    for index, ((method, values), figure) in enumerate(zip(rows, printed, strict=True)):
        best = {field for field in BETTER if method.label in leading[field]}
        cells = [_method_cell(method, values), _spread_cell(values.accuracy, "accuracy" in best)]
        if with_paper:
            gap = math.nan if figure is None else values.accuracy.mean - figure
            cells += [_number_cell(figure, "{:.2f}"), _number_cell(gap, "{:+.2f}")]
        cells += [
            *(_spread_cell(getattr(values, field), field in best) for field in known),
            _spread_cell(values.worst_class, "worst_class" in best),
            _spread_cell(values.entropy, "entropy" in best, 3),
            _spread_cell(values.full_cover, "full_cover" in best, 1),
            _spread_cell(values.h_norm, "h_norm" in best, 3),
            _spread_cell(values.never_selected, "never_selected" in best, 1),
            _number_cell(values.bytes_sent.mean / 1e6, "{:,.1f}", "bytes_sent" in best),
        ]
        if with_time:
            cells.append(_number_cell(values.simulated_seconds.mean, "{:,.0f}", "simulated_seconds" in best))
        cells += [_number_cell(values.finished or values.unfinished, "{:.0f}")]
        lines.append(f'<tr data-method="{index}">{"".join(cells)}</tr>')
    note = " ".join(WHAT_IS_KNOWN[field] for field in known if field in WHAT_IS_KNOWN)
    table = html_table(f"summary-{number}", "Accuracy and participation by method", heads, lines)
    return f'{table}<p class="note">{escape(note)}</p>' if note else table


def belief_table(rows: Sequence[tuple[Method, Belief]], number: int) -> str:
    """One row per method whose server doubted reports: beliefs, liars chosen, suspects."""
    with_liars = any(values.liars.count for _, values in rows)
    heads = [("Method", "text"), ("Cohort entropy (bits)", "number"), ("Believed (bits)", "number")]
    if with_liars:
        heads += [("Liars among clients %", "number"), ("Liars among the chosen %", "number")]
    heads += [("Error of estimates", "number")]
    if with_liars:
        heads += [("AUC of suspicion", "number"), ("Liars suspected", "number")]
    heads += [("Others suspected" if with_liars else "Suspected", "number")]
    lines = []
    for method, values in rows:
        found = values.verdicts
        others = None if found is None else (found.honest[0] + found.unknown[0], found.honest[1] + found.unknown[1])
        cells = [
            f'<th scope="row" data-value="{escape(method.label)}">{escape(method.label).replace("+", "+<wbr>")}</th>',
            _spread_cell(values.entropy, False, 3),
            _spread_cell(values.believed, False, 3),
        ]
        if with_liars:
            cells += [_number_cell(values.liars.mean, "{:.3g}"), _spread_cell(values.liars_chosen, False, 1)]
        cells += [_spread_cell(values.estimate_error, False, 3)]
        if with_liars:
            cells += [_spread_cell(values.auc, False, 3), _part_cell(None if found is None else found.liars)]
        lines.append(f"<tr>{''.join([*cells, _part_cell(others)])}</tr>")
    return html_table(f"belief-{number}", "What the server believed, by method", heads, lines)


def overview_table(groups: Sequence[Group], rows: Sequence[Rows]) -> str:
    """One row per setting, for folders with several: best method, gain of entropy selection, a button that shows it."""
    gain = f"{SELECTORS.label(BALANCED)} − {SELECTORS.label(PLAIN).lower()}"
    heads = [
        ("Setting", "text"),
        ("Methods", "number"),
        ("Runs", "number"),
        ("Best method", "text"),
        ("Accuracy %", "number"),
        (gain, "number"),
    ]
    lines = []
    for number, (group, group_rows) in enumerate(zip(groups, rows, strict=True)):
        _, best = most_accurate(group_rows)
        name = ", ".join(method.label for method, _ in best) or "–"
        accuracy = best[0][1].accuracy if best else Spread.of([])
        plain, balanced = group.plain(), group.balanced()
        gains = Spread.of(paired_gains(plain, balanced) if plain and balanced else [])
        button = f'<button type="button" class="link" data-show-group="{number}">{escape(group.title)}</button>'
        lines.append(
            f'<tr><th scope="row" data-value="{escape(group.title)}">{button}</th>'
            f"{_number_cell(len(group.methods), '{:.0f}')}"
            f"{_number_cell(sum(len(method.runs) for method in group.methods), '{:.0f}')}"
            f'<td class="text" data-value="{escape(name)}">{escape(name)}</td>'
            f"{_spread_cell(accuracy, False)}{_spread_cell(gains, False)}</tr>"
        )
    note = (
        f"{gain}: mean of the differences in accuracy, in points, seed by seed over the seeds that both have, ± the "
        "sample standard deviation of these differences."
    )
    table = html_table("overview", "Best method by setting; a click on a setting shows it", heads, lines)
    return f'{table}<p class="note">{escape(note)}</p>'


def settings_tables(group: Group) -> str:
    """Settings shared by all runs, settings in which methods differ, environment, commands."""
    runs = [run for method in group.methods for run in method.runs]
    names = [*SETTING, *sorted({name for run in runs for name in run.config} - set(SETTING))]
    shared, differing = [], []
    for name in names:
        values = {json.dumps(run.config.get(name), sort_keys=True) for run in runs}
        if len(values) == 1 and any(name in run.config for run in runs):
            shared.append((name, runs[0].config.get(name)))
        elif len(values) > 1 and name != "seed":
            differing.append(name)
    parts = [_pairs("Settings of every run", shared)]
    if differing:
        heads = [("Method", "text"), *((name, "text") for name in differing), ("seeds", "text")]
        lines = []
        for method in group.methods:
            seeds = ", ".join(str(run.seed) for run in method.runs)
            cells = "".join(_text(method.config.get(name)) for name in differing)
            lines.append(f'<tr><th scope="row">{escape(method.label)}</th>{cells}{_text(seeds)}</tr>')
        parts.append(html_table("", "Settings in which methods differ", heads, lines, sortable=False))
    environments = _distinct(
        {key: value for key, value in run.environment.items() if key not in {"command", "started", "dataset"}}
        for run in runs
    )
    for number, environment in enumerate(environments, start=1):
        title = "Environment" if len(environments) == 1 else f"Environment {number} of {len(environments)}"
        parts.append(_pairs(title, list(environment.items())))
    commands = _distinct(run.environment["command"] for run in runs if run.environment.get("command"))
    return "".join(parts) + _commands([str(command) for command in commands])


def _commands(commands: Sequence[str]) -> str:
    """The first command in full view, the others (every run may have its own) behind a fold."""
    blocks = [
        '<div class="command"><pre tabindex="0" aria-label="Command that made these runs"><code>'
        f'{escape(command)}</code></pre><button type="button" data-copy>Copy</button></div>'
        for command in commands
    ]
    if len(blocks) < 2:
        return "".join(blocks)
    folded = f"<summary>{len(blocks) - 1} more commands</summary>{''.join(blocks[1:])}"
    return f'{blocks[0]}<details class="more">{folded}</details>'


def _best(rows: Rows, field: str) -> set[str]:
    """The methods whose figure is the best of a column."""
    means = [getattr(values, field).mean for _, values in rows]
    return {rows[i][0].label for i in best_of([-mean for mean in means] if field in FEWER else means)}


def _distinct(values: Iterable[Any]) -> list[Any]:
    seen: dict[str, Any] = {}
    for value in values:
        seen.setdefault(json.dumps(value, sort_keys=True, default=str), value)
    return list(seen.values())


def _pairs(caption: str, pairs: Sequence[tuple[str, Any]]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(_shown(value))}</dd></div>" for name, value in pairs)
    return f"<h3>{escape(caption)}</h3><dl>{items}</dl>"


def _method_cell(method: Method, values: Figures) -> str:
    notes = []
    if values.unfinished:
        done = min(len(run.rounds) for run in method.runs if not run.finished)
        notes.append(f"{values.unfinished} unfinished, round {done}{_planned(method)}")
    if values.diverged:
        notes.append("diverged: " + ", ".join(f"seed {seed}, round {number}" for seed, number in values.diverged[:3]))
        notes[-1] += f" and {len(values.diverged) - 3} more" if len(values.diverged) > 3 else ""
    note = f'<small class="warn">{escape("; ".join(notes))}</small>' if notes else ""
    return (
        f'<th scope="row" data-value="{escape(method.label)}"><span class="swatch" aria-hidden="true"></span>'
        f"{escape(method.label).replace('+', '+<wbr>')}{note}</th>"
    )


def _planned(method: Method) -> str:
    """Of how many rounds, where this is known before the end: an algorithm with a second stage, or one of the user's
    own that may have one, divides its budget among two stages and has more or fewer rounds than were asked for."""
    from fedentopt.algorithms import ALGORITHMS, Algorithm

    algorithm, rounds = str(method.config.get("algorithm", "")), method.config.get("rounds")
    if rounds is None or algorithm not in ALGORITHMS:
        return ""
    staged = ALGORITHMS.get(algorithm).second_stage is not Algorithm.second_stage
    return "" if staged else f" of {rounds}"


def _spread_cell(value: Spread, best: bool, digits: int = 2) -> str:
    number = f"{value.mean:.6g}" if math.isfinite(value.mean) else ""
    return _marked_cell(number, plus_minus(value, digits), best)


def _number_cell(value: float | None, form: str, best: bool = False) -> str:
    if value is None or not math.isfinite(value):
        return '<td class="number" data-value="">–</td>'
    return _marked_cell(f"{value:.10g}", form.format(value), best)


def _marked_cell(number: str, shown: str, best: bool) -> str:
    mark = ' <span class="best" title="best">★<span class="unseen"> best</span></span>' if best else ""
    return f'<td class="number{" is-best" if best else ""}" data-value="{number}">{shown}{mark}</td>'


def _part_cell(part: tuple[int, int] | None) -> str:
    """`3 of 30`, sorted by its share."""
    if part is None or not part[1]:
        return _number_cell(None, "")
    return _marked_cell(f"{part[0] / part[1]:.6g}", f"{part[0]} of {part[1]}", False)


def _text(value: Any) -> str:
    return f'<td class="text">{escape(_shown(value))}</td>'


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
