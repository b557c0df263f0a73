"""A server's state on disk: one file, committed by one rename, without pickle; and the one before it.

The file is a NumPy archive: arrays under running numbers, and one JSON document (`header`) with the kind and version of
the file, the names of the arrays and everything that is not an array. It is read with `allow_pickle=False`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.files import LOCK_NAME, aside, lock_file

Arrays = dict[str, np.ndarray]
Groups = Mapping[str, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class StateFiles:
    """Where one kind of state lies in its folder, the newest and the one before; `what` is its name in messages."""

    kind: str
    version: int
    newest: str
    before: str
    what: str

    def save(self, folder: Path, header: Mapping[str, Any], groups: Groups, meta: Mapping[str, Any]) -> None:
        """Write named groups of named arrays, and JSON; a stop at any moment leaves a whole file under `newest`."""
        names: list[list[str]] = []
        members: Arrays = {}
        for group, arrays in groups.items():
            for name, array in arrays.items():
                if array.dtype.hasobject:
                    raise InputError(f"{self.what}: array {name!r} holds Python objects; accepted: numbers")
                members[f"{len(names):06d}"] = array
                names.append([group, name])
        document = {**header, "groups": list(groups), "names": names, "meta": meta}
        with aside(folder / self.newest, private=True) as part:
            write_archive(part, self.kind, self.version, document, members)
            if (folder / self.newest).is_file():
                name_again(folder / self.newest, folder / self.before)

    def read(self, path: Path) -> tuple[dict[str, Any], dict[str, Arrays]]:
        """Header and groups of one file that `save` wrote; anything else raises, whatever its reader trips over."""
        header, members = read_archive(path, self.kind, self.version)
        groups: dict[str, Arrays] = {group: {} for group in header["groups"]}
        for number, (group, name) in enumerate(header["names"]):
            groups[group][name] = members[f"{number:06d}"]
        return header, groups


def check_json(memory: object, whose: str) -> None:
    """Refuse what somebody's own code would have kept and JSON does not hold, or gives back as something else: NumPy's
    numbers, sets, keys that are no text."""
    if isinstance(memory, Mapping):
        for key, value in memory.items():
            if not isinstance(key, str):
                raise InputError(f"{whose}: the key {key!r} is no text, and would come back as such; accepted: text")
            check_json(value, whose)
    elif isinstance(memory, list | tuple):
        for value in memory:
            check_json(value, whose)
    elif not isinstance(memory, str | int | float | None):
        raise InputError(
            f"{whose}: {memory!r} ({type(memory).__name__}) is not kept by JSON; accepted: numbers of Python's own, "
            "text, lists, and mappings with text as keys"
        )


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


def make_writable(folder: Path, setting: str, *, mode: int = 0o777) -> None:
    """Make the folder where it is missing; one that nothing can be written to is refused, before a round is spent."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=mode)
        with tempfile.TemporaryFile(prefix="state", dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{setting}: {folder}: {error.strerror or error}; accepted: a folder that can be written to"
        ) from error


@contextmanager
def kept_alone(folder: Path, setting: str, patience: float = 0.0) -> Iterator[None]:
    """Keep everybody else out of a folder of states while the block runs: two that write by turns would mix theirs.

    One that another process, or another thread of this one, still uses after `patience` seconds is refused.
    """

    def busy(holder: str) -> InputError:
        return InputError(
            f"{setting}: {folder} is in use by another run (process {holder or 'unknown'}); accepted: a folder "
            "of this run's own, or the same once that run has ended"
        )

    def unusable(error: OSError) -> InputError:
        return InputError(f"{setting}: {folder}: {error.strerror or error}; accepted: a folder that can be locked")

    with lock_file(folder / LOCK_NAME, busy, unusable, patience=patience):
        yield


def name_again(path: Path, other: Path) -> None:
    """Put a file in the place of another one too, at once."""
    name = other.with_name(f".{other.name}.part")
    name.unlink(missing_ok=True)
    try:
        try:
            os.link(path, name)
        except OSError:  # a file system without hard links
            name.touch(mode=0o600)  # for its owner alone, as the file is
            shutil.copyfile(path, name)
        os.replace(name, other)
    finally:
        name.unlink(missing_ok=True)
