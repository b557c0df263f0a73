# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The weight gradient of the stacked convolution + bias + ReLU + 2x2 max-pool in Triton (see `windows`).

Only a pooled pixel's arg-max carries a gradient, so a row of the output gradient has one non-zero among the four
positions of each (pooled pixel, channel); `spread` puts it there. Input windows times spread gradients, summed over the
rows, is the gradient of the expanded filters. Programs share the rows of a model and write partial sums; a second
kernel adds them in a fixed order and folds the shifted copies of the filter together.

A model's gradient has the same bits whatever trains beside it: its rows are cut into leaves, one program each, and
leaves into groups, by the layer's shape alone; rows are added within a leaf, then leaves within a group, then groups.
No atomics. The cut was chosen on an H200 with 10 to 850 LeNet-5 models: small leaves give few models enough programs,
large ones give many models less to fold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.windows import Windows, power_of_two

LEAF_TILES = 10  # row tiles of a leaf,
FEWEST_LEAVES = 3  # fewer where a layer would have fewer leaves than this,
MOST_LEAVES = 16  # more where it would have more than this
PAIRED = 4  # more leaves than this are folded two at a time


class WeightTiles(NamedTuple):
    """Rows per tile, window entries per product, products per program, warps, pooled pixels per row (None: by
    alignment), pipeline stages, most registers per thread (None: as many as the compiler likes)."""

    rows: int = 64
    entries: int = 64
    together: int = 1
    warps: int = 4
    px: int | None = None
    stages: int = 1
    registers: int | None = None


@triton.jit
def spread(grad, code, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, ..., C) gradients -> (ROWS, ... * C * 4): each at its arg-max position, zeros at the other three."""
    grad = tl.join(grad, grad)
    code = tl.join(code, code)
    grad = tl.reshape(tl.join(grad, grad), (ROWS, COLUMNS))
    code = tl.reshape(tl.join(code, code), (ROWS, COLUMNS))
    return tl.where(code == (tl.arange(0, COLUMNS) % 4)[None, :], grad, 0.0)


@triton.jit
def read_tile(x, dy, argmax, first_row, first, total, CI: tl.constexpr, CO: tl.constexpr, COP: tl.constexpr,
              K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr, PX: tl.constexpr,
              V: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """Arg-max codes and gradients (ROWS, PX, COP) of a tile of rows, and TOGETHER pieces of their windows.

    All loads come before the first use, so that their latencies overlap.
    """
    WH: tl.constexpr = K + 1
    GROUPS: tl.constexpr = (2 * PX + K - 1) // V
    BLOCKS: tl.constexpr = WP // PX
    channel = tl.arange(0, COP)
    output = tl.arange(0, PX)[:, None] + (channel * (HP * WP))[None, :]
    row = first_row + tl.arange(0, ROWS)
    inside = row < total
    bx = row % BLOCKS
    by = row // BLOCKS % HP
    image = row // (BLOCKS * HP)
    at = tl.where(inside, image * (CO * HP * WP) + by * WP + bx * PX, 0)[:, None, None] + output[None, :, :]
    real = (channel < CO)[None, None, :] & inside[:, None, None]
    code = tl.load(argmax + at, mask=real, other=4).to(tl.int32)
    grad = tl.load(dy + at, mask=real, other=0.0)
    window = x + tl.where(inside, image * (CI * H * W) + by * (2 * W) + bx * (2 * PX), 0)
    windows = ()
    for c in tl.static_range(TOGETHER):
        group = first + c * (ENTRIES // V) + tl.arange(0, ENTRIES // V)
        ci = group // (GROUPS * WH)
        pixel = (ci * (H * W) + (group // GROUPS % WH) * W + group % GROUPS * V)[:, None] + tl.arange(0, V)[None, :]
        a = tl.load(window[:, None, None] + pixel[None, :, :], mask=(ci < CI)[None, :, None], other=0.0)
        windows = windows + (a,)  # type: ignore[assignment]  # noqa: RUF005
    return code, grad, windows


@triton.jit(do_not_specialize=["tiles"])
def weight_grad_kernel(x, dy, argmax, filters, biases, batch, tiles, CI: tl.constexpr, CO: tl.constexpr,
                       COP: tl.constexpr, K: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HP: tl.constexpr,
                       WP: tl.constexpr, PX: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr,
                       TOGETHER: tl.constexpr, GROUPS_OF: tl.constexpr, BF16: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    """Program (leaf, group of entries, model) adds the leaf's `tiles` row tiles."""
    COLUMNS: tl.constexpr = PX * 4 * COP
    leaf = tl.program_id(0)
    model = tl.program_id(2).to(tl.int64)
    x += model * batch * (CI * H * W)
    dy += model * batch * (CO * HP * WP)
    argmax += model * batch * (CO * HP * WP)
    total = batch * (HP * (WP // PX))
    first = 0
    if GROUPS_OF > 1:
        first = tl.program_id(1) * (TOGETHER * ENTRIES // V)
    channel = tl.arange(0, COP)
    summed = tl.zeros((ROWS, PX, COP), tl.float32)
    sums = ()
    for _ in tl.static_range(TOGETHER):
        sums = sums + (tl.zeros((ENTRIES, COLUMNS), tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    row = leaf * tiles * ROWS
    for tile in range(tiles):
        code, grad, windows = read_tile(x, dy, argmax, row + tile * ROWS, first, total, CI, CO, COP, K, H, W, HP, WP,
                                        PX, V, ROWS, ENTRIES, TOGETHER)  # fmt: skip
        summed += tl.where(code == 4, 0.0, grad)
        d = spread(grad, code, ROWS, COLUMNS)
        if BF16:
            d = d.to(tl.bfloat16)
        operands = ()
        for c in tl.static_range(TOGETHER):
            a = tl.trans(tl.reshape(windows[c], (ROWS, ENTRIES)))
            if BF16:
                a = a.to(tl.bfloat16)
            operands = operands + (a,)  # type: ignore[assignment]  # noqa: RUF005
        added = ()
        for c in tl.static_range(TOGETHER):
            added = added + (tl.dot(operands[c], d, sums[c], input_precision=PRECISION),)  # type: ignore[assignment]  # noqa: RUF005
        sums = added
    slot = model * tl.num_programs(0) + leaf
    filters += slot * (GROUPS_OF * TOGETHER * ENTRIES * COLUMNS)
    for c in tl.static_range(TOGETHER):
        entry = (tl.program_id(1) * TOGETHER + c) * ENTRIES + tl.arange(0, ENTRIES)
        real = (entry < CI * (K + 1) * (2 * PX + K - 1))[:, None]  # the rest is padding that nobody reads
        tl.store(filters + entry[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :], sums[c], mask=real)
    if tl.program_id(1) == 0:
        tl.store(biases + slot * COP + channel, tl.sum(tl.sum(summed, axis=0), axis=0))


@triton.jit(do_not_specialize=["leaves", "groups"])
def fold_kernel(filters, biases, dw, db, dw_row, db_row, leaves, groups, filters_size, CI: tl.constexpr,
                CO: tl.constexpr, COP: tl.constexpr, K: tl.constexpr, PX: tl.constexpr, SHARE: tl.constexpr,
                AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Add the `leaves` of a model, SHARE of them to each of `groups`; shifted copies fold together."""
    WH: tl.constexpr = K + 1
    WW: tl.constexpr = 2 * PX + K - 1
    COLUMNS: tl.constexpr = PX * 4 * COP
    model = tl.program_id(1).to(tl.int64)
    filters += model * leaves * filters_size
    biases += model * leaves * COP
    # Weights before leaves and output channels fastest, so that the threads of a warp read neighbours in memory.
    weight = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = weight < CO * CI * K * K
    co = weight % CO
    tap = weight // CO
    kx = tap % K
    ky = tap // K % K
    ci = tap // (K * K)
    total = tl.zeros((BLOCK, AT_ONCE), tl.float32)
    channel = tl.arange(0, COP)
    bias = tl.zeros((COP, AT_ONCE), tl.float32)
    for first in range(0, groups, AT_ONCE):
        part = (first + tl.arange(0, AT_ONCE)) * SHARE
        for position in tl.static_range(4 * PX):
            entry = (ci * WH + ky + position // 2 % 2) * WW + kx + position % 2 + position // 4 * 2
            at = entry * COLUMNS + (position // 4 * COP + co) * 4 + position % 4
            group = tl.zeros((BLOCK, AT_ONCE), tl.float32)
            for leaf in tl.static_range(SHARE):
                known = there[:, None] & (part + leaf < leaves)[None, :]
                group += tl.load(filters + at[:, None] + ((part + leaf) * filters_size)[None, :], mask=known, other=0.0)
            total += group
        own = tl.zeros((COP, AT_ONCE), tl.float32)
        for leaf in tl.static_range(SHARE):
            known = (part + leaf < leaves)[None, :]
            own += tl.load(biases + channel[:, None] + ((part + leaf) * COP)[None, :], mask=known, other=0.0)
        bias += own
    tl.store(dw + model * dw_row + co * (CI * K * K) + tap, tl.sum(total, axis=1), mask=there)
    if tl.program_id(0) == 0:
        tl.store(db + model * db_row + channel, tl.sum(bias, axis=1), mask=channel < CO)


class Shares(NamedTuple):
    """How the row tiles of a layer are cut: tiles per leaf, leaves, leaves per group, groups."""

    tiles: int
    leaves: int
    group: int
    groups: int

    @classmethod
    def of(cls, row_tiles: int) -> Shares:
        """By the number of row tiles of one model alone: no sum may depend on how many models there are."""
        tiles = max(min(LEAF_TILES, triton.cdiv(row_tiles, FEWEST_LEAVES)), triton.cdiv(row_tiles, MOST_LEAVES))
        leaves = triton.cdiv(row_tiles, tiles)
        group = leaves if leaves <= PAIRED else 2
        return cls(tiles, leaves, group, triton.cdiv(leaves, group))


def weight_grad(
    x: Tensor, dy: Tensor, argmax: Tensor, dw: Tensor, db: Tensor, *, bf16: bool, precision: str,
    tiles: WeightTiles | None = None,
) -> None:  # fmt: skip
    """See `interface.Kernels.conv_relu_pool_weight_grad`."""
    n, batch, ci, height, width = x.shape
    co, k = dw.shape[1], dw.shape[3]
    tiles = tiles or WeightTiles()
    size = Windows(ci, co, k, height, width, block=tiles.px)
    hp, wp = size.pooled
    cuts = triton.cdiv(size.entries, tiles.entries * tiles.together)
    shares = Shares.of(triton.cdiv(batch * size.blocks, tiles.rows))
    filters_size = cuts * tiles.together * tiles.entries * size.columns
    filters = torch.empty((n, shares.leaves, filters_size), dtype=torch.float32, device=x.device)
    biases = torch.empty((n, shares.leaves, size.padded_out), dtype=torch.float32, device=x.device)
    weight_grad_kernel[(shares.leaves, cuts, n)](
        x, dy, argmax, filters, biases, batch, shares.tiles, CI=ci, CO=co, COP=size.padded_out, K=k, H=height, W=width,
        HP=hp, WP=wp, PX=size.px, V=size.vector, ROWS=tiles.rows, ENTRIES=tiles.entries, TOGETHER=tiles.together,
        GROUPS_OF=cuts, BF16=bf16, PRECISION=precision, num_warps=tiles.warps, num_stages=tiles.stages,
        maxnreg=tiles.registers,
    )  # fmt: skip
    at_once = min(8, power_of_two(shares.groups))
    block = 512 // at_once
    fold_kernel[(triton.cdiv(co * ci * k * k, block), n)](
        filters, biases, dw, db, dw.stride(0), db.stride(0), shares.leaves, shares.groups, filters_size, CI=ci, CO=co,
        COP=size.padded_out, K=k, PX=size.px, SHARE=shares.group, AT_ONCE=at_once, BLOCK=block, num_warps=4,
    )  # fmt: skip
