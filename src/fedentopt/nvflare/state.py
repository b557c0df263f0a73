"""A controller's state after a round: one file, written aside and renamed, without pickle; the last two are kept.

NVFlare's persistor keeps the model of one job, in that job's folder. A server that is restarted ends its running jobs,
and a job submitted again is another job, so what must outlive it (round, model, label counts, selector's memory,
SCAFFOLD's control terms) lies beside the jobs, under a name that the job gives, in the server's workspace.

The file is a NumPy archive: arrays under running numbers, and one JSON document with their names and everything that is
not an array. It is read with `allow_pickle=False`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.files import aside

FOLDER = "fedentopt"
FILE, BEFORE = "state.npz", "state.before.npz"
FORMAT = "fedentopt nvflare state"

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class State:
    """After `rounds` rounds: named groups of named arrays (the model among them), and JSON for the rest."""

    rounds: int
    arrays: Mapping[str, Mapping[str, np.ndarray]]
    meta: Mapping[str, Any]


def check_name(name: str) -> str:
    """A name for a state: one folder's name, so that a job cannot reach elsewhere on the server."""
    if not isinstance(name, str) or not name or name.startswith(".") or set(name) & set("/\\:\0") or len(name) > 100:
        raise InputError(f"state: {name!r} is not accepted; accepted: a name without / \\ : that does not begin with .")
    return name


def make_folder(workspace: Path, name: str) -> Path:
    """The state's folder, made where it is missing; one that cannot be written to is refused before round 1."""
    folder = workspace / FOLDER / check_name(name)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(prefix=FILE, dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"state: {folder}: {error.strerror or error}; accepted: a folder that can be written"
        ) from error
    return folder


def save(folder: Path, state: State) -> None:
    """Write the state; a stop at any moment leaves a whole one, and the one before stays beside it."""
    names: list[list[str]] = []
    members: Arrays = {}
    for group, arrays in state.arrays.items():
        for name, array in arrays.items():
            if array.dtype.hasobject:
                raise InputError(f"state: array {name!r} holds Python objects; accepted: numbers")
            members[f"{len(names):06d}"] = array
            names.append([group, name])
    header = {
        "format": FORMAT,
        "version": 1,
        "rounds": state.rounds,
        "groups": list(state.arrays),
        "names": names,
        "meta": state.meta,
    }
    members["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    with aside(folder / FILE, private=True) as part:
        with part.open("wb") as file:
            np.savez(file, **members)  # type: ignore[arg-type]
        if (folder / FILE).exists():
            os.replace(folder / FILE, folder / BEFORE)


def load(folder: Path) -> State | None:
    """The newest whole state in the folder, or None where there is none; a damaged one is refused."""
    for path in (folder / FILE, folder / BEFORE):  # the first is missing for the moment between two renames
        if path.exists():
            return _read(path)
    return None


def _read(path: Path) -> State:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            header = json.loads(archive["header"].tobytes())
            if header["format"] != FORMAT or header["version"] != 1:
                raise ValueError(f"format {header['format']!r}, version {header['version']!r}")
            arrays: dict[str, Arrays] = {group: {} for group in header["groups"]}
            for number, (group, name) in enumerate(header["names"]):
                arrays[group][name] = archive[f"{number:06d}"]
            return State(rounds=int(header["rounds"]), arrays=arrays, meta=header["meta"])
    except Exception as error:  # a damaged archive raises whatever its reader trips over, by the byte that is wrong
        raise InputError(
            f"state: {path} cannot be read ({error}); remove it to go on from {BEFORE}, both to begin anew"
        ) from error
