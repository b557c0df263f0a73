# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Wide 3x3 convolutions that bring what neighbouring taps share only once, in Gluon (`hopper`); otherwise as
`wide_descriptors`.

A tile is four neighbouring pixels of a line x 64 samples x up to 128 outputs. For a line of taps and a block of inputs
the six pixels around come once, and the three taps of the line read those under them; weights come tap by tap through
a ring. What leaves a line of the map comes as zeros, and lines of taps outside the map are left out.

One warp does nothing but ask the copy engine for what comes, two warp groups multiply two pixels each. They wait for
each other through barriers in shared memory alone. There is one program per multiprocessor, which makes its tiles in
turn: what the next one needs comes while this one is written. The order of a sum is (line of taps, block of inputs, tap
of the line); which program makes a tile when depends on the number of models, no sum does.
"""

from __future__ import annotations

import functools

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
from fedentopt.simulation.triton.wide_maps import BATCH_TILE, NOBODY_WAITS, Running, Size

PIXELS = 4  # of a line, that a tile has
LARGEST_COLUMNS = 128  # outputs of a tile: of two pixels they fill the registers of a warp group
LINE = 128  # bytes of inputs in a block: one line of shared memory as tensor cores read it
FEW = 4  # tiles per multiprocessor up to which the longest come first


@gluon.jit
def trains(steps, step, model):
    """See `wide_maps.trains`."""
    if steps is None:
        return True
    else:  # noqa: RET505
        return gl.load(steps + model) > gl.load(step)


@gluon.jit
def bring_maps(x, a, ready, half, model, line, row, block, STEP: gl.constexpr):
    """Ask for the six pixels of a line from `row` on and one block of inputs, into one half of the buffer."""
    arrival = ready.index(half)
    mbarrier.expect(arrival, 6 * x.block_type.nbytes)
    for i in gl.static_range(6):
        bring(x, [model, line, row + 64 * i, block * STEP], arrival, a.index(6 * half + i))


@gluon.jit
def bring_weights(w, b, ready, slot, model, ky, kx: gl.constexpr, block, column, CI: gl.constexpr, CO: gl.constexpr,
                  ORDER: gl.constexpr, STEP: gl.constexpr):  # fmt: skip
    """Ask for the weights of one tap and block of inputs, in the order that `wide_descriptors.joined` explains."""
    arrival = ready.index(slot)
    mbarrier.expect(arrival, w.block_type.nbytes)
    if ORDER == 0:
        which = ky * 3 + kx
        at = [model, column, which * CI + block * STEP]
    elif ORDER == 1:
        which = 8 - kx - ky * 3
        at = [model, which * CO + column, block * STEP]
    else:
        which = 8 - kx - ky * 3
        at = [model, block * STEP, which * CO + column]
    bring(w, at, arrival, b.index(slot))


@gluon.jit
def weights_of_slot(b, slot, ORDER: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr):
    """The weights (STEP, COLUMNS) of a slot of the ring."""
    if ORDER == 2:
        return b.index(slot).reshape([STEP, COLUMNS])
    else:  # noqa: RET505
        return b.index(slot).reshape([COLUMNS, STEP]).permute((1, 0))


@gluon.jit
def columns_of(product, i: gl.constexpr, PARTS: gl.constexpr):
    """The i-th of 1, 2 or 4 parts of the columns: a thread holds some of each, nothing moves."""
    ROWS: gl.constexpr = product.shape[0]
    COLUMNS: gl.constexpr = product.shape[1]
    if PARTS == 1:
        return product
    else:  # noqa: RET505
        low, high = gl.split(gl.permute(gl.reshape(product, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        if i < PARTS // 2:
            return columns_of(low, i, PARTS // 2)
        else:  # noqa: RET505
            return columns_of(high, i - PARTS // 2, PARTS // 2)


@gluon.jit
def finish(product, bias, left_over, y, yt, sums, bias_model, model, pixel, column, PIXELS: gl.constexpr,
           CO: gl.constexpr, BIASED: gl.constexpr, MASKED: gl.constexpr, TURN: gl.constexpr, PART: gl.constexpr,
           WARPS: gl.constexpr):  # fmt: skip
    """What becomes of a product (whole pixels x 64 samples, outputs), PART bytes of each of its lines at a time."""
    KIND: gl.constexpr = y.dtype.element_ty
    ITEM: gl.constexpr = KIND.primitive_bitwidth // 8
    ROWS: gl.constexpr = product.shape[0]
    COLUMNS: gl.constexpr = product.shape[1]
    PARTS: gl.constexpr = 1 if COLUMNS * ITEM <= PART else COLUMNS * ITEM // PART
    SLICE: gl.constexpr = COLUMNS // PARTS
    EACH: gl.constexpr = 16 // ITEM  # entries that a thread stores at once
    ALONG: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // SLICE, SLICE // EACH], [WARPS, 1], [1, 0])
    PLACES: gl.constexpr = [ROWS // 64, WARPS * 64 // ROWS]
    ACROSS: gl.constexpr = gl.BlockedLayout([EACH, 1], [64 // EACH, EACH // 2], PLACES, [0, 1])
    base = model.to(gl.int64) * (PIXELS * CO * 64)
    at = (pixel * 64 + gl.arange(0, ROWS, gl.SliceLayout(1, ALONG)))[:, None] * CO
    at = at + (column + gl.arange(0, SLICE, gl.SliceLayout(0, ALONG)))[None, :]
    y += base
    if MASKED:
        left_over += base
        kept = gl.load(left_over + at)
    for i in gl.static_range(PARTS):
        part = columns_of(product, i, PARTS)
        if BIASED:
            columns = gl.arange(0, SLICE, gl.SliceLayout(0, part.type.layout)) + (column + i * SLICE)
            part += gl.load(bias + model.to(gl.int64) * bias_model + columns)[None, :]
            part = gl.where(part <= 0, 0.0, part)  # NaN stays
        value = gl.convert_layout(part.to(KIND), ALONG)
        if MASKED:
            value = gl.where(kept.to(gl.float32) <= 0, 0.0, value.to(gl.float32))
            if i + 1 < PARTS:
                kept = gl.load(left_over + at + (i + 1) * SLICE)
            total = gl.sum(gl.reshape(value, (ROWS // 64, 64, SLICE)), axis=1)
            slot = gl.arange(0, ROWS // 64, gl.SliceLayout(1, total.type.layout)) + pixel
            slot = slot + model.to(gl.int64) * PIXELS
            summed = gl.arange(0, SLICE, gl.SliceLayout(0, total.type.layout)) + (column + i * SLICE)
            gl.store(sums + slot[:, None] * CO + summed[None, :], total)
            value = value.to(KIND)
        gl.store(y + at + i * SLICE, value)
        if TURN:
            value = gl.convert_layout(value, ACROSS)
            sample = gl.arange(0, ROWS, gl.SliceLayout(1, ACROSS))
            turned = gl.arange(0, SLICE, gl.SliceLayout(0, ACROSS)) + (column + i * SLICE)
            to = ((pixel + sample // 64) * (CO * 64) + sample % 64)[:, None] + turned[None, :] * 64
            gl.store(yt + base + to, value)


@gluon.jit
def place_of(index, together, HI: gl.constexpr, WI: gl.constexpr, TILES: gl.constexpr):
    """Model, line, first pixel of the line and column tile of one of all models' tiles.

    Of `together` models come first all tiles inside the map, which take three lines of taps, then those of its first
    and last line, which take two.
    """
    ACROSS: gl.constexpr = WI // 4 * TILES  # tiles of a line
    INSIDE: gl.constexpr = (HI - 2) * ACROSS
    BORDER: gl.constexpr = 2 * ACROSS
    group = index // (together * HI * ACROSS)
    rest = index % (together * HI * ACROSS)
    if rest < together * INSIDE:
        model = rest // INSIDE
        h = rest % INSIDE // ACROSS + 1
    else:
        model = (rest - together * INSIDE) // BORDER
        h = (rest - together * INSIDE) % BORDER // ACROSS * (HI - 1)
    return group * together + model, h, rest % ACROSS // TILES * 4, rest % TILES


@gluon.jit
def index_of(turn):
    """Of all tiles, the one a program takes in its n-th turn: back and forth, so that none has only long ones."""
    programs = gl.num_programs(0)
    at = gl.program_id(0)
    if turn % 2 == 1:
        at = programs - 1 - at
    return turn * programs + at


@gluon.jit
def bring_all(x, w, a, b, maps_here, weights_here, maps_free, weights_free, steps, step, total, together,
              X_MODELS: gl.constexpr, HI: gl.constexpr, WI: gl.constexpr, CI: gl.constexpr, CO: gl.constexpr,
              ORDER: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr):  # fmt: skip
    """What the one warp does that asks for everything, in the order in which slots become free."""
    BLOCKS: gl.constexpr = CI // STEP
    count = 0  # groups of three taps and a block of inputs so far
    for turn in range(gl.cdiv(total, gl.num_programs(0))):
        index = index_of(turn)
        if index < total:
            model, h, v, tile = place_of(index, together, HI, WI, CO // COLUMNS)
            if trains(steps, step, model):
                top = gl.maximum(0, 1 - h)
                groups = (gl.minimum(3, HI + 1 - h) - top) * BLOCKS
                for g in range(groups):
                    half = (count + g) & 1
                    before = ((count + g) >> 1) & 1 ^ 1
                    ky = top + g // BLOCKS
                    block = g % BLOCKS
                    for kx in gl.static_range(3):
                        if kx == 2:
                            mbarrier.wait(maps_free.index(half), before)
                            bring_maps(x, a, maps_here, half, model * X_MODELS, h - 1 + ky, (v - 1) * 64, block, STEP)
                        mbarrier.wait(weights_free.index(3 * half + kx), before)
                        bring_weights(w, b, weights_here, 3 * half + kx, model, ky, kx, block, tile * COLUMNS, CI, CO,
                                      ORDER, STEP)  # fmt: skip
                count += groups


@gluon.jit
def multiply_all(x, w, bias, left_over, y, yt, sums, bias_model, a, b, maps_here, weights_here, maps_free, weights_free,
                 steps, step, total, together, HI: gl.constexpr, WI: gl.constexpr, CI: gl.constexpr, CO: gl.constexpr,
                 ORDER: gl.constexpr, BIASED: gl.constexpr, MASKED: gl.constexpr, TURN: gl.constexpr,
                 COLUMNS: gl.constexpr, STEP: gl.constexpr, SIDE: gl.constexpr, PART: gl.constexpr):  # fmt: skip
    """What one of two warp groups does: two of a tile's four pixels.

    On maps of four pixels the first has nothing to the left and the last nothing to the right: those taps are left out.
    """
    DTYPE: gl.constexpr = x.dtype
    ITEM: gl.constexpr = DTYPE.primitive_bitwidth // 8
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32 // ITEM])
    BLOCKS: gl.constexpr = CI // STEP
    count = 0
    for turn in range(gl.cdiv(total, gl.num_programs(0))):
        index = index_of(turn)
        if index < total:
            model, h, v, tile = place_of(index, together, HI, WI, CO // COLUMNS)
            if trains(steps, step, model):
                groups = (gl.minimum(3, HI + 1 - h) - gl.maximum(0, 1 - h)) * BLOCKS
                one = gl.zeros((64, COLUMNS), gl.float32, MMA)
                other = gl.zeros((64, COLUMNS), gl.float32, MMA)
                for g in range(groups):
                    half = (count + g) & 1
                    phase = ((count + g) >> 1) & 1
                    for kx in gl.static_range(3):
                        if kx == 0:
                            mbarrier.wait(maps_here.index(half), phase)
                        mbarrier.wait(weights_here.index(3 * half + kx), phase)
                        weights = weights_of_slot(b, 3 * half + kx, ORDER, COLUMNS, STEP)
                        if kx > 0 or not (WI == 4 and SIDE == 0):
                            under = a.index(6 * half + 2 * SIDE + kx).reshape([64, STEP])
                            one = warpgroup_mma(under, weights, one, is_async=True)
                        if kx < 2 or not (WI == 4 and SIDE == 1):
                            under = a.index(6 * half + 2 * SIDE + kx + 1).reshape([64, STEP])
                            other = warpgroup_mma(under, weights, other, is_async=True)
                        if WI == 4 and kx == 2 * SIDE:
                            one, other = warpgroup_mma_wait(1, deps=[one, other])
                        else:
                            one, other = warpgroup_mma_wait(2, deps=[one, other])
                        # The products before these have ended: what they have read is free.
                        barrier()
                        if kx == 0:
                            mbarrier.arrive(maps_free.index(1 - half), count=1, pred=g > 0)
                            mbarrier.arrive(weights_free.index(5 - 3 * half), count=1, pred=g > 0)
                        else:
                            mbarrier.arrive(weights_free.index(3 * half + kx - 1), count=1)
                count += groups
                one, other = warpgroup_mma_wait(0, deps=[one, other])
                barrier()
                last = (count - 1) & 1
                mbarrier.arrive(maps_free.index(last), count=1)
                mbarrier.arrive(weights_free.index(3 * last + 2), count=1)
                pixel = h * WI + v + 2 * SIDE
                finish(one, bias, left_over, y, yt, sums, bias_model, model, pixel, tile * COLUMNS, HI * WI, CO, BIASED,
                       MASKED, TURN, PART, 4)  # fmt: skip
                finish(other, bias, left_over, y, yt, sums, bias_model, model, pixel + 1, tile * COLUMNS, HI * WI, CO,
                       BIASED, MASKED, TURN, PART, 4)  # fmt: skip


@gluon.jit(do_not_specialize=["total", "together"])
def convolution_kernel(x, w, bias, left_over, y, yt, sums, steps, step, bias_model, total, together,
                   X_MODELS: gl.constexpr, HI: gl.constexpr, WI: gl.constexpr, CI: gl.constexpr, CO: gl.constexpr,
                   ORDER: gl.constexpr, BIASED: gl.constexpr, MASKED: gl.constexpr, TURN: gl.constexpr,
                   COLUMNS: gl.constexpr, STEP: gl.constexpr, PART: gl.constexpr):  # fmt: skip
    """A warp that brings and two warp groups that multiply."""
    a = gl.allocate_shared_memory(x.dtype, [12, 1, 1, 64, STEP], x.layout)
    b = gl.allocate_shared_memory(x.dtype, [6] + w.block_shape, w.layout)  # noqa: RUF005
    maps_here = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    maps_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    weights_here = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    weights_free = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(maps_here.index(i), count=1)
        mbarrier.init(maps_free.index(i), count=2)
    for i in gl.static_range(6):
        mbarrier.init(weights_here.index(i), count=1)
        mbarrier.init(weights_free.index(i), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize([
        (multiply_all, (x, w, bias, left_over, y, yt, sums, bias_model, a, b, maps_here, weights_here, maps_free,
                        weights_free, steps, step, total, together, HI, WI, CI, CO, ORDER, BIASED, MASKED, TURN,
                        COLUMNS, STEP, 0, PART)),
        (multiply_all, (x, w, bias, left_over, y, yt, sums, bias_model, a, b, maps_here, weights_here, maps_free,
                        weights_free, steps, step, total, together, HI, WI, CI, CO, ORDER, BIASED, MASKED, TURN,
                        COLUMNS, STEP, 1, PART)),
        (bring_all, (x, w, a, b, maps_here, weights_here, maps_free, weights_free, steps, step, total, together,
                     X_MODELS, HI, WI, CI, CO, ORDER, COLUMNS, STEP)),
    ], [4, 1], [240, 24])  # fmt: skip


def fits(
    x: Tensor, w: Tensor, size: Size, padding: int, *, taps_first: bool, inputs_first: bool, precision: str
) -> bool:
    """Whether a product of `wide_descriptors.joined` can be made here."""
    batch, ci = x.shape[2:]
    taps, co = (w.shape[1], w.shape[2]) if taps_first else (w.shape[2], w.shape[3 if inputs_first else 1])
    shape = taps == 9 and padding == 1 and size[0] > 2 and size[1] % PIXELS == 0 and batch == BATCH_TILE
    kind = precision == "tf32" and (x.dtype == torch.bfloat16 or not inputs_first)  # TF32 wants weights turned
    return shape and kind and ci % (LINE // x.element_size()) == 0 and (co == 64 or co % LARGEST_COLUMNS == 0)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, size: Size, *, models: int, taps_first: bool, inputs_first: bool,
    turned: bool, left: Tensor | None, running: Running | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """What `wide_descriptors.joined` gives, for products that fit."""
    n, pixels, batch, ci = x.shape
    co = w.shape[2] if taps_first else w.shape[3 if inputs_first else 1]
    columns, step = min(co, LARGEST_COLUMNS), LINE // x.element_size()
    y = torch.empty((models, pixels, batch, co), dtype=x.dtype, device=x.device)
    yt = torch.empty((models, pixels, co, batch), dtype=x.dtype, device=x.device) if turned else None
    sums = None if left is None else torch.empty((models, pixels, co), dtype=torch.float32, device=x.device)
    total = co // columns * (pixels // PIXELS) * models
    programs = multiprocessors(x.device)
    weights = w.flatten(1, 2) if taps_first else w.flatten(2)
    convolution_kernel[(min(total, programs), 1)](
        described(x.view(n, size[0], size[1] * batch, ci), 1, 1, BATCH_TILE, step),
        described(weights, 1, *((step, columns) if inputs_first else (columns, step))), bias, left, y, yt, sums,
        *(running or NOBODY_WAITS), 0 if bias is None else bias.stride(0), total,
        models if total < FEW * programs else 1, X_MODELS=int(n > 1), HI=size[0], WI=size[1], CI=ci, CO=co,
        ORDER=1 if taps_first else 2 if inputs_first else 0, BIASED=bias is not None, MASKED=left is not None,
        TURN=turned, COLUMNS=columns, STEP=step, PART=64 * x.element_size(), num_warps=4,
    )  # fmt: skip
    return y, yt, sums
