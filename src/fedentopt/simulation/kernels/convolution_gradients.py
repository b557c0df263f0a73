# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Gradients of the stacked convolution + bias + ReLU + 2x2 max-pool in Triton (see `windows` for the matrix form).

Only a pooled pixel's arg-max carries a gradient, so a row of the output gradient has one non-zero among the four
positions of each (pooled pixel, channel); `spread` puts it there.

Weight gradient: windows' x spread gradients, summed over the rows, gives the gradient of the expanded filters; programs
share the rows of a model, write partial sums, and a second kernel adds them in a fixed order and folds the shifted
copies of the filter together. No atomics: the same input gives the same bits.

Input gradient: a row is a column of 2x2 blocks of input pixels. The pooled pixels whose windows cover a block are its
neighbours, and each adds one product of its spread gradient with the filter taps between the two. A program walks down
the pooled rows, spreads each gradient once per horizontal neighbour, and adds it to all block rows it reaches, of which
only a few are open at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.kernels.windows import Windows, power_of_two


class WeightTiles(NamedTuple):
    """Rows a tile, window entries a program, programs to aim for over all models, warps, pooled pixels a row."""

    rows: int = 64
    entries: int = 64
    programs: int = 1024
    warps: int = 4
    px: int | None = None


class InputTiles(NamedTuple):
    """Rows a program, warps."""

    rows: int = 128
    warps: int = 8


@triton.jit
def spread(grad, code, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, ..., C) gradients -> (ROWS, ... * C * 4): each at its arg-max position, zeros at the other three."""
    grad = tl.join(grad, grad)
    code = tl.join(code, code)
    grad = tl.reshape(tl.join(grad, grad), (ROWS, COLUMNS))
    code = tl.reshape(tl.join(code, code), (ROWS, COLUMNS))
    return tl.where(code == (tl.arange(0, COLUMNS) % 4)[None, :], grad, 0.0)


@triton.jit(do_not_specialize=["tiles"])
def weight_grad_kernel(x, dy, argmax, filters, biases, batch, tiles, CI: tl.constexpr, CO: tl.constexpr,
                       COP: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HP: tl.constexpr,
                       WP: tl.constexpr, PX: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
                       CHUNKS: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    WH: tl.constexpr = K + 1
    GROUPS: tl.constexpr = (2 * PX + K - 1) // V
    BLOCKS: tl.constexpr = WP // PX
    COLUMNS: tl.constexpr = PX * 4 * COP
    part = tl.program_id(0)
    model = tl.program_id(2).to(tl.int64)
    x += model * batch * (CI * H * W)
    dy += model * batch * (CO * HP * WP)
    argmax += model * batch * (CO * HP * WP)
    total = batch * (HP * BLOCKS)
    group = tl.arange(0, ENTRIES // V)
    if CHUNKS > 1:
        group += tl.program_id(1) * (ENTRIES // V)
    ci = group // (GROUPS * WH)
    pixel = (ci * (H * W) + (group // GROUPS % WH) * W + group % GROUPS * V)[:, None] + tl.arange(0, V)[None, :]
    channel = tl.arange(0, COP)
    output = tl.arange(0, PX)[:, None] + (channel * (HP * WP))[None, :]
    folded = tl.zeros((ENTRIES, COLUMNS), tl.float32)
    summed = tl.zeros((ROWS, PX, COP), tl.float32)
    for tile in range(tiles):
        row = (part * tiles + tile) * ROWS + tl.arange(0, ROWS)
        inside = row < total
        bx = row % BLOCKS
        by = row // BLOCKS % HP
        image = row // (BLOCKS * HP)
        window = x + tl.where(inside, image * (CI * H * W) + by * (2 * W) + bx * (2 * PX), 0)
        a = tl.load(window[:, None, None] + pixel[None, :, :], mask=(ci < CI)[None, :, None], other=0.0)
        a = tl.trans(tl.reshape(a, (ROWS, ENTRIES)))
        at = tl.where(inside, image * (CO * HP * WP) + by * WP + bx * PX, 0)[:, None, None] + output[None, :, :]
        real = (channel < CO)[None, None, :] & inside[:, None, None]
        code = tl.load(argmax + at, mask=real, other=4).to(tl.int32)
        grad = tl.load(dy + at, mask=real, other=0.0)
        summed += tl.where(code == 4, 0.0, grad)
        d = spread(grad, code, ROWS, COLUMNS)
        if BF16:
            a = a.to(tl.bfloat16)
            d = d.to(tl.bfloat16)
        folded = tl.dot(a, d, folded, input_precision=PRECISION)
    slot = model * tl.num_programs(0) + part
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    filters += slot * (CHUNKS * ENTRIES * COLUMNS)
    tl.store(filters + entry[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], folded)
    if tl.program_id(1) == 0:
        tl.store(biases + slot * COP + channel, tl.sum(tl.sum(summed, axis=0), axis=0))


@triton.jit(do_not_specialize=["parts"])
def fold_kernel(filters, biases, dw, db, dw_row, db_row, parts, filters_size, CI: tl.constexpr, CO: tl.constexpr,
                COP: tl.constexpr, K: tl.constexpr, PX: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    WH: tl.constexpr = K + 1
    WW: tl.constexpr = 2 * PX + K - 1
    COLUMNS: tl.constexpr = PX * 4 * COP
    model = tl.program_id(1).to(tl.int64)
    filters += model * parts * filters_size
    biases += model * parts * COP
    # Output channels fastest: neighbours in memory of the partial sums.
    weight = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = weight < CO * CI * K * K
    co = weight % CO
    tap = weight // CO
    kx = tap % K
    ky = tap // K % K
    ci = tap // (K * K)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        for position in tl.static_range(4 * PX):
            entry = (ci * WH + ky + position // 2 % 2) * WW + kx + position % 2 + position // 4 * 2
            at = part * filters_size + entry * COLUMNS + (position // 4 * COP + co) * 4 + position % 4
            total += tl.load(filters + at, mask=there, other=0.0)
    tl.store(dw + model * dw_row + co * (CI * K * K) + tap, total, mask=there)
    if tl.program_id(0) == 0:
        channel = tl.arange(0, COP)
        bias = tl.zeros((COP,), tl.float32)
        for part in range(parts):
            bias += tl.load(biases + part * COP + channel)
        tl.store(db + model * db_row + channel, bias, mask=channel < CO)


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
def input_grad_kernel(dy, argmax, w, dx, w_row, batch, CI: tl.constexpr, CO: tl.constexpr, CIP: tl.constexpr,
                      COP: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HP: tl.constexpr,
                      WP: tl.constexpr, ROWS: tl.constexpr, BF16: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
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
    # Block row `by` collects from pooled rows by - NEAR + 1 to by; g0 is the one that the current pooled row completes.
    g0 = tl.zeros((ROWS, COLUMNS), tl.float32)
    g1 = tl.zeros((ROWS, COLUMNS), tl.float32)
    g2 = tl.zeros((ROWS, COLUMNS), tl.float32)
    g3 = tl.zeros((ROWS, COLUMNS), tl.float32)
    for py in range(HP):
        for nx in tl.static_range(NEAR):
            there = (inside & (bx >= nx) & (bx < WP + nx))[:, None] & (channel < CO)[None, :]
            at = pooled + (py * WP - nx)
            code = tl.load(argmax + at, mask=there, other=4).to(tl.int32)
            grad = tl.load(dy + at, mask=there, other=0.0)
            d = spread(grad, code, ROWS, ENTRIES)
            if BF16:
                d = d.to(tl.bfloat16)
            g0 = tl.dot(d, filters[nx], g0, input_precision=PRECISION)
            if NEAR > 1:
                g1 = tl.dot(d, filters[NEAR + nx], g1, input_precision=PRECISION)
            if NEAR > 2:
                g2 = tl.dot(d, filters[2 * NEAR + nx], g2, input_precision=PRECISION)
            if NEAR > 3:
                g3 = tl.dot(d, filters[3 * NEAR + nx], g3, input_precision=PRECISION)
        store_block_row(dx, g0, py, image, bx, inside, CI, CIP, H, W, ROWS)
        g0 = g1
        g1 = g2
        g2 = g3
        g3 = tl.zeros((ROWS, COLUMNS), tl.float32)
    for by in range(HP, BY):
        store_block_row(dx, g0, by, image, bx, inside, CI, CIP, H, W, ROWS)
        g0 = g1
        g1 = g2
        g2 = g3


def weight_grad(
    x: Tensor, dy: Tensor, argmax: Tensor, dw: Tensor, db: Tensor, *, bf16: bool, precision: str,
    tiles: WeightTiles | None = None,
) -> None:  # fmt: skip
    """See `interface.Kernels.conv_relu_pool_weight_grad`."""
    n, batch, ci, height, width = x.shape
    co, k = dw.shape[1], dw.shape[3]
    size = Windows(ci, co, k, height, width, block=tiles.px if tiles else None)
    tiles = tiles or WeightTiles()
    hp, wp = size.pooled
    chunks = triton.cdiv(size.entries, tiles.entries)
    row_tiles = triton.cdiv(batch * size.blocks, tiles.rows)
    parts = min(row_tiles, max(1, tiles.programs // (n * chunks)))
    part_tiles = triton.cdiv(row_tiles, parts)
    parts = triton.cdiv(row_tiles, part_tiles)
    filters_size = chunks * tiles.entries * size.columns
    filters = torch.empty((n, parts, filters_size), dtype=torch.float32, device=x.device)
    biases = torch.empty((n, parts, size.padded_out), dtype=torch.float32, device=x.device)
    weight_grad_kernel[(parts, chunks, n)](
        x, dy, argmax, filters, biases, batch, part_tiles, CI=ci, CO=co, COP=size.padded_out, K=k, H=height, W=width,
        HP=hp, WP=wp, PX=size.px, V=size.vector, ROWS=tiles.rows, ENTRIES=tiles.entries, CHUNKS=chunks,
        BF16=bf16, PRECISION=precision, num_warps=tiles.warps, num_stages=1,
    )  # fmt: skip
    block = 256
    fold_kernel[(triton.cdiv(co * ci * k * k, block), n)](
        filters, biases, dw, db, dw.stride(0), db.stride(0), parts, filters_size, CI=ci, CO=co, COP=size.padded_out,
        K=k, PX=size.px, BLOCK=block, num_warps=4,
    )  # fmt: skip


def input_grad(
    dy: Tensor, argmax: Tensor, w: Tensor, size: tuple[int, int], *, bf16: bool, precision: str,
    tiles: InputTiles | None = None,
) -> Tensor:  # fmt: skip
    """See `interface.Kernels.conv_relu_pool_input_grad`."""
    n, batch, co, hp, wp = dy.shape
    ci, k = w.shape[2], w.shape[3]
    height, width = size
    tiles = tiles or InputTiles()
    dx = torch.empty((n, batch, ci, height, width), dtype=dy.dtype, device=dy.device)
    input_grad_kernel[(triton.cdiv(batch * ((width + 1) // 2), tiles.rows), n)](
        dy, argmax, w, dx, w.stride(0), batch, CI=ci, CO=co, CIP=power_of_two(ci, 4), COP=power_of_two(co, 8), K=k,
        H=height, W=width, HP=hp, WP=wp, ROWS=tiles.rows, BF16=bf16, PRECISION=precision, num_warps=tiles.warps,
        num_stages=1,
    )  # fmt: skip
    return dx
