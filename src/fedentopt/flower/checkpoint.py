"""A strategy's checkpoint: one file, committed by one rename, without pickle; and the one before it.

The file is a NumPy archive (`checkpoint.npz`): arrays under running numbers, and one JSON document with their names
and everything that is not an array. It is read with `allow_pickle=False`. The checkpoint of the round before is kept as
`checkpoint-previous.npz` and used where the newest cannot be read.

The register of clients is large and seldom changes, so it lies beside the checkpoint in files of its own
(`register_files`), which the checkpoint names.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.files import aside

FILE, PREVIOUS, DAMAGED = "checkpoint.npz", "checkpoint-previous.npz", "checkpoint-damaged.npz"
FORMAT, VERSION = "fedentopt flower checkpoint", 2

Arrays = dict[str, np.ndarray]

log = logging.getLogger("flwr")


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
    header = {"round": checkpoint.round, "groups": list(checkpoint.arrays), "names": names, "meta": checkpoint.meta}
    with aside(folder / FILE, private=True) as part:
        write_archive(part, FORMAT, VERSION, header, members)
        _keep_previous(folder)


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
                _name_again(path, folder / DAMAGED)
                _name_again(folder / PREVIOUS, path)
            return before
        raise InputError(f"checkpoint: {path} cannot be read ({error}); remove it to start at round 1") from error


def write_archive(path: Path, kind: str, version: int, header: Mapping[str, Any], arrays: Arrays) -> None:
    """Write arrays and one JSON document."""
    document = np.frombuffer(json.dumps({"format": kind, "version": version, **header}).encode(), dtype=np.uint8)
    with path.open("wb") as file:
        np.savez(file, **arrays, header=document)  # type: ignore[arg-type]


def read_archive(path: Path, kind: str, version: int) -> tuple[dict[str, Any], Arrays]:
    """Read what `write_archive` wrote; anything else raises."""
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        header = json.loads(archive["header"].tobytes())
        if header["format"] != kind or header["version"] != version:
            raise ValueError(f"format {header['format']!r}, version {header['version']!r}, not {kind!r}, {version}")
        return header, {name: archive[name] for name in archive.files if name != "header"}


def _read(path: Path) -> Checkpoint:
    header, members = read_archive(path, FORMAT, VERSION)
    arrays: dict[str, Arrays] = {group: {} for group in header["groups"]}
    for number, (group, name) in enumerate(header["names"]):
        arrays[group][name] = members[f"{number:06d}"]
    return Checkpoint(round=int(header["round"]), arrays=arrays, meta=header["meta"])


def _keep_previous(folder: Path) -> None:
    """Give the checkpoint that is about to be replaced its second name."""
    if (folder / FILE).is_file():
        _name_again(folder / FILE, folder / PREVIOUS)


def _name_again(path: Path, other: Path) -> None:
    """Put a file in the place of another one too, at once."""
    name = other.with_name(f".{other.name}.part")
    name.unlink(missing_ok=True)
    try:
        try:
            os.link(path, name)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, name)
        os.replace(name, other)
    finally:
        name.unlink(missing_ok=True)
