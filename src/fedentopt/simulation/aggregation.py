"""Server steps of all runs of a stack: factors on the host, one matrix product on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fedentopt.simulation.device import to_device
from fedentopt.simulation.layout import FlatLayout


@dataclass
class Blend:
    """Next model of one row: own * start + sum of factors over trained rows. Buffers use the data shares alone."""

    row: int
    own: float
    trained: np.ndarray
    factors: np.ndarray
    shares: np.ndarray


def blend_models(starts: torch.Tensor, trained: torch.Tensor, blends: list[Blend], layout: FlatLayout) -> torch.Tensor:
    """New global models (G, width); rows without a blend stay as they are, and so does what never changes.

    On CUDA all rows are one exact fp32 product; on the CPU each row is computed by itself, so that its bits do not
    depend on the other runs.
    """
    new = starts.clone()
    if not blends:
        return new
    width, end = layout.parameter_width, layout.moving_width
    if starts.is_cuda:
        factors = np.zeros((2, len(blends), len(trained)), dtype=np.float32)
        for i, b in enumerate(blends):
            factors[0, i, b.trained] = b.factors
            factors[1, i, b.trained] = b.shares
        table = to_device(factors, starts.device)
        own = to_device(torch.tensor([b.own for b in blends], dtype=torch.float32), starts.device)
        index = to_device(torch.tensor([b.row for b in blends]), starts.device)
        # Zero times NaN is NaN: a client that diverged must spoil its own run's model and no other.
        trained = trained[:, :end]
        sound = torch.isfinite(trained).all(1)
        clean = torch.where(sound[:, None], trained, 0.0)
        with exact_products():
            mixed = table[0] @ clean[:, :width] + own[:, None] * starts[index, :width]
            spoilt = ((table[1] != 0).float() @ (~sound).float()) > 0
            new[index, :width] = torch.where(spoilt[:, None], torch.nan, mixed)
            if end > width:
                new[index, width:end] = table[1] @ clean[:, width:]
        return new
    for b in blends:
        rows_t = torch.from_numpy(b.trained)
        mine = trained[rows_t]
        new[b.row, :width] = mine[:, :width].t() @ torch.from_numpy(b.factors).float()
        if b.own:
            new[b.row, :width] += b.own * starts[b.row, :width]
        if end > width:
            new[b.row, width:end] = mine[:, width:end].t() @ torch.from_numpy(b.shares).float()
    return new


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """No TF32 inside: averages of models must not lose bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
