# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Wide convolutions whose tiles the copy engine of a Hopper GPU brings, in Triton; otherwise as `wide`.

A tensor descriptor tells the engine where a matrix lies; a program then asks for a tile by its corner, and no thread
computes addresses. What lies outside comes as zeros, and that is a convolution's padding: the pixels of one line of a
map with their batches are one matrix (W * B, C), so the tile under a tap that leaves the line has its zeros by itself.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fedentopt.simulation.triton import wide
from fedentopt.simulation.triton.wide_maps import NOBODY_WAITS, Running, Size, pool, trains, unpool
from fedentopt.simulation.triton.wide_tiles import WideTiles, chosen


@triton.jit
def weights_of_tap(w, model, which, column, block, CI: tl.constexpr, CO: tl.constexpr, ORDER: tl.constexpr,
                   COLUMNS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """The weights (STEP, COLUMNS) of one tap and block of inputs, in the order that `joined` explains."""
    if ORDER == 0:
        b = tl.trans(tl.reshape(w.load([model, column, which * CI + block * STEP]), (COLUMNS, STEP)))
    elif ORDER == 1:
        b = tl.trans(tl.reshape(w.load([model, which * CO + column, block * STEP]), (COLUMNS, STEP)))
    else:
        b = tl.reshape(w.load([model, block * STEP, which * CO + column]), (STEP, COLUMNS))
    return b


@triton.jit
def convolution_kernel(x, w, bias, left_over, y, yt, sums, steps, step, bias_model, batch, X_MODELS: tl.constexpr,
                       HI: tl.constexpr, WI: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr,
                       CI: tl.constexpr, CO: tl.constexpr, SIDE: tl.constexpr, ORDER: tl.constexpr,
                       BIASED: tl.constexpr, MASKED: tl.constexpr, TURN: tl.constexpr, PIXELS: tl.constexpr,
                       ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    if trains(steps, step, tl.program_id(1)):
        BLOCKS: tl.constexpr = CI // STEP
        TILES: tl.constexpr = CO // COLUMNS
        column = (tl.program_id(0) % TILES) * COLUMNS
        tile = tl.program_id(0) // TILES
        model = tl.program_id(1)
        first = tile * ROWS // batch
        sample = tile * ROWS % batch
        h = first // WO
        v = first % WO
        # Taps that fall outside the map for all of the tile's pixels are left out.
        top = tl.maximum(0, PAD - h)
        bottom = tl.minimum(SIDE, HI + PAD - h)
        left = tl.maximum(0, PAD - (v + PIXELS - 1))
        right = tl.minimum(SIDE, WI + PAD - v)
        across = right - left
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for i in range((bottom - top) * across * BLOCKS):
            block = i % BLOCKS
            tap = i // BLOCKS
            ky = top + tap // across
            kx = left + tap % across
            a = x.load([model * X_MODELS, h + ky - PAD, (v + kx - PAD) * batch + sample, block * STEP])
            a = tl.reshape(a, (ROWS, STEP))
            which = ky * SIDE + kx
            if ORDER != 0:
                which = SIDE * SIDE - 1 - which
            b = weights_of_tap(w, model, which, column, block, CI, CO, ORDER, COLUMNS, STEP)
            product = tl.dot(a, b, product, input_precision=PRECISION)
        columns = column + tl.arange(0, COLUMNS)
        row = tile * ROWS + tl.arange(0, ROWS)
        place = model.to(tl.int64)
        base = place * (HO * WO * CO) * batch
        at = row[:, None] * CO + columns[None, :]
        if BIASED:
            product += tl.load(bias + place * bias_model + columns)[None, :]
            product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if MASKED:
            product = product.to(y.dtype.element_ty).to(tl.float32)
            product = tl.where(tl.load(left_over + base + at).to(tl.float32) <= 0, 0.0, product)
            slot = tile * PIXELS + tl.arange(0, PIXELS)
            total = tl.sum(tl.reshape(product, (PIXELS, ROWS // PIXELS, COLUMNS)), axis=1)
            slots = tl.num_programs(0) // TILES * PIXELS
            tl.store(sums + (place * slots + slot)[:, None] * CO + columns[None, :], total)
        value = product.to(y.dtype.element_ty)
        tl.store(y + base + at, value)
        if TURN:
            turned_at = columns[:, None] * batch + (row // batch * (CO * batch) + row % batch)[None, :]
            tl.store(yt + base + turned_at, tl.trans(value))


def described(matrix: Tensor, *block: int) -> Any:
    """The descriptor of a tensor for tiles of this shape."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(block))


class Joined(NamedTuple):
    """Maps (n, H' * W', B, Co), the same turned (n, H' * W', Co, B) if asked for, and of gradients their sums over
    samples (n, parts, Co)."""

    maps: Tensor
    turned: Tensor | None
    sums: Tensor | None


def joined(
    x: Tensor, w: Tensor, bias: Tensor | None, size: Size, padding: int, *, models: int, taps_first: bool = False,
    inputs_first: bool = False, precision: str, turned: bool = False, left: Tensor | None = None,
    running: Running | None = None, tiles: WideTiles | None = None,
) -> Joined:  # fmt: skip
    """`wide.convolution` and what comes behind it, in one kernel where descriptors fit its tiles, otherwise in several.

    Behind a layer without a pool that is the `turned` copy of its maps; behind an input gradient the way back through
    the ReLU of the layer below, whose maps are `left`.
    """
    n, _, batch, ci = x.shape
    taps, co = (w.shape[1], w.shape[2]) if taps_first else (w.shape[2], w.shape[3 if inputs_first else 1])
    side = math.isqrt(taps)
    height, width = (length + 2 * padding - side + 1 for length in size)
    back = taps_first or inputs_first
    if tiles is None and (left is None or ci == co):  # sums over a tile may differ with it: see `wide_tiles`
        of_layer = ("input", co, ci, width) if back else ("forward", ci, co, size[1])
        tiles = chosen(*of_layer, models, batch, x.dtype, precision)
        if tiles is not None and not wide.pixels_together(tiles.rows, batch, width):
            tiles = None  # measured on maps that stay as large as they are
    tiles = tiles or wide.convolution_tiles(ci, co, batch, width, x.dtype, precision)
    together = wide.pixels_together(tiles.rows, batch, width)
    if not together:
        y = wide.convolution(
            x, w, bias, size, padding, models=models, taps_first=taps_first, inputs_first=inputs_first,
            precision=precision, tiles=tiles,
        )  # fmt: skip
        if left is None:
            return Joined(y, pool(y, (height, width), pooled=False, keep=turned)[1], None)
        passed = unpool(y, left, None, (height, width), passes=True, turned=turned)
        assert passed[0] is not None
        return Joined(passed[0], *passed[1:])
    maps = described(x.view(n, size[0], size[1] * batch, ci), 1, 1, tiles.rows, tiles.step)
    # (n, Co, taps * Ci) as they lie, (n, taps * Co, Ci) turned, (n, Ci, taps * Co) as they lie for the input gradient.
    order = 1 if taps_first else 2 if inputs_first else 0
    weights = w.flatten(1, 2) if taps_first else w.flatten(2)
    block = (tiles.step, tiles.columns) if inputs_first else (tiles.columns, tiles.step)
    rows = height * width * batch
    y = torch.empty((models, height * width, batch, co), dtype=x.dtype, device=x.device)
    yt = torch.empty((models, height * width, co, batch), dtype=x.dtype, device=x.device) if turned else None
    slots = rows // tiles.rows * together
    sums = None if left is None else torch.empty((models, slots, co), dtype=torch.float32, device=x.device)
    convolution_kernel[(co // tiles.columns * (rows // tiles.rows), models)](
        maps, described(weights, 1, *block), bias, left, y, yt, sums, *(running or NOBODY_WAITS),
        0 if bias is None else bias.stride(0), batch, X_MODELS=int(n > 1),
        HI=size[0], WI=size[1], HO=height, WO=width, PAD=padding, CI=ci, CO=co, SIDE=side,
        ORDER=order, BIASED=bias is not None, MASKED=left is not None, TURN=turned, PIXELS=together, ROWS=tiles.rows,
        COLUMNS=tiles.columns, STEP=tiles.step, PRECISION=precision,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return Joined(y, yt, sums)
