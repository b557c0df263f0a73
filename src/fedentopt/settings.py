"""Values of settings as people give them: words of a command line, or values of a TOML file.

What comes out has the type that the setting is declared with, so that the same run gets the same id whichever
way it was asked for (`lr = 1` and `--lr 1.0`).

Settings from a TOML file: a flat list of `name = value`, the names being those of the options with `_` for `-`.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError

WORDS = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false"}


def kind_of(field: dataclasses.Field[Any]) -> tuple[str, bool]:
    """Type of one value of the setting (int, float, str, bool), and whether `none` is accepted."""
    text = str(field.type)
    if text.startswith("tuple["):
        return text.removeprefix("tuple[").partition(",")[0], False
    options = [option.strip() for option in text.split("|")]
    return options[0], "None" in options


def is_list(field: dataclasses.Field[Any]) -> bool:
    """Whether the setting takes any number of values."""
    return str(field.type).startswith("tuple[")


def from_word(field: dataclasses.Field[Any], word: str) -> Any:
    """The value that a word of the command line stands for; `none` where the setting may be left open."""
    kind, optional = kind_of(field)
    if optional and word.strip().lower() == "none":
        return None
    try:
        return {"int": int, "float": float, "str": str}[kind](word)
    except ValueError:
        raise _refusal(field, word) from None


def from_toml(field: dataclasses.Field[Any], value: Any) -> Any:
    """The value that a TOML value stands for; whole numbers pass as numbers, and `"none"` as in `from_word`."""
    if is_list(field):
        values = value if isinstance(value, list) else [value]
        return tuple(_from_toml(field, one) for one in values)
    return _from_toml(field, value)


def _from_toml(field: dataclasses.Field[Any], value: Any) -> Any:
    kind, optional = kind_of(field)
    if optional and value == "none":
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "float" and number:
        return float(value)
    if kind == "str" and field.name in ("cohort", "buffer") and number:
        return str(value)  # `cohort = 10` beside `cohort = "10%"`
    accepted = {"int": int, "float": float, "str": str, "bool": bool}[kind]
    if type(value) is accepted:
        return value
    raise _refusal(field, value)


def _refusal(field: dataclasses.Field[Any], value: Any) -> InputError:
    kind, optional = kind_of(field)
    return InputError(
        f"{field.name}: {value!r} cannot be used; accepted: {WORDS[kind]}{' or none' if optional else ''}"
    )


def read_toml(path: Path, fields: Mapping[str, dataclasses.Field[Any]], extra: Iterable[str] = ()) -> dict[str, Any]:
    """Read a file; its values get the types of `fields`, those named in `extra` are handed on as they are.

    Refused, naming the file: one that cannot be read, a key that is not known, a value of the wrong type.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"config: {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise InputError(f"config: {path} is not TOML: {error}") from error
    known = [*fields, *extra]
    values = {}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; accepted: {', '.join(sorted(known))}"
            raise InputError(f"{key}: unknown setting in {path}{hint}")
        if isinstance(value, str) and "\0" in value:  # a command line cannot hold it, and no path may
            raise InputError(f"{key}: {value!r} holds a null character; accepted: text without (in {path})")
        try:
            values[key] = from_toml(fields[key], value) if key in fields else value
        except OverflowError as error:  # a whole number that no float can hold
            raise InputError(f"{key}: the number is too large; accepted: up to about 1e308 (in {path})") from error
        except InputError as error:
            raise InputError(f"{error} (in {path})") from error
    return values
