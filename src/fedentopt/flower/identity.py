"""What makes a run the run it is: compared between a checkpoint and whoever continues it.

A run that goes on with another learning rate, other shares of the data or another method is another run, and its
results would stand under a wrong name. How long to wait, how many rounds, whom to exclude and what to write may change.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedentopt.errors import InputError

MAY_DIFFER = frozenset(
    {"min_available_nodes", "min_evaluate_nodes", "fraction_evaluate", "evaluate_metrics_aggr_fn", "exclude"}
)


def describe(settings: Mapping[str, Any], *, whole: bool = False) -> dict[str, Any]:
    """Settings as JSON can hold and compare them; what it cannot hold by the name of its type, or with `whole`, since a
    change of that would pass, not at all."""
    found = {}
    for name, value in settings.items():
        if name in MAY_DIFFER:
            continue
        try:
            found[str(name)] = _plain(value, whole)
        except TypeError as error:
            raise InputError(
                f"settings: {name} holds a {error}, by which a checkpoint could not tell this run from another; "
                "accepted: numbers, texts, paths, and lists, sets and mappings of them"
            ) from error
    return found


def check_same(own: Mapping[str, Any], saved: Mapping[str, Any], what: str = "") -> None:
    """Refuse a checkpoint written with other settings, naming the first that differs and how many more do."""
    odd = [name for name in [*own, *(n for n in saved if n not in own)] if own.get(name) != saved.get(name)]
    if odd:
        name = odd[0]
        more = f" (and {len(odd) - 1} more: {', '.join(odd[1:6])})" if odd[1:] else ""
        raise InputError(
            f"{what}{name}: {own.get(name)!r}, but the checkpoint was written with {saved.get(name)!r}{more}; "
            "accepted: the same settings, or another checkpoint folder"
        )


def _plain(value: Any, whole: bool) -> Any:
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        return f"{len(value)} bytes, SHA-256 {hashlib.sha256(value).hexdigest()}"
    if isinstance(value, Mapping):
        return {str(name): _plain(item, whole) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, whole) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if whole and not hasattr(value, "__qualname__"):  # functions and classes have their names
        raise TypeError(type(value).__name__)
    return getattr(value, "__qualname__", type(value).__qualname__)
