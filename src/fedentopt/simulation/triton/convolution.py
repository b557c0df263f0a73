# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Stacked convolution + bias + ReLU + 2x2 max-pool in Triton, forward (see `windows` for the matrix form).

One program takes one model and a run of row tiles: it expands the model's filters once, keeps them in shared memory,
and multiplies tile after tile of input windows with them. The pool's max and arg-max are taken over accumulators of
the same thread, so neither the dense output nor its ReLU ever reaches memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.windows import WAVE, Windows, power_of_two


class ForwardTiles(NamedTuple):
    """Rows per tile, tiles per program, entries per product step, warps; pooled pixels per row (None: by alignment),
    pipeline stages, pixels per load (None: by alignment), and whether all of a tile's loads go before its first
    product."""

    rows: int = 64
    tiles: int = 8
    step: int = 16
    warps: int = 4
    px: int | None = None
    stages: int = 1
    vector: int | None = None


@triton.jit
def expanded_filters(w, first, CI: tl.constexpr, CO: tl.constexpr, COP: tl.constexpr, K: tl.constexpr,
                     PX: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Entries first..first+STEP of the expanded filter matrix, (STEP, PX * 4 * COP)."""
    WH: tl.constexpr = K + 1
    WW: tl.constexpr = 2 * PX + K - 1
    column = tl.arange(0, PX * 4 * COP)
    co = column % COP
    position = column // COP
    entry = first + tl.arange(0, STEP)
    ci = entry // (WH * WW)
    ky = (entry // WW % WH)[:, None] - (position // 2 % 2)[None, :]
    kx = (entry % WW)[:, None] - (position % 2 + position // 4 * 2)[None, :]
    there = (ci < CI)[:, None] & (co < CO)[None, :] & (ky >= 0) & (ky < K) & (kx >= 0) & (kx < K)
    at = (co * (CI * K * K))[None, :] + (ci * (K * K))[:, None] + ky * K + kx
    return tl.load(w + at, mask=there, other=0.0)


@triton.jit
def forward_kernel(x, w, b, y, argmax, x_row, w_row, b_row, batch, CI: tl.constexpr, CO: tl.constexpr,
                   COP: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HP: tl.constexpr,
                   WP: tl.constexpr, PX: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
                   STEP: tl.constexpr, STEPS: tl.constexpr, BF16: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    WH: tl.constexpr = K + 1
    GROUPS: tl.constexpr = (2 * PX + K - 1) // V
    BLOCKS: tl.constexpr = WP // PX
    COLUMNS: tl.constexpr = PX * 4 * COP
    NAN: tl.constexpr = tl.PropagateNan.ALL  # a diverged model must show
    model = tl.program_id(1).to(tl.int64)
    x += model * x_row
    y += model * batch * (CO * HP * WP)
    argmax += model * batch * (CO * HP * WP)
    w += model * w_row
    channel = tl.arange(0, COP)
    bias = tl.load(b + model * b_row + channel, mask=channel < CO, other=0.0)
    filters = ()
    for s in tl.static_range(STEPS):
        part = expanded_filters(w, s * STEP, CI, CO, COP, K, PX, STEP)
        if BF16:
            part = part.to(tl.bfloat16)
        filters = filters + (part,)  # type: ignore[assignment]  # noqa: RUF005  (a tuple that Triton can unroll)
    total = batch * (HP * BLOCKS)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = row < total
        bx = row % BLOCKS
        by = row // BLOCKS % HP
        image = row // (BLOCKS * HP)
        # Rows past the end read the first window again and are not stored: cheaper than masking every load.
        window = x + tl.where(inside, image * (CI * H * W) + by * (2 * W) + bx * (2 * PX), 0)
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for s in tl.static_range(STEPS):
            group = s * (STEP // V) + tl.arange(0, STEP // V)
            ci = group // (GROUPS * WH)
            at = ci * (H * W) + (group // GROUPS % WH) * W + group % GROUPS * V
            pixels = window[:, None, None] + (at[None, :, None] + tl.arange(0, V)[None, None, :])
            if STEPS * STEP == CI * WH * GROUPS * V:
                a = tl.load(pixels)
            else:
                a = tl.load(pixels, mask=(ci < CI)[None, :, None], other=0.0)
            a = tl.reshape(a, (ROWS, STEP))
            if BF16:
                a = a.to(tl.bfloat16)
            product = tl.dot(a, filters[s], product, input_precision=PRECISION)
        positions = tl.permute(tl.reshape(product, (ROWS, PX, 2, 2, COP)), (0, 1, 4, 2, 3))
        left, right = tl.split(positions)
        v0, v2 = tl.split(left)
        v1, v3 = tl.split(right)
        best = tl.maximum(tl.maximum(v0, v1, propagate_nan=NAN), tl.maximum(v2, v3, propagate_nan=NAN),
                          propagate_nan=NAN)  # fmt: skip
        code = tl.where(v0 == best, 0, tl.where(v1 == best, 1, tl.where(v2 == best, 2, 3)))
        best += bias[None, None, :]
        code = tl.where(best <= 0, 4, code)
        best = tl.maximum(best, 0.0, propagate_nan=NAN)
        at = image * (CO * HP * WP) + by * WP + bx * PX
        at = at[:, None, None] + (channel * (HP * WP))[None, None, :] + tl.arange(0, PX)[None, :, None]
        keep = (channel < CO)[None, None, :] & inside[:, None, None]
        tl.store(y + at, best, mask=keep)
        tl.store(argmax + at, code.to(tl.uint8), mask=keep)


def _default_tiles(size: Windows, rows: int, precision: str) -> ForwardTiles:
    """The fastest on an H200 at LeNet-5's two layers for `rows` rows of all models.

    Few rows are shared out in one wave of small programs. Split products need the registers of half the rows per tile.
    """
    share = power_of_two(triton.cdiv(triton.cdiv(rows, 64), WAVE))
    if size.px == 2 or share == 1:
        return ForwardTiles(64, min(8, share), 32, 4)
    return ForwardTiles(128, 2, 32, 4) if precision == "tf32" else ForwardTiles(64, 5, 32, 4)


def forward(
    x: Tensor, w: Tensor, b: Tensor, *, bf16: bool, precision: str, tiles: ForwardTiles | None = None
) -> tuple[Tensor, Tensor]:
    """See `interface.Kernels.conv_relu_pool_forward`."""
    n, batch, ci, height, width = x.shape
    co, k = w.shape[1], w.shape[3]
    size = Windows(ci, co, k, height, width, block=tiles.px if tiles else None)
    tiles = tiles or _default_tiles(size, n * batch * size.blocks, precision)
    hp, wp = size.pooled
    y = torch.empty((n, batch, co, hp, wp), dtype=x.dtype, device=x.device)
    argmax = torch.empty((n, batch, co, hp, wp), dtype=torch.uint8, device=x.device)
    step = max(tiles.step, 16)
    grid = (triton.cdiv(batch * size.blocks, tiles.rows * tiles.tiles), n)
    forward_kernel[grid](
        x, w, b, y, argmax, x.stride(0), w.stride(0), b.stride(0), batch, CI=ci, CO=co, COP=size.padded_out, K=k,
        H=height, W=width, HP=hp, WP=wp, PX=size.px, V=tiles.vector or size.vector, ROWS=tiles.rows,
        TILES=tiles.tiles, STEP=step, STEPS=triton.cdiv(size.entries, step), BF16=bf16,
        PRECISION=precision, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y, argmax
