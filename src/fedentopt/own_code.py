"""A user's own model, selector or algorithm by import path: `package.module:factory`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError


def is_import_path(name: str) -> bool:
    """Whether a setting names code of the user's."""
    module, _, attribute = name.partition(":")
    return bool(module) and bool(attribute)


def make_own(setting: str, path: str, argument: Any) -> Any:
    """Import the factory behind `path` (modules of the current directory count) and call it with `argument`.

    Refused, naming the setting: no such module or attribute, something that cannot be called, and any exception that
    the user's code raises on the way.
    """
    with _current_directory_importable():
        factory = _find(setting, path)
        try:
            return factory(argument)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{setting}: calling {path} raised {describe_error(error)}") from error


def describe_error(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _find(setting: str, path: str) -> Any:
    module, _, attribute = path.partition(":")
    if not is_import_path(path):
        raise InputError(f"{setting}: {path!r} is not of the form package.module:factory")
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            where = "nor in the current directory"
            raise InputError(f"{setting}: no module {error.name!r} for {path!r}, {where}") from error
        raise InputError(f"{setting}: importing {module} raised {describe_error(error)}") from error
    except Exception as error:
        raise InputError(f"{setting}: importing {module} raised {describe_error(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"{setting}: {module} has no attribute {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise InputError(f"{setting}: {path} is {type(found).__name__}; accepted: a callable factory")
    return found


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)
