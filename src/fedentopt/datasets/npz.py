"""A user's own data in one .npz file: x_train, y_train, x_test, y_test, class_names and client_train if there are any.

Its arrays are read piece by piece and without pickle, so that files larger than memory can be converted.

Images: uint8, or floats in 0..1 (scaled by 255 and rounded), shaped (n, H, W), (n, H, W, 1 or 3) or
(n, 1 or 3, H, W). Labels: integers, one an image. With class_names (text, one a class) the labels are
0..C-1; without, the distinct labels of both splits in ascending order are the classes, named by their value.
client_train (whole numbers or text, one per training image): which client it belongs to.
"""

from __future__ import annotations

import hashlib
import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.lib import format as npy

from fedentopt.datasets.clients import ClientIds, client_ids
from fedentopt.datasets.source import Content, Images, Labels
from fedentopt.errors import InputError

PIECE_BYTES = 64 << 20


class ArraySource(Protocol):
    """An array that is read when it is needed: one of an .npz file, or one in memory."""

    @property
    def key(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def pieces(self) -> Iterator[np.ndarray]: ...

    def read(self) -> np.ndarray: ...


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


_SHAPES = "(n, H, W), (n, H, W, 1 or 3) or (n, 1 or 3, H, W)"


@dataclass(frozen=True)
class Npz:
    """An .npz file."""

    path: Path
    official: bool = False

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def key(self) -> str:
        return own_key(self.path)

    @property
    def root(self) -> Path:
        return self.path.parent

    def files(self) -> list[Path]:
        if not self.path.is_file():
            raise InputError(f"dataset: {self.path} is not there")
        return [self.path]

    def open(self) -> Content:
        images = {split: array(self.path, f"x_{split}") for split in ("train", "test")}
        channels = {split: check_images(found) for split, found in images.items()}
        if channels["train"] != channels["test"]:
            raise InputError(f"{self.path}: x_train has {channels['train']} channels, x_test {channels['test']}")
        raw = {split: read_labels(array(self.path, f"y_{split}"), images[split]) for split in ("train", "test")}
        names, labels, notes = label_classes(str(self.path), raw["train"], raw["test"], self._names())
        clients = self._clients(images["train"].shape[0])
        return Content(
            channels["train"],
            {"": Labels(names, *labels)},
            image_pieces(images["train"]),
            image_pieces(images["test"]),
            notes,
            clients=clients,
        )

    def _clients(self, samples: int) -> ClientIds | None:
        """Who holds which training image, None where the file does not say."""
        if "client_train" not in keys(self.path):
            return None
        given = array(self.path, "client_train")
        try:
            ids = given.read()
        except (SystemError, ValueError) as error:
            raise InputError(f"{given}: cannot be read ({error}); accepted: whole numbers or text") from error
        return client_ids(f"{self.path}: client_train", ids, samples)

    def _names(self) -> tuple[str, ...] | None:
        """The names of classes in the file, None where it has none."""
        if "class_names" not in keys(self.path):
            return None
        given = array(self.path, "class_names")
        if given.dtype.kind != "U" or len(given.shape) != 1:
            raise InputError(f"{given}; accepted: one text per class, as in np.array(['cat', 'dog'])")
        try:
            return tuple(str(name) for name in given.read())
        except (SystemError, ValueError) as error:  # numbers beyond all characters
            raise InputError(f"{given}: not text ({error}); accepted: one text per class") from error


def label_classes(
    where: str, train: np.ndarray, test: np.ndarray, given: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[np.ndarray, np.ndarray], tuple[str, ...]]:
    """Names of the classes, labels 0..C-1 of both splits, and notes on classes without images.

    With names `given` the labels are their places; without, the distinct labels in ascending order are the classes.
    """
    if given is not None:
        names = tuple(given)
        check_names(where, names)
        if len(set(names)) < len(names):
            raise InputError(f"{where}: class_names holds a name twice; accepted: distinct names")
        for key, labels in (("y_train", train), ("y_test", test)):
            check_range(where, key, labels, len(names))
    else:
        distinct = np.unique(np.concatenate([train, test]))
        names = tuple(str(label) for label in distinct)
        train, test = np.searchsorted(distinct, train), np.searchsorted(distinct, test)
    if len(names) < 2:
        raise InputError(f"{where}: y_train holds one class only ({', '.join(names)}); accepted: two or more")
    return names, (train.astype(np.int64), test.astype(np.int64)), absent(where, names, train, test)


def own_key(path: Path) -> str:
    """Cache folder of a user's own data: a readable name, made unique by the whole path."""
    whole = str(path.expanduser().resolve())
    readable = "".join(c if c.isalnum() else "-" for c in path.stem)[:24]
    return f"own-{readable}-{hashlib.sha256(os.fsencode(whole)).hexdigest()[:12]}"


def check_names(where: str, names: Sequence[str]) -> None:
    """Refuse names of classes that no table can hold: blank ones, and those that are not Unicode text."""
    for name in names:
        if not name.strip() or not is_text(name):
            raise InputError(f"{where}: the class name {name!r} cannot be written to a table; accepted: text in UTF-8")


def is_text(name: str) -> bool:
    """Whether a name, such as that of a file with stray bytes in it, can be written as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def absent(where: str, names: tuple[str, ...], train: np.ndarray, test: np.ndarray) -> tuple[str, ...]:
    """Notes on classes without a single image in one of the splits."""
    notes = []
    for split, labels in (("training", train), ("test", test)):
        without = [names[i] for i in np.flatnonzero(np.bincount(labels, minlength=len(names)) == 0)]
        if without:
            notes.append(f"{where}: no {split} images of {', '.join(without)}")
    return tuple(notes)


def check_range(path: Path | str, key: str, labels: np.ndarray, classes: int) -> None:
    """Refuse a label outside 0..classes-1, by its place."""
    wrong = (labels < 0) | (labels >= classes)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise InputError(f"{path}: {key}[{at}] is {labels[at]}; accepted: 0 to {classes - 1}")


def read_labels(found: ArraySource, images: ArraySource) -> np.ndarray:
    """Labels as int64 (n,); refused unless they are integers, one for every image."""
    shape = found.shape
    if found.dtype.kind not in "iu" or not (len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)):
        raise InputError(f"{found}; accepted: integers of shape (n,), one label an image")
    if shape[0] != images.shape[0]:
        raise InputError(f"{found}; accepted: {images.shape[0]} labels, as many as {images.key} has images")
    values = found.read().reshape(-1)
    if values.size and int(values.max()) > np.iinfo(np.int64).max:
        raise InputError(f"{found}: {values.max()} is too large a label")
    return values.astype(np.int64)


def check_images(found: ArraySource) -> int:
    """The number of channels; refused are shapes and types that are not images."""
    if found.dtype != np.uint8 and found.dtype.kind != "f":
        raise InputError(f"{found}; accepted: uint8 (0 to 255), or floats from 0 to 1")
    if 0 in found.shape:
        raise InputError(f"{found}; accepted: at least one image, {_SHAPES}")
    return _axis(found)[1]


def _axis(found: ArraySource) -> tuple[int | None, int]:
    """Where the channels are (None: nowhere) and how many there are."""
    shape = found.shape
    if len(shape) == 3:
        return None, 1
    if len(shape) == 4 and (shape[1] in (1, 3)) != (shape[3] in (1, 3)):
        axis = 1 if shape[1] in (1, 3) else 3
        return axis, shape[axis]
    if len(shape) == 4 and shape[1] in (1, 3):
        raise InputError(f"{found}; the channels may be axis 1 or axis 3; accepted: {_SHAPES} with H and W above 3")
    raise InputError(f"{found}; accepted: {_SHAPES}")


def image_pieces(found: ArraySource) -> Images:
    """The images of an array that `check_images` has passed."""

    def iterate(side: int) -> Iterator[np.ndarray]:
        from fedentopt.datasets.pixels import resized

        axis = _axis(found)[0]
        for piece in found.pieces():
            if axis is None:
                piece = piece[:, None]
            elif axis == 3:
                piece = piece.transpose(0, 3, 1, 2)
            yield from resized(_bytes(found, piece), side)

    return iterate


def _bytes(found: ArraySource, piece: np.ndarray) -> np.ndarray:
    if piece.dtype == np.uint8:
        return np.ascontiguousarray(piece)
    low, high = float(piece.min()), float(piece.max())
    if not (low >= 0 and high <= 1):  # NaN fails both
        raise InputError(f"{found}: values from {low:g} to {high:g}; accepted: floats from 0 to 1, or uint8")
    scaled: np.ndarray = np.rint(piece * 255).astype(np.uint8)
    return scaled
