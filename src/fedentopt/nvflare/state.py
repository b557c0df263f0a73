"""A controller's state after a round, kept across jobs: one file, and the one before it (see `state_files`).

NVFlare's persistor keeps the model of one job, in that job's folder. A server that is restarted ends its running jobs,
and a job submitted again is another job, so what must outlive it (round, model, label counts, selector's memory,
SCAFFOLD's control terms) lies beside the jobs, under a name that the job gives, in the server's workspace.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection import ClientId
from fedentopt.server.state_files import StateFiles, make_writable

FOLDER = "fedentopt"
FILE, BEFORE = "state.npz", "state.before.npz"
FILES = StateFiles("fedentopt nvflare state", 1, FILE, BEFORE, "state")


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
    make_writable(folder, "state", mode=0o700)
    return folder


def save(folder: Path, state: State) -> None:
    """Write the state; a stop at any moment leaves a whole one, and the one before stays beside it."""
    FILES.save(folder, {"rounds": state.rounds}, state.arrays, state.meta)


def load(folder: Path) -> State | None:
    """The newest state in the folder, or None where there is none; a damaged one is refused."""
    for path in (folder / FILE, folder / BEFORE):  # the first may have been removed, as the message below says
        if path.exists():
            return _read(path)
    return None


def write_pauses(pauses: Iterable[Sequence[ClientId | int]]) -> dict[str, list[int]]:
    """What a `Backoff` remembers as it stands in the file: by site, failures, the round it is tried again from, and
    what it owes."""
    return {str(site): [int(failures), int(last) + 1, *map(int, owed)] for site, failures, last, *owed in pauses}


def read_pauses(state: Mapping[str, Sequence[int]]) -> list[list[ClientId | int]]:
    """The reverse."""
    return [[site, failures, again - 1, *owed] for site, (failures, again, *owed) in state.items()]


def _read(path: Path) -> State:
    try:
        header, arrays = FILES.read(path)
        return State(rounds=int(header["rounds"]), arrays=arrays, meta=header["meta"])
    except Exception as error:  # a damaged archive raises whatever its reader trips over, by the byte that is wrong
        raise InputError(
            f"state: {path} cannot be read ({error}); remove it to go on from {BEFORE}, both to begin anew"
        ) from error
