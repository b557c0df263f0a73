# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Depthwise convolutions of maps in channels-last order: every channel with a filter of its own.

y_p,c = Σ_t w_c,t x_(p,t),c: a few products per value, so the time goes into reading maps. A program takes a tile of
output pixels and neighbouring channels, and the taps read the input around them from caches. No algorithm is chosen by
timing and every sum has a fixed order: the same bits from run to run. The weight gradient is summed over spans of
pixels first (`norm_statistics.fold`), one row of the filter per program. All is computed in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.norm_statistics import WARPS, Maps, _share, fold
from fedentopt.simulation.triton.windows import WAVE

TILES = {torch.float32: 2048, torch.bfloat16: 1024}  # values per program: registers for the taps on their way
GRADIENT_TILE = 1024  # of the weight gradient, which keeps a sum for each tap of a row beside it
SIZES = ["rows", "height", "width", "out_height", "out_width", "channels", "blocks", "span", "parts"]


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(x, w, y, rows, height, width, out_height, out_width, channels, blocks, K: tl.constexpr,
                   STRIDE: tl.constexpr, PADDING: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr):  # fmt: skip
    size = channels * UNIT
    first = tl.program_id(0) // blocks * ROWS
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    known = column < size
    row = first + tl.arange(0, ROWS)
    inside = row < rows
    left = row % out_width * STRIDE - PADDING
    top = row // out_width % out_height * STRIDE - PADDING
    sample = row // (out_width * out_height)
    corner = ((sample * height + top) * width + left).to(tl.int64) * size
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for ky in tl.static_range(K):
        in_map = inside & (top + ky >= 0) & (top + ky < height)
        for kx in tl.static_range(K):
            there = in_map & (left + kx >= 0) & (left + kx < width)
            at = (corner + (ky * width + kx) * size)[:, None] + column[None, :]
            values = tl.load(x + at, mask=there[:, None] & known[None, :], other=0.0).to(tl.float32)
            total += values * tl.load(w + (ky * K + kx) * size + column, mask=known, other=0.0)[None, :]
    at = first.to(tl.int64) * size + (tl.arange(0, ROWS)[:, None] * size + column[None, :])
    tl.store(y + at, total.to(y.dtype.element_ty), mask=inside[:, None] & known[None, :])


@triton.jit(do_not_specialize=SIZES)
def input_grad_kernel(dy, w, dx, rows, height, width, out_height, out_width, channels, blocks, K: tl.constexpr,
                      STRIDE: tl.constexpr, PADDING: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
                      COLUMNS: tl.constexpr):  # fmt: skip
    size = channels * UNIT
    first = tl.program_id(0) // blocks * ROWS
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    known = column < size
    row = first + tl.arange(0, ROWS)
    inside = row < rows
    left = row % width + PADDING
    top = row // width % height + PADDING
    sample = row // (width * height)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for ky in tl.static_range(K):
        y = (top - ky) // STRIDE
        in_map = inside & (top >= ky) & (y < out_height) & (y * STRIDE == top - ky)
        for kx in tl.static_range(K):
            x = (left - kx) // STRIDE
            there = in_map & (left >= kx) & (x < out_width) & (x * STRIDE == left - kx)
            at = (((sample * out_height + y) * out_width + x).to(tl.int64) * size)[:, None] + column[None, :]
            push = tl.load(dy + at, mask=there[:, None] & known[None, :], other=0.0).to(tl.float32)
            total += push * tl.load(w + (ky * K + kx) * size + column, mask=known, other=0.0)[None, :]
    at = first.to(tl.int64) * size + (tl.arange(0, ROWS)[:, None] * size + column[None, :])
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=inside[:, None] & known[None, :])


@triton.jit
def _tap(x, corner, left, in_map, push, column, known, width, size, KX: tl.constexpr):
    there = in_map & (left + KX >= 0) & (left + KX < width)
    at = (corner + KX * size)[:, None] + column[None, :]
    return push * tl.load(x + at, mask=there[:, None] & known[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def weight_grad_kernel(x, dy, sums, rows, height, width, out_height, out_width, channels, blocks, span, parts,
                       K: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, UNIT: tl.constexpr,
                       ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    # Programs of one span, whose rows of the filter read the same pixels, come one after another.
    ky = tl.program_id(0) % K
    block = tl.program_id(0) // K % blocks
    part = tl.program_id(0) // (K * blocks)
    size = channels * UNIT
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    known = column < size
    first = part * span
    last = tl.minimum(first + span, rows)
    tap0 = tl.zeros((ROWS, COLUMNS), tl.float32)
    tap1 = tl.zeros((ROWS, COLUMNS), tl.float32)
    tap2 = tl.zeros((ROWS, COLUMNS), tl.float32)
    tap3 = tl.zeros((ROWS, COLUMNS), tl.float32)
    tap4 = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < last
        left = row % out_width * STRIDE - PADDING
        top = row // out_width % out_height * STRIDE - PADDING + ky
        sample = row // (out_width * out_height)
        corner = ((sample * height + top) * width + left).to(tl.int64) * size
        in_map = inside & (top >= 0) & (top < height)
        at = (row.to(tl.int64) * size)[:, None] + column[None, :]
        push = tl.load(dy + at, mask=inside[:, None] & known[None, :], other=0.0).to(tl.float32)
        tap0 += _tap(x, corner, left, in_map, push, column, known, width, size, 0)
        tap1 += _tap(x, corner, left, in_map, push, column, known, width, size, 1)
        tap2 += _tap(x, corner, left, in_map, push, column, known, width, size, 2)
        if K > 3:
            tap3 += _tap(x, corner, left, in_map, push, column, known, width, size, 3)
            tap4 += _tap(x, corner, left, in_map, push, column, known, width, size, 4)
    step = parts * size
    at = ky * K * step + part * size + column
    tl.store(sums + at, tl.sum(tap0, axis=0), mask=known)
    tl.store(sums + at + step, tl.sum(tap1, axis=0), mask=known)
    tl.store(sums + at + 2 * step, tl.sum(tap2, axis=0), mask=known)
    if K > 3:
        tl.store(sums + at + 3 * step, tl.sum(tap3, axis=0), mask=known)
        tl.store(sums + at + 4 * step, tl.sum(tap4, axis=0), mask=known)


def _maps(samples: int, channels: int, size: tuple[int, int], x: Tensor) -> tuple[Maps, Tensor]:
    """The cut of maps of this size, and memory for them, channels last, of x's type."""
    shape = samples, channels, *size
    empty = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    return Maps(samples, size[0] * size[1], channels), empty


def by_tap(weight: Tensor) -> Tensor:
    """Filters (C, 1, k, k) as the kernels read them, neighbouring channels side by side: (k, k, C)."""
    return weight.squeeze(1).permute(1, 2, 0).contiguous()


def forward(x: Tensor, taps: Tensor, stride: int, padding: int) -> Tensor:
    """x (B, C, H, W) channels last, float32 or bf16; taps (k, k, C) float32."""
    samples, channels, height, width = x.shape
    side = len(taps)
    size = (height + 2 * padding - side) // stride + 1, (width + 2 * padding - side) // stride + 1
    maps, y = _maps(samples, channels, size, x)
    lines = maps.lines(TILES[x.dtype])
    forward_kernel[(triton.cdiv(maps.rows, lines) * maps.blocks,)](
        x, taps, y, maps.rows, height, width, *size, channels // maps.unit, maps.blocks, K=side, STRIDE=stride,
        PADDING=padding, UNIT=maps.unit, ROWS=lines, COLUMNS=maps.columns, num_warps=WARPS,
    )  # fmt: skip
    return y


def input_grad(dy: Tensor, taps: Tensor, size: tuple[int, int], stride: int, padding: int) -> Tensor:
    """The gradient of an input of `size` pixels."""
    samples, channels, out_height, out_width = dy.shape
    maps, dx = _maps(samples, channels, size, dy)
    lines = maps.lines(TILES[dy.dtype])
    input_grad_kernel[(triton.cdiv(maps.rows, lines) * maps.blocks,)](
        dy, taps, dx, maps.rows, *size, out_height, out_width, channels // maps.unit, maps.blocks,
        K=len(taps), STRIDE=stride, PADDING=padding, UNIT=maps.unit, ROWS=lines, COLUMNS=maps.columns,
        num_warps=WARPS,
    )  # fmt: skip
    return dx


def weight_grad(x: Tensor, dy: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """The gradient of the weight, (C, 1, side, side) float32."""
    maps = Maps.of(dy)
    lines = maps.lines(GRADIENT_TILE)
    span = _share(maps.rows, 2 * WAVE // (maps.blocks * side), lines)
    parts = triton.cdiv(maps.rows, span)
    sums = torch.empty(side * side, parts, maps.channels, device=x.device)
    weight_grad_kernel[(parts * maps.blocks * side,)](
        x, dy, sums, maps.rows, x.shape[2], x.shape[3], dy.shape[2], dy.shape[3], maps.channels // maps.unit,
        maps.blocks, span, parts, K=side, STRIDE=stride, PADDING=padding, UNIT=maps.unit, ROWS=lines,
        COLUMNS=maps.columns, num_warps=WARPS,
    )  # fmt: skip
    return fold(sums).t().reshape(maps.channels, 1, side, side)
