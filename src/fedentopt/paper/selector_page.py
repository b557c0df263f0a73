"""The page `docs/SELECTORS.md`: which selector wins where, made from exported results alone.

It begins with where FedEntOpt is not best. What a person has to add lies beside the results in `remarks.md`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedentopt.files import make_folder, write_text
from fedentopt.paper import names, provenance
from fedentopt.paper.comparison import Comparison
from fedentopt.paper.figures import write_figures
from fedentopt.paper.formats import Section, Table, markdown
from fedentopt.paper.results_page import REMARKS, commands_behind, read_remarks, what_was_run
from fedentopt.paper.selector_table import (
    OURS,
    RANDOM,
    SELECTORS,
    SURE,
    TUNED,
    Against,
    BenchSetting,
    ask,
    bench_settings,
    gains,
)
from fedentopt.paper.selector_tuned import beside_defaults, not_best_when_tuned
from fedentopt.paper.tables import tables
from fedentopt.results.statistics import holm, mean, paired_interval, paired_p_value

if TYPE_CHECKING:
    from fedentopt.paper.reproduction import Reproduction

INTRODUCTION = """# Every selector in one benchmark

Which clients should train next? Every selector that the field uses, on the same partitions, start models and local
training, over the same seeds, each with the defaults of its own paper, the weights of its average among them. What each
one is: [Methods](methods.md). This page is made by one command from the files in `results/selectors`, which hold a row
for every cell and seed:

```console
fedentopt reproduce selectors --results results/selectors --results-page docs/SELECTORS.md
```

The cells are written down in `src/fedentopt/paper/selectors.toml`. To run them (those that are done are not repeated):

```console
fedentopt reproduce selectors --device cuda --known results/selectors --export results/selectors
fedentopt reproduce selectors-tuning --device cuda --known results/selectors --export results/selectors
fedentopt reproduce selectors-tuned --device cuda --known results/selectors --export results/selectors
```
"""
NOTHING_YET = """## Results

There are none yet: the commands above make them.
"""


def write_selector_page(path: Path, request: Reproduction, source: Path) -> list[Path]:
    """Write the page and, in a folder beside it, its figure; `source` holds the log of commands and the remarks."""
    commands, remarks = provenance.read(source), read_remarks(source / REMARKS)
    entries = request.compare(request.plan)
    folder = path.parent / "results"
    make_folder(path.parent)
    drawn = [file for file in write_figures(folder, entries, request.results) if file.suffix == ".svg"]
    figures = {file.stem: f"{folder.name}/{file.name}" for file in drawn}
    write_text(path, selector_page(entries, commands=commands, remarks=remarks, figures=figures))
    return [path, *drawn]


def selector_page(
    entries: Sequence[Comparison], *, commands: Sequence[dict[str, Any]], remarks: str, figures: dict[str, str]
) -> str:
    """The page as text."""
    parts = [INTRODUCTION]
    known = [entry for entry in entries if entry.ours is not None]
    settings = [setting for setting in bench_settings(known) if setting.by_method]
    if not known:
        return "\n".join([*parts, NOTHING_YET, _asks(entries), what_was_run(entries)])
    if settings:
        parts.append(_not_best(settings, not_best_when_tuned(known)))
    if SELECTORS in figures:
        parts.append(f"![Accuracy against what a selector asks of a client]({figures[SELECTORS]})\n")
    if settings:
        parts.append(_over_all(settings))
    tuned = beside_defaults(known)
    if tuned is not None:
        parts.append(markdown(tuned, level=2))
    parts.append(_asks(known))
    if remarks.strip():
        parts.append(remarks.strip() + "\n")
    parts += [_algorithms(known), *(_shown(table) for table in tables(known)), what_was_run(entries)]
    return "\n".join([part for part in parts if part] + [commands_behind(commands)])


def _not_best(settings: Sequence[BenchSetting], when_tuned: str) -> str:
    """First of all: the settings in which another selector has the higher mean."""
    judged = [setting for setting in settings if OURS in setting.by_method and len(setting.by_method) > 2]
    lines = ["## Where FedEntOpt is not best", ""]
    if not judged:
        return "\n".join([*lines, "No setting has results of FedEntOpt and of two others yet.", ""])
    rows = []
    for setting in judged:
        best = max(setting.by_method.values(), key=lambda entry: entry.ours or 0.0)
        method = best.cell.method or ""
        if method != OURS:
            found = setting.against_ours[method]
            ours = names.ours(setting.by_method[OURS])
            rows.append((setting.title, names.method(method), names.ours(best), ours, found.text(), found.p_text()))
    better = [(s, m) for s in judged for m, found in s.against_ours.items() if found.clear and _above(found)]
    worse = [(s, m) for s in judged for m, found in s.against_ours.items() if found.clear and not _above(found)]
    pairs = sum(len(setting.against_ours) for setting in judged)
    lines += [
        f"Another selector has the highest mean accuracy in {len(rows)} of {len(judged)} settings, FedEntOpt in "
        f"{len(judged) - len(rows)}. Of {pairs} comparisons with another selector, after Holm's correction over those "
        f"of a setting (p < {SURE:g}), the other is better in {len(better)}, FedEntOpt in {len(worse)}; the rest may "
        f"be luck.{when_tuned and ' '}{when_tuned}",
        "",
    ]
    if better:
        by_method: dict[str, list[str]] = {}
        for setting, method in better:
            by_method.setdefault(method, []).append(setting.title)
        lines += ["Better beyond luck:", ""]
        lines += [f"- {names.method(method)}: {'; '.join(where)}" for method, where in by_method.items()]
        lines.append("")
    if not rows:
        return "\n".join([*lines, "In no setting has another selector the higher mean.", ""])
    columns = ("setting", "best", "its accuracy", "FedEntOpt's", "best minus FedEntOpt, 95 % interval", "p (Holm)")
    return "\n".join([*lines, _plain(columns, rows)])


def _above(found: Against) -> bool:
    return found.interval is not None and found.interval.mean > 0


def _over_all(settings: Sequence[BenchSetting]) -> str:
    """One line per selector."""
    found = gains(settings)
    shares = sorted({setting.participation for setting in settings})
    methods = list(dict.fromkeys(method for setting in settings for method in setting.by_method))
    rows = []
    for method in sorted(methods, key=lambda method: -(mean(list(found.get(method, {}).values())) or 0.0)):
        own = [setting for setting in settings if method in setting.by_method]
        best = sum(max(s.by_method.values(), key=lambda entry: entry.ours or 0.0).cell.method == method for s in own)
        by_share = []
        for share in shares:
            values = [found.get(method, {}).get(s.title) for s in own if s.participation == share]
            average = mean([value for value in values if value is not None])
            by_share.append(names.NOTHING if average is None else f"{average:+.2f}")
        rows.append((
            names.method(method), str(len(own)), str(best), *by_share,
            *(_clearly(own, method, other) if method != other else names.NOTHING for other in (RANDOM, OURS)),
        ))  # fmt: skip
    columns = (
        "selector", "settings", "best in", *(f"points above random at {share:g} %" for share in shares),
        "clearly above / below random", "clearly above / below FedEntOpt",
    )  # fmt: skip
    text = (
        "Means over the settings that have results. Clearly: in how many settings the difference is more than luck "
        "after Holm's correction over the comparisons of a setting with the same selector."
    )
    return "\n".join(["## Over all settings", "", text, "", _plain(columns, rows)])


def _clearly(settings: Sequence[BenchSetting], method: str, other: str) -> str:
    found = [setting.against(other).get(method) for setting in settings]
    clear = [one for one in found if one is not None and one.clear]
    above = sum(_above(one) for one in clear)
    return f"{above} / {len(clear) - above}"


def _asks(entries: Sequence[Comparison]) -> str:
    methods = dict.fromkeys(e.cell.method or "" for e in entries if e.cell.table == SELECTORS)
    rows = []
    for method in sorted(methods, key=lambda method: ask(method).burden):
        asked = ask(method)
        rows.append((names.method(method), asked.words, asked.size))
    if not rows:
        return ""
    columns = ("selector", "what leaves the client beside its model", "bytes per client (C classes)")
    return "\n".join(["## What each asks of a client", "", _plain(columns, rows)])


def _algorithms(entries: Sequence[Comparison]) -> str:
    """Does re-weighting help once cohorts are even: algorithms with random selection and with FedEntOpt's."""
    own = [entry for entry in entries if entry.cell.table == "selectors-algorithms"]
    sections = []
    for heading in dict.fromkeys(names.heading(entry.cell) for entry in own):
        by_method = {e.cell.method or "": e for e in own if names.heading(e.cell) == heading}
        algorithms = [method for method in by_method if "+" not in method and method not in ("fedavg", OURS)]
        with_ours = {a: by_method[f"{a}+{OURS}"] for a in algorithms if f"{a}+{OURS}" in by_method}
        pairs = [(by_method[a], by_method.get("fedavg")) for a in algorithms]
        pairs += [(entry, by_method.get(OURS)) for entry in with_ours.values()]
        found = iter(_compared(pairs))
        alone = {a: next(found) for a in algorithms}
        combined = {a: next(found) for a in with_ours}
        rows = [(
            "FedAvg", *(names.ours(by_method[m]) if m in by_method else names.NOTHING for m in ("fedavg",)),
            names.NOTHING, *(names.ours(by_method[m]) if m in by_method else names.NOTHING for m in (OURS,)),
            names.NOTHING,
        )]  # fmt: skip
        for a in algorithms:
            mine = with_ours.get(a)
            rows.append((
                names.method(a), names.ours(by_method[a]), alone[a].text(),
                names.NOTHING if mine is None else names.ours(mine),
                names.NOTHING if mine is None else combined[a].text(),
            ))  # fmt: skip
        sections.append(Section(heading, tuple(rows)))
    if not sections:
        return ""
    columns = ("algorithm", "random selection", "minus FedAvg", "FedEntOpt's selection", "minus FedEntOpt with FedAvg")
    note = (
        "Test accuracy in per cent. The last column says whether an algorithm that re-weights or corrects still helps "
        f"once cohorts are even; bold below p = {SURE:g}, by Holm's correction over all differences of a setting."
    )
    title = "Does re-weighting help once cohorts are even?"
    return markdown(Table("selectors-algorithms", title, note, columns, tuple(sections)), level=2)


def _compared(pairs: Sequence[tuple[Comparison, Comparison | None]]) -> list[Against]:
    adjusted = holm([None if other is None else paired_p_value(own.values, other.values) for own, other in pairs])
    return [
        Against(None if other is None else paired_interval(own.values, other.values), p)
        for (own, other), p in zip(pairs, adjusted, strict=True)
    ]


def _shown(table: Table) -> str:
    """A table of the cells; those of the algorithms and of tuned selectors have been shown in other words."""
    if table.name in ("selectors-algorithms", TUNED):
        return ""
    sections = tuple(section for section in table.sections if section.rows)
    return markdown(dataclasses.replace(table, sections=sections), level=2)


def _plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])
