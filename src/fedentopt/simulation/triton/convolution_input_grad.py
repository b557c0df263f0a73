# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The input gradient of the stacked convolution + bias + ReLU + 2x2 max-pool in Triton.

A row is a column of 2x2 blocks of input pixels. The pooled pixels whose windows cover a block are its neighbours, and
each adds one product of its spread gradient (see `convolution_weight_grad`) with the filter taps between the two. A
program walks down the pooled rows, spreads each gradient once per horizontal neighbour, and adds it to all block rows
it reaches, of which only a few are open at a time. Where there are few rows, two programs share a row: one does the
upper block rows, the other the lower ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.convolution_weight_grad import spread
from fedentopt.simulation.triton.windows import WAVE, power_of_two

UNROLLED_ROWS = tl.constexpr(8)  # pooled rows whose code stays short enough (split products are three times the code)


class InputTiles(NamedTuple):
    """Rows per program, warps, programs that share the block rows (1 or 2)."""

    rows: int = 64
    warps: int = 4
    halves: int = 1


@triton.jit
def store_block_row(dx, grads, by, image, bx, inside, CI: tl.constexpr, CIP: tl.constexpr, H: tl.constexpr,
                    W: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    line = tl.arange(0, 2 * CIP)
    iy = by * 2 + line // CIP
    ix = bx[:, None, None] * 2 + tl.arange(0, 2)[None, None, :]
    at = (image * (CI * H * W))[:, None, None] + (line % CIP * (H * W) + iy * W)[None, :, None] + ix
    keep = ((line % CIP < CI) & (iy < H))[None, :, None] & inside[:, None, None] & (ix < W)
    tl.store(dx + at, tl.reshape(grads, (ROWS, 2 * CIP, 2)), mask=keep)


@triton.jit
def pooled_gradient(dy, argmax, there, channel, CO: tl.constexpr):
    mask = there[:, None] & (channel < CO)[None, :]
    return tl.load(argmax, mask=mask, other=4).to(tl.int32), tl.load(dy, mask=mask, other=0.0)


@triton.jit
def pooled_row(dy, argmax, dx, pooled, py, image, bx, inside, code, grad, g0, g1, g2, g3, filters, CI: tl.constexpr,
               CO: tl.constexpr, CIP: tl.constexpr, COP: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
               W: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr, ROWS: tl.constexpr, FROM: tl.constexpr,
               TO: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Add pooled row `py` to the open block rows g0.. and store g0, which it completes.

    Block row `by` collects from pooled rows by - NEAR + 1 to by. Of the open ones, FROM to TO are this
    program's; the others are left alone. Returns the next row's first gradient and the block rows that are open then.
    """
    NEAR: tl.constexpr = K // 2 + 1
    channel = tl.arange(0, COP)
    for nx in tl.static_range(NEAR):
        d = spread(grad, code, ROWS, 4 * COP)
        if BF16:
            d = d.to(tl.bfloat16)
        # The next gradient is on its way while this one is multiplied.
        if nx + 1 < NEAR:
            ahead = pooled + (py * WP - nx - 1)
            there = inside & (bx >= nx + 1) & (bx < WP + nx + 1)
        else:
            ahead = pooled + (py + 1) * WP
            there = inside & (bx < WP) & (py + 1 < HP)
        code, grad = pooled_gradient(dy + ahead, argmax + ahead, there, channel, CO)
        if FROM <= 0 and TO > 0:
            g0 = tl.dot(d, filters[nx], g0, input_precision=PRECISION)
        if NEAR > 1 and FROM <= 1 and TO > 1:
            g1 = tl.dot(d, filters[NEAR + nx], g1, input_precision=PRECISION)
        if NEAR > 2 and FROM <= 2 and TO > 2:
            g2 = tl.dot(d, filters[2 * NEAR + nx], g2, input_precision=PRECISION)
        if NEAR > 3 and FROM <= 3 and TO > 3:
            g3 = tl.dot(d, filters[3 * NEAR + nx], g3, input_precision=PRECISION)
    if FROM <= 0 and TO > 0:
        store_block_row(dx, g0, py, image, bx, inside, CI, CIP, H, W, ROWS)
    return code, grad, g1, g2, g3, tl.zeros((ROWS, 4 * CIP), tl.float32)


@triton.jit
def unrolled(dy, argmax, dx, pooled, image, bx, inside, filters, CI: tl.constexpr, CO: tl.constexpr, CIP: tl.constexpr,
             COP: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr,
             ROWS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, BF16: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """Block rows FIRST to LAST. Unrolled, the hand-over from row to row is renaming, and products need not wait for
    each other."""
    START: tl.constexpr = FIRST - K // 2 if FIRST > K // 2 else 0
    STOP: tl.constexpr = LAST if LAST < HP else HP
    g0 = tl.zeros((ROWS, 4 * CIP), tl.float32)
    g1 = tl.zeros((ROWS, 4 * CIP), tl.float32)
    g2 = tl.zeros((ROWS, 4 * CIP), tl.float32)
    g3 = tl.zeros((ROWS, 4 * CIP), tl.float32)
    top = pooled + START * WP
    there = inside & (bx < WP)
    if START >= HP:  # nothing is left; a term in the usual mask would make its loads narrower
        there = there & (bx < 0)
    code, grad = pooled_gradient(dy + top, argmax + top, there, tl.arange(0, COP), CO)
    for py in tl.static_range(START, STOP):
        code, grad, g0, g1, g2, g3 = pooled_row(
            dy, argmax, dx, pooled, py, image, bx, inside, code, grad, g0, g1, g2, g3, filters, CI, CO, CIP, COP, K, H,
            W, HP, WP, ROWS, FIRST - py, LAST - py, BF16, PRECISION,
        )  # fmt: skip
    for by in tl.static_range(STOP, LAST):
        if by >= FIRST:
            store_block_row(dx, g0, by, image, bx, inside, CI, CIP, H, W, ROWS)
        g0 = g1
        g1 = g2
        g2 = g3


@triton.jit
def input_grad_kernel(dy, argmax, w, dx, w_row, batch, CI: tl.constexpr, CO: tl.constexpr, CIP: tl.constexpr,
                      COP: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HP: tl.constexpr,
                      WP: tl.constexpr, ROWS: tl.constexpr, HALVES: tl.constexpr, BF16: tl.constexpr,
                      PRECISION: tl.constexpr):  # fmt: skip
    NEAR: tl.constexpr = K // 2 + 1
    BX: tl.constexpr = (W + 1) // 2
    BY: tl.constexpr = (H + 1) // 2
    ENTRIES: tl.constexpr = 4 * COP
    COLUMNS: tl.constexpr = 4 * CIP
    model = tl.program_id(1).to(tl.int64)
    dy += model * batch * (CO * HP * WP)
    argmax += model * batch * (CO * HP * WP)
    dx += model * batch * (CI * H * W)
    w += model * w_row
    # Entries are (output channel, position), columns (input row, input channel, input column) of the 2x2 block.
    entry = tl.arange(0, ENTRIES)
    column = tl.arange(0, COLUMNS)
    co = (entry // 4)[:, None]
    ci = (column // 2 % CIP)[None, :]
    near_y = (column // (2 * CIP))[None, :] - (entry // 2 % 2)[:, None]
    near_x = (column % 2)[None, :] - (entry % 2)[:, None]
    tap = co * (CI * K * K) + ci * (K * K) + near_y * K + near_x
    known = (co < CO) & (ci < CI)
    filters = ()
    for i in tl.static_range(NEAR * NEAR):
        ky = near_y + 2 * (i // NEAR)
        kx = near_x + 2 * (i % NEAR)
        taps = known & (ky >= 0) & (ky < K) & (kx >= 0) & (kx < K)
        part = tl.load(w + tap + (2 * (i // NEAR) * K + 2 * (i % NEAR)), mask=taps, other=0.0)
        if BF16:
            part = part.to(tl.bfloat16)
        filters = filters + (part,)  # type: ignore[assignment]  # noqa: RUF005  (a tuple that Triton can unroll)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < batch * BX
    bx = row % BX
    image = row // BX
    channel = tl.arange(0, COP)
    pooled = (image * (CO * HP * WP) + bx)[:, None] + (channel * (HP * WP))[None, :]
    if HALVES == 2:
        if tl.program_id(2) == 0:
            unrolled(dy, argmax, dx, pooled, image, bx, inside, filters, CI, CO, CIP, COP, K, H, W, HP, WP, ROWS, 0,
                     (BY + 1) // 2, BF16, PRECISION)  # fmt: skip
        else:
            unrolled(dy, argmax, dx, pooled, image, bx, inside, filters, CI, CO, CIP, COP, K, H, W, HP, WP, ROWS,
                     (BY + 1) // 2, BY, BF16, PRECISION)  # fmt: skip
    elif HP <= UNROLLED_ROWS and PRECISION == "tf32":
        unrolled(dy, argmax, dx, pooled, image, bx, inside, filters, CI, CO, CIP, COP, K, H, W, HP, WP, ROWS, 0, BY,
                 BF16, PRECISION)  # fmt: skip
    else:
        g0 = tl.zeros((ROWS, COLUMNS), tl.float32)
        g1 = tl.zeros((ROWS, COLUMNS), tl.float32)
        g2 = tl.zeros((ROWS, COLUMNS), tl.float32)
        g3 = tl.zeros((ROWS, COLUMNS), tl.float32)
        code, grad = pooled_gradient(dy + pooled, argmax + pooled, inside & (bx < WP), channel, CO)
        for py in range(HP):
            code, grad, g0, g1, g2, g3 = pooled_row(
                dy, argmax, dx, pooled, py, image, bx, inside, code, grad, g0, g1, g2, g3, filters, CI, CO, CIP, COP,
                K, H, W, HP, WP, ROWS, 0, 4, BF16, PRECISION,
            )  # fmt: skip
        for by in range(HP, BY):
            store_block_row(dx, g0, by, image, bx, inside, CI, CIP, H, W, ROWS)
            g0 = g1
            g1 = g2
            g2 = g3


def input_grad(
    dy: Tensor, argmax: Tensor, w: Tensor, size: tuple[int, int], *, bf16: bool, precision: str,
    tiles: InputTiles | None = None,
) -> Tensor:  # fmt: skip
    """See `interface.Kernels.conv_relu_pool_input_grad`."""
    n, batch, co, hp, wp = dy.shape
    ci, k = w.shape[2], w.shape[3]
    height, width = size
    rows = batch * ((width + 1) // 2)
    if tiles is None:
        few = n * triton.cdiv(rows, 64) <= WAVE // 4  # less than a program for each multiprocessor
        tiles = InputTiles(halves=2 if few and hp <= UNROLLED_ROWS.value and precision == "tf32" else 1)
    dx = torch.empty((n, batch, ci, height, width), dtype=dy.dtype, device=dy.device)
    input_grad_kernel[(triton.cdiv(rows, tiles.rows), n, tiles.halves)](
        dy, argmax, w, dx, w.stride(0), batch, CI=ci, CO=co, CIP=power_of_two(ci, 4), COP=power_of_two(co, 8), K=k,
        H=height, W=width, HP=hp, WP=wp, ROWS=tiles.rows, HALVES=tiles.halves, BF16=bf16, PRECISION=precision,
        num_warps=tiles.warps, num_stages=1,
    )  # fmt: skip
    return dx
