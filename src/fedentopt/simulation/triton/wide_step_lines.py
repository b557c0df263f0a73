# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The weight gradient of a 3x3 convolution with the optimiser in its epilogue, a line of taps at a time, in
Gluon (`hopper`).

What `wide_update` does, by the same sums in the same order, so with the same bits. A program takes three neighbouring
taps: a pixel's maps and gradients come once for three products instead of once for each, and stay in a ring in shared
memory until the pixel to their right has been multiplied, too. The copy engine brings the next ones meanwhile. Weights
and momentum then pass through the same memory, several slices of them on their way at a time.
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
from fedentopt.simulation.triton.interface import Optimiser
from fedentopt.simulation.triton.wide_maps import Size
from fedentopt.simulation.triton.wide_update import ALIGN, Copies

ROWS, COLUMNS = 64, 128  # outputs and inputs of a program: three such tiles of sums fill the registers of four warps
WARPS = 4
CHUNK = 64  # bytes of the summed axis in a stage: more stages are on their way with small ones
RING = 8  # stages in shared memory, of which a multiprocessor then has enough for two programs
SLICE = 32  # columns of weights and momentum that are updated at a time
SLICES = 6  # such slices in shared memory, which is then no more than the ring's
LARGEST_LINE = 64  # stages: a line of the map is written out as code


@gluon.jit
def bring_stage(x, dy, maps, gradients, ready, stage: gl.constexpr, line, down, wanted, row, column,
                WIDTH: gl.constexpr, CI: gl.constexpr, CO: gl.constexpr, BATCH: gl.constexpr, STEP: gl.constexpr,
                TURNED: gl.constexpr, RING: gl.constexpr):  # fmt: skip
    """Have gradients and maps of a stage of a line brought, if `wanted`: a chunk of one pixel's batch."""
    CHUNKS: gl.constexpr = BATCH // STEP
    slot: gl.constexpr = stage % RING
    at = line * WIDTH + stage // CHUNKS
    under = (line + down) * WIDTH + stage // CHUNKS
    chunk: gl.constexpr = stage % CHUNKS * STEP
    arrival = ready.index(slot)
    mbarrier.expect(arrival, dy.block_type.nbytes + x.block_type.nbytes, pred=wanted)
    if TURNED:
        bring(dy, [at * CO + row, chunk], arrival, gradients.index(slot), pred=wanted)
        bring(x, [under * CI + column, chunk], arrival, maps.index(slot), pred=wanted)
    else:
        bring(dy, [at * BATCH + chunk, row], arrival, gradients.index(slot), pred=wanted)
        bring(x, [under * BATCH + chunk, column], arrival, maps.index(slot), pred=wanted)


@gluon.jit
def add_product(gradients, maps, of_gradient: gl.constexpr, of_maps: gl.constexpr, total, TURNED: gl.constexpr):
    """`total` and the product of two slots, begun and not waited for."""
    if TURNED:
        return warpgroup_mma(gradients.index(of_gradient), maps.index(of_maps).permute((1, 0)), total, is_async=True)
    else:  # noqa: RET505  (Gluon compiles one of two branches)
        return warpgroup_mma(gradients.index(of_gradient).permute((1, 0)), maps.index(of_maps), total, is_async=True)


@gluon.jit
def multiply_stage(x, dy, maps, gradients, ready, left, middle, right, stage: gl.constexpr, line, first_line, end, down,
                   row, column, WIDTH: gl.constexpr, CI: gl.constexpr, CO: gl.constexpr, BATCH: gl.constexpr,
                   STEP: gl.constexpr, TURNED: gl.constexpr, RING: gl.constexpr):  # fmt: skip
    """Begin a stage's products, wait for those of the stage before, have the next brought to what they leave."""
    CHUNKS: gl.constexpr = BATCH // STEP
    STAGES: gl.constexpr = WIDTH * CHUNKS
    USES: gl.constexpr = STAGES // RING  # of a slot, per line
    slot: gl.constexpr = stage % RING
    before: gl.constexpr = (stage - CHUNKS) % RING  # the same chunk of the pixel to the left
    if USES % 2 == 0:
        mbarrier.wait(ready.index(slot), stage // RING % 2)
    else:
        mbarrier.wait(ready.index(slot), ((line - first_line) * USES + stage // RING) % 2)
    middle = add_product(gradients, maps, slot, slot, middle, TURNED)
    if stage >= CHUNKS:
        left = add_product(gradients, maps, slot, before, left, TURNED)
        right = add_product(gradients, maps, before, slot, right, TURNED)
        left, middle, right = warpgroup_mma_wait(3, deps=[left, middle, right])
    else:
        left, middle, right = warpgroup_mma_wait(1, deps=[left, middle, right])
    coming: gl.constexpr = stage + RING - CHUNKS - 1
    if coming < STAGES:
        bring_stage(x, dy, maps, gradients, ready, coming, line, down, True, row, column, WIDTH, CI, CO, BATCH, STEP,
                    TURNED, RING)  # fmt: skip
    else:
        bring_stage(x, dy, maps, gradients, ready, coming - STAGES, line + 1, down, line + 1 < end, row, column, WIDTH,
                    CI, CO, BATCH, STEP, TURNED, RING)  # fmt: skip
    return left, middle, right


@gluon.jit
def halves(product, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    return gl.split(gl.permute(gl.reshape(product, (ROWS, 2, WIDTH)), (0, 2, 1)))


@gluon.jit
def quarter(product, which: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Columns which * WIDTH and on of a product of four times as many."""
    low, high = halves(product, ROWS, 2 * WIDTH)
    if which < 2:  # noqa: SIM108  (of the two, Gluon compiles one)
        half = low
    else:
        half = high
    first, second = halves(half, ROWS, WIDTH)
    if which % 2 == 0:
        return first
    else:  # noqa: RET505
        return second


@gluon.jit
def bring_slice(weights, speeds, old, speed, ready, which: gl.constexpr, model, row, first, CI: gl.constexpr,
                SLICES: gl.constexpr):  # fmt: skip
    """Have a slice of weights and momentum brought: four of each tap."""
    slot: gl.constexpr = which % SLICES
    column = first + which // 4 * CI + which % 4 * weights.block_type.shape[2]
    arrival = ready.index(slot)
    mbarrier.expect(arrival, weights.block_type.nbytes + speeds.block_type.nbytes)
    bring(weights, [model, row, column], arrival, old.index(slot))
    bring(speeds, [model, row, column], arrival, speed.index(slot))


@gluon.jit
def weight_step_kernel(x, dy, weights, speeds, w, v, start, correction, plain, turned, lr, momentum, weight_decay, mu,
                       start_row, steps, step, correction_row, correction_mode, w_model, start_model, correction_model,
                       ALIGN: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, CI: gl.constexpr,
                       CO: gl.constexpr, BATCH: gl.constexpr, STEP: gl.constexpr, TURNED: gl.constexpr,
                       CORRECTED: gl.constexpr, COPY: gl.constexpr, TURN: gl.constexpr, ROWS: gl.constexpr,
                       COLUMNS: gl.constexpr, RING: gl.constexpr, SLICE: gl.constexpr, SLICES: gl.constexpr,
                       WARPS: gl.constexpr):  # fmt: skip
    model = gl.program_id(1)
    now = gl.load(step).to(gl.int32)
    if gl.load(steps + model) > now:
        column = (gl.program_id(0) % (CI // COLUMNS)) * COLUMNS
        rest = gl.program_id(0) // (CI // COLUMNS)
        row = (rest % (CO // ROWS)) * ROWS
        ky = rest // (CO // ROWS)
        down = ky - 1
        first_line = model * HEIGHT + gl.maximum(0, -down)  # lines of all models' maps, one below the other
        end = model * HEIGHT + gl.minimum(HEIGHT, HEIGHT - down)

        maps = gl.allocate_shared_memory(x.dtype, [RING] + x.block_type.shape, x.layout)  # noqa: RUF005
        gradients = gl.allocate_shared_memory(x.dtype, [RING] + dy.block_type.shape, dy.layout)  # noqa: RUF005
        ready = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(RING):
            mbarrier.init(ready.index(i), count=1)
        fence_async_shared()
        DEPTH: gl.constexpr = 256 // x.dtype.primitive_bitwidth
        sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, COLUMNS, DEPTH])
        left = gl.zeros((ROWS, COLUMNS), gl.float32, layout=sums)
        middle = gl.zeros((ROWS, COLUMNS), gl.float32, layout=sums)
        right = gl.zeros((ROWS, COLUMNS), gl.float32, layout=sums)
        for stage in gl.static_range(RING - BATCH // STEP - 1):
            bring_stage(x, dy, maps, gradients, ready, stage, first_line, down, True, row, column, WIDTH, CI, CO, BATCH,
                        STEP, TURNED, RING)  # fmt: skip
        for line in range(first_line, end):
            for stage in gl.static_range(WIDTH * BATCH // STEP):
                left, middle, right = multiply_stage(x, dy, maps, gradients, ready, left, middle, right, stage, line,
                                                     first_line, end, down, row, column, WIDTH, CI, CO, BATCH, STEP,
                                                     TURNED, RING)  # fmt: skip
        left, middle, right = warpgroup_mma_wait(0, deps=[left, middle, right])
        for i in gl.static_range(RING):
            mbarrier.invalidate(ready.index(i))
        maps._keep_alive()
        gradients._keep_alive()
        ready._keep_alive()

        # The optimiser; its formula is that of `update.sgd_kernel`.
        old = gl.allocate_shared_memory(gl.float32, [SLICES, 1, ROWS, SLICE], weights.layout)
        speed = gl.allocate_shared_memory(gl.float32, [SLICES, 1, ROWS, SLICE], speeds.layout)
        here = gl.allocate_shared_memory(gl.int64, [SLICES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(SLICES):
            mbarrier.init(here.index(i), count=1)
        fence_async_shared()
        first = ky * 3 * CI + column
        for i in gl.static_range(SLICES):
            bring_slice(weights, speeds, old, speed, here, i, model, row, first, CI, SLICES)
        place = model.to(gl.int64)
        rate = gl.load(lr + model)
        keeps = gl.load(momentum + model)
        decay = gl.load(weight_decay + model)
        pull = gl.load(mu + model)
        start += gl.load(start_row + model).to(gl.int64) * start_model * ALIGN
        mode = 0
        if CORRECTED:
            from_row = gl.load(correction_row + model).to(gl.int64)
            mode = gl.where(from_row >= 0, gl.load(correction_mode + model), 0)
            correction += gl.maximum(from_row, 0) * correction_model * ALIGN
        w += place * w_model * ALIGN
        v += place * w_model * ALIGN
        if COPY:
            plain += place * (CO * 9 * CI)
        if TURN:
            turned += place * (CO * 9 * CI)
        slices: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SLICE, DEPTH])
        rows = gl.expand_dims(row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, slices)), 1)
        for i in gl.static_range(12):
            if i < 4:
                of_tap = left
            elif i < 8:
                of_tap = middle
            else:
                of_tap = right
            gradient = gl.convert_layout(quarter(of_tap, i % 4, ROWS, SLICE), slices)
            mbarrier.wait(here.index(i % SLICES), i // SLICES % 2)
            was = old.index(i % SLICES).reshape([ROWS, SLICE]).load(slices)
            moved = speed.index(i % SLICES).reshape([ROWS, SLICE]).load(slices)
            moved = gl.where(now > 0, moved, 0.0)  # before step 0 it is what another round has left
            columns = i % 4 * SLICE + gl.arange(0, SLICE, layout=gl.SliceLayout(0, slices))
            entry = first + i // 4 * CI + gl.expand_dims(columns, 0)  # of a row: tap, input
            at = rows * (9 * CI) + entry
            d = gradient + decay * was
            if pull != 0:
                d += pull * (was - gl.load(start + at))
            if CORRECTED:  # noqa: SIM102  (the one is for the compiler, the other for the device)
                if mode == 1:
                    d += gl.load(correction + at)
            moved = keeps * moved + d
            total = moved
            if CORRECTED:  # noqa: SIM102
                if mode == 2:
                    total += gl.load(correction + at)
            new = was - rate * total
            gl.store(v + at, moved)
            gl.store(w + at, new)
            if COPY:
                gl.store(plain + at, new.to(plain.dtype.element_ty))
            if TURN:
                gl.store(turned + entry * CO + rows, new.to(turned.dtype.element_ty))
            if i + SLICES < 12:
                barrier()  # all warps have read the slot
                bring_slice(weights, speeds, old, speed, here, i + SLICES, model, row, first, CI, SLICES)


def fits(ci: int, co: int, batch: int, size: Size, side: int, padding: int, dtype: torch.dtype, precision: str) -> bool:
    """Whether such a layer's step can be made here."""
    step = CHUNK // dtype.itemsize
    stages = size[1] * batch // step
    # Of a map of one line the lines of taps above and below would have nothing to multiply, and what they have brought
    # first would still be on its way when weights come to the same memory.
    lines = side == 3 and padding == 1 and size[0] > 1 and stages % RING == 0 and stages <= LARGEST_LINE
    tiles = ci % COLUMNS == 0 and co % ROWS == 0 and batch % step == 0
    return lines and tiles and batch // step <= RING - 2 and precision == "tf32"


def weight_step(
    x: Tensor, dy: Tensor, offset: int, optimiser: Optimiser, copies: Copies, size: Size, *, turned: bool
) -> None:
    """See `wide_update.weight_step`."""
    n = len(x)
    ci, batch = x.shape[2:] if turned else (x.shape[3], x.shape[2])
    co = dy.shape[2 if turned else 3]
    step = CHUNK // x.dtype.itemsize
    o = optimiser.columns(offset, offset + co * 9 * ci)
    matrices = (rows[:n].as_strided((n, co, 9 * ci), (rows.stride(0), 9 * ci, 1)) for rows in (o.w, o.v))
    strides = [b.stride(0) for b in (o.w, o.start, o.correction) if b is not None]
    assert not any(stride % ALIGN.value for stride in strides)
    assert o.v.stride(0) == o.w.stride(0)
    w_model, start_model, *rest = (stride // ALIGN.value for stride in strides)
    of_maps, of_gradient = ((COLUMNS, step), (ROWS, step)) if turned else ((step, COLUMNS), (step, ROWS))
    weight_step_kernel[(3 * (co // ROWS) * (ci // COLUMNS), n)](
        described(x.view(-1, x.shape[3]), *of_maps), described(dy.view(-1, dy.shape[3]), *of_gradient),
        *(described(matrix, 1, ROWS, SLICE) for matrix in matrices), o.w, o.v, o.start, o.correction, copies.plain,
        copies.turned, o.lr, o.momentum, o.weight_decay, o.mu, o.start_row, o.steps, o.step, o.correction_row,
        o.correction_mode, w_model, start_model, rest[0] if rest else 0, ALIGN=ALIGN.value, HEIGHT=size[0],
        WIDTH=size[1], CI=ci, CO=co, BATCH=batch, STEP=step, TURNED=turned, CORRECTED=o.correction is not None,
        COPY=copies.plain is not None, TURN=copies.turned is not None, ROWS=ROWS, COLUMNS=COLUMNS, RING=RING,
        SLICE=SLICE, SLICES=SLICES, WARPS=WARPS, num_warps=WARPS,
    )  # fmt: skip
