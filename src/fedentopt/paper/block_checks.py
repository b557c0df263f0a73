"""What a cells file may say: refuses what nothing could honour, and reads lists and seeds."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from typing import Any

from fedentopt.errors import InputError
from fedentopt.partition import parse as parse_partition
from fedentopt.simulation.config import RunConfig, known_keys
from fedentopt.simulation.methods import MOST_SEEDS

Document = Mapping[str, Any]

SECTIONS = ("dataset", "model", "partition", "method", "availability")
AXES = ("availability", "model", "dataset", "partition", "participation", "method", "buffer", "metric")
REQUIRED = ("table", "metric", "model", "dataset")
STAND_INS = "stand_ins"
LARGEST = sys.float_info.max
TAKEN = ("all", "rounds-to-target")
"""Table names that mean something else already: every table, and the table that goes with Table 1."""

ELSEWHERE = {
    "seed": "seeds",
    "algorithm": "method",
    "selector": "method",
    **{name: f"{name} in [[cells]]" for name in ("dataset", "model", "partition")},
}
"""Settings of a run that a cell says in other words, and where; given as settings they would not be looked at."""


def one_spelling(section: str, name: Any) -> Any:
    """A name by which a section and a cell are matched: of a partition that which all its spellings share, `dir:0.1`
    for `dir:0.10`. What is no partition keeps its name, by which it is refused where it is used."""
    if section != "partition" or not isinstance(name, str):
        return name
    try:
        return str(parse_partition(name))
    except InputError:
        return name


def check_sections(document: Document, source: str) -> None:
    """Refuse sections that mean nothing, or that hold anything but settings."""
    known = ("settings", "cells", *SECTIONS)
    for name, section in document.items():
        if name not in known:
            raise InputError(f"{source}: [{name}] is unknown; accepted: {', '.join(known)}")
        inner = section.values() if name in SECTIONS and isinstance(section, dict) else [section]
        if name != "cells" and not all(isinstance(table, dict) for table in inner):
            form = "[settings]" if name == "settings" else f"[{name}.NAME]"
            raise InputError(f"{source}: {name} is not a section of settings; accepted: {form}")
        if name != "cells":
            for table in inner:
                check_settings(table, f"{source}: [{name}]: ")
    _check_one_each(document.get("partition", {}), source)


def _check_one_each(partitions: Document, source: str) -> None:
    """Refuse two sections about one partition: which of them wins would be a matter of their order."""
    first: dict[str, str] = {}
    for name in partitions:
        other = first.setdefault(one_spelling("partition", name), name)
        if other != name:
            raise InputError(
                f"{source}: [partition.{name}] and [partition.{other}] are the same; accepted: one of them"
            )


def check_settings(settings: Document, where: str = "") -> None:
    """Refuse settings that could not be honoured."""
    for name in settings:
        if name in ELSEWHERE:
            raise InputError(f"{where}{name}: cannot be set here; accepted: {ELSEWHERE[name]}")
    if "cohort" in settings and "participation" in settings:
        raise InputError(f"{where}cohort: says the same as participation; accepted: one of the two")


def check_table(name: Any) -> None:
    """A table's name becomes part of file names, which must stay in their folder and be told apart again."""
    fits = isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name) and name not in TAKEN
    if not fits or name.endswith("_curves"):
        raise InputError(
            f"table: {name!r} cannot be used; accepted: letters, digits, '-' and '_', a letter or digit first, "
            f"no '_curves' at the end, not {' or '.join(TAKEN)}"
        )


def check_paper(value: Any) -> None:
    """Refuse a printed figure that is no number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and abs(value) <= LARGEST):  # NaN fails every comparison
        raise InputError(f"paper: {value!r} cannot be used; accepted: a finite number")


def check_known(settings: Mapping[str, Any]) -> None:
    """Refuse settings that no run has, where there is no run to refuse them."""
    known = known_keys()
    for name in settings:
        if name not in known:
            raise InputError(f"{name}: unknown setting; accepted: {', '.join(sorted(known))}")


def as_list(name: str, value: Any) -> list[Any]:
    """The values a block names for an axis or a setting, one or several."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise InputError(f"{name}: the list is empty")
    for item in values:
        if name in ("participation", "buffer"):
            if isinstance(item, bool) or not isinstance(item, int | float):
                raise InputError(f"{name}: {item!r} is not a number; accepted: per cent of the clients")
        elif name in AXES and not isinstance(item, str):
            raise InputError(f"{name}: {item!r} is not a name")
        elif isinstance(item, list | dict):
            raise InputError(f"{name}: {item!r} cannot be used; accepted: a single value, or a list of such")
    return values


def read_stand_ins(value: Any, config: RunConfig) -> tuple[str, ...]:
    """Precisions that count instead of a cell's own."""
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str):
            raise InputError(f"{STAND_INS}: {name!r} cannot be used; accepted: a list of precisions, such as bf16")
        try:
            dataclasses.replace(config, precision=name)
        except InputError as error:
            raise InputError(f"{STAND_INS}: {error}") from None
    return tuple(dict.fromkeys(name for name in names if name != config.precision))


def read_seeds(value: Any) -> tuple[int, ...]:
    """A number of seeds (3 is 0, 1, 2) or the seeds themselves; no more than the command line takes."""
    number = len(value) if isinstance(value, list) else value
    if isinstance(number, int) and number > MOST_SEEDS:
        shown = f"a list of {number}" if isinstance(value, list) else value
        raise InputError(f"seeds: {shown} are too many; accepted: at most {MOST_SEEDS}")
    seeds = list(range(value)) if isinstance(value, int) and not isinstance(value, bool) else value
    good = isinstance(seeds, list) and seeds and len(set(map(str, seeds))) == len(seeds)
    if not good or any(isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1e15 for seed in seeds):
        raise InputError(
            f"seeds: {value!r} cannot be used; accepted: how many, or a list of different whole numbers "
            "(at most 15 digits)"
        )
    return tuple(seeds)
