"""A user's own selector or algorithm by import path: `package.module:factory`, called with the run's config."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from fedentopt.errors import InputError


def is_import_path(name: str) -> bool:
    """Whether a setting names code of the user's."""
    module, _, attribute = name.partition(":")
    return bool(module) and bool(attribute)


def load_factory(setting: str, path: str) -> Callable[..., Any]:
    """The callable behind `package.module:factory`; modules of the current directory are found too."""
    module_name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(f"{setting}: cannot import {module_name!r} of {path!r}: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise InputError(f"{setting}: {module_name!r} has no callable {attribute!r} (from {path!r})")
    return factory  # type: ignore[no-any-return]
