"""A user's own data in one .npz file: x_train, y_train, x_test, y_test, class_names and client_train if there are any.

Its arrays are read piece by piece and without pickle, so that files larger than memory can be converted.

Images: uint8, uint16 (of 16 bits, whose upper eight are kept), or floats in 0..1 (scaled by 255 and rounded), shaped
(n, H, W), (n, H, W, 1, 3 or 4) or (n, 1, 3 or 4, H, W); the fourth channel is how opaque a pixel is, over black.
Labels: whole numbers or text, one per image, or one-hot rows. With class_names (text, one per class) numbers are
0..C-1 and text is one of them; without, the distinct labels of both splits in ascending order are the classes, named by
their value, and the columns of one-hot rows 0..C-1.
client_train (whole numbers or text, one per training image): which client it belongs to.
"""

from __future__ import annotations

import hashlib
import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from fedentopt.datasets.class_labels import label_classes, read_labels
from fedentopt.datasets.clients import ClientIds, client_ids
from fedentopt.datasets.source import ArraySource, Content, Images, Labels
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
        raise InputError(f"{path}: {key} is a single value; accepted: an array with one row per sample")
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


_CHANNELS = (1, 3, 4)
_SHAPES = "(n, H, W), (n, H, W, 1, 3 or 4) or (n, 1, 3 or 4, H, W)"
_LEAST_OF_16_BITS = 1 << 12  # what has no larger value would keep four bits or fewer


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


def own_key(path: Path) -> str:
    """Cache folder of a user's own data: a readable name, made unique by the whole path."""
    whole = str(path.expanduser().resolve())
    readable = "".join(c if c.isalnum() else "-" for c in path.stem)[:24]
    return f"own-{readable}-{hashlib.sha256(os.fsencode(whole)).hexdigest()[:12]}"


def check_images(found: ArraySource) -> int:
    """The number of channels, 1 or 3; refused are shapes and types that are not images."""
    if found.dtype not in (np.uint8, np.uint16) and found.dtype.kind != "f":
        raise InputError(f"{found}; accepted: uint8 (0 to 255), uint16 (0 to 65535), or floats from 0 to 1")
    if 0 in found.shape:
        raise InputError(f"{found}; accepted: at least one image, {_SHAPES}")
    channels = min(_axis(found)[1], 3)
    if found.dtype == np.uint16:
        highest = max(int(piece.max()) for piece in found.pieces())
        if highest < _LEAST_OF_16_BITS:
            raise InputError(
                f"{found}: no value above {highest}, so these are no images of 16 bits; accepted: values up to 65535, "
                "or the same as uint8 or as floats from 0 to 1"
            )
    return channels


def _axis(found: ArraySource) -> tuple[int | None, int]:
    """Where the channels are (None: nowhere) and how many there are."""
    shape = found.shape
    if len(shape) == 3:
        return None, 1
    if len(shape) == 4 and (shape[1] in _CHANNELS) != (shape[3] in _CHANNELS):
        axis = 1 if shape[1] in _CHANNELS else 3
        return axis, shape[axis]
    if len(shape) == 4 and shape[1] in _CHANNELS:
        raise InputError(f"{found}; the channels may be axis 1 or axis 3; accepted: {_SHAPES} with H and W above 4")
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
            yield from resized(_over_black(_bytes(found, piece)), side)

    return iterate


def _bytes(found: ArraySource, piece: np.ndarray) -> np.ndarray:
    if piece.dtype == np.uint8:
        return np.ascontiguousarray(piece)
    if piece.dtype == np.uint16:  # as of image files of 16 bits
        upper: np.ndarray = (piece >> 8).astype(np.uint8)
        return upper
    low, high = float(piece.min()), float(piece.max())
    if not (low >= 0 and high <= 1):  # NaN fails both
        raise InputError(f"{found}: values from {low:g} to {high:g}; accepted: floats from 0 to 1, or uint8")
    scaled: np.ndarray = np.rint(piece * 255).astype(np.uint8)
    return scaled


def _over_black(images: np.ndarray) -> np.ndarray:
    """Images with a fourth channel, how opaque a pixel is, as they look on black; others as they are."""
    if images.shape[1] != 4:
        return images
    seen: np.ndarray = np.rint(images[:, :3] * (images[:, 3:] / 255)).astype(np.uint8)
    return seen
