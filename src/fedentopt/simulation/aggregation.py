"""Server steps of all runs of a stack: factors on the host, weighted sums of models on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedentopt.simulation.device import to_device
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.triton import runs_on


@dataclass
class Blend:
    """Next model of one row: own * start + sum of factors over trained rows. Buffers use the shares alone."""

    row: int
    own: float
    trained: np.ndarray
    factors: np.ndarray
    shares: np.ndarray


def blend_models(starts: torch.Tensor, trained: torch.Tensor, blends: list[Blend], layout: FlatLayout) -> torch.Tensor:
    """New global models (G, width); rows without a blend stay as they are, and so does what never changes.

    Each row is computed by itself, in the order of its clients, so that its bits do not depend on the other runs.
    """
    new = starts.clone()
    if not blends:
        return new
    width, end = layout.parameter_width, layout.moving_width
    if runs_on(starts.device):
        _blend_together(starts, trained, blends, new, width, end)
        return new
    with exact_products():
        for b in blends:
            rows_t = to_device(b.trained, starts.device)
            factors, shares = (to_device(f.astype(np.float32), starts.device) for f in (b.factors, b.shares))
            mine = trained[rows_t]
            new[b.row, :width] = mine[:, :width].t() @ factors
            if b.own:
                new[b.row, :width] += b.own * starts[b.row, :width]
            if end > width:
                new[b.row, width:end] = mine[:, width:end].t() @ shares
    return new


def _blend_together(
    starts: torch.Tensor, trained: torch.Tensor, blends: list[Blend], new: torch.Tensor, width: int, end: int
) -> None:
    """All blends in one launch."""
    from fedentopt.simulation.triton import blend

    def put(values: Sequence[float] | np.ndarray, dtype: type) -> torch.Tensor:
        return to_device(np.asarray(values, dtype=dtype), starts.device)

    def joined(field: str, dtype: type) -> torch.Tensor:
        return put(np.concatenate([getattr(b, field) for b in blends]), dtype)

    blend.blend_rows(
        trained, starts, new, ends=put(np.cumsum([0, *(len(b.trained) for b in blends)]), np.int32),
        places=joined("trained", np.int32), factors=joined("factors", np.float32), shares=joined("shares", np.float32),
        own=put([b.own for b in blends], np.float32), rows=put([b.row for b in blends], np.int32), width=width, end=end,
    )  # fmt: skip


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """No TF32 inside: averages of models must not lose bits."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
