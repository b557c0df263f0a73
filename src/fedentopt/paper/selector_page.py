"""The page `docs/SELECTORS.md`: which selector wins where, made from exported results alone.

It begins with where FedEntOpt is not best. What a person has to add lies beside the results in `remarks.md`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedentopt.paper import names
from fedentopt.paper.comparison import Comparison
from fedentopt.paper.formats import Table, folded, grid, markdown
from fedentopt.paper.results_page import commands_behind, what_was_run
from fedentopt.paper.selector_algorithms import ALGORITHMS, algorithms
from fedentopt.paper.selector_asks import MADE_HERE, OURS, RANDOM
from fedentopt.paper.selector_averaging import AVERAGING, averaging
from fedentopt.paper.selector_overall import (
    ceiling_seeds,
    costs,
    from_ours,
    gap_closed,
    largest_gains,
    methods_of,
    participations,
    summary,
    where,
)
from fedentopt.paper.selector_table import SELECTORS, SURE, TUNED, BenchSetting, bench_settings, p_text, selector_table
from fedentopt.paper.selector_tuned import beside_defaults, not_best_when_tuned
from fedentopt.paper.tables import tables
from fedentopt.results.statistics import mean, student_quantile

INTRODUCTION = """# Every selector in one benchmark

Which clients should train next? Every selector that this package has, the field's and its own, on the same
partitions, start models and local training, over the same seeds, each with the defaults of its own paper, the weights
of its average among them. What each one is: [Methods](methods.md); which one to take:
[Selection](selection.md#which-one). Figures are test accuracies in per cent and differences of them, seed by seed.
"""
HOW = """## How this page is made

By one command, from the files in `results/selectors`, which hold a row for every cell and seed:

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

There are none yet: the commands below make them.
"""
CAPTION = """\
Points above random selection, by what a selector asks of a client beside its model: from nothing at the top to the
client's own update, which secure aggregation would hide, at the bottom. Small dots are single settings, large marks
their means, stars FedEntOpt and the selectors made here.
"""
TOGETHER = "What all settings say together is in the table over all settings."
CEILING = "The dashed line is training all clients in every round"


def selector_page(
    entries: Sequence[Comparison], *, commands: Sequence[dict[str, Any]], remarks: str, figures: dict[str, str]
) -> str:
    """The page as text."""
    parts = [INTRODUCTION]
    known = [entry for entry in entries if entry.ours is not None]
    settings = [setting for setting in bench_settings(known) if setting.by_method]
    methods = list(dict.fromkeys(e.cell.method or "" for e in known or entries if e.cell.table == SELECTORS))
    if not known:
        return "\n".join([*parts, NOTHING_YET, _asks([], methods), HOW, what_was_run(entries)])
    if settings:
        parts.append(_not_best(settings, not_best_when_tuned(entries)))
    if SELECTORS in figures:
        parts.append(f"![Accuracy against what a selector asks of a client]({figures[SELECTORS]})\n")
        parts.append(CAPTION + _sentence(CEILING, settings))
    if settings:
        parts += [_over_all(settings), _where(settings)]
    parts += [algorithms(known), averaging(entries), _tuned(entries), _asks(settings, methods)]
    if remarks.strip():
        parts.append(f"## Remarks\n\n{remarks.strip()}\n")
    if settings:
        parts.append(_every_setting(known, settings))
    parts += [_shown(table) for table in tables(known) if table.name != SELECTORS]
    parts += [HOW, what_was_run(entries), commands_behind(commands)]
    return "\n".join([part for part in parts if part])


def _sentence(about_ceiling: str, settings: Sequence[BenchSetting]) -> str:
    """A sentence about full participation, with the number of its seeds where others have more; empty without it."""
    if all(setting.ceiling_gain is None for setting in settings):
        return ""
    few, many = ceiling_seeds(settings)
    return f"{about_ceiling}{f' (in {few} of {many} seeds)' if few < many else ''}.\n"


def _not_best(settings: Sequence[BenchSetting], when_tuned: str) -> str:
    """First of all: the settings in which another selector has the higher mean."""
    judged = [setting for setting in settings if OURS in setting.by_method and len(setting.by_method) > 2]
    lines = ["## Where FedEntOpt is not best", ""]
    if not judged:
        return "\n".join([*lines, "No setting has results of FedEntOpt and of two others yet.", ""])
    lost = [setting for setting in judged if setting.best != OURS]
    lines += [
        _who_is_best(judged, lost) + _nearest(judged),
        "",
        f"{_how_sure(judged)}{when_tuned and ' '}{when_tuned}",
        "",
    ]
    better = [(s, m) for s in judged for m, found in s.against_ours.items() if found.better]
    if better:
        by_method: dict[str, list[str]] = {}
        for setting, method in better:
            by_method.setdefault(method, []).append(setting.place)
        lines += ["Clearly better than FedEntOpt:", ""]
        lines += [f"- {names.method(method)}: {'; '.join(places)}" for method, places in by_method.items()]
        lines.append("")
    if not lost:
        return "\n".join([*lines, "In no setting has another selector the higher mean.", ""])
    rows = []
    for setting in lost:
        best, found = setting.by_method[setting.best], setting.against_ours[setting.best]
        accuracies = (f"{entry.ours:.2f}" for entry in (best, setting.by_method[OURS]))
        rows.append((setting.place, names.method(setting.best), *accuracies, found.text(), p_text(found.p)))
    columns = ("setting", "best", "its accuracy", "FedEntOpt's", "difference, 95 % interval", "p (Holm)")
    return "\n".join([*lines, grid(columns, rows)])


def _who_is_best(judged: Sequence[BenchSetting], lost: Sequence[BenchSetting]) -> str:
    models = dict.fromkeys(names.model(e.cell.model) for s in judged for e in s.entries)
    number = len(judged)
    text = (
        f"FedEntOpt has the highest mean accuracy in {number - len(lost)} of {names.counted(number, 'setting')} "
        f"({', '.join(models)}, {_seeds(judged)})"
    )
    counts = Counter(setting.best for setting in lost).most_common()
    groups = {
        "made here": [f"{names.method(m)} in {n}" for m, n in counts if m in MADE_HERE],
        "of others": [f"{names.method(m)} in {n}" for m, n in counts if m not in MADE_HERE],
    }
    found = [f"selectors {whose} ({', '.join(which)})" for whose, which in groups.items() if which]
    return f"{text}; elsewhere {' and '.join(found)}." if found else f"{text}."


def _nearest(judged: Sequence[BenchSetting]) -> str:
    """In a sentence: the selector of others that does best beside FedEntOpt, over the settings that both have."""
    gaps = {m: from_ours(judged, m) for m in methods_of(judged) if m not in (OURS, RANDOM, *MADE_HERE)}
    means = {method: mean(own) or 0.0 for method, own in gaps.items() if own}
    if not means:
        return ""
    first = max(means, key=lambda method: means[method])
    ahead = sum(gap > 0 for gap in gaps[first])
    return (
        f" Of the selectors that others have published, {names.method(first)} does best: on average "
        f"{means[first]:+.2f} points from FedEntOpt, above it in {ahead} of "
        f"{names.counted(len(gaps[first]), 'setting')}."
    )


def _how_sure(judged: Sequence[BenchSetting]) -> str:
    """In words: how many comparisons are more than luck, and how much that takes."""
    found = [against for setting in judged for against in setting.against_ours.values()]
    told = [against for against in found if against.p is not None]
    if not told:
        return f"One seed says nothing about luck within a setting: differences come without an interval. {TOGETHER}"
    most = max(against.interval.seeds for against in told if against.interval is not None)
    of_one = max(len([a for a in s.against_ours.values() if a.p is not None]) for s in judged)
    errors = student_quantile(most - 1, 1 - SURE / of_one)
    return (
        f"Of {names.counted(len(told), 'comparison')} with another selector, the other is clearly better in "
        f"{sum(a.better for a in told)}, FedEntOpt in {sum(a.worse for a in told)}; the rest may be luck. Clearly "
        f"means p < {SURE:g} after Holm's correction over the comparisons of a setting: of {of_one}, the first has to "
        f"be {errors:.{0 if errors >= 10 else 1}f} times its standard error with {most} seeds. "
        f"{TOGETHER}"
    )


def _seeds(settings: Sequence[BenchSetting]) -> str:
    numbers = sorted({len(entry.values) for setting in settings for entry in setting.by_method.values()})
    return names.counted(numbers[0], "seed") if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} seeds"


def _over_all(settings: Sequence[BenchSetting]) -> str:
    """One line per selector."""
    text = (
        "Points of accuracy, means over the settings that have results. What is asked of a client stands in full "
        "[below](#what-each-asks-of-a-client). Clearly: in how many settings the difference "
        "is more than luck after Holm's correction over the comparisons of a setting with the same selector. P over "
        "settings: Wilcoxon's signed-rank test of the differences to FedEntOpt, one per setting, by Holm's correction "
        f"over the selectors, bold below {SURE:g}; it takes settings for independent, which those of one data set, let "
        "alone one partition at two participations, are not quite."
    )
    return "\n".join(
        [
            "## Over all settings",
            "",
            *_paragraph(gap_closed(settings)),
            *_paragraph(largest_gains(settings)),
            text,
            "",
            grid(*summary(settings)),
        ]
    )


def _paragraph(text: str) -> list[str]:
    return [text, ""] if text else []


def _where(settings: Sequence[BenchSetting]) -> str:
    """Which selector wins where: a table for every participation."""
    lines = [
        "## What wins where",
        "",
        (
            f"Points above random selection, the highest of a setting in bold.{_mixed(settings)} "
            + _sentence("All clients are counted from random selection in the seeds that both have", settings)
        ).rstrip(),
        "",
    ]
    for share in participations(settings):
        columns, rows = where(settings, share)
        if len(columns) > 1:
            lines += [f"### {share:g} % of the clients per round", "", grid(columns, rows, words=1)]
    return "\n".join(lines) if len(lines) > 4 else ""


def _mixed(settings: Sequence[BenchSetting]) -> str:
    """What a short name stands for."""
    partitions = {e.cell.partition for s in settings if s.short.endswith("mixed Dirichlet") for e in s.entries}
    return "".join(f" Mixed Dirichlet is {names.partition(one)}." for one in partitions if one)


def _asks(settings: Sequence[BenchSetting], methods: Sequence[str]) -> str:
    if not methods:
        return ""
    note = "MB: all that travels, models included. Selection: time of the selector on the machine that trained."
    return "\n".join([
        "## What each asks of a client", "", *_paragraph(note if settings else ""), grid(*costs(settings, methods))
    ])  # fmt: skip


def _every_setting(known: Sequence[Comparison], settings: Sequence[BenchSetting]) -> str:
    """The long table, a setting at a time behind a line that says who is best in it."""
    table = selector_table(SELECTORS, known)
    lines = [f"## {table.title}, setting by setting", "", table.note, ""]
    for setting, section in zip(settings, table.sections, strict=True):
        named = [method for method in dict.fromkeys((setting.best, OURS, RANDOM)) if method in setting.by_method]
        shown = [f"{names.method(method)} {setting.by_method[method].ours:.2f}" for method in named]
        targets = "rounds to {} % and {} %".format(*setting.targets)
        inside = grid(table.columns, section.rows, words=1)
        lines.append(folded(f"{setting.place}: {', '.join(shown)} ({targets})", inside))
    return "\n".join(lines)


def _tuned(entries: Sequence[Comparison]) -> str:
    table = beside_defaults(entries)
    return "" if table is None else markdown(table, level=2)


def _shown(table: Table) -> str:
    """A table of the cells; those of algorithms, averages and tuned selectors have been shown in other words."""
    if table.name in (ALGORITHMS, AVERAGING, TUNED):
        return ""
    sections = tuple(section for section in table.sections if section.rows)
    inside = markdown(dataclasses.replace(table, sections=sections), level=2).partition("\n")[2]
    return f"## {table.title}\n\n{folded('Every value of the grid, on held-out data', inside)}"
