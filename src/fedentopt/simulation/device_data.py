"""A data set where training happens: stored bytes, not floats, so that all of it fits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedentopt.datasets import Dataset


@dataclass(frozen=True)
class DeviceData:
    """Train and test split on one device: uint8 images (n, 1 or 3, H, W), int64 labels."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    num_classes: int

    @classmethod
    def place(cls, data: Dataset, device: torch.device) -> DeviceData:
        """Copy a data set to `device`; memory-mapped files are read once."""

        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.array(array)).to(device)

        return cls(
            put(data.x_train),
            put(data.y_train.astype(np.int64)),
            put(data.x_test),
            put(data.y_test.astype(np.int64)),
            data.num_classes,
        )
