"""The state file of `fedentopt select`: where a sequence of rounds stood, and what it was a sequence of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedentopt.cli.console import note
from fedentopt.cli.written_aside import written_aside
from fedentopt.errors import InputError
from fedentopt.selection.selector import TableSelector

_FORMAT = "fedentopt select 1"


def read_state(path: Path) -> dict[str, Any] | None:
    """What the file holds, or None where there is no such file yet; anything but a state file is refused."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}; accepted: a file written by --state, or one that does not exist") from error
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}: {error}; accepted: a file written by --state") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise InputError(f"{path}: not a state of fedentopt select; accepted: a file written by --state")
    if not isinstance(content.get("state"), dict) or not isinstance(content.get("about"), dict):
        raise InputError(f"{path}: 'state' or 'about' is missing; accepted: a file written by --state")
    return content


def continue_from(path: Path, content: Mapping[str, Any], selector: TableSelector, about: Mapping[str, Any]) -> None:
    """Put the selector where the state stood; refused unless everything the state is about is the same now.

    Clients may have joined or left meanwhile; one that left while in the buffer is forgotten there, with a note.
    """
    for key, value in about.items():
        kept = content["about"].get(key)
        if kept != value:
            raise InputError(f"{path}: the state is of {key} {_short(kept)}; accepted: {_short(value)}, as given now")
    state = dict(content["state"])
    buffer = state.get("buffer")
    if isinstance(buffer, list):
        known = set(selector.clients)
        here = [client for client in buffer if not isinstance(client, str) or client in known]
        if here and len(here) < len(buffer):  # where nobody is left the state is of other clients altogether
            note(f"{path}: clients in the buffer that are not in the counts any more: {len(buffer) - len(here)}")
            state["buffer"] = here
    try:
        selector.load_state_dict(state)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def write_state(path: Path, selector: TableSelector, about: Mapping[str, Any]) -> None:
    """Put the state in the place of the file, whole or not at all."""
    content = {"format": _FORMAT, "about": dict(about), "state": selector.state_dict()}
    with written_aside(path) as file:
        file.write((json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode())


def _short(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 6:
        return f"{[*value[:3]]!r} and {len(value) - 3} more"
    return "none" if value is None else repr(value)
