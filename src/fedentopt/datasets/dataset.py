"""What a loaded data set is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_size(self) -> int:
        return int(self.x_train.shape[-1])
