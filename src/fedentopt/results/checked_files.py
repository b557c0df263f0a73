"""`run.json` and `summary.json` as they are read: what is missing or cannot be used is refused by file, field and what
would be accepted, so that a file that was changed by hand is no riddle later.

Fields that nobody computes with are not looked at, and any others may be there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError
from fedentopt.files import read_json
from fedentopt.partition import parse
from fedentopt.results.summary import TRUST

LARGEST = 1e150  # whose square is a number, too
REMEDY = "delete the run's folder to run it again"


@dataclass(frozen=True)
class _Kind:
    accepted: str
    fits: Callable[[Any], bool]

    def or_null(self) -> _Kind:
        return _Kind(f"{self.accepted} or null", lambda value: value is None or self.fits(value))


def _is_figure(value: Any) -> bool:
    """Whether it can be computed with, which no NaN can."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _has_endless(value: Any) -> bool:
    """Whether NaN or infinity is anywhere in it."""
    if isinstance(value, dict | list):
        return any(map(_has_endless, value.values() if isinstance(value, dict) else value))
    return isinstance(value, float) and not math.isfinite(value)


_FIGURE = _Kind("a finite number", _is_figure)
_WHOLE = _Kind("a whole number", lambda value: type(value) is int and abs(value) < 2**63)
_TRUTH = _Kind("true or false", lambda value: isinstance(value, bool))
_ANY_WHOLE = _Kind("a whole number", lambda value: type(value) is int)
_TEXT = _Kind("text", lambda value: isinstance(value, str))
_OBJECT = _Kind("an object", lambda value: isinstance(value, dict))
_LIST = _Kind("a list", lambda value: isinstance(value, list))
_PRINTABLE = _Kind("JSON without NaN or infinity", lambda value: not _has_endless(value))
_CLASSES = _Kind("a list of numbers, one per class", lambda value: isinstance(value, list) and bool(value))
_BY_ACCURACY = _Kind("rounds by accuracy", _OBJECT.fits)
_SPLIT = _Kind("'test' or 'validation'", lambda value: value in ("test", "validation"))

ALWAYS = {
    **dict.fromkeys(("accuracy", "final_accuracy", "best_accuracy"), _FIGURE.or_null()),
    "class_accuracy": _CLASSES,
    **dict.fromkeys(("worst_class_accuracy", "h_norm"), _FIGURE.or_null()),
    "never_selected": _WHOLE.or_null(),
    **dict.fromkeys(("mean_entropy", "min_entropy"), _FIGURE.or_null()),
    "rounds_to": _BY_ACCURACY,
    **dict.fromkeys(("bytes_up", "bytes_down"), _FIGURE),
    "diverged_round": _WHOLE.or_null(),
    "rounds": _WHOLE,
    **dict.fromkeys(("seconds", "chance"), _FIGURE),
}
"""Fields of the summary of every finished run, one of the first version included."""
WHERE_KNOWN = {
    **dict.fromkeys(("simulated_seconds", "selection_seconds", *TRUST), _FIGURE),
    "asked": _WHOLE,
    "validation_accuracy": _FIGURE.or_null(),
    "client_accuracy": _OBJECT,
}
SETTINGS = {"seed": _ANY_WHOLE, "dropout": _FIGURE.or_null(), "stragglers": _FIGURE.or_null()}
DIGESTED = ("dataset", "code", "weights")
OF_CLIENTS = {"mean": _FIGURE.or_null(), "worst_tenth": _FIGURE.or_null(), "measured_on": _SPLIT}


def read_about(path: Path) -> dict[str, Any]:
    """The content of `run.json`, with its settings as `plain_settings` has them."""
    about = read_json(path)
    if not isinstance(about.get("config"), dict):
        raise InputError(f"{path}: field 'config' is missing or no object")
    for name in DIGESTED:
        if about.get(name) is None:
            about.pop(name, None)
            continue
        _check(path, name, about[name], _OBJECT)
        if "digest" in about[name]:
            _check(path, f"{name} digest", about[name]["digest"], _TEXT)
    if "resumed" in about:
        _check(path, "resumed", about["resumed"], _LIST)
    _check_all(path, about["config"], {name: kind for name, kind in SETTINGS.items() if name in about["config"]})
    about["config"] = plain_settings(about["config"])
    return about


def read_summary(path: Path) -> dict[str, Any]:
    """The content of `summary.json`; empty where it says itself that the run is not finished."""
    summary = read_json(path)
    _check_all(path, summary, {"finished": _TRUTH})
    if not summary["finished"]:
        return {}
    _check_all(path, summary, ALWAYS)
    _check_all(path, summary, {name: kind for name, kind in WHERE_KNOWN.items() if name in summary})
    for name, value, kind in _inner(summary):
        _check(path, name, value, kind)
    for name, value in summary.items():
        _check(path, name, value, _PRINTABLE)
    return summary


def plain_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run with its partition in the spelling that identifies runs now: `dir:0.1` for the `dir:.1`
    that versions before kept as it was typed."""
    plain = dict(config)
    with contextlib.suppress(InputError):
        plain |= {"partition": str(parse(plain["partition"]))} if "partition" in plain else {}
    return plain


def _inner(summary: Mapping[str, Any]) -> Iterator[tuple[str, Any, _Kind]]:
    """What fields hold, by the name of its place."""
    for number, value in enumerate(summary["class_accuracy"]):
        yield f"class_accuracy {number}", value, _FIGURE.or_null()
    for accuracy, value in summary["rounds_to"].items():
        yield f"rounds_to {accuracy}", value, _WHOLE.or_null()
    of_clients = summary.get("client_accuracy", {})
    for name, kind in OF_CLIENTS.items():
        if name in of_clients:
            yield f"client_accuracy {name}", of_clients[name], kind


def _check_all(path: Path, content: Mapping[str, Any], kinds: Mapping[str, _Kind]) -> None:
    for name, kind in kinds.items():
        if name not in content:
            raise InputError(f"{path}: {name} is missing; accepted: {kind.accepted}; {REMEDY}")
    for name, kind in kinds.items():
        _check(path, name, content[name], kind)


def _check(path: Path, name: str, value: Any, kind: _Kind) -> None:
    if not kind.fits(value):
        raise InputError(f"{path}: {name} is {value!r}; accepted: {kind.accepted}; {REMEDY}")
