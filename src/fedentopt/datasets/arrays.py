"""A data set from arrays in memory, as a notebook has them: read by the same rules as an .npz file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedentopt.datasets.cache import in_memory
from fedentopt.datasets.class_labels import label_classes, read_labels
from fedentopt.datasets.clients import client_ids
from fedentopt.datasets.dataset import Dataset
from fedentopt.datasets.loading import check_image_size, default_image_size
from fedentopt.datasets.npz import check_images, image_pieces
from fedentopt.datasets.source import Content, Labels
from fedentopt.errors import InputError

NAME = "arrays"
KEYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class HeldArray:
    """One array, with what `npz.NpzArray` offers."""

    key: str
    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    def __str__(self) -> str:
        return f"dataset: {self.key} of shape {self.shape} and type {self.dtype}"

    def pieces(self) -> Iterator[np.ndarray]:
        """The rows, all at once: they are in memory already."""
        yield self.values

    def read(self) -> np.ndarray:
        """The array."""
        return self.values


def from_arrays(
    x_train: Any,
    y_train: Any,
    x_test: Any,
    y_test: Any,
    *,
    class_names: Sequence[str] | None = None,
    client_train: Any = None,
    image_size: int | None = None,
) -> Dataset:
    """A data set of images and labels in any form that an .npz file may hold them in (see `npz`); anything with
    `__array__` will do.

    `client_train`: whole numbers or text, the client of every training image, for the partition `natural`.
    Images become squares of `image_size` pixels, 32 unless another size is asked for.
    """
    size = default_image_size(NAME) if image_size is None else image_size
    check_image_size(size)
    given = zip(KEYS, (x_train, y_train, x_test, y_test), strict=True)
    held = {key: HeldArray(key, _read(key, values)) for key, values in given}
    channels = {split: check_images(held[f"x_{split}"]) for split in ("train", "test")}
    if channels["train"] != channels["test"]:
        raise InputError(f"dataset: x_train has {channels['train']} channels, x_test {channels['test']}")
    raw_train, raw_test = (read_labels(held[f"y_{split}"], held[f"x_{split}"]) for split in ("train", "test"))
    names, (train, test), notes = label_classes("dataset", raw_train, raw_test, _names(class_names))
    images = image_pieces(held["x_train"]), image_pieces(held["x_test"])
    content = Content(channels["train"], {"": Labels(names, train, test)}, *images)
    arrays = in_memory(content, size, None)
    clients = None
    if client_train is not None:
        clients = client_ids("dataset: client_train", _read("client_train", client_train), len(train))
    return Dataset(NAME, arrays.x_train, train, arrays.x_test, test, names, arrays.mean, arrays.std, notes, clients)


def _names(given: Any) -> tuple[str, ...] | None:
    """Names of classes as plain text in their order; refused: what has none, or holds anything else."""
    if given is None:
        return None
    unordered = isinstance(given, str | set | frozenset | Mapping) or not isinstance(given, Iterable)
    names = [] if unordered else list(given)
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"dataset: class_names is {given!r}; accepted: one text per class, in a list")
    return tuple(map(str, names))  # NumPy's text is printed, and so known again, by another name


def _read(key: str, values: Any) -> np.ndarray:
    if np.ma.is_masked(values):
        raise InputError(f"dataset: {key} is masked in part; accepted: an array without missing values")
    try:
        array = _plain(np.asarray(values))
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"dataset: {key} cannot be read as an array ({error})") from error
    if isinstance(values, list | tuple) and array.dtype.kind == "U" and array.ndim == 1:
        # NumPy makes text of everything beside text: a missing value would become a name, "nan".
        for place, value in enumerate(values):
            if not isinstance(value, str):
                raise InputError(
                    f"dataset: {key}[{place}] is {value!r}, beside text; accepted: text alone, or whole numbers alone"
                )
    return array


def _plain(values: np.ndarray) -> np.ndarray:
    """Text that pandas keeps as objects, and NumPy's text of any length, as text; anything else as it is."""
    if values.dtype.kind == "T":  # not cast to text of one length by itself, and missing values may be among it
        values = values.astype(object)
    objects = values.dtype == object and values.size and all(isinstance(value, str) for value in values.flat)
    return values.astype(str) if objects else values
