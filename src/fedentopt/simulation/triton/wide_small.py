# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Wide convolutions of 3x3 taps on maps of 2x2 pixels in one Triton kernel, with all that comes behind them.

On so small a map every pixel sees every other, and the weights outnumber the maps by far: what bounds the product is
how often they are brought. Here a program takes all four pixels, so that each weight is brought once instead of once
for every pixel that it meets, and a pool behind the layer is a maximum of four sums that are there already.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.interface import DEAD
from fedentopt.simulation.triton.wide_descriptors import described, weights_of_tap
from fedentopt.simulation.triton.wide_maps import BATCH_TILE, Size, cut
from fedentopt.simulation.triton.wide_pooled import larger

_DEAD = tl.constexpr(DEAD)
COLUMNS = 64  # that one program takes: nine taps of them, twice, fill the shared memory of a Hopper multiprocessor


@triton.jit
def tap(w, model, ky, kx, column, block, CI: tl.constexpr, CO: tl.constexpr, ORDER: tl.constexpr,
        COLUMNS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """The weights under which a pixel meets its neighbour ky - 1 lines below and kx - 1 pixels to the right."""
    which = ky * 3 + kx if ORDER == 0 else 8 - ky * 3 - kx
    return weights_of_tap(w, model, which, column, block, CI, CO, ORDER, COLUMNS, STEP)


@triton.jit
def leave(product, pixel, left, y, yt, sums, model, tile, row, columns, batch, CO: tl.constexpr, MASKED: tl.constexpr,
          TURN: tl.constexpr):  # fmt: skip
    """Write one pixel's maps, or the gradient of its maps behind the ReLU whose output is `left`."""
    base = (model * 4 + pixel) * CO * batch
    at = row[:, None] * CO + columns[None, :]
    value = product.to(y.dtype.element_ty)
    if MASKED:
        kept = tl.where(tl.load(left + base + at).to(tl.float32) <= 0, 0.0, value.to(tl.float32))
        tiles = tl.num_programs(0) // (CO // columns.shape[0])
        tl.store(sums + ((model * 4 + pixel) * tiles + tile) * CO + columns, tl.sum(kept, axis=0))
        value = kept.to(y.dtype.element_ty)
    tl.store(y + base + at, value)
    if TURN:
        tl.store(yt + base + columns[:, None] * batch + row[None, :], tl.trans(value))


@triton.jit
def convolution_kernel(x, w, bias, left, y, yt, code, sums, bias_model, batch, X_MODELS: tl.constexpr,
                       CI: tl.constexpr, CO: tl.constexpr, ORDER: tl.constexpr, BIASED: tl.constexpr,
                       MASKED: tl.constexpr, TURN: tl.constexpr, POOLED: tl.constexpr, KEEP: tl.constexpr,
                       ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    column = (tl.program_id(0) % (CO // COLUMNS)) * COLUMNS
    tile = tl.program_id(0) // (CO // COLUMNS)
    model = tl.program_id(1)
    sample = tile * ROWS
    # Pixels in row-major order: of the maps that enter a, b, c, d, of those that leave p, q, r, s.
    p = tl.zeros((ROWS, COLUMNS), tl.float32)
    q = tl.zeros((ROWS, COLUMNS), tl.float32)
    r = tl.zeros((ROWS, COLUMNS), tl.float32)
    s = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(CI // STEP):
        a = tl.reshape(x.load([model * X_MODELS * 4, sample, block * STEP]), (ROWS, STEP))
        b = tl.reshape(x.load([model * X_MODELS * 4 + 1, sample, block * STEP]), (ROWS, STEP))
        c = tl.reshape(x.load([model * X_MODELS * 4 + 2, sample, block * STEP]), (ROWS, STEP))
        d = tl.reshape(x.load([model * X_MODELS * 4 + 3, sample, block * STEP]), (ROWS, STEP))
        f = tap(w, model, 0, 0, column, block, CI, CO, ORDER, COLUMNS, STEP)
        s = tl.dot(a, f, s, input_precision=PRECISION)
        f = tap(w, model, 0, 1, column, block, CI, CO, ORDER, COLUMNS, STEP)
        r = tl.dot(a, f, r, input_precision=PRECISION)
        s = tl.dot(b, f, s, input_precision=PRECISION)
        f = tap(w, model, 0, 2, column, block, CI, CO, ORDER, COLUMNS, STEP)
        r = tl.dot(b, f, r, input_precision=PRECISION)
        f = tap(w, model, 1, 0, column, block, CI, CO, ORDER, COLUMNS, STEP)
        q = tl.dot(a, f, q, input_precision=PRECISION)
        s = tl.dot(c, f, s, input_precision=PRECISION)
        f = tap(w, model, 1, 1, column, block, CI, CO, ORDER, COLUMNS, STEP)
        p = tl.dot(a, f, p, input_precision=PRECISION)
        q = tl.dot(b, f, q, input_precision=PRECISION)
        r = tl.dot(c, f, r, input_precision=PRECISION)
        s = tl.dot(d, f, s, input_precision=PRECISION)
        f = tap(w, model, 1, 2, column, block, CI, CO, ORDER, COLUMNS, STEP)
        p = tl.dot(b, f, p, input_precision=PRECISION)
        r = tl.dot(d, f, r, input_precision=PRECISION)
        f = tap(w, model, 2, 0, column, block, CI, CO, ORDER, COLUMNS, STEP)
        q = tl.dot(c, f, q, input_precision=PRECISION)
        f = tap(w, model, 2, 1, column, block, CI, CO, ORDER, COLUMNS, STEP)
        p = tl.dot(c, f, p, input_precision=PRECISION)
        q = tl.dot(d, f, q, input_precision=PRECISION)
        f = tap(w, model, 2, 2, column, block, CI, CO, ORDER, COLUMNS, STEP)
        p = tl.dot(d, f, p, input_precision=PRECISION)
    columns = column + tl.arange(0, COLUMNS)
    row = sample + tl.arange(0, ROWS)
    model = model.to(tl.int64)
    if BIASED:
        shift = tl.load(bias + model * bias_model + columns)[None, :]
        p += shift
        q += shift
        r += shift
        s += shift
    if POOLED:
        # Rounded as maps are kept, so that the same pixel wins as if they had been.
        kind = y.dtype.element_ty
        place = tl.zeros((ROWS, COLUMNS), tl.int32)
        best, top = larger(p.to(kind).to(tl.float32), place, q.to(kind).to(tl.float32), place + 1)
        best, top = larger(best, top, r.to(kind).to(tl.float32), place + 2)
        best, top = larger(best, top, s.to(kind).to(tl.float32), place + 3)
        base = model * CO * batch
        at = row[:, None] * CO + columns[None, :]
        if KEEP:
            tl.store(code + base + at, tl.where(best <= 0, _DEAD, top).to(tl.uint8))
        best = tl.maximum(best, 0.0, propagate_nan=tl.PropagateNan.ALL).to(kind)
        tl.store(y + base + at, best)
        if TURN:
            tl.store(yt + base + columns[:, None] * batch + row[None, :], tl.trans(best))
    else:
        if BIASED:
            p = tl.maximum(p, 0.0, propagate_nan=tl.PropagateNan.ALL)
            q = tl.maximum(q, 0.0, propagate_nan=tl.PropagateNan.ALL)
            r = tl.maximum(r, 0.0, propagate_nan=tl.PropagateNan.ALL)
            s = tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL)
        leave(p, 0, left, y, yt, sums, model, tile, row, columns, batch, CO, MASKED, TURN)
        leave(q, 1, left, y, yt, sums, model, tile, row, columns, batch, CO, MASKED, TURN)
        leave(r, 2, left, y, yt, sums, model, tile, row, columns, batch, CO, MASKED, TURN)
        leave(s, 3, left, y, yt, sums, model, tile, row, columns, batch, CO, MASKED, TURN)


class Small(NamedTuple):
    """Maps (n, 4 or, pooled, 1, B, Co), the same turned (n, 4 or 1, Co, B) if asked for, of a pool the arg-max codes if
    kept, and of gradients their sums over samples (n, parts, Co)."""

    maps: Tensor
    turned: Tensor | None
    code: Tensor | None
    sums: Tensor | None


def fits(size: Size, side: int, padding: int, batch: int, precision: str) -> bool:
    """Whether a layer is one of these, with batches that fill tensor cores. Products in three parts have no registers
    left for four sums."""
    return (size, side, padding) == ((2, 2), 3, 1) and batch % BATCH_TILE == 0 and precision == "tf32"


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, *, models: int, taps_first: bool = False, inputs_first: bool = False,
    precision: str, turned: bool = False, left: Tensor | None = None, pooled: bool = False, keep: bool = False,
) -> Small:  # fmt: skip
    """Maps x (n or 1, 4, B, Ci) through a layer that `fits`; weights, bias and orders as for `wide.convolution`.

    With `left`, the maps that the layer below has left by its ReLU, the way back through that as well; with `pooled`
    the pool behind the layer, with `keep` its codes.
    """
    n, _, batch, ci = x.shape
    co = w.shape[2] if taps_first else w.shape[3 if inputs_first else 1]
    assert math.isqrt(w.shape[1 if taps_first else 2]) == 3
    step, columns = cut(ci, 128 // x.dtype.itemsize), cut(co, COLUMNS)
    order = 1 if taps_first else 2 if inputs_first else 0
    weights = w.flatten(1, 2) if taps_first else w.flatten(2)
    block = (step, columns) if inputs_first else (columns, step)
    pixels, tiles = 1 if pooled else 4, batch // BATCH_TILE
    y = torch.empty((models, pixels, batch, co), dtype=x.dtype, device=x.device)
    yt = torch.empty((models, pixels, co, batch), dtype=x.dtype, device=x.device) if turned else None
    code = torch.empty(y.shape, dtype=torch.uint8, device=x.device) if pooled and keep else None
    sums = None if left is None else torch.empty((models, 4 * tiles, co), dtype=torch.float32, device=x.device)
    convolution_kernel[(co // columns * tiles, models)](
        described(x.view(n * 4, batch, ci), 1, BATCH_TILE, step), described(weights, 1, *block), bias, left, y, yt,
        code, sums, 0 if bias is None else bias.stride(0), batch, X_MODELS=int(n > 1), CI=ci, CO=co, ORDER=order,
        BIASED=bias is not None, MASKED=left is not None, TURN=turned, POOLED=pooled, KEEP=keep, ROWS=BATCH_TILE,
        COLUMNS=columns, STEP=step, PRECISION=precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    return Small(y, yt, code, sums)
