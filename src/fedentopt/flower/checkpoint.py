"""A strategy's checkpoint: one file (`checkpoint.npz`) after each round, and the one before it (see `state_files`).

The checkpoint of the round before is kept as `checkpoint-previous.npz` and used where the newest cannot be read.

The register of clients is large and seldom changes, so it lies beside the checkpoint in files of its own
(`register_files`), which the checkpoint names.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError
from fedentopt.server.state_files import Arrays, StateFiles, kept_alone, make_writable, name_again

FILE, PREVIOUS, DAMAGED = "checkpoint.npz", "checkpoint-previous.npz", "checkpoint-damaged.npz"
FILES = StateFiles("fedentopt flower checkpoint", 2, FILE, PREVIOUS, "checkpoint")

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Checkpoint:
    """State after `round`: named groups of named arrays (the model among them), and JSON for the rest."""

    round: int
    arrays: Mapping[str, Arrays]
    meta: Mapping[str, Any]


def make_folder(folder: Path) -> None:
    """Make the folder where it is missing; one that nothing can be written to is refused, before a round is spent."""
    make_writable(folder, "checkpoint_dir")


@contextlib.contextmanager
def in_use(folder: Path | None) -> Iterator[None]:
    """Keep other runs out of the folder, made where it is missing; nothing happens for None.

    A `flwr run` whose stream broke off may be started again while its ServerApp goes on.
    """
    if folder is None:
        yield
        return
    make_folder(folder)
    with kept_alone(folder, "checkpoint_dir"):
        yield


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint beside the old one and rename it; a stop at any moment leaves one of the two whole."""
    folder.mkdir(parents=True, exist_ok=True)
    FILES.save(folder, {"round": checkpoint.round}, checkpoint.arrays, checkpoint.meta)


def load(folder: Path) -> Checkpoint | None:
    """The checkpoint in the folder, or None where there is none; anything else of that name is refused.

    A newest one that cannot be read gives way, with a warning, to the one before it, and is kept under another name.
    """
    path = folder / FILE
    try:
        return _read(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged archive raises whatever its reader trips over, by the byte that is wrong
        with contextlib.suppress(Exception):
            before = _read(folder / PREVIOUS)
            log.error("%s cannot be read (%s); going on from %s, round %d", path, error, PREVIOUS, before.round)
            with contextlib.suppress(OSError):  # else the next save would take the damaged one for the one before
                name_again(path, folder / DAMAGED)
                name_again(folder / PREVIOUS, path)
            return before
        raise InputError(f"checkpoint: {path} cannot be read ({error}); remove it to start at round 1") from error


def _read(path: Path) -> Checkpoint:
    header, arrays = FILES.read(path)
    return Checkpoint(round=int(header["round"]), arrays=arrays, meta=header["meta"])
