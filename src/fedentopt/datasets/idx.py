"""MNIST and Fashion-MNIST: images and labels in the IDX format, two files per split, as published or unpacked.

A file is four bytes 0, 0, 8 (unsigned bytes) and the number of axes, the length of each axis in four bytes, highest
first, then the bytes.

Y. LeCun, C. Cortes and C. J. C. Burges, "The MNIST database of handwritten digits", 1998; H. Xiao, K. Rasul and R.
Vollgraf, "Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms", 2017.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np

from fedentopt.datasets.catalog import ENTRIES, missing
from fedentopt.datasets.fingerprint import md5
from fedentopt.datasets.source import Content, Images, Labels
from fedentopt.errors import InputError

PIECE = 10_000  # images per piece
LARGEST = 1 << 16  # of an axis of images: more is no picture
CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
}  # fmt: skip
PLACES = {"mnist": ("mnist", "MNIST/raw"), "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw")}
"""Folders under the data folder, in the order they are looked for; the second is where torchvision puts them."""
STEMS = {"train": "train", "test": "t10k"}


@dataclass(frozen=True)
class IdxFile:
    """A file in the IDX format, packed by gzip or not."""

    path: Path

    def shape(self) -> tuple[int, ...]:
        """The lengths of its axes; what is no IDX file of bytes is refused."""
        with self._open() as file:
            return self._shape(file)

    def pieces(self) -> Iterator[np.ndarray]:
        """Its rows, some at a time; fewer or more bytes than announced are refused."""
        with self._open() as file:
            rows, *inner = self._shape(file)
            width = math.prod(inner)
            for start in range(0, rows, PIECE):
                count = min(PIECE, rows - start)
                data = _read(file, count * width)
                if len(data) != count * width:
                    raise InputError(f"{self.path}: {rows:,} rows announced, the data end before: it is truncated")
                yield np.frombuffer(data, np.uint8).reshape(count, *inner)
            if file.read(1):
                raise InputError(f"{self.path}: more data than its header announces; accepted: the published file")

    def _open(self) -> _Opened:
        return _Opened(self.path)

    def _shape(self, file: IO[bytes]) -> tuple[int, ...]:
        head = _read(file, 4)
        if len(head) < 4 or head[:3] != b"\0\0\x08" or head[3] not in (1, 3):
            raise InputError(f"{self.path}: not an IDX file of bytes; accepted: the published file, packed or unpacked")
        axes = _read(file, 4 * head[3])
        if len(axes) < 4 * head[3]:
            raise InputError(f"{self.path}: it ends within its header: it is truncated")
        shape = tuple(int(length) for length in np.frombuffer(axes, ">u4"))
        if 0 in shape or any(length > LARGEST for length in shape[1:]):
            raise InputError(f"{self.path}: axes of {shape}; accepted: images of at least one pixel")
        return shape


class _Opened:
    """An open file, packed or not, whose damage is an `InputError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> IO[bytes]:
        packed = self.path.suffix == ".gz"
        self._file = cast(IO[bytes], gzip.open(self.path) if packed else self.path.open("rb"))
        return self._file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        assert self._file is not None
        self._file.close()
        if isinstance(error, EOFError | zlib.error | gzip.BadGzipFile):
            raise InputError(f"{self.path}: damaged or truncated ({error})") from error


def _read(file: IO[bytes], count: int) -> bytes:
    """`count` bytes, fewer at the end: a packed file may give fewer at a time."""
    parts = []
    while count and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


@dataclass(frozen=True)
class Idx:
    """One of the sets, under a data folder."""

    name: str
    data_dir: Path
    official: bool = True

    @property
    def key(self) -> str:
        return self.name

    @property
    def root(self) -> Path:
        places = [self.data_dir / place for place in PLACES[self.name]]
        return next((place for place in places if place.is_dir()), places[0])

    def files(self) -> list[Path]:
        found = []
        for stem in STEMS.values():
            for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"):
                packed = self.root / f"{stem}-{kind}.gz"
                there = next((path for path in (packed, packed.with_suffix("")) if path.is_file()), None)
                if there is None:
                    raise missing(self.name, packed, self.data_dir)
                found.append(there)
        return found

    def open(self) -> Content:
        paths = self.files()
        opened = [IdxFile(path) for path in paths]
        labels, images = [], []
        for pictures, classes in (opened[:2], opened[2:]):
            shape, count = pictures.shape(), classes.shape()
            if len(shape) != 3 or len(count) != 1:
                wrong = pictures if len(shape) != 3 else classes
                raise InputError(f"{wrong.path}: axes of {wrong.shape()}; accepted: images (n, H, W) and labels (n,)")
            if shape[0] != count[0]:
                raise InputError(f"{classes.path}: {count[0]:,} labels for {shape[0]:,} images")
            labels.append(self._labels(classes))
            images.append(_images(pictures))
        notes, verified = self._check(paths, len(labels[0]), len(labels[1]))
        return Content(1, {"": Labels(CLASSES[self.name], *labels)}, images[0], images[1], notes, verified)

    def _labels(self, file: IdxFile) -> np.ndarray:
        values = np.concatenate(list(file.pieces()))
        if values.max() > 9:
            at = int(np.argmax(values > 9))
            raise InputError(f"{file.path}: label {at} is {values[at]}; accepted: 0 to 9. The file was changed")
        return values.astype(np.int64)

    def _check(self, paths: list[Path], train: int, test: int) -> tuple[tuple[str, ...], bool]:
        """Notes, and whether all files have the published checksums, which only packed ones can have."""
        entry = ENTRIES[self.name]
        if (train, test) != (entry.train, entry.test):
            there, published = train + test, entry.train + entry.test
            return (f"{self.name}: {self.root} holds {there:,} images, not the official {published:,}",), False
        sums = {Path(download.filename).name: download.md5 for download in entry.downloads}
        packed = [path for path in paths if path.name in sums]
        for path in packed:
            if (found := md5(path)) != sums[path.name]:
                raise InputError(f"{path}: MD5 {found}, published {sums[path.name]}: the file was changed")
        return (), len(packed) == len(paths)


def _images(file: IdxFile) -> Images:
    def iterate(side: int) -> Iterator[np.ndarray]:
        from fedentopt.datasets.pixels import resized

        for piece in file.pieces():
            yield from resized(piece[:, None], side)

    return iterate
