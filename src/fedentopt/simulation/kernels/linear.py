# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Stacked linear layers in Triton: bias and ReLU ride along with the forward product, ReLU's mask and the bias
gradient with the backward ones.

Weights are views of the flat parameter buffer (row stride w_row, contiguous inside), which a batched matrix product
would first have to copy, and a batch of 64 leaves a library's product mostly launch time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.kernels.windows import power_of_two


def aligned(row: int) -> tuple[int, int]:
    """A row stride as (quotient, factor), the factor 4 where rows stay 16-byte aligned: the compiler then knows it."""
    return (row // 4, 4) if row % 4 == 0 else (row, 1)


class LinearTiles(NamedTuple):
    """Batch rows and output columns a program, entries a product step, warps, pipeline stages."""

    rows: int = 64
    columns: int = 64
    step: int = 32
    warps: int = 4
    stages: int = 3


@triton.jit
def forward_kernel(x, w, b, y, x_row, w_row, b_row, batch, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
                   ALIGNED: tl.constexpr, RELU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   STEP: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x += model * x_row
    w += model * w_row * ALIGNED
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, INPUTS, STEP):
        entry = first + tl.arange(0, STEP)
        known = entry < INPUTS
        a = tl.load(x + row[:, None] * INPUTS + entry[None, :], mask=(row < batch)[:, None] & known[None, :], other=0.0)
        f = tl.load(w + column[:, None] * INPUTS + entry[None, :], mask=(column < OUTPUTS)[:, None] & known[None, :],
                    other=0.0)  # fmt: skip
        if BF16:
            a = a.to(tl.bfloat16)
            f = f.to(tl.bfloat16)
        product = tl.dot(a, tl.trans(f), product, input_precision=PRECISION)
    product += tl.load(b + model * b_row + column, mask=column < OUTPUTS, other=0.0)[None, :]
    if RELU:
        product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
    there = (row < batch)[:, None] & (column < OUTPUTS)[None, :]
    tl.store(y + model * batch * OUTPUTS + row[:, None] * OUTPUTS + column[None, :], product, mask=there)


@triton.jit
def weight_grad_kernel(x, dy, dw, db, dw_row, db_row, batch, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
                       ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
                       BF16: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x += model * batch * INPUTS
    dy += model * batch * OUTPUTS
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((STEP, ROWS), tl.float32)
    for first in range(0, batch, STEP):
        sample = first + tl.arange(0, STEP)
        there = (sample < batch)[:, None] & (row < OUTPUTS)[None, :]
        d = tl.load(dy + sample[:, None] * OUTPUTS + row[None, :], mask=there, other=0.0)
        there = (sample < batch)[:, None] & (column < INPUTS)[None, :]
        a = tl.load(x + sample[:, None] * INPUTS + column[None, :], mask=there, other=0.0)
        total += d
        if BF16:
            a = a.to(tl.bfloat16)
            d = d.to(tl.bfloat16)
        product = tl.dot(tl.trans(d), a, product, input_precision=PRECISION)
    there = (row < OUTPUTS)[:, None] & (column < INPUTS)[None, :]
    tl.store(dw + model * dw_row * ALIGNED + row[:, None] * INPUTS + column[None, :], product, mask=there)
    if tl.program_id(0) == 0:
        tl.store(db + model * db_row + row, tl.sum(total, axis=0), mask=row < OUTPUTS)


@triton.jit
def input_grad_kernel(dy, w, relu_of, dx, w_row, batch, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
                      ALIGNED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                      STEP: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    dy += model * batch * OUTPUTS
    w += model * w_row * ALIGNED
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, OUTPUTS, STEP):
        entry = first + tl.arange(0, STEP)
        there = (row < batch)[:, None] & (entry < OUTPUTS)[None, :]
        d = tl.load(dy + row[:, None] * OUTPUTS + entry[None, :], mask=there, other=0.0)
        there = (entry < OUTPUTS)[:, None] & (column < INPUTS)[None, :]
        f = tl.load(w + entry[:, None] * INPUTS + column[None, :], mask=there, other=0.0)
        if BF16:
            d = d.to(tl.bfloat16)
            f = f.to(tl.bfloat16)
        product = tl.dot(d, f, product, input_precision=PRECISION)
    there = (row < batch)[:, None] & (column < INPUTS)[None, :]
    at = model * batch * INPUTS + row[:, None] * INPUTS + column[None, :]
    if MASKED:
        product = tl.where(tl.load(relu_of + at, mask=there, other=0.0) > 0, product, 0.0)
    tl.store(dx + at, product, mask=there)


def forward(
    x: Tensor, w: Tensor, b: Tensor, relu: bool, *, bf16: bool, precision: str, tiles: LinearTiles | None = None
) -> Tensor:
    """See `interface.Kernels.linear_forward`."""
    n, batch, inputs = x.shape
    outputs = w.shape[1]
    tiles = tiles or LinearTiles(columns=min(64, power_of_two(outputs, 16)))
    w_row, factor = aligned(w.stride(0))
    y = torch.empty((n, batch, outputs), dtype=x.dtype, device=x.device)
    forward_kernel[(triton.cdiv(outputs, tiles.columns), triton.cdiv(batch, tiles.rows), n)](
        x, w, b, y, x.stride(0), w_row, b.stride(0), batch, INPUTS=inputs, OUTPUTS=outputs, ALIGNED=factor, RELU=relu,
        ROWS=tiles.rows, COLUMNS=tiles.columns, STEP=tiles.step, BF16=bf16, PRECISION=precision, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    return y


def weight_grad(
    x: Tensor, dy: Tensor, dw: Tensor, db: Tensor, *, bf16: bool, precision: str, tiles: LinearTiles | None = None
) -> None:
    """See `interface.Kernels.linear_weight_grad`."""
    n, batch, inputs = x.shape
    outputs = dy.shape[2]
    tiles = tiles or (LinearTiles(64, 64, 32, 4, 1) if inputs * outputs > 16384 else LinearTiles(32, 32, 64, 4, 1))
    dw_row, factor = aligned(dw.stride(0))
    weight_grad_kernel[(triton.cdiv(inputs, tiles.columns), triton.cdiv(outputs, tiles.rows), n)](
        x, dy, dw, db, dw_row, db.stride(0), batch, INPUTS=inputs, OUTPUTS=outputs, ALIGNED=factor, ROWS=tiles.rows,
        COLUMNS=tiles.columns, STEP=tiles.step, BF16=bf16, PRECISION=precision, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip


def input_grad(
    dy: Tensor, w: Tensor, relu_of: Tensor | None, *, bf16: bool, precision: str, tiles: LinearTiles | None = None
) -> Tensor:
    """See `interface.Kernels.linear_input_grad`."""
    n, batch, outputs = dy.shape
    inputs = w.shape[2]
    tiles = tiles or LinearTiles(32, 64, 32, 4, 3)
    w_row, factor = aligned(w.stride(0))
    dx = torch.empty((n, batch, inputs), dtype=dy.dtype, device=dy.device)
    input_grad_kernel[(triton.cdiv(inputs, tiles.columns), triton.cdiv(batch, tiles.rows), n)](
        dy, w, relu_of, dx, w_row, batch, INPUTS=inputs, OUTPUTS=outputs, ALIGNED=factor, MASKED=relu_of is not None,
        ROWS=tiles.rows, COLUMNS=tiles.columns, STEP=tiles.step, BF16=bf16, PRECISION=precision, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    return dx
