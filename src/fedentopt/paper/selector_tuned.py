"""Selectors with the value of their one setting that the grid prefers, on the test split, beside the published default.

The grid (`selectors-tuning`) trains every selector with each of its values on data from which the clients hold a part
out, in seeds of its own. In each setting (data set, partition, participation) a selector's value is the one with the
highest mean accuracy on what is held out; of equal ones the default, then the first. Nothing else is looked at, least
of all the test split. The cells made here run that value like the default's cells: on all data, over the same seeds. A
selector that has nothing to choose, or chooses its default, has its default's runs, which are not repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fedentopt.errors import InputError
from fedentopt.paper import names
from fedentopt.paper.cells import Cell, named_tables
from fedentopt.paper.comparison import Comparison, grouped
from fedentopt.paper.formats import Section, Table
from fedentopt.paper.measures import Results
from fedentopt.paper.selector_asks import OURS
from fedentopt.paper.selector_table import GRID, SELECTORS, SURE, TUNED, Against, compared, falling
from fedentopt.results.statistics import mean, paired_differences, paired_interval
from fedentopt.simulation.config import RunConfig

PLACE = ("model", "dataset", "partition", "availability", "participation")
DEFAULT = "default"
NOT_RUN = "not run yet"


def with_tuned(plan: list[Cell], results: Results, target: str) -> list[Cell]:
    """The plan and the tuned cells that the grid's results lead to; none are refused where `target` names them."""
    groups = _groups(plan)
    made = _tuned_cells(groups, results)
    if TUNED in named_tables(target) and groups and not made:
        varied = [(default, own) for default, own in groups if len(own) > 1]
        most = sum(len(default.seeds) for default, _ in varied)
        raise InputError(
            f"{TUNED}: no selector has a finished grid here yet; accepted: after `fedentopt reproduce {GRID}`, with "
            f"--known, --results or --out naming where its results are (at most {most} runs will then be to do)"
        )
    return [*plan, *made]


def _groups(plan: Sequence[Cell]) -> list[tuple[Cell, list[Cell]]]:
    """For every selector in every setting of the grid: the cell of its default, and the grid's cells."""
    groups: dict[Any, tuple[Cell, list[Cell]]] = {}
    defaults = [cell for cell in plan if cell.table == SELECTORS and cell.metric == "accuracy"]
    for cell in (cell for cell in plan if cell.table == GRID):
        default = next((one for one in defaults if _is_default_of(one, cell)), None)
        if default is not None:
            groups.setdefault(default.identity, (default, []))[1].append(cell)
    return list(groups.values())


def _is_default_of(default: Cell, cell: Cell) -> bool:
    """Whether two cells differ in settings of the selector, and in what is held out, alone."""
    if default.method != cell.method or any(getattr(default, name) != getattr(cell, name) for name in PLACE):
        return False
    assert default.config is not None
    assert cell.config is not None
    own, other = default.config.to_dict(), cell.config.to_dict()
    apart = {name for name in own.keys() | other.keys() if own.get(name) != other.get(name)}
    return all(name in ("validation", "buffer") or name.startswith("selector.") for name in apart)


def _tuned_cells(groups: Sequence[tuple[Cell, list[Cell]]], results: Results) -> list[Cell]:
    chosen = [(default, own, _best(default, own, results)) for default, own in groups]
    # Those with nothing to choose come with the first that has chosen.
    settled = {_place(default) for default, own, best in chosen if best is not None and len(own) > 1}
    return [
        _tuned(default, own, best)
        for default, own, best in chosen
        if best is not None and _place(default) in settled
    ]  # fmt: skip


def _place(cell: Cell) -> tuple[Any, ...]:
    """The setting of a cell: everything but its selector."""
    return (*(getattr(cell, name) for name in PLACE), names.heading(cell))


def _best(default: Cell, cells: Sequence[Cell], results: Results) -> Cell | None:
    """The grid's cell with the highest mean over all of its seeds; None while a seed of any is missing."""
    if len(cells) == 1:
        return cells[0]
    means = []
    for cell in cells:
        values = [results.value(cell, seed) for seed in cell.seeds]
        known = [value for value in values if value is not None]
        average = mean(known)
        if average is None or len(known) < len(values):
            return None
        means.append(round(average, 6))
    ranked = [(value, _is_default(default, cell, cells)) for value, cell in zip(means, cells, strict=True)]
    return cells[ranked.index(max(ranked))]


def _varied(cells: Sequence[Cell]) -> list[str]:
    """The settings of the selector in which these cells differ."""
    options = [cell.config.of("selector") for cell in cells if cell.config is not None]
    return [name for name in options[0] if any(one[name] != options[0][name] for one in options)]


def _is_default(default: Cell, cell: Cell, cells: Sequence[Cell]) -> bool:
    """Whether the cell has the default's value of what the grid varies."""
    assert default.config is not None
    assert cell.config is not None
    ours, its = cell.config.of("selector"), default.config.of("selector")
    return all(ours[name] == _meant(name, its[name], default.config) for name in _varied(cells))


def _meant(name: str, value: Any, config: RunConfig) -> Any:
    """What a default that is left open comes to: power-of-choice's 2 M candidates, FLIPS's M clusters."""
    if value is not None:
        return value
    return {"d": 2 * config.cohort_size, "clusters": config.cohort_size}.get(name)


def _tuned(default: Cell, cells: Sequence[Cell], best: Cell) -> Cell:
    assert default.config is not None
    assert best.config is not None
    made = dataclasses.replace(default, table=TUNED, extra=True)
    if len(cells) == 1 or _is_default(default, best, cells):
        return made
    options = best.config.of("selector")
    swept = tuple((name, options[name]) for name in _varied(cells) if name != "buffer")
    config = dataclasses.replace(best.config, validation=default.config.validation)
    return dataclasses.replace(made, config=config, buffer=best.buffer, swept=(*default.swept, *swept))


def chosen(cell: Cell, default: Cell | None) -> str:
    """The value that a tuned cell has, in words."""
    if default is None or cell.config == default.config:
        return DEFAULT
    if cell.buffer != default.buffer:
        return f"buffer {cell.buffer:g} %"
    return ", ".join(f"{name} {value:g}" for name, value in cell.swept if (name, value) not in default.swept)


def tuned_table(name: str, entries: Sequence[Comparison]) -> Table:
    """A section per setting, a row per selector, the most accurate first; the page has the defaults beside them."""
    return Table(
        name, names.table(name),
        f"Test accuracy in per cent, {names.averaged(entries)}, of every selector with the value that the grid on "
        "held-out data prefers. Against random: differences seed by seed with Student's 95 % interval, bold where zero "
        "lies outside.",
        ("selector", "setting", "accuracy", "against random, 95 % interval", "seeds"),
        tuple(
            Section(heading, tuple(
                (names.method(e.cell.method), _written(e.cell), names.ours(e), names.against(e), names.seeds(e))
                for e in sorted(own, key=falling)
            ))
            for heading, own in _by_setting(entries).items()
        ),
    )  # fmt: skip


def _written(cell: Cell) -> str:
    """The settings of the cell's selector that a table can tell without its default."""
    parts = [f"{name} {value:g}" for name, value in cell.swept if not isinstance(value, bool)]
    return ", ".join([*([] if cell.buffer is None else [f"buffer {cell.buffer:g} %"]), *parts]) or DEFAULT


def _by_setting(entries: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    found = grouped(entries, lambda cell: f"{names.heading(cell)}, {cell.participation:g} % per round")
    return {heading: own for heading, own in found.items() if any(entry.ours is not None for entry in own)}


def beside_defaults(entries: Sequence[Comparison]) -> Table | None:
    """Tuned beside default, setting by setting, each against FedEntOpt tuned; None where nothing was tuned."""
    tuned = [entry for entry in entries if entry.cell.table == TUNED]
    defaults = {_key(entry.cell): entry for entry in entries if entry.cell.table == SELECTORS}
    sections = []
    for heading, own in _by_setting(tuned).items():
        ours = next((entry for entry in own if entry.cell.method == OURS), None)
        others = [entry for entry in own if entry is not ours]
        found = {id(e): one for e, one in zip(others, compared([(e, ours) for e in others]), strict=True)}
        rows = []
        for entry in sorted(own, key=falling):
            default = defaults.get(_key(entry.cell))
            same = default is not None and entry.cell.config == default.cell.config
            rows.append((
                names.method(entry.cell.method),
                chosen(entry.cell, None if default is None else default.cell),
                names.ours(default),
                NOT_RUN if entry.ours is None else names.ours(entry),
                names.NOTHING if default is None or same else _gap(entry, default).text(),
                found.get(id(entry), Against()).text(),
            ))  # fmt: skip
        sections.append(Section(heading, tuple(rows)))
    if not sections:
        return None
    note = (
        "Test accuracy in per cent. Tuned: the value of its one setting with the highest mean accuracy on data that "
        "the clients hold out, three values each, in seeds that this page does not use elsewhere; those without such a "
        "setting, and those whose default came out first, keep the default. Differences seed by seed with Student's 95 "
        f"% interval; those to FedEntOpt are bold below p = {SURE:g} by Holm's correction over the setting."
    )
    columns = ("selector", "chosen", "default", "tuned", "tuned minus default", "minus FedEntOpt, both tuned")
    return Table(TUNED, "Every selector tuned on held-out data", note, columns, tuple(sections))


def _gap(entry: Comparison, default: Comparison) -> Against:
    """Tuned minus default, a comparison of its own."""
    both = (entry.values, default.values)
    return Against(mean(paired_differences(*both)), paired_interval(*both))


def _key(cell: Cell) -> tuple[Any, ...]:
    return (*(getattr(cell, name) for name in PLACE), names.heading(cell), cell.method)


def not_best_when_tuned(entries: Sequence[Comparison]) -> str:
    """In a sentence: how often FedEntOpt is not the best of the tuned ones; empty where it cannot be told, as long as
    the value that any selector of a setting chose has not been run."""
    judged = [own for own in _by_setting([e for e in entries if e.cell.table == TUNED]).values() if len(own) > 2]
    judged = [own for own in judged if any(entry.cell.method == OURS for entry in own)]
    judged = [own for own in judged if all(entry.ours is not None for entry in own)]
    if not judged:
        return ""
    best = [max(own, key=lambda entry: entry.ours or 0.0) for own in judged]
    lost = [entry for entry in best if entry.cell.method != OURS]
    text = (
        f"With every selector tuned on held-out data, FedEntOpt has the highest mean in {len(judged) - len(lost)} of "
    )
    text += f"{len(judged)} settings"
    where = [f"{names.method(e.cell.method)} on {names.heading(e.cell)}" for e in lost]
    return f"{text}; higher: {'; '.join(where)}, with the highest mean there." if where else f"{text}."
