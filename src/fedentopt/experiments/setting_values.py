"""Values of settings as people give them: words of a command line, or values of a TOML file.

What comes out has the type that the setting is declared with, so that the same run gets the same id whichever
way it was asked for (`lr = 1` and `--lr 1.0`).
"""

from __future__ import annotations

import dataclasses
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
