"""Which commands made a folder of results: code, libraries, hardware, time. No host name, no path of the machine."""

from __future__ import annotations

import datetime
import json
import math
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError
from fedentopt.files import FOLDER_PATIENCE, locked_folder, write_text
from fedentopt.results.environment import environment, source_digest
from fedentopt.results.folder import RunFolder
from fedentopt.results.reading import SUMMARY, read_run
from fedentopt.simulation.config import RunConfig

FILE = "provenance.json"
PATH_OPTIONS = ("--out", "--data-dir", "--export", "--known", "--results", "--results-page", "--cells")
CLUSTERS = ("local", "auto")
"""What `--ray` takes that names no machine."""


def command_line(words: Sequence[str]) -> str:
    """The command as typed, with the last part of every path only and without the address of a cluster."""
    shown, option = ["fedentopt"], ""
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name.startswith("--"):
            shown.append(f"{name}={_public(name, value)}")
        else:
            shown.append(_public(option, word))
        option = word
    return shlex.join(shown)


def _public(option: str, value: str) -> str:
    """The value of an option without what it says of the machine."""
    if option == "--ray":
        return value if value in CLUSTERS else "ADDRESS"
    if option == "--dataset":  # names of data sets, and files of one's own
        return ",".join(map(_tail, value.split(",")))
    return _tail(value) if option in PATH_OPTIONS else value


def note_command(out_dir: Path, command: str, runs: Iterable[RunConfig], started: float, seconds: float) -> None:
    """Add a command to the log in `out_dir`: what it ran, with which code, on which device, for how long.

    Given again as the command goes on, it takes its earlier entry's place. One that finished nothing is not logged.
    """
    folders = [RunFolder(out_dir, run).path for run in runs]
    finished = [folder for folder in folders if (folder / SUMMARY).exists()]
    if not finished:
        return
    devices = {read_run(folder).about.get("device") for folder in finished}
    entry = {
        "command": command,
        "started": datetime.datetime.fromtimestamp(started, datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds),
        "runs": len(finished),
        "device": ", ".join(sorted(str(device) for device in devices)),
        **made_with(),
    }
    with locked_folder(out_dir, patience=FOLDER_PATIENCE):  # other commands may run other cells in the same folder
        merge(out_dir, [entry])


def made_with() -> dict[str, Any]:
    """Code, libraries and hardware, as they are when this is called first."""
    return {**environment(), "sources": source_digest()}


def read(folder: Path) -> list[dict[str, Any]]:
    """The commands logged in a folder, oldest first; none where it has no log."""
    path = folder / FILE
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        commands = [dict(entry) for entry in entries["commands"]]
        for entry in commands:
            if not math.isfinite(entry.get("seconds", 0)):
                raise ValueError(f"seconds: {entry['seconds']!r}")
        return commands
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise InputError(f"{path}: cannot be read ({error}); accepted: a file that `reproduce` wrote") from None


def merge(folder: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Add commands to a folder's log; one that is there already is not repeated, and of two states of one command the
    later stays."""
    known = read(folder)
    for entry in entries:
        same = [one for one in known if all(one.get(name) == entry.get(name) for name in ("command", "started"))]
        if not any(one.get("seconds", 0) > entry.get("seconds", 0) for one in same):
            known = [one for one in known if one not in same] + [entry]
    known.sort(key=lambda entry: str(entry.get("started", "")))
    if known:
        write_text(folder / FILE, json.dumps({"commands": known}, indent=1, ensure_ascii=False) + "\n")


def _tail(path: str) -> str:
    return Path(path).name or path
