# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""A wide 3x3 convolution with bias, 2x2 max-pool and ReLU that brings every tile only once, in Gluon (`hopper`);
otherwise as `wide_pooled`.

A tile is one pooled pixel, that is 2x2 dense ones, x 64 samples x up to 128 outputs. For a block of inputs a program
goes through the (up to four) lines of the map around: of each it brings four pixels once, which the upper pixels read
under one line of taps and the lower pixels under the line of taps before. The weights of a block's nine taps come once
and stay until both have read them. Lines outside the map are left out, pixels outside a line come as zeros.

One warp asks for lines, another for weights; two warp groups multiply. Each has 32 samples of all four pixels: a
product's 64 rows are 32 samples of the left pixel, then 32 of the right one, which are neighbours in shared memory for
every tap. So the upper and the lower pixel meet in a thread, the left and the right one in the exchange that also lays
a line of outputs together for the store, and the groups need not wait for each other. As in `wide_taps` a program makes
its tiles in turn.

Every sum runs in the order (block of inputs, line of taps, tap), whatever the number of models and programs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fedentopt.simulation.triton.hopper import barrier, bring, described
from fedentopt.simulation.triton.interface import DEAD
from fedentopt.simulation.triton.wide_maps import BATCH_TILE, NOBODY_WAITS, Running, Size
from fedentopt.simulation.triton.wide_taps import (
    FEW,
    LARGEST_COLUMNS,
    LINE,
    columns_of,
    index_of,
    multiprocessors,
    trains,
)

ROOM = 213_000  # bytes of shared memory for weights and lines
MOST_LINES = 4
REACHING_VIEWS = hasattr(
    gl.shared_memory_descriptor, "_reinterpret"
)  # later versions hold views to their memory's size
_DEAD = gl.constexpr(DEAD)
UPPER = gl.constexpr(0x7F90)  # see `pool_halves`


@gluon.jit
def place_of(index, together, HI: gl.constexpr, WI: gl.constexpr, TILES: gl.constexpr):
    """Model, upper line, left pixel and column tile of one of all models' tiles.

    Of `together` models come first all tiles inside the map, which see four lines, then those at its upper and lower
    end, which see three.
    """
    HP: gl.constexpr = HI // 2
    ACROSS: gl.constexpr = WI // 2 * TILES  # tiles of a pooled line
    INSIDE: gl.constexpr = (HP - 2) * ACROSS
    BORDER: gl.constexpr = 2 * ACROSS
    group = index // (together * HP * ACROSS)
    rest = index % (together * HP * ACROSS)
    beyond = rest - together * INSIDE
    model = beyond // BORDER
    line = beyond % BORDER // ACROSS * (HP - 1)
    if HP > 2:  # noqa: SIM102  (the one is for the compiler, the other for the device)
        if beyond < 0:
            model = rest // INSIDE
            line = rest % INSIDE // ACROSS + 1
    return group * together + model, 2 * line, rest % ACROSS // TILES * 2, rest % TILES


@gluon.jit
def bring_lines(x, a, here, free, steps, step, total, together, X_MODELS: gl.constexpr, HI: gl.constexpr,
                WI: gl.constexpr, TILES: gl.constexpr, BLOCKS: gl.constexpr, STEP: gl.constexpr,
                LINES: gl.constexpr):  # fmt: skip
    """What the warp does that asks for maps: four pixels of a line, first 32 samples of all, then the other 32."""
    DTYPE: gl.constexpr = x.dtype
    SWIZZLED: gl.constexpr = x.layout
    count = 0  # lines so far
    for turn in range(gl.cdiv(total, gl.num_programs(0))):
        index = index_of(turn)
        if index < total:
            model, h, v, _ = place_of(index, together, HI, WI, TILES)
            if trains(steps, step, model):
                first = gl.maximum(0, h - 1)
                lines = gl.minimum(HI, h + 3) - first
                for i in range(lines * BLOCKS):
                    slot = (count + i) % LINES
                    mbarrier.wait(free.index(slot), (count + i) // LINES & 1 ^ 1)
                    bar = here.index(slot)
                    mbarrier.expect(bar, 2 * x.block_type.nbytes)
                    for half in gl.static_range(2):
                        part = a.index(8 * slot + 4 * half)._reinterpret(DTYPE, [1, 1, 4, 32, STEP], SWIZZLED)
                        at = [model * X_MODELS, first + i % lines, v - 1, 32 * half, i // lines * STEP]
                        bring(x, at, bar, part)
                count += lines * BLOCKS


@gluon.jit
def bring_weights(w, b, here, free, steps, step, total, together, HI: gl.constexpr, WI: gl.constexpr,
                  CI: gl.constexpr, TILES: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr):  # fmt: skip
    """What the warp does that asks for weights: a block's nine taps, each as soon as its last ones have been read."""
    BLOCKS: gl.constexpr = CI // STEP
    count = 0  # blocks so far
    for turn in range(gl.cdiv(total, gl.num_programs(0))):
        index = index_of(turn)
        if index < total:
            model, _, _, tile = place_of(index, together, HI, WI, TILES)
            if trains(steps, step, model):
                for block in range(BLOCKS):
                    for tap in gl.static_range(9):
                        mbarrier.wait(free.index(tap), (count + block) & 1 ^ 1)
                        bar = here.index(tap)
                        mbarrier.expect(bar, w.block_type.nbytes)
                        bring(w, [model, tile * COLUMNS, tap * CI + block * STEP], bar, b.index(tap))
                count += BLOCKS


@gluon.jit
def release(lines_free, weights_free, at: gl.constexpr, kx: gl.constexpr, slot, pred, LAST: gl.constexpr):
    """Say that the products of the `at`-th line and tap kx have ended, and what nobody reads after them is free."""
    if at > 0:
        mbarrier.arrive(weights_free.index(3 * at - 3 + kx), count=1, pred=pred)
    if at == 2 and LAST == 3:  # no lower pixels will read the last line of taps
        mbarrier.arrive(weights_free.index(6 + kx), count=1, pred=pred)
    if kx == 2:
        mbarrier.arrive(lines_free.index(slot), count=1, pred=pred)


@gluon.jit
def products(shift, a, b, lines_here, lines_free, weights_here, weights_free, lines, blocks, FIRST: gl.constexpr,
             LAST: gl.constexpr, BLOCKS: gl.constexpr, LINES: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr,
             SIDE: gl.constexpr, DTYPE: gl.constexpr):  # fmt: skip
    """Upper and lower pixels of a warp group's samples, from the lines FIRST to LAST (of h - 1 to h + 2), shifted by
    what lies at `shift`."""
    ITEM: gl.constexpr = DTYPE.primitive_bitwidth // 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32 // ITEM])
    FLAT: gl.constexpr = gl.NVMMASharedLayout(128, ITEM * 8, 2)
    SEEN: gl.constexpr = LAST - FIRST
    upper = gl.zeros((64, COLUMNS), gl.float32, MMA)
    lower = gl.zeros((64, COLUMNS), gl.float32, MMA)
    for block in range(BLOCKS):
        phase = (blocks + block) & 1
        begin = lines + block * SEEN
        for at in gl.static_range(FIRST, LAST):
            slot = (begin + (at - FIRST)) % LINES
            mbarrier.wait(lines_here.index(slot), (begin + (at - FIRST)) // LINES & 1)
            for kx in gl.static_range(3):
                under = a.index(8 * slot + 4 * SIDE + kx)._reinterpret(DTYPE, [64, STEP], FLAT)
                if at < 3:
                    mbarrier.wait(weights_here.index(3 * at + kx), phase)
                if at == FIRST and at > 0:
                    mbarrier.wait(weights_here.index(3 * at - 3 + kx), phase)
                if at < 3:
                    under_upper = b.index(3 * at + kx)._reinterpret(DTYPE, [COLUMNS, STEP], FLAT).permute((1, 0))
                    upper = warpgroup_mma(under, under_upper, upper, is_async=True)
                if at > 0:
                    under_lower = b.index(3 * at - 3 + kx)._reinterpret(DTYPE, [COLUMNS, STEP], FLAT).permute((1, 0))
                    lower = warpgroup_mma(under, under_lower, lower, is_async=True)
                if at == 0 or at == 3:
                    upper, lower = warpgroup_mma_wait(1, deps=[upper, lower])
                else:
                    upper, lower = warpgroup_mma_wait(2, deps=[upper, lower])
                # The products before these have ended.
                barrier()
                if kx > 0:
                    release(lines_free, weights_free, at, kx - 1, slot, True, LAST)
                elif at > FIRST:
                    release(lines_free, weights_free, at - 1, 2, (begin + (at - 1 - FIRST)) % LINES, True, LAST)
                else:
                    release(lines_free, weights_free, LAST - 1, 2, (begin + (LINES - 1)) % LINES, block > 0, LAST)
    by = gl.load(shift + gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA)))[None, :]  # while the last products run
    upper, lower = warpgroup_mma_wait(0, deps=[upper, lower])
    barrier()
    release(lines_free, weights_free, LAST - 1, 2, (lines + (BLOCKS * SEEN - 1)) % LINES, True, LAST)
    return upper + by, lower + by


@gluon.jit
def side_by_side(part):
    """Left and right pixels (32, 32) of a part (64, 32), in the same thread, whose entries it can store at once."""
    BOTH: gl.constexpr = gl.BlockedLayout([1, 4, 2], [4, 8, 1], [4, 1, 1], [2, 1, 0])
    ALONG: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])  # the same without the last
    left, right = gl.split(gl.convert_layout(gl.permute(gl.reshape(part, (2, 32, 32)), (1, 2, 0)), BOTH))
    return gl.convert_layout(left, ALONG), gl.convert_layout(right, ALONG)


@gluon.jit
def pool_floats(above, below, KEEP: gl.constexpr):
    """The best of four, or 0, and its place, or DEAD. Of equals the first wins, of NaN the last."""
    wins = (below > above) | (below != below)
    left, right = side_by_side(gl.where(wins, below, above))
    if KEEP:
        place, its_place = side_by_side(gl.where(wins, 2, 0).to(gl.uint8))
        place, its_place = place.to(gl.int32), its_place.to(gl.int32) + 1
        # As `larger` of wide_pooled.py.
        wins = (right > left) | ((right == left) & (its_place < place))
        wins = gl.where(left != left, (right != right) & (its_place > place), wins | (right != right))
        best = gl.where(wins, right, left)
        place = gl.where(best <= 0, _DEAD, gl.where(wins, its_place, place))
    else:
        best = gl.where((right > left) | (right != right), right, left)
        place = best
    return gl.where(best <= 0, 0.0, best), place  # NaN stays


@gluon.jit
def pool_halves(above, below, KEEP: gl.constexpr):
    """The same rounded to bfloat16, as whole numbers: those above 0 lie in the order of their bits, NaN (0x7FFF) last.

    An upper pixel's bits are followed by a number between the largest float (0x7F80) and NaN, a lower pixel's by
    themselves: where the first bits are equal, the upper one is larger, but for NaN. A right pixel is one less than a
    left one, but one more for NaN.
    """
    best = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 both, first, second;
        cvt.rn.bf16x2.f32 both, $1, $2;
        prmt.b32 first, both, 0x7F90, 0x3254;
        prmt.b32 second, both, both, 0x1010;
        max.s32 $0, first, second;
        }
        """,
        "=r,r,r", [above, below], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    left, right = side_by_side(best)
    if KEEP:
        wins = right + gl.where(right >= 0x7F810000, 1, -1) > left
        best = gl.where(wins, right, left)
        place = gl.where(wins, 1, 0) + gl.where((best & 0xFFFF) == UPPER, 0, 2)
        place = gl.where(best < 0x10000, _DEAD, place)
    else:
        best = gl.maximum(left, right)
        place = best
    return (gl.maximum(best, 0) >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True), place


@gluon.jit
def finish(upper, lower, y, yt, code, model, pixel, column, HP: gl.constexpr, WP: gl.constexpr, CO: gl.constexpr,
           KEEP: gl.constexpr, TURN: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """Pool, ReLU and stores of a warp group's 32 samples, 32 outputs at a time."""
    KIND: gl.constexpr = y.dtype.element_ty
    PARTS: gl.constexpr = upper.shape[1] // 32
    ALONG: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])  # what `side_by_side` gives
    ACROSS: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, 4], [0, 1])
    base = (model.to(gl.int64) * (HP * WP) + pixel) * (64 * CO)
    at = (32 * SIDE + gl.arange(0, 32, gl.SliceLayout(1, ALONG)))[:, None] * CO
    at = at + (column + gl.arange(0, 32, gl.SliceLayout(0, ALONG)))[None, :]
    for i in gl.static_range(PARTS):
        # Rounded as maps are kept, so that the same pixel wins as if they had been.
        above = columns_of(upper, i, PARTS)
        below = columns_of(lower, i, PARTS)
        if KIND == gl.bfloat16:  # noqa: SIM300
            value, place = pool_halves(above, below, KEEP)
        else:
            value, place = pool_floats(above, below, KEEP)
        gl.store(y + base + at + i * 32, value)
        if KEEP:
            gl.store(code + base + at + i * 32, place.to(gl.uint8))
        if TURN:
            value = gl.convert_layout(value, ACROSS)
            sample = 32 * SIDE + gl.arange(0, 32, gl.SliceLayout(1, ACROSS))
            turned = gl.arange(0, 32, gl.SliceLayout(0, ACROSS)) + (column + i * 32)
            gl.store(yt + base + sample[:, None] + turned[None, :] * 64, value)


@gluon.jit
def multiply_all(bias, y, yt, code, bias_model, a, b, lines_here, lines_free, weights_here, weights_free, steps, step,
                 total, together, HI: gl.constexpr, WI: gl.constexpr, CI: gl.constexpr, CO: gl.constexpr,
                 KEEP: gl.constexpr, TURN: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr,
                 LINES: gl.constexpr, SIDE: gl.constexpr):  # fmt: skip
    """What one of two warp groups does: 32 of the samples of every tile."""
    DTYPE: gl.constexpr = y.dtype.element_ty
    BLOCKS: gl.constexpr = CI // STEP
    lines = 0  # and blocks so far
    blocks = 0
    for turn in range(gl.cdiv(total, gl.num_programs(0))):
        index = index_of(turn)
        if index < total:
            model, h, v, tile = place_of(index, together, HI, WI, CO // COLUMNS)
            if trains(steps, step, model):
                shift = bias + model.to(gl.int64) * bias_model + tile * COLUMNS
                if h == 0:
                    upper, lower = products(shift, a, b, lines_here, lines_free, weights_here, weights_free, lines,
                                            blocks, 1, 4, BLOCKS, LINES, COLUMNS, STEP, SIDE, DTYPE)  # fmt: skip
                elif HI == 4 or h == HI - 2:
                    upper, lower = products(shift, a, b, lines_here, lines_free, weights_here, weights_free, lines,
                                            blocks, 0, 3, BLOCKS, LINES, COLUMNS, STEP, SIDE, DTYPE)  # fmt: skip
                else:
                    upper, lower = products(shift, a, b, lines_here, lines_free, weights_here, weights_free, lines,
                                            blocks, 0, 4, BLOCKS, LINES, COLUMNS, STEP, SIDE, DTYPE)  # fmt: skip
                lines += (gl.minimum(HI, h + 3) - gl.maximum(0, h - 1)) * BLOCKS
                blocks += BLOCKS
                finish(upper, lower, y, yt, code, model, h // 2 * (WI // 2) + v // 2, tile * COLUMNS,
                       HI // 2, WI // 2, CO, KEEP, TURN, SIDE)  # fmt: skip


@gluon.jit(do_not_specialize=["total", "together"])
def forward_kernel(x, w, bias, y, yt, code, steps, step, bias_model, total, together, X_MODELS: gl.constexpr,
                  HI: gl.constexpr, WI: gl.constexpr, CI: gl.constexpr, CO: gl.constexpr, KEEP: gl.constexpr,
                  TURN: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr, LINES: gl.constexpr):  # fmt: skip
    gl.static_assert(CI % STEP == 0 and CO % COLUMNS == 0)
    gl.static_assert(HI % 2 == 0 and WI % 2 == 0 and HI > 2)
    TILES: gl.constexpr = CO // COLUMNS
    BLOCKS: gl.constexpr = CI // STEP
    a = gl.allocate_shared_memory(x.dtype, [8 * LINES, 1, 1, 1, 32, STEP], x.layout)
    b = gl.allocate_shared_memory(x.dtype, [9] + w.block_shape, w.layout)  # noqa: RUF005
    lines_here = gl.allocate_shared_memory(gl.int64, [LINES, 1], mbarrier.MBarrierLayout())
    lines_free = gl.allocate_shared_memory(gl.int64, [LINES, 1], mbarrier.MBarrierLayout())
    weights_here = gl.allocate_shared_memory(gl.int64, [9, 1], mbarrier.MBarrierLayout())
    weights_free = gl.allocate_shared_memory(gl.int64, [9, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(LINES):
        mbarrier.init(lines_here.index(i), count=1)
        mbarrier.init(lines_free.index(i), count=2)
    for i in gl.static_range(9):
        mbarrier.init(weights_here.index(i), count=1)
        mbarrier.init(weights_free.index(i), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize([
        (multiply_all, (bias, y, yt, code, bias_model, a, b, lines_here, lines_free, weights_here, weights_free, steps,
                        step, total, together, HI, WI, CI, CO, KEEP, TURN, COLUMNS, STEP, LINES, 0)),
        (multiply_all, (bias, y, yt, code, bias_model, a, b, lines_here, lines_free, weights_here, weights_free, steps,
                        step, total, together, HI, WI, CI, CO, KEEP, TURN, COLUMNS, STEP, LINES, 1)),
        (bring_lines, (x, a, lines_here, lines_free, steps, step, total, together, X_MODELS, HI, WI, TILES, BLOCKS,
                       STEP, LINES)),
        (bring_weights, (w, b, weights_here, weights_free, steps, step, total, together, HI, WI, CI, TILES, COLUMNS,
                         STEP)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip


def fits(x: Tensor, w: Tensor, size: Size, padding: int, *, precision: str) -> bool:
    """Whether a layer of `wide_pooled.forward` can be made here."""
    batch, ci = x.shape[2:]
    co, taps = w.shape[1:3]
    shape = taps == 9 and padding == 1 and size[0] % 2 == 0 and size[1] % 2 == 0 and size[0] > 2 and batch == BATCH_TILE
    channels = ci % (LINE // x.element_size()) == 0 and (co == 64 or co % LARGEST_COLUMNS == 0)
    return REACHING_VIEWS and shape and channels and precision == "tf32"


def forward(
    x: Tensor, w: Tensor, bias: Tensor, size: Size, *, models: int, keep: bool, turned: bool, running: Running | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `wide_pooled.forward`, for layers that fit."""
    n, _, batch, ci = x.shape
    co = w.shape[1]
    columns, step = min(co, LARGEST_COLUMNS), LINE // x.element_size()
    pixels = size[0] // 2 * (size[1] // 2)
    y = torch.empty((models, pixels, batch, co), dtype=x.dtype, device=x.device)
    yt = torch.empty((models, pixels, co, batch), dtype=x.dtype, device=x.device) if turned else None
    code = torch.empty(y.shape, dtype=torch.uint8, device=x.device) if keep else None
    total = models * pixels * (co // columns)
    programs = multiprocessors(x.device) if x.is_cuda else 1
    forward_kernel[(min(total, programs),)](
        described(x.view(n, *size, batch, ci), 1, 1, 4, 32, step), described(w.flatten(2), 1, columns, step), bias, y,
        yt, code, *(running or NOBODY_WAITS), bias.stride(0), total, models if total < FEW * programs else 1,
        X_MODELS=int(n > 1), HI=size[0], WI=size[1], CI=ci, CO=co, KEEP=keep, TURN=turned, COLUMNS=columns, STEP=step,
        LINES=min(MOST_LINES, (ROOM - 9 * LINE * columns) // (4 * BATCH_TILE * LINE)), num_warps=4,
    )  # fmt: skip
    return y, yt, code
