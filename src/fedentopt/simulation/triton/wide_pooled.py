# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A wide convolution with bias, ReLU and 2x2 max-pool in one Triton kernel, its tiles brought by tensor descriptors.

A program takes two neighbours of one line with their batches and the two below them, one product for each line, and
keeps the maximum: of the dense map, three quarters of all that a pooled layer writes and all that its pool would read
back, nothing reaches memory. The price: a tap is left out only where it falls outside the map for all four pixels, so
maps must be large for this to pay.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.interface import DEAD
from fedentopt.simulation.triton.wide_descriptors import described, weights_of_tap
from fedentopt.simulation.triton.wide_maps import BATCH_TILE, NOBODY_WAITS, Running, Size, cut, trains
from fedentopt.simulation.triton.wide_tiles import WideTiles, chosen

_DEAD = tl.constexpr(DEAD)
NARROWEST = 8  # pixels of a line of the dense map from which it pays: 3x3 taps of narrower ones often fall outside


@triton.jit
def larger(value, place, other, its_place):
    """The larger of two values and its place; the first in row-major order where they are equal. NaN wins, so that a
    diverged model shows."""
    wins = (other > value) | ((other == value) & (its_place < place))
    wins = tl.where(value != value, (other != other) & (its_place > place), wins | (other != other))
    return tl.where(wins, other, value), tl.where(wins, its_place, place)


@triton.jit
def forward_kernel(x, w, bias, y, yt, code, steps, step, bias_model, X_MODELS: tl.constexpr, BATCH: tl.constexpr,
                   HI: tl.constexpr, WI: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr, PAD: tl.constexpr,
                   CI: tl.constexpr, CO: tl.constexpr, SIDE: tl.constexpr, KEEP: tl.constexpr, TURN: tl.constexpr,
                   COLUMNS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    if trains(steps, step, tl.program_id(1)):
        BLOCKS: tl.constexpr = CI // STEP
        TILES: tl.constexpr = CO // COLUMNS
        column = (tl.program_id(0) % TILES) * COLUMNS
        pixel = tl.program_id(0) // TILES
        model = tl.program_id(1)
        h = pixel // WP * 2
        v = pixel % WP * 2
        top = tl.maximum(0, PAD - (h + 1))
        bottom = tl.minimum(SIDE, HI + PAD - h)
        left = tl.maximum(0, PAD - (v + 1))
        right = tl.minimum(SIDE, WI + PAD - v)
        across = right - left
        upper = tl.zeros((2 * BATCH, COLUMNS), tl.float32)
        lower = tl.zeros((2 * BATCH, COLUMNS), tl.float32)
        for i in range((bottom - top) * across * BLOCKS):
            block = i % BLOCKS
            tap = i // BLOCKS
            ky = top + tap // across
            kx = left + tap % across
            at = (v + kx - PAD) * BATCH
            above = x.load([model * X_MODELS, h + ky - PAD, at, block * STEP])
            below = x.load([model * X_MODELS, h + ky - PAD + 1, at, block * STEP])
            b = weights_of_tap(w, model, ky * SIDE + kx, column, block, CI, CO, 0, COLUMNS, STEP)
            upper = tl.dot(tl.reshape(above, (2 * BATCH, STEP)), b, upper, input_precision=PRECISION)
            lower = tl.dot(tl.reshape(below, (2 * BATCH, STEP)), b, lower, input_precision=PRECISION)
        columns = column + tl.arange(0, COLUMNS)
        model = model.to(tl.int64)
        shift = tl.load(bias + model * bias_model + columns)[None, :]
        # Rounded as maps are kept, so that the same pixel wins as if they had been.
        upper = (upper + shift).to(y.dtype.element_ty).to(tl.float32)
        lower = (lower + shift).to(y.dtype.element_ty).to(tl.float32)
        place = tl.arange(0, 2 * BATCH)[:, None] // BATCH + tl.zeros((2 * BATCH, COLUMNS), tl.int32)
        best, place = larger(upper, place, lower, place + 2)
        value, other = tl.split(tl.permute(tl.reshape(best, (2, BATCH, COLUMNS)), (1, 2, 0)))
        place, its_place = tl.split(tl.permute(tl.reshape(place.to(tl.uint8), (2, BATCH, COLUMNS)), (1, 2, 0)))
        best, place = larger(value, place, other, its_place)
        place = tl.where(best <= 0, _DEAD, place).to(tl.uint8)
        best = tl.maximum(best, 0.0, propagate_nan=tl.PropagateNan.ALL).to(y.dtype.element_ty)
        row = tl.arange(0, BATCH)
        base = (model * (HP * WP) + pixel) * (BATCH * CO)
        at = row[:, None] * CO + columns[None, :]
        tl.store(y + base + at, best)
        if KEEP:
            tl.store(code + base + at, place)
        if TURN:
            tl.store(yt + base + columns[:, None] * BATCH + row[None, :], tl.trans(best))


def pooled_tiles(ci: int, co: int, batch: int, kind: torch.dtype, precision: str) -> WideTiles:
    """Rows are those of two pixels, columns those of each of two products. Products in three parts have no registers
    left for the widest tile."""
    columns = cut(co, 128 if precision == "tf32" else 64)
    warps = 8 if 4 * batch * columns >= 128 * 128 else 4
    return WideTiles(2 * batch, columns, cut(ci, 128 // kind.itemsize), warps, 4)


def fits(batch: int, dense: Size) -> bool:
    """Whether a program holds such a layer's batch, which fills tensor cores, and its `dense` map is large enough."""
    return 32 <= batch <= BATCH_TILE and dense[1] >= NARROWEST


def forward(
    x: Tensor, w: Tensor, bias: Tensor, size: Size, padding: int, *, models: int, keep: bool, turned: bool,
    precision: str, running: Running | None = None, tiles: WideTiles | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Maps x (n or 1, H * W, B, Ci) of `size`, w (n, Co, side * side, Ci), bias (n, Co): what `wide_maps.pool` gives
    for the maps that `wide.convolution` does."""
    n, _, batch, ci = x.shape
    co, taps = w.shape[1:3]
    side = math.isqrt(taps)
    height, width = ((length + 2 * padding - side + 1) // 2 for length in size)
    tiles = tiles or chosen("pooled", ci, co, size[1], models, batch, x.dtype, precision)
    tiles = tiles or pooled_tiles(ci, co, batch, x.dtype, precision)
    shape = (models, height * width, batch, co)
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    yt = torch.empty((models, height * width, co, batch), dtype=x.dtype, device=x.device) if turned else None
    code = torch.empty(shape, dtype=torch.uint8, device=x.device) if keep else None
    forward_kernel[(co // tiles.columns * height * width, models)](
        described(x.view(n, size[0], size[1] * batch, ci), 1, 1, tiles.rows, tiles.step),
        described(w.flatten(2), 1, tiles.columns, tiles.step), bias, y, yt, code, *(running or NOBODY_WAITS),
        bias.stride(0),
        X_MODELS=int(n > 1), BATCH=batch, HI=size[0], WI=size[1], HP=height, WP=width, PAD=padding, CI=ci, CO=co,
        SIDE=side, KEEP=keep, TURN=turned, COLUMNS=tiles.columns, STEP=tiles.step, PRECISION=precision,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y, yt, code
