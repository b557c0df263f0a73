"""What a loaded data set is, and a test split for data that comes without one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedentopt.datasets.clients import ClientIds

SEED = 0x5EED
SHARE = 5  # one in five


def held_out(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices (train, test), ascending: a fifth of every class (rounded, at least one of two) for the test.

    The draw depends on nothing but the labels and a fixed seed, so everyone gets the same split.
    """
    rng = np.random.Generator(np.random.PCG64(SEED))
    test = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = max(round(len(members) / SHARE), 1 if len(members) > 1 else 0)
        test.append(rng.permutation(members)[:count])
    chosen = np.sort(np.concatenate(test))
    return np.setdiff1d(np.arange(len(labels)), chosen), chosen


SAMPLED = 64  # images of a split whose pixels are in the digest


@dataclass(frozen=True)
class Dataset:
    """Images and labels of a training and a test split, ready for the device."""

    name: str
    x_train: np.ndarray  # uint8 (n, channels, H, W); one channel is grey; may be memory-mapped and read-only
    y_train: np.ndarray  # int64 (n,)
    x_test: np.ndarray
    y_test: np.ndarray
    class_names: tuple[str, ...]
    mean: tuple[float, ...]  # of the training images scaled to 0..1, three values (grey repeated)
    std: tuple[float, ...]
    notes: tuple[str, ...] = ()  # what a person should know about this copy, such as a split made here
    clients: ClientIds | None = None  # where the data says whose a training sample is

    @cached_property
    def digest(self) -> str:
        """Thirty-two hexadecimal digits for the content: all labels, statistics of all training pixels, some images.

        Statistics are sums in the processor's own order, which differ in the last bit from one kind to another. So half
        of the digits are of rounded ones; versions before had the other half alone (see `reading.is_same_data`).
        """
        numbers = [float(value) for value in (*self.mean, *self.std)]
        return self._digest([f"{number:.12g}" for number in numbers]) + self._digest(numbers)

    def _digest(self, numbers: list[str] | list[float]) -> str:
        shapes = self.x_train.shape, self.x_test.shape
        told = hashlib.sha256(repr((shapes, self.class_names, numbers)).encode())
        for labels in (self.y_train, self.y_test):
            told.update(np.ascontiguousarray(labels, dtype=np.int64).tobytes())
        if self.clients is not None:
            told.update(repr(self.clients.names).encode())
            told.update(np.ascontiguousarray(self.clients.numbers, dtype=np.int64).tobytes())
        for images in (self.x_train, self.x_test):
            chosen = np.unique(np.linspace(0, max(0, len(images) - 1), SAMPLED).astype(np.int64))
            told.update(np.ascontiguousarray(images[chosen[chosen < len(images)]]).tobytes())
        return told.hexdigest()[:16]

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_size(self) -> int:
        return int(self.x_train.shape[-1])
