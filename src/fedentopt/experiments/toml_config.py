"""Settings from a TOML file: a flat list of `name = value`, the names being those of the options with `_` for `-`."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError
from fedentopt.experiments.setting_values import from_toml


def read_toml(
    path: Path, fields: Mapping[str, dataclasses.Field[Any]], extra: Iterable[str] = ()
) -> dict[str, Any]:
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
