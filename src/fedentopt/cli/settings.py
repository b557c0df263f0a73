"""Options made from dataclasses: every field is an option, its help text the field's, and a TOML file may give it.

The order of precedence is: option, then file, then the command's own default, then the field's.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from fedentopt.errors import InputError
from fedentopt.settings import from_word, is_list, kind_of, read_toml
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.methods import parse_seeds
from fedentopt.simulation.options import Execution

PANELS = {
    "Data": ("dataset", "fine_labels", "image_size", "partition", "min_samples", "clients", "data_dir"),
    "Method": ("method", "algorithm", "selector", "cohort", "buffer", "epsilon", "dropout", "stragglers"),
    "Training": (
        "model", "weights", "rounds", "epochs", "batch_size", "lr", "lr_decay", "weight_decay", "momentum",
        "jitter", "flip", "grayscale", "evaluate_every", "precision", "seed", "seeds",
    ),
    "Settings of single methods": (
        "mu", "scaffold_variant", "fedrs_alpha", "fedrs_soft", "fedlc_tau", "clusters", "concat_share",
        "concat_max_rounds",
    ),
    "Where and how": (
        "out", "config", "resume", "device", "trainer", "workers", "checkpoint_every", "target", "page", "log",
        "as_json",
    ),
}  # fmt: skip
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}

Given = Mapping[str, Any]


def fields_of(*classes: type) -> dict[str, dataclasses.Field[Any]]:
    """Fields of the dataclasses by name."""
    return {f.name: f for one in classes for f in dataclasses.fields(one)}


def field_options(fields: Mapping[str, dataclasses.Field[Any]], defaults: Mapping[str, Any]) -> list[inspect.Parameter]:
    """An option for each field. All default to None, "not given", since a file may give the value instead."""
    parameters = []
    for name, field in fields.items():
        kind, optional = kind_of(field)
        default = defaults.get(name, field.default)
        help_text = field.metadata["help"]
        if default not in (None, ()):
            help_text += f" (default: {_word(default)})"
        flag = f"--{name.replace('_', '-')}"
        annotation: Any = str | None
        metavar: str | None = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT"}.get(kind)
        if kind == "bool":
            annotation, metavar = bool | None, None
            flag = f"{flag}/--no-{name.replace('_', '-')}"
        elif is_list(field):
            annotation = list[str] | None
        elif optional:
            metavar = f"{metavar}|none"
        parameters.append(option(name, annotation, flag, help_text, metavar=metavar))
    return parameters


def option(
    name: str, annotation: Any, flag: str, help_text: str, *, metavar: str | None = None, default: Any = None
) -> inspect.Parameter:
    """One option as a parameter of a command."""
    panel = PANEL_OF.get(name, "Other settings")
    info = typer.Option(default, flag, help=help_text, metavar=metavar, rich_help_panel=panel, show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=annotation)


def shared_options() -> list[inspect.Parameter]:
    """Options that are no field: several seeds, the file, JSON."""
    return [
        option("seeds", str | None, "--seeds", "several seeds, such as 0,1,2 or 0-4", metavar="LIST"),
        option("config", str | None, "--config", "TOML file with settings; options win", metavar="FILE"),
        option("as_json", bool, "--json", "print JSON instead of a table", default=False),
    ]


def command(body: Callable[[dict[str, Any]], None], parameters: Iterable[inspect.Parameter]) -> Callable[..., None]:
    """A function with these parameters, for typer to read, that hands them to `body` as a dict."""

    def run(**given: Any) -> None:
        body(given)

    order = list(PANEL_OF)
    listed = sorted(parameters, key=lambda p: order.index(p.name) if p.name in order else len(order))
    run.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in listed}
    # typer keeps the line breaks of later paragraphs, which are the source's and not the terminal's.
    paragraphs = inspect.cleandoc(body.__doc__ or "").split("\n\n")
    run.__doc__ = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    return run


@dataclasses.dataclass(frozen=True)
class Request:
    """What a command was asked for. `settings` holds what was given for `RunConfig`, defaults not included."""

    settings: dict[str, Any]
    seeds: tuple[int, ...] | None
    execution: Execution
    methods: list[str] | None


def gather(
    given: Given,
    *,
    fields: Mapping[str, dataclasses.Field[Any]],
    defaults: Mapping[str, Any],
    methods: bool = False,
) -> Request:
    """Put options, file and the command's defaults together; anything unknown or unusable is an `InputError`."""
    extra = ["seeds", "methods"] if methods else ["seeds"]
    file: dict[str, Any] = {}
    if given["config"] is not None:
        file = read_toml(Path(given["config"]), fields, extra)
    typed = {name: _value(field, given[name]) for name, field in fields.items() if _is_given(given[name])}
    seeds = _seeds(given, typed, file)
    if seeds is not None:
        typed.pop("seed", None)
        file.pop("seed", None)
    values = {**defaults, **{name: v for name, v in file.items() if name in fields}, **typed}
    of_run = fields_of(RunConfig)
    execution = Execution(**{name: value for name, value in values.items() if name not in of_run})
    settings = {name: value for name, value in values.items() if name in of_run}
    return Request(settings, seeds, execution, _methods(given, file) if methods else None)


def _seeds(given: Given, typed: Given, file: Given) -> tuple[int, ...] | None:
    """Several seeds, from the option or else the file; None where one seed, or none, was given."""
    for source, several in ((typed, given["seeds"]), (file, file.get("seeds"))):
        if several is not None and "seed" in source:
            raise InputError("seeds: was given together with seed; accepted: one of the two")
        if several is not None:
            text = ",".join(map(str, several)) if isinstance(several, list) else str(several)
            return parse_seeds(text)
        if "seed" in source:
            return None
    return None


def _methods(given: Given, file: Given) -> list[str] | None:
    if given["method"]:
        return list(given["method"])
    listed = file.get("methods")
    if listed is None:
        return None
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise InputError(f"methods: {listed!r} cannot be used; accepted: a list of names, such as ['fedavg', 'kl']")
    return list(listed)


def _is_given(value: Any) -> bool:
    return value is not None and value != []


def _value(field: dataclasses.Field[Any], given: Any) -> Any:
    if isinstance(given, bool):
        return given
    if isinstance(given, list | tuple):
        return tuple(from_word(field, word) for word in given)
    return from_word(field, given)


def _word(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)
