"""Arrays of an .npz file, read piece by piece and without pickle, so that files larger than memory can be converted."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from fedentopt.errors import InputError

PIECE_BYTES = 64 << 20


@dataclass(frozen=True)
class NpzArray:
    """One array of an .npz file; only its header has been read."""

    path: Path
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]

    def __str__(self) -> str:
        return f"{self.path}: {self.key} of shape {self.shape} and type {self.dtype}"

    def pieces(self) -> Iterator[np.ndarray]:
        """The rows, some at a time; a truncated or damaged array is refused."""
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        step = max(1, PIECE_BYTES // max(row, 1))
        with _member(self.path, self.key) as file:
            _header(file)
            for start in range(0, self.shape[0], step):
                rows = min(step, self.shape[0] - start)
                data = file.read(rows * row)
                if len(data) != rows * row:
                    raise EOFError(f"{self.shape[0]} rows announced, the data end before row {start + rows}")
                yield np.frombuffer(data, self.dtype).reshape(rows, *self.shape[1:])
            if file.read(1):  # reading to the end is also what makes zipfile compare its checksum
                raise ValueError("more data than the header announces")

    def read(self) -> np.ndarray:
        """The whole array."""
        pieces = list(self.pieces())
        return np.concatenate(pieces) if pieces else np.empty(self.shape, self.dtype)


def keys(path: Path) -> list[str]:
    """Names of the arrays in an .npz file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    except Exception as error:  # unpackers raise whatever a damaged file makes them stumble over
        raise InputError(f"{path}: not a readable .npz file ({error}); it may be truncated") from error


def array(path: Path, key: str) -> NpzArray:
    """The array `key`; refused if it is not there or holds Python objects, which only pickle could read."""
    found = keys(path)
    if key not in found:
        raise InputError(f"{path}: no array {key!r}; it holds {', '.join(found) or 'nothing'}")
    with _member(path, key) as file:
        shape, fortran, dtype = _header(file)
    if dtype.hasobject:
        raise InputError(f"{path}: {key} holds Python objects, which are never loaded; accepted: plain numbers")
    if fortran and len(shape) > 1:
        raise InputError(f"{path}: {key} is stored column by column; save it with np.ascontiguousarray")
    if not shape:
        raise InputError(f"{path}: {key} is a single value; accepted: an array with one row a sample")
    return NpzArray(path, key, shape, dtype)


@contextmanager
def _member(path: Path, key: str) -> Iterator[IO[bytes]]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{key}.npy") as file:
            yield file
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{path}: {key} is damaged or truncated ({error})") from error


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    version = npy.read_magic(file)
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"array format {version} is unknown")
    shape, fortran, dtype = readers[version](file)
    return shape, fortran, dtype
