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


class LinearTiles(NamedTuple):
    """Batch rows and output columns a program, entries a product step, warps, pipeline stages."""

    rows: int = 64
    columns: int = 64
    step: int = 32
    warps: int = 4
    stages: int = 3


@triton.jit
def forward_kernel(x, w, b, y, w_row, b_row, batch, inputs, outputs, RELU: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr, STEP: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x += model * batch * inputs
    w += model * w_row
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, inputs, STEP):
        entry = first + tl.arange(0, STEP)
        known = entry < inputs
        a = tl.load(x + row[:, None] * inputs + entry[None, :], mask=(row < batch)[:, None] & known[None, :], other=0.0)
        f = tl.load(w + column[:, None] * inputs + entry[None, :], mask=(column < outputs)[:, None] & known[None, :],
                    other=0.0)  # fmt: skip
        if BF16:
            a = a.to(tl.bfloat16)
            f = f.to(tl.bfloat16)
        product = tl.dot(a, tl.trans(f), product, input_precision=PRECISION)
    product += tl.load(b + model * b_row + column, mask=column < outputs, other=0.0)[None, :]
    if RELU:
        product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
    there = (row < batch)[:, None] & (column < outputs)[None, :]
    tl.store(y + model * batch * outputs + row[:, None] * outputs + column[None, :], product, mask=there)


@triton.jit
def weight_grad_kernel(x, dy, dw, db, dw_row, db_row, batch, inputs, outputs, ROWS: tl.constexpr,
                       COLUMNS: tl.constexpr, STEP: tl.constexpr, BF16: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x += model * batch * inputs
    dy += model * batch * outputs
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    total = tl.zeros((STEP, ROWS), tl.float32)
    for first in range(0, batch, STEP):
        sample = first + tl.arange(0, STEP)
        there = (sample < batch)[:, None] & (row < outputs)[None, :]
        d = tl.load(dy + sample[:, None] * outputs + row[None, :], mask=there, other=0.0)
        there = (sample < batch)[:, None] & (column < inputs)[None, :]
        a = tl.load(x + sample[:, None] * inputs + column[None, :], mask=there, other=0.0)
        total += d
        if BF16:
            a = a.to(tl.bfloat16)
            d = d.to(tl.bfloat16)
        product = tl.dot(tl.trans(d), a, product, input_precision=PRECISION)
    there = (row < outputs)[:, None] & (column < inputs)[None, :]
    tl.store(dw + model * dw_row + row[:, None] * inputs + column[None, :], product, mask=there)
    if tl.program_id(0) == 0:
        tl.store(db + model * db_row + row, tl.sum(total, axis=0), mask=row < outputs)


@triton.jit
def input_grad_kernel(dy, w, relu_of, dx, w_row, batch, inputs, outputs, MASKED: tl.constexpr, ROWS: tl.constexpr,
                      COLUMNS: tl.constexpr, STEP: tl.constexpr, BF16: tl.constexpr,
                      PRECISION: tl.constexpr):  # fmt: skip
    model = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    dy += model * batch * outputs
    w += model * w_row
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, outputs, STEP):
        entry = first + tl.arange(0, STEP)
        there = (row < batch)[:, None] & (entry < outputs)[None, :]
        d = tl.load(dy + row[:, None] * outputs + entry[None, :], mask=there, other=0.0)
        there = (entry < outputs)[:, None] & (column < inputs)[None, :]
        f = tl.load(w + entry[:, None] * inputs + column[None, :], mask=there, other=0.0)
        if BF16:
            d = d.to(tl.bfloat16)
            f = f.to(tl.bfloat16)
        product = tl.dot(d, f, product, input_precision=PRECISION)
    there = (row < batch)[:, None] & (column < inputs)[None, :]
    at = model * batch * inputs + row[:, None] * inputs + column[None, :]
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
    y = torch.empty((n, batch, outputs), dtype=x.dtype, device=x.device)
    forward_kernel[(triton.cdiv(outputs, tiles.columns), triton.cdiv(batch, tiles.rows), n)](
        x, w, b, y, w.stride(0), b.stride(0), batch, inputs, outputs, RELU=relu, ROWS=tiles.rows,
        COLUMNS=tiles.columns, STEP=tiles.step, BF16=bf16, PRECISION=precision, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    return y


def weight_grad(
    x: Tensor, dy: Tensor, dw: Tensor, db: Tensor, *, bf16: bool, precision: str, tiles: LinearTiles | None = None
) -> None:
    """See `interface.Kernels.linear_weight_grad`."""
    n, batch, inputs = x.shape
    outputs = dy.shape[2]
    tiles = tiles or LinearTiles(rows=min(64, power_of_two(outputs, 16)))
    weight_grad_kernel[(triton.cdiv(inputs, tiles.columns), triton.cdiv(outputs, tiles.rows), n)](
        x, dy, dw, db, dw.stride(0), db.stride(0), batch, inputs, outputs, ROWS=tiles.rows, COLUMNS=tiles.columns,
        STEP=tiles.step, BF16=bf16, PRECISION=precision, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def input_grad(
    dy: Tensor, w: Tensor, relu_of: Tensor | None, *, bf16: bool, precision: str, tiles: LinearTiles | None = None
) -> Tensor:
    """See `interface.Kernels.linear_input_grad`."""
    n, batch, outputs = dy.shape
    inputs = w.shape[2]
    tiles = tiles or LinearTiles()
    dx = torch.empty((n, batch, inputs), dtype=dy.dtype, device=dy.device)
    input_grad_kernel[(triton.cdiv(inputs, tiles.columns), triton.cdiv(batch, tiles.rows), n)](
        dy, w, relu_of, dx, w.stride(0), batch, inputs, outputs, MASKED=relu_of is not None, ROWS=tiles.rows,
        COLUMNS=tiles.columns, STEP=tiles.step, BF16=bf16, PRECISION=precision, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    return dx
