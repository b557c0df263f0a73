"""Options made from declared settings: every one is an option with its help text, and a TOML file may give it.

The order of precedence is: option, then file, then the command's own default, then the setting's. Settings of single
methods that have no option are set by `--set NAME=VALUE`, or in the file's [settings].
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from fedentopt.cli.console import note
from fedentopt.errors import InputError
from fedentopt.settings import Setting, read_toml, settings_of
from fedentopt.simulation.config import FIELDS, PARTS, option_of, options
from fedentopt.simulation.jobs import DATASET_DEFAULTS, Job, serves
from fedentopt.simulation.methods import parse_seeds
from fedentopt.simulation.options import RunOptions

METHOD_PANEL = "Settings of single methods"
PANELS = {
    "Data": ("dataset", "fine_labels", "image_size", "partition", "min_samples", "clients", "validation", "data_dir"),
    "Method": (
        "method", "algorithm", "selector", "cohort", "buffer", "epsilon", "averaging", "dropout", "stragglers",
        "speed_spread", "set",
    ),
    "Training": (
        "model", "weights", "rounds", "epochs", "batch_size", "lr", "lr_decay", "weight_decay", "momentum",
        "jitter", "flip", "grayscale", "evaluate_every", "client_accuracy", "precision", "seed", "seeds",
    ),
    METHOD_PANEL: (),
    "Where and how": (
        "out", "config", "resume", "device", "trainer", "workers", "checkpoint_every", "target", "page", "log",
        "as_json",
    ),
}  # fmt: skip
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}

Given = Mapping[str, Any]


def run_settings(leave_out: Iterable[str] = ()) -> dict[str, Setting]:
    """All settings of a run and of how it executes that have an option, by name."""
    how = {name: s for name, s in settings_of(RunOptions).items() if s.help}
    return {name: s for name, s in (options() | how).items() if name not in tuple(leave_out)}


def setting_options(settings: Mapping[str, Setting], defaults: Mapping[str, Any]) -> list[inspect.Parameter]:
    """An option for each setting. All default to None, "not given", since a file may give the value instead."""
    parameters = []
    for name, declared in settings.items():
        default = defaults.get(name, declared.default)
        help_text = declared.help
        if default not in (None, ()):
            by_dataset = "".join(
                f"; {dataset}: {_word(values[name])}" for dataset, values in DATASET_DEFAULTS.items() if name in values
            )
            help_text += f" (default: {_word(default)}{by_dataset})"
        flag = f"--{name.replace('_', '-')}"
        annotation: Any = str | None
        metavar: str | None = {"int": "INTEGER", "float": "NUMBER", "str": "TEXT"}.get(declared.kind)
        if declared.kind == "bool":
            annotation, metavar = bool | None, None
            flag = f"{flag}/--no-{name.replace('_', '-')}"
        elif declared.many:
            annotation = list[str] | None
        elif declared.optional:
            metavar = f"{metavar}|none"
        parameters.append(option(name, annotation, flag, help_text, metavar=metavar))
    return parameters


def option(
    name: str, annotation: Any, flag: str, help_text: str, *, metavar: str | None = None, default: Any = None
) -> inspect.Parameter:
    """One option as a parameter of a command."""
    panel = PANEL_OF.get(name, METHOD_PANEL)
    info = typer.Option(default, flag, help=help_text, metavar=metavar, rich_help_panel=panel, show_default=False)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=annotation)


def shared_options() -> list[inspect.Parameter]:
    """Options that are no setting: those of methods without one, several seeds, the file, JSON."""
    text = "a setting of a method, such as beta=0.9; may be repeated (`fedentopt methods` lists them)"
    return [
        option("set", list[str] | None, "--set", text, metavar="NAME=VALUE"),
        option("seeds", str | None, "--seeds", "several seeds, such as 0,1,2 or 0-4; 3 is seed 3", metavar="LIST"),
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
    run.__doc__ = body.__doc__
    return run


@dataclasses.dataclass(frozen=True)
class Request:
    """What a command was asked for.

    `settings` holds what was given for `RunConfig`, defaults not included; `own` what was given for single methods by
    `--set` or a file's [settings], `offered` what was given by options that only some methods use.
    """

    settings: dict[str, Any]
    own: dict[str, Any]
    offered: dict[str, Any]
    seeds: tuple[int, ...] | None
    options: RunOptions
    methods: list[str] | None


def gather(
    given: Given, *, settings: Mapping[str, Setting], defaults: Mapping[str, Any], methods: bool = False
) -> Request:
    """Put options, file and the command's defaults together; anything unknown or unusable is an `InputError`."""
    extra = ["seeds", "settings", *(["methods"] if methods else [])]
    file: dict[str, Any] = {}
    if given["config"] is not None:
        file = read_toml(Path(given["config"]), settings, extra)
    typed = {name: _value(declared, given[name]) for name, declared in settings.items() if _is_given(given[name])}
    seeds = _seeds(given, typed, file)
    if seeds is not None:
        typed.pop("seed", None)
        file.pop("seed", None)
    values = {**defaults, **{name: v for name, v in file.items() if name in settings}, **typed}
    of_methods = [name for name in options() if name not in FIELDS]
    how = {name: value for name, value in values.items() if name in settings_of(RunOptions)}
    return Request(
        settings={name: value for name, value in values.items() if name in FIELDS},
        own=_own(given, file, typed),
        offered={name: values[name] for name in of_methods if name in values},
        seeds=seeds,
        options=RunOptions(**how),
        methods=_methods(given, file) if methods else None,
    )


def note_unused(offered: Mapping[str, Any], jobs: Sequence[Job]) -> None:
    """Say which options none of the methods uses."""
    parts = {(part, getattr(job.config, part)) for job in jobs for part in PARTS}
    for name in offered:
        found = option_of(name)
        if found is not None and not any(serves(name, part, method) for part, method in parts):
            methods = ", ".join(dict.fromkeys(job.config.method for job in jobs))
            note(f"--{name.replace('_', '-')}: {methods} has no such setting, so {offered[name]} is not used")


def _own(given: Given, file: Given, typed: Given) -> dict[str, Any]:
    """What a file's [settings] and `--set` say; an option of that name wins over the file, `--set` over all."""
    listed = file.get("settings", {})
    if not isinstance(listed, dict):
        raise InputError(f"settings: {listed!r} cannot be used; accepted: a table [settings] of a method's settings")
    for name, value in listed.items():
        if isinstance(value, dict):  # of `algorithm.mu = 0.1`, whose dot TOML takes for a table
            key = f"{name}.{next(iter(value), 'mu')}"
            raise InputError(f'settings: {key} is read as a table; accepted: the name in quotes, "{key}" = ...')
    own = {name: value for name, value in listed.items() if name not in typed}
    said: dict[str, Any] = {}
    for word in given["set"] or ():
        name, equals, value = word.partition("=")
        if not equals or not name.strip():
            raise InputError(f"set: {word!r} cannot be read; accepted: NAME=VALUE, such as beta=0.9")
        if name.strip() in said:
            raise InputError(f"set: {word!r} gives {name.strip()} more than once; accepted: each setting once")
        said[name.strip()] = value.strip()
    return own | said


def _seeds(given: Given, typed: Given, file: Given) -> tuple[int, ...] | None:
    """Several seeds, from the option or else the file; None where one seed, or none, was given."""
    for source, several in ((typed, given["seeds"]), (file, file.get("seeds"))):
        if several is not None and "seed" in source:
            raise InputError("seeds: was given together with seed; accepted: one of the two")
        if several is not None:
            text = ",".join(map(str, several)) if isinstance(several, list) else str(several)
            seeds = parse_seeds(text)
            if len(seeds) == 1 < seeds[0]:  # from Python `seeds=3` is how many
                note(f"--seeds {seeds[0]}: one seed, {seeds[0]}; {seeds[0]} seeds are 0-{seeds[0] - 1}")
            return seeds
        if "seed" in source:
            return None
    return None


def _methods(given: Given, file: Given) -> list[str] | None:
    if given["method"]:
        # Where there are settings a comma stands between those of one method.
        return [name for text in given["method"] for name in ([text] if "=" in text else text.split(","))]
    listed = file.get("methods")
    if listed is None:
        return None
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise InputError(f"methods: {listed!r} cannot be used; accepted: a list of names, such as ['fedavg', 'kl']")
    return list(listed)


def _is_given(value: Any) -> bool:
    return value is not None and value != []


def _value(declared: Setting, given: Any) -> Any:
    if isinstance(given, bool):
        return given
    if isinstance(given, list | tuple):
        return tuple(one for word in given for one in declared.from_word(word))
    return declared.from_word(given)


def _word(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)
