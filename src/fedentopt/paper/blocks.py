"""From a cells file (`paper.toml`, or a user's own) to cells with complete settings.

The format is explained at the top of `paper.toml`. A user's file stands on the paper's settings: what it says in
its own sections wins over all of `paper.toml`, its `[[cells]]` replace the paper's.
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError
from fedentopt.paper.block_checks import (
    AXES,
    REQUIRED,
    SECTIONS,
    STAND_INS,
    Document,
    as_list,
    check_known,
    check_paper,
    check_sections,
    check_settings,
    check_table,
    one_spelling,
    read_seeds,
    read_stand_ins,
)  # fmt: skip
from fedentopt.paper.cells import METRICS, Cell
from fedentopt.paper.printed import Place, Printed, printed_figures
from fedentopt.paper.selector_table import SELECTORS as SELECTOR_TABLE
from fedentopt.selection import SELECTORS
from fedentopt.settings import amount
from fedentopt.simulation.config import FIELDS, PARTS, RunConfig, option_of
from fedentopt.simulation.methods import parse_method

PRECISION = "fp32"


def paper_cells() -> list[Cell]:
    """Every cell of the paper, and the extras, with the printed figure where there is one."""
    return list(_paper_cells())


@cache  # thousands of settings to check, and always the same
def _paper_cells() -> tuple[Cell, ...]:
    return tuple(_cells([_paper()], "paper.toml", printed_figures()))


def cells_from_file(path: Path) -> list[Cell]:
    """The cells a user's file names; refused with the file and the block where something in it cannot be used."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"cells: {path} cannot be read ({error.strerror}); accepted: a TOML file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"cells: {path} is not text in UTF-8 ({error.reason}); accepted: a TOML file") from None
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, lists in lists in lists
        raise InputError(f"cells: {path} is not valid TOML: {error}") from None
    return _cells([_paper(), document], str(path), {})


def selector_cells() -> list[Cell]:
    """Every cell of the benchmark of selectors, which stands on the paper's settings."""
    return _cells([_paper(), _document("selectors.toml")], "selectors.toml", {})


def audit_cells() -> list[Cell]:
    """Every cell about liars and about selection without reports, on the paper's settings."""
    return _cells([_paper(), _document("audit.toml")], "audit.toml", {})


def _paper() -> Document:
    return _document("paper.toml")


def _document(name: str) -> Document:
    return tomllib.loads(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _cells(documents: Sequence[Document], source: str, printed: Mapping[Place, Printed]) -> list[Cell]:
    """Cells of the last document, whose settings build on those of the documents before it."""
    check_sections(documents[-1], source)
    blocks = documents[-1].get("cells")
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, dict) for block in blocks):
        raise InputError(f"{source}: has no [[cells]] block; accepted: at least one, with {', '.join(REQUIRED)}")
    cells: dict[Any, Cell] = {}
    for number, block in enumerate(blocks, 1):
        where = f"{source}: [[cells]] block {number}"
        try:
            for cell in _block_cells(documents, block, printed):
                if cell.identity in cells:
                    raise InputError(f"names a cell that is already there: {_name(cell)}")
                cells[cell.identity] = cell
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    _check_read(documents[-1], cells.values(), source)
    return list(cells.values())


def _check_read(document: Document, cells: Iterable[Cell], source: str) -> None:
    """Refuse a section that no cell reads: its name is misspelt, or what it says would silently not be looked at."""
    names: dict[str, set[str]] = {section: set() for section in SECTIONS}
    names["method"].add("fedavg")  # with which every cell is compared
    for cell in cells:
        for section in SECTIONS:
            name = getattr(cell, section)
            names[section].update(_read_for(section, name) if name is not None else ())
    for section, read in names.items():
        for name in document.get(section, {}):
            if one_spelling(section, name) not in read:
                near = difflib.get_close_matches(name, read, n=1)
                hint = f" did you mean {near[0]}?" if near else ""
                accepted = ", ".join(sorted(read)) or f"no [{section}.NAME]"
                raise InputError(f"{source}: [{section}.{name}] is read by no cell;{hint} accepted: {accepted}")


def _read_for(section: str, name: str) -> list[str]:
    """The names of the sections that a cell reads, in order: a combination takes those of its parts, then its own."""
    return [*name.split("+"), name] if section == "method" else [name]


def _block_cells(documents: Sequence[Document], block: Document, printed: Mapping[Place, Printed]) -> list[Cell]:
    for name in REQUIRED:
        if name not in block:
            raise InputError(f"{name} is missing")
    check_table(block["table"])
    check_paper(block.get("paper"))
    if not isinstance(block.get("extra", False), bool):
        raise InputError(f"extra: {block['extra']!r} cannot be used; accepted: true or false")
    fixed = {"table", "extra", "paper", "seeds"}
    check_settings({name: value for name, value in block.items() if name not in ("dataset", "model", "partition")})
    settings = [name for name in block if name not in fixed and name not in AXES and name != STAND_INS]
    swept = [name for name in settings if isinstance(block[name], list)]
    axes = [name for name in AXES if name in block]
    values = [as_list(name, block[name]) for name in (*axes[:-1], *swept, axes[-1])]  # metric stays innermost
    _check_looked_at(settings, as_list("method", block["method"]) if "method" in block else [])
    cells = []
    for combination in itertools.product(*values):
        chosen = dict(zip((*axes[:-1], *swept, axes[-1]), combination, strict=True))
        chosen = {name: one_spelling(name, value) for name, value in chosen.items()}
        plain = {name: block[name] for name in settings} | {name: chosen[name] for name in swept}
        cells.append(_cell(documents, block, chosen, plain, tuple(swept), printed))
        if block["table"] == SELECTOR_TABLE and chosen.get("method") not in (None, *SELECTORS.names):
            # Its page and its figure say what a selector asks of a client; they are made when all is trained.
            raise InputError(
                f"method: {chosen['method']!r} is no selector, and the table {SELECTOR_TABLE!r} compares selectors; "
                f"accepted there: {', '.join(SELECTORS.names)}; any other table takes it"
            )
    return cells


def _check_looked_at(settings: Sequence[str], methods: Sequence[str]) -> None:
    """Refuse settings of a method that none of a block's methods has."""
    for name in settings if methods else ():
        option = option_of(name)
        if option is not None and all(parse_method(method)[option[0]] != option[1] for method in methods):
            raise InputError(f"{name}: {methods[0]} does not look at it; accepted: methods with {option[1]}")


def _cell(
    documents: Sequence[Document],
    block: Document,
    chosen: Mapping[str, Any],
    settings: dict[str, Any],
    swept: tuple[str, ...],
    printed: Mapping[Place, Printed],
) -> Cell:
    """One cell: the axes' values it was given, and the runs they lead to."""
    table, metric, method = block["table"], chosen["metric"], chosen.get("method")
    if metric not in METRICS:
        raise InputError(f"metric: {metric!r} is unknown; accepted: {', '.join(METRICS)}")
    place = Place(
        table,
        metric,
        chosen["model"],
        chosen["dataset"],
        chosen.get("partition"),
        method,
        chosen.get("availability"),
        chosen.get("buffer"),
    )
    figure = printed.get(place)
    common: dict[str, Any] = {
        **{name: chosen.get(name) for name in ("model", "dataset", "partition", "method", "availability")},
        "table": table,
        "metric": metric,
        "paper": figure.mean if figure else block.get("paper"),
        "paper_std": figure.std if figure else None,
        "extra": block.get("extra", False),
        "swept": tuple((name, chosen[name]) for name in swept),
    }
    if metric == "model_mb":
        check_known(settings)
        return Cell(**common)
    availability = common["availability"]
    if availability is not None and not any(availability in doc.get("availability", {}) for doc in documents):
        known = {name for doc in documents for name in doc.get("availability", {})}
        raise InputError(f"availability: {availability!r} has no section; accepted: {', '.join(sorted(known))}")
    if method is None or common["partition"] is None:
        raise InputError(f"{'method' if method is None else 'partition'} is missing")

    def config(name: str) -> RunConfig:
        # What is said of the cell's own selector or algorithm is not meant for those that it is compared with.
        parts = {part: parse_method(name)[part] == parse_method(method)[part] for part in PARTS}
        meant = {key: value for key, value in settings.items() if parts.get(key.partition(".")[0], True)}
        merged = _over(_layered(documents, {**chosen, "method": name}), meant)
        merged = _over(merged, {key: chosen[key] for key in ("participation", "buffer") if key in chosen})
        return _run_config(merged, {**chosen, "method": name})

    own = config(method)
    if metric == "accuracy_change" and (own.selector != "fedentopt" or own.algorithm == "fedavg"):
        raise InputError(f"method: {method!r} has no baseline to change from; accepted: such as fedprox+fedentopt")
    if metric == "validation_accuracy" and not own.validation:
        raise InputError("validation: nothing is held out; accepted: the share that clients hold out, such as 0.1")
    merged = _layered(documents, chosen) | settings
    # What was measured of bf16 was measured beside the paper's own arithmetic; a block may say more of its own runs.
    inherited = merged.get(STAND_INS, []) if own.precision == PRECISION and "precision" not in settings else []
    stand_ins = read_stand_ins(block.get(STAND_INS, inherited), own)
    return Cell(
        **common,
        participation=chosen.get("participation", _per_cent(own.cohort_size, own.clients)),
        buffer=None if _buffer(own) is None else chosen.get("buffer", _buffer(own)),
        seeds=read_seeds(block.get("seeds", merged.get("seeds", 1))),
        config=own,
        baseline=config(own.algorithm) if metric == "accuracy_change" else None,
        reference=config("fedavg"),
        full_rounds=own.rounds,
        stand_ins=stand_ins,
    )


def _buffer(config: RunConfig) -> float | None:
    """The buffer of the run's selector in per cent of the clients, None where it has none."""
    given = config.of("selector").get("buffer")
    return None if given is None else _per_cent(amount(given, config.clients, "buffer"), config.clients)


def _layered(documents: Sequence[Document], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of all sections that speak of this cell, later documents and later sections winning."""
    merged: dict[str, Any] = {}
    for document in documents:
        merged = _over(merged, document.get("settings", {}))
        for section in SECTIONS:
            name = chosen.get(section)
            tables = {one_spelling(section, said): table for said, table in document.get(section, {}).items()}
            for part in _read_for(section, name) if name else ():
                merged = _over(merged, tables.get(part, {}))
    return merged


def _over(merged: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with later ones on top; a number of clients and a share of them are the same setting."""
    replaced = {"cohort", "participation"} if {"cohort", "participation"} & later.keys() else set()
    return {**{name: value for name, value in merged.items() if name not in replaced}, **later}


def _run_config(merged: Mapping[str, Any], chosen: Mapping[str, Any]) -> RunConfig:
    """A run from merged settings, without those its method does not look at."""
    of_run = {name: value for name, value in merged.items() if name not in ("seeds", STAND_INS)}
    settings = {name: None if _open(name, value) else value for name, value in of_run.items()}
    for name, key in (("participation", "cohort"), ("buffer", "buffer")):
        if name in settings:
            value = settings.pop(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{name}: {value!r} is not a number; accepted: per cent of the clients")
            settings[key] = f"{value:g}%"
    method = parse_method(chosen["method"])
    if "buffer" in settings and method["selector"] != "fedentopt" and _has_buffer(method["selector"]):
        settings["selector.buffer"] = settings.pop("buffer")
    if method["epsilon"] is not None:
        method["epsilon"] = settings.get("epsilon", method["epsilon"])
    settings |= method
    if settings.get("averaging") == "samples" and not _has_weights(method["selector"]):
        del settings["averaging"]  # what it does anyway: the run is the same, and shared with cells that do not say so
    for name in list(settings):
        found = option_of(name)
        if found is not None and method[found[0]] != found[1]:
            del settings[name]
    named = {name: chosen[name] for name in ("model", "dataset", "partition")}
    return RunConfig.from_dict(settings | named)


def _open(name: str, value: Any) -> bool:
    """Whether a setting that may be left open is, which TOML has no value for."""
    return value == "none" and name in FIELDS and FIELDS[name].optional


def _has_buffer(selector: str) -> bool:
    """Whether a selector has a buffer of its own beside FedEntOpt's, whose setting is an option."""
    return selector in SELECTORS and "buffer" in SELECTORS.settings(selector)


def _has_weights(selector: str) -> bool:
    """Whether a selector may define weights for the average; of a user's own nobody knows before it runs."""
    return selector not in SELECTORS or bool(SELECTORS.get(selector).own_weights)


def _per_cent(part: int, whole: int) -> float:
    share = 100 * part / whole
    return int(share) if share == int(share) else round(share, 2)


def _name(cell: Cell) -> str:
    return ", ".join(str(part) for part in cell.identity if part is not None)
