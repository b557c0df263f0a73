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

from fedentopt.simulation.triton.windows import power_of_two


def aligned(row: int) -> tuple[int, int]:
    """A row stride as (quotient, factor), the factor 4 where rows stay 16-byte aligned: the compiler then knows it."""
    return (row // 4, 4) if row % 4 == 0 else (row, 1)


class LinearTiles(NamedTuple):
    """Rows and columns of the result per program, entries per product step, warps, pipeline stages; for the
    gradients, whether operands are read in fours (`transposed`)."""

    rows: int = 64
    columns: int = 64
    step: int = 32
    warps: int = 4
    stages: int = 3
    fours: bool = False


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
def transposed(x, row, column, rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Rows row..row+STEP and columns column..column+COLUMNS of x (rows, WIDTH), zeros outside, as (COLUMNS, STEP).

    A tensor core takes TF32 operands only with the summed index contiguous, here x's rows, which in memory are not. A
    thread reads four rows of four columns and so holds runs of four rows, which go to shared memory whole. Line
    j * COLUMNS / 4 + i is column 4 i + j (`rows_in_order` and `columns_in_order` undo it in the product): neighbouring
    threads then write neighbouring lines, which lie in different banks.
    """
    at = column + tl.arange(0, COLUMNS // 4)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
    row += tl.arange(0, STEP // 4)[None, :, None] * 4
    known = at < WIDTH
    x0 = tl.load(x + row * WIDTH + at, mask=known & (row < rows), other=0.0)
    x1 = tl.load(x + (row + 1) * WIDTH + at, mask=known & (row + 1 < rows), other=0.0)
    x2 = tl.load(x + (row + 2) * WIDTH + at, mask=known & (row + 2 < rows), other=0.0)
    x3 = tl.load(x + (row + 3) * WIDTH + at, mask=known & (row + 3 < rows), other=0.0)
    fours = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return tl.reshape(tl.permute(fours, (2, 0, 1, 3, 4)), (COLUMNS, STEP))


@triton.jit
def rows_in_order(product, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.reshape(tl.permute(tl.reshape(product, (4, ROWS // 4, COLUMNS)), (1, 0, 2)), (ROWS, COLUMNS))


@triton.jit
def columns_in_order(product, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.reshape(tl.permute(tl.reshape(product, (ROWS, 4, COLUMNS // 4)), (0, 2, 1)), (ROWS, COLUMNS))


@triton.jit
def weight_grad_kernel(x, dy, dw, db, dw_row, db_row, batch, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
                       ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
                       FOURS: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x += model * batch * INPUTS
    dy += model * batch * OUTPUTS
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((ROWS, STEP), tl.float32)
    for first in range(0, batch, STEP):
        if FOURS:
            d = transposed(dy, first, tl.program_id(1) * ROWS, batch, OUTPUTS, ROWS, STEP)
            a = transposed(x, first, tl.program_id(0) * COLUMNS, batch, INPUTS, COLUMNS, STEP)
        else:
            sample = first + tl.arange(0, STEP)
            there = (sample < batch)[:, None] & (row < OUTPUTS)[None, :]
            d = tl.trans(tl.load(dy + sample[:, None] * OUTPUTS + row[None, :], mask=there, other=0.0))
            there = (sample < batch)[:, None] & (column < INPUTS)[None, :]
            a = tl.trans(tl.load(x + sample[:, None] * INPUTS + column[None, :], mask=there, other=0.0))
        total += d
        if BF16:
            a = a.to(tl.bfloat16)
            d = d.to(tl.bfloat16)
        product = tl.dot(d, tl.trans(a), product, input_precision=PRECISION)
    bias = tl.sum(total, axis=1)
    if FOURS:
        product = rows_in_order(columns_in_order(product, ROWS, COLUMNS), ROWS, COLUMNS)
        bias = tl.reshape(tl.trans(tl.reshape(bias, (4, ROWS // 4))), (ROWS,))
    there = (row < OUTPUTS)[:, None] & (column < INPUTS)[None, :]
    tl.store(dw + model * dw_row * ALIGNED + row[:, None] * INPUTS + column[None, :], product, mask=there)
    if tl.program_id(0) == 0:
        tl.store(db + model * db_row + row, bias, mask=row < OUTPUTS)


@triton.jit
def input_grad_kernel(dy, w, relu_of, dx, w_row, batch, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
                      ALIGNED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                      STEP: tl.constexpr, FOURS: tl.constexpr, BF16: tl.constexpr,
                      PRECISION: tl.constexpr):  # fmt: skip
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
        if FOURS:
            f = tl.trans(transposed(w, first, tl.program_id(0) * COLUMNS, OUTPUTS, INPUTS, COLUMNS, STEP))
        else:
            there = (entry < OUTPUTS)[:, None] & (column < INPUTS)[None, :]
            f = tl.load(w + entry[:, None] * INPUTS + column[None, :], mask=there, other=0.0)
        if BF16:
            d = d.to(tl.bfloat16)
            f = f.to(tl.bfloat16)
        product = tl.dot(d, f, product, input_precision=PRECISION)
    if FOURS:
        product = columns_in_order(product, ROWS, COLUMNS)
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
    side = 64 if inputs * outputs > 16384 else 32
    tiles = tiles or LinearTiles(side, side, 64, 4, 1, fours=True)
    dw_row, factor = aligned(dw.stride(0))
    weight_grad_kernel[(triton.cdiv(inputs, tiles.columns), triton.cdiv(outputs, tiles.rows), n)](
        x, dy, dw, db, dw_row, db.stride(0), batch, INPUTS=inputs, OUTPUTS=outputs, ALIGNED=factor, ROWS=tiles.rows,
        COLUMNS=tiles.columns, STEP=tiles.step, FOURS=tiles.fours, BF16=bf16, PRECISION=precision,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def input_grad(
    dy: Tensor, w: Tensor, relu_of: Tensor | None, *, bf16: bool, precision: str, tiles: LinearTiles | None = None
) -> Tensor:
    """See `interface.Kernels.linear_input_grad`."""
    n, batch, outputs = dy.shape
    inputs = w.shape[2]
    tiles = tiles or LinearTiles(64, 32, 64, 4, 1, fours=True)
    w_row, factor = aligned(w.stride(0))
    dx = torch.empty((n, batch, inputs), dtype=dy.dtype, device=dy.device)
    input_grad_kernel[(triton.cdiv(inputs, tiles.columns), triton.cdiv(batch, tiles.rows), n)](
        dy, w, relu_of, dx, w_row, batch, INPUTS=inputs, OUTPUTS=outputs, ALIGNED=factor, MASKED=relu_of is not None,
        ROWS=tiles.rows, COLUMNS=tiles.columns, STEP=tiles.step, FOURS=tiles.fours, BF16=bf16, PRECISION=precision,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return dx
