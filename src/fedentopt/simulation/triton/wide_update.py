# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The weight gradient of a wide convolution with the optimiser in its epilogue, in Triton.

A gradient that is used at once need not be written and read again, and what the optimiser reads and writes travels
while other programs multiply: together six of the ten passes over a model's weights that a step of VGG-11 makes. The
new weights leave in the orders that the next step's products want, too. The formula is that of `update.sgd_kernel`; a
model that has finished its steps costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.interface import Optimiser
from fedentopt.simulation.triton.wide import SHARED, operands, tap_products, tap_steps
from fedentopt.simulation.triton.wide_maps import Size, cut
from fedentopt.simulation.triton.wide_tiles import WideTiles, chosen

ALIGN = tl.constexpr(4)  # floats: rows of parameters start at multiples of 16 bytes
TWO_PROGRAMS = 128  # most registers per thread with which a multiprocessor holds two programs of eight warps


class Copies(NamedTuple):
    """A layer's weights as products take them: `plain` (N, Co, taps, Ci) where they are rounded for products, `turned`
    (N, taps, Ci, Co) where the input gradient wants them so."""

    plain: Tensor | None
    turned: Tensor | None


@triton.jit
def move(gradient, at, turned_at, w, v, start, correction, rate, momentum, decay, pull, mode, now, plain, turned,
         CORRECTED: tl.constexpr, COPY: tl.constexpr, TURN: tl.constexpr):  # fmt: skip
    """SGD step number `now` of a tile of weights, given its gradient; before step 0 its momentum is zero."""
    old = tl.load(w + at)
    d = gradient + decay * old
    if pull != 0:
        d += pull * (old - tl.load(start + at))
    late = tl.zeros_like(gradient)
    if CORRECTED:  # noqa: SIM102  (the one is for the compiler, the other for the device)
        if mode > 0:
            c = tl.load(correction + at)
            if mode == 1:
                d += c
            else:
                late = c
    moving = tl.zeros_like(at) + now > 0  # where it is not, memory holds what another round has left
    speed = momentum * tl.load(v + at, mask=moving, other=0.0) + d
    tl.store(v + at, speed)
    new = old - rate * (speed + late)
    tl.store(w + at, new)
    if COPY:
        tl.store(plain + at, new.to(plain.dtype.element_ty))
    if TURN:
        tl.store(turned + turned_at, tl.trans(new).to(turned.dtype.element_ty))


@triton.jit
def weight_step_kernel(x, dy, w, v, start, correction, plain, turned, lr, momentum, weight_decay, mu, start_row, steps,
                       step, correction_row, correction_mode, w_model, start_model, correction_model, batch,
                       HI: tl.constexpr, WI: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr,
                       CI: tl.constexpr, CO: tl.constexpr, SIDE: tl.constexpr, TURNED: tl.constexpr,
                       DESCRIBED: tl.constexpr, CORRECTED: tl.constexpr, COPY: tl.constexpr, TURN: tl.constexpr,
                       ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    model = tl.program_id(1)
    if tl.load(steps + model) > tl.load(step):
        first = (tl.program_id(0) % (CI // COLUMNS)) * COLUMNS
        rest = tl.program_id(0) // (CI // COLUMNS)
        first_row = (rest % (CO // ROWS)) * ROWS
        row = first_row + tl.arange(0, ROWS)
        tap = rest // (CO // ROWS)
        place = model.to(tl.int64)
        w += place * w_model * ALIGN
        v += place * w_model * ALIGN
        count = tap_steps(tap, batch, HI, WI, HO, WO, PAD, SIDE, STEP)
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        product = tap_products(x, dy, product, 0, count, model, first_row, first, tap, batch, HI, WI, HO, WO, PAD,
                               CI, CO, SIDE, TURNED, DESCRIBED, ROWS, COLUMNS, STEP, PRECISION)  # fmt: skip
        start += tl.load(start_row + model).to(tl.int64) * start_model * ALIGN
        mode = 0
        if CORRECTED:
            from_row = tl.load(correction_row + model).to(tl.int64)
            mode = tl.where(from_row >= 0, tl.load(correction_mode + model), 0)
            correction += tl.maximum(from_row, 0) * correction_model * ALIGN
        if COPY:
            plain += place * (CO * SIDE * SIDE * CI)
        if TURN:
            turned += place * (CO * SIDE * SIDE * CI)
        # A quarter of the columns after the other: all that belongs to a whole tile would not fit in registers.
        QUARTER: tl.constexpr = COLUMNS // 4
        low, high = tl.split(tl.permute(tl.reshape(product, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        quarters = (tl.split(tl.permute(tl.reshape(low, (ROWS, 2, QUARTER)), (0, 2, 1)))
                    + tl.split(tl.permute(tl.reshape(high, (ROWS, 2, QUARTER)), (0, 2, 1))))  # fmt: skip
        rate = tl.load(lr + model)
        keeps = tl.load(momentum + model)
        decay = tl.load(weight_decay + model)
        pull = tl.load(mu + model)
        now = tl.load(step).to(tl.int32)
        for quarter in tl.static_range(4):
            column = first + quarter * QUARTER + tl.arange(0, QUARTER)
            at = row[:, None] * (SIDE * SIDE * CI) + tap * CI + column[None, :]
            turned_at = (tap * CI + column)[:, None] * CO + row[None, :]
            move(quarters[quarter], at, turned_at, w, v, start, correction, rate, keeps, decay, pull, mode, now,
                 plain, turned, CORRECTED, COPY, TURN)  # fmt: skip


def step_tiles(ci: int, co: int, batch: int, itemsize: int) -> WideTiles:
    """Small enough for two programs on a multiprocessor: one multiplies while the other updates."""
    rows, columns = cut(co, 128), cut(ci, 128)
    return WideTiles(rows, columns, min(batch, 128 // itemsize), 8 if min(rows, columns) >= 128 else 4, 3)


def fuses(ci: int, co: int, taps: int) -> bool:
    """Whether one program sums all of an entry of such a layer's gradient: only then can it update it."""
    return SHARED // (taps * (co // cut(co, 128)) * (ci // cut(ci, 256))) <= 1


def weight_step(
    x: Tensor, dy: Tensor, offset: int, optimiser: Optimiser, copies: Copies, size: Size, padding: int, *, side: int,
    turned: bool = True, described: bool = False, precision: str, tiles: WideTiles | None = None,
) -> None:  # fmt: skip
    """One SGD step of the weights (n, Co, side * side, Ci) that begin at column `offset` of the optimiser's rows, and
    of their `copies`, from the layer's maps x and the gradient dy, which are those that `wide.weight_grad` takes.

    Before step 0 nothing has moved: what the optimiser's rows of momentum hold then is not read.
    """
    n = len(x)
    ci, batch = x.shape[2:] if turned else (x.shape[3], x.shape[2])
    co = dy.shape[2 if turned else 3]
    height, width = (length + 2 * padding - side + 1 for length in size)
    if tiles is None and described:
        tiles = chosen("step", ci, co, size[1], batch, x.dtype, precision)
    tiles = tiles or step_tiles(ci, co, batch, x.dtype.itemsize)
    o = optimiser.columns(offset, offset + co * side * side * ci)
    strides = [b.stride(0) for b in (o.w, o.start, o.correction) if b is not None]
    assert not any(stride % ALIGN.value for stride in strides)
    assert o.v.stride(0) == o.w.stride(0)
    w_model, start_model, *rest = (stride // ALIGN.value for stride in strides)
    registers = TWO_PROGRAMS if tiles.warps == 8 and tiles.rows * tiles.columns <= 128 * 128 else None
    weight_step_kernel[(side * side * (co // tiles.rows) * (ci // tiles.columns), n)](
        *operands(x, dy, tiles, turned=turned, described=described), o.w, o.v, o.start, o.correction,
        copies.plain, copies.turned, o.lr, o.momentum, o.weight_decay, o.mu, o.start_row, o.steps, o.step,
        o.correction_row, o.correction_mode, w_model, start_model, rest[0] if rest else 0, batch, HI=size[0],
        WI=size[1], HO=height, WO=width, PAD=padding, CI=ci, CO=co, SIDE=side, TURNED=turned,
        DESCRIBED=described, CORRECTED=o.correction is not None, COPY=copies.plain is not None,
        TURN=copies.turned is not None, ROWS=tiles.rows, COLUMNS=tiles.columns, STEP=tiles.step, PRECISION=precision,
        num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=registers,
    )  # fmt: skip
