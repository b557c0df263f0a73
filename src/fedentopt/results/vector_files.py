"""What a run's method remembers of its clients, on disk: a checkpoint writes the clients that changed, and no others.

A hundred clients' vectors of a large model are gigabytes, of which a few rounds change a part. They lie beside the
checkpoint in files of rows, one after the other, as plain float32 (`numpy.fromfile(path, "<f4")`); a client that was
never written is as it was before round 1. The checkpoint names its files, and where in them every client's newest row
is, with a checksum. A file is complete on disk before a checkpoint names it, is never changed, and is removed once the
checkpoint on disk does not name it any more. When more than half of all rows are outdated, or the files become many,
the next file takes over what is still current in the emptiest of them.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fedentopt.errors import InputError
from fedentopt.files import write_aside
from fedentopt.results.records import ClientRow

NAME = re.compile(r"vectors-(\d{6,})\.f32(\.part)?")
MOST_FILES = 16
FLOAT = np.dtype("<f4")


class Place(NamedTuple):
    """Where a row lies in its file, in floats."""

    start: int
    size: int
    checksum: int


@dataclass(eq=False)
class VectorFile:
    """One file: how many floats it holds, and those of its rows that are current, by vector and client."""

    name: str
    size: int = 0
    rows: dict[tuple[str, int], Place] = field(default_factory=dict)

    @property
    def current(self) -> int:
        """Floats in it that are not outdated."""
        return sum(place.size for place in self.rows.values())


class VectorFiles:
    """The files of one run's folder, as its checkpoint names them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[VectorFile] = []

    def write(self, rows: Iterable[ClientRow]) -> list[dict[str, Any]]:
        """Write rows that changed; what the checkpoint has to keep to find every current row is returned."""
        rows = iter(rows)
        first = next(rows, None)
        if first is None:
            return self._index()
        made = VectorFile(self._next_name())
        kept = [VectorFile(file.name, file.size, dict(file.rows)) for file in self._files]

        def fill(part: Path) -> None:
            with part.open("wb") as stream:
                for row in itertools.chain([first], rows):
                    self._append(stream, made, (row.vector, row.client), row.values.numpy().astype(FLOAT, copy=False))
                for file in kept:
                    for key in made.rows.keys() & file.rows.keys():
                        del file.rows[key]
                for file in _outdated(kept, made):
                    for key, values in self._read(file):
                        self._append(stream, made, key, values)
                    file.rows.clear()

        write_aside(self._folder / made.name, fill)
        self._files = [file for file in [*kept, made] if file.rows]
        return self._index()

    def _index(self) -> list[dict[str, Any]]:
        return [
            {"file": file.name, "size": file.size, "rows": [[*key, *place] for key, place in file.rows.items()]}
            for file in self._files
        ]

    def open(self, index: Iterable[dict[str, Any]]) -> Iterator[ClientRow]:
        """Take over the files that a checkpoint names; a row at a time is read, and is valid until the next one.

        One that is missing or cut is refused at once, a changed one when its row is read.
        """
        self._files = []
        for about in index:
            rows = {(vector, client): Place(*place) for vector, client, *place in about["rows"]}
            file = VectorFile(about["file"], about["size"], rows)
            path = self._folder / file.name
            try:
                found = path.stat().st_size
            except OSError as error:
                raise _damaged(path, error.strerror or str(error)) from error
            if found != file.size * FLOAT.itemsize:
                raise _damaged(path, f"{found} bytes, {file.size * FLOAT.itemsize} were written")
            self._files.append(file)
        return self._rows()

    def clean(self) -> None:
        """The checkpoint on disk names the present files: remove others, of older checkpoints and of stopped ones."""
        named = {file.name for file in self._files}
        for path in list(self._folder.iterdir()):
            if NAME.fullmatch(path.name) and path.name not in named:
                with contextlib.suppress(OSError):
                    path.unlink()

    def remove(self) -> None:
        """Nothing on disk names a file any more."""
        self._files = []
        self.clean()

    def _rows(self) -> Iterator[ClientRow]:
        import torch

        for file in self._files:
            for (vector, client), values in self._read(file):
                yield ClientRow(vector, client, torch.from_numpy(values.astype(np.float32, copy=False)))

    def _read(self, file: VectorFile) -> Iterator[tuple[tuple[str, int], np.ndarray]]:
        path = self._folder / file.name
        try:
            with path.open("rb") as stream:
                for key, place in file.rows.items():
                    stream.seek(place.start * FLOAT.itemsize)
                    values = np.fromfile(stream, FLOAT, place.size)
                    if len(values) != place.size or zlib.crc32(values.data) != place.checksum:
                        raise _damaged(path, "it was changed or damaged: a checksum does not fit")
                    yield key, values
        except OSError as error:
            raise _damaged(path, error.strerror or str(error)) from error

    def _next_name(self) -> str:
        """A name that no file has had, named or left behind."""
        found = (NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return f"vectors-{1 + max((int(name[1]) for name in found if name), default=0):06d}.f32"

    @staticmethod
    def _append(stream: BinaryIO, file: VectorFile, key: tuple[str, int], values: np.ndarray) -> None:
        stream.write(values.data)
        file.rows[key] = Place(file.size, values.size, zlib.crc32(values.data))
        file.size += values.size


def _damaged(path: Path, why: str) -> InputError:
    return InputError(f"{path}: cannot be read ({why}); start the run again with --no-resume")


def _outdated(files: list[VectorFile], made: VectorFile) -> list[VectorFile]:
    """Which files the new one takes over: the emptiest, until at most half of all is outdated and the files are few."""
    with_rows = [file for file in files if file.rows]
    current = made.current + sum(file.current for file in with_rows)
    total = made.size + sum(file.size for file in with_rows)
    chosen = []
    for file in sorted(with_rows, key=lambda file: file.current / file.size):
        if total <= 2 * current:
            break
        total += file.current - file.size
        chosen.append(file)
    left = [file for file in with_rows if file not in chosen]
    if len(left) >= MOST_FILES:  # as few bytes as will do for half of them
        chosen += sorted(left, key=lambda file: file.current)[: MOST_FILES // 2]
    return chosen
