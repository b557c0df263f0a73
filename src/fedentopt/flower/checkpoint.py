"""A strategy's checkpoint: one file, committed by one rename, without pickle.

The file is a NumPy archive (`checkpoint.npz`): arrays under running numbers, and one JSON document with their names
and everything that is not an array. It is read with `allow_pickle=False`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.files import aside

FILE = "checkpoint.npz"
FORMAT = "fedentopt flower checkpoint"

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Checkpoint:
    """State after `round`: named groups of named arrays (the model among them), and JSON for the rest."""

    round: int
    arrays: Mapping[str, Arrays]
    meta: Mapping[str, Any]


def make_folder(folder: Path) -> None:
    """Make the folder where it is missing; one that nothing can be written to is refused, before a round is spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(prefix=FILE, dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"checkpoint_dir: {folder}: {error.strerror or error}; accepted: a folder that can be written to"
        ) from error


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint beside the old one and rename it; a stop at any moment leaves one of the two whole."""
    folder.mkdir(parents=True, exist_ok=True)
    names: list[list[str]] = []
    members: Arrays = {}
    for group, arrays in checkpoint.arrays.items():
        for name, array in arrays.items():
            if array.dtype.hasobject:
                raise InputError(f"checkpoint: array {name!r} holds Python objects; accepted: numbers")
            members[f"{len(names):06d}"] = array
            names.append([group, name])
    header = {
        "format": FORMAT,
        "version": 1,
        "round": checkpoint.round,
        "groups": list(checkpoint.arrays),
        "names": names,
        "meta": checkpoint.meta,
    }
    members["header"] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    with aside(folder / FILE, private=True) as part, part.open("wb") as file:
        np.savez(file, **members)  # type: ignore[arg-type]


def load(folder: Path) -> Checkpoint | None:
    """The checkpoint in the folder, or None where there is none; anything else of that name is refused."""
    path = folder / FILE
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            header = json.loads(archive["header"].tobytes())
            if header["format"] != FORMAT or header["version"] != 1:
                raise ValueError(f"format {header['format']!r}, version {header['version']!r}")
            arrays: dict[str, Arrays] = {group: {} for group in header["groups"]}
            for number, (group, name) in enumerate(header["names"]):
                arrays[group][name] = archive[f"{number:06d}"]
            return Checkpoint(round=int(header["round"]), arrays=arrays, meta=header["meta"])
    except FileNotFoundError:
        return None
    except Exception as error:  # a damaged archive raises whatever its reader trips over, by the byte that is wrong
        raise InputError(f"checkpoint: {path} cannot be read ({error}); remove it to start at round 1") from error
