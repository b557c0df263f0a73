# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Cross-entropy: of scaled and shifted logits with its gradient, and sums of the plain one; one Triton program per
model."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.windows import power_of_two


@triton.jit
def softmax_xent_kernel(logits, labels, scale, shift, grads, losses, batch, classes, SCALED: tl.constexpr,
                        SHIFTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    model = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    known = column < classes
    labels += model * batch
    logits += model * batch * classes
    grads += model * batch * classes
    factor = tl.full((COLUMNS,), 1.0, tl.float32)
    if SCALED:
        factor = tl.load(scale + model * classes + column, mask=known, other=0.0)
    offset = tl.zeros((COLUMNS,), tl.float32)
    if SHIFTED:
        offset = tl.load(shift + model * classes + column, mask=known, other=0.0)
    real = tl.zeros((ROWS,), tl.int32)
    for first in range(0, batch, ROWS):
        row = first + tl.arange(0, ROWS)
        real += (tl.load(labels + row, mask=row < batch, other=-1) >= 0).to(tl.int32)
    share = 1.0 / tl.maximum(tl.sum(real, axis=0), 1).to(tl.float32)
    loss = tl.zeros((ROWS,), tl.float32)
    for first in range(0, batch, ROWS):
        row = first + tl.arange(0, ROWS)
        at = row[:, None] * classes + column[None, :]
        there = (row < batch)[:, None] & known[None, :]
        label = tl.load(labels + row, mask=row < batch, other=-1)
        z = tl.load(logits + at, mask=there, other=0.0) * factor[None, :] + offset[None, :]
        z = tl.where(known[None, :], z, float("-inf"))
        z = z - tl.max(z, axis=1)[:, None]
        e = tl.exp(z)
        total = tl.sum(e, axis=1)
        hit = column[None, :] == label[:, None]
        # A diverged row is all NaN; the sum over the hit keeps it.
        own = tl.sum(tl.where(hit, z, 0.0), axis=1)
        loss += tl.where(label >= 0, (tl.log(total) - own) * share, 0.0)
        grad = (e / total[:, None] - tl.where(hit, 1.0, 0.0)) * share * factor[None, :]
        tl.store(grads + at, tl.where((label >= 0)[:, None], grad, 0.0), mask=there)
    tl.store(losses + model, tl.sum(loss, axis=0))


def softmax_xent_grad(
    logits: Tensor, labels: Tensor, scale: Tensor | None = None, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `interface.Kernels.softmax_xent_grad`."""
    n, batch, classes = logits.shape
    columns = power_of_two(classes, 2)
    grads = torch.empty_like(logits)
    losses = torch.empty((n,), dtype=torch.float32, device=logits.device)
    softmax_xent_kernel[(n,)](
        logits, labels, scale, shift, grads, losses, batch, classes, SCALED=scale is not None,
        SHIFTED=shift is not None, ROWS=min(power_of_two(batch), max(1, 8192 // columns)), COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return grads, losses


@triton.jit
def sample_losses_kernel(logits, labels, sums, batch, classes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    model = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    known = column < classes
    labels += model * batch
    logits += model * batch * classes
    total = tl.zeros((ROWS,), tl.float64)
    squares = tl.zeros((ROWS,), tl.float64)
    for first in range(0, batch, ROWS):
        row = first + tl.arange(0, ROWS)
        at = row[:, None] * classes + column[None, :]
        there = (row < batch)[:, None] & known[None, :]
        label = tl.load(labels + row, mask=row < batch, other=-1)
        z = tl.where(known[None, :], tl.load(logits + at, mask=there, other=0.0), float("-inf"))
        z = z - tl.max(z, axis=1)[:, None]
        own = tl.sum(tl.where(column[None, :] == label[:, None], z, 0.0), axis=1)
        loss = tl.where(label >= 0, tl.log(tl.sum(tl.exp(z), axis=1)) - own, 0.0).to(tl.float64)
        total += loss
        squares += loss * loss
    sums += 2 * model
    tl.store(sums, tl.load(sums) + tl.sum(total, axis=0))
    tl.store(sums + 1, tl.load(sums + 1) + tl.sum(squares, axis=0))


def add_sample_losses(logits: Tensor, labels: Tensor, sums: Tensor) -> None:
    """See `interface.Kernels.add_sample_losses`."""
    n, batch, classes = logits.shape
    columns = power_of_two(classes, 2)
    sample_losses_kernel[(n,)](
        logits.contiguous(), labels, sums, batch, classes, ROWS=min(power_of_two(batch), max(1, 8192 // columns)),
        COLUMNS=columns, num_warps=4,
    )  # fmt: skip
