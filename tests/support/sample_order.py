"""The order of samples, by its definition."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fedentopt.randomness import GOLDEN, key, mix64
from fedentopt.simulation.config import RunConfig


def batches(own: np.ndarray, cfg: RunConfig, round_: int, client: int) -> Iterator[torch.Tensor]:
    """Sample order by its definition: epoch e sorts the samples by the top 43 bits of hash(key, e * n + i)."""
    n = len(own)
    start = np.uint64(key(cfg.seed, "order", round_, client))
    for epoch in range(cfg.epochs):
        with np.errstate(over="ignore"):
            draws = mix64(start + np.arange(epoch * n, (epoch + 1) * n, dtype=np.uint64) * np.uint64(GOLDEN))
        order = np.argsort(draws >> np.uint64(21), kind="stable")
        for first in range(0, n, cfg.batch_size):
            yield torch.from_numpy(own[order[first : first + cfg.batch_size]])
