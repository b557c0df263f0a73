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
HELD = 32  # sums per thread up to which there are registers left to fetch weights ahead
REGISTERS = {8: 128, 4: 168}  # most per thread, by warps, with which a multiprocessor holds two or three such programs


class Copies(NamedTuple):
    """A layer's weights as products take them: `plain` (N, Co, taps, Ci) where they are rounded for products, `turned`
    (N, taps, Ci, Co) where the input gradient wants them so."""

    plain: Tensor | None
    turned: Tensor | None


@triton.jit
def fetch(w, v, at, now):
    """Weights and momentum of a slice. Before step 0 nothing moves, and memory holds what another round has left."""
    moving = tl.zeros_like(at) + now > 0
    return tl.load(w + at), tl.load(v + at, mask=moving, other=0.0)


@triton.jit
def move(gradient, old, speed, at, turned_at, w, v, start, correction, rate, momentum, decay, pull, mode, plain, turned,
         CORRECTED: tl.constexpr, COPY: tl.constexpr, TURN: tl.constexpr):  # fmt: skip
    """SGD step of a slice of weights, given its gradient and what `fetch` has brought."""
    d = gradient + decay * old
    if pull != 0:
        d += pull * (old - tl.load(start + at))
    if CORRECTED:  # noqa: SIM102  (the one is for the compiler, the other for the device)
        if mode == 1:
            d += tl.load(correction + at)
    speed = momentum * speed + d
    total = speed
    if CORRECTED:  # noqa: SIM102
        if mode == 2:
            total += tl.load(correction + at)
    new = old - rate * total
    tl.store(v + at, speed)
    tl.store(w + at, new)
    if COPY:
        # Four entries per thread as of the weights, though eight would fit: no exchange between threads then.
        tl.store(tl.max_contiguous(plain + at, [1, 4]), new.to(plain.dtype.element_ty))
    if TURN:
        tl.store(turned + turned_at, tl.trans(new).to(turned.dtype.element_ty))


@triton.jit
def weight_step_kernel(x, dy, w, v, start, correction, plain, turned, lr, momentum, weight_decay, mu, start_row, steps,
                       step, correction_row, correction_mode, w_model, start_model, correction_model, batch,
                       HI: tl.constexpr, WI: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr,
                       CI: tl.constexpr, CO: tl.constexpr, SIDE: tl.constexpr, TURNED: tl.constexpr,
                       DESCRIBED: tl.constexpr, CORRECTED: tl.constexpr, COPY: tl.constexpr, TURN: tl.constexpr,
                       ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, SLICES: tl.constexpr,
                       AHEAD: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    model = tl.program_id(1)
    now = tl.load(step).to(tl.int32)
    if tl.load(steps + model) > now:
        first = (tl.program_id(0) % (CI // COLUMNS)) * COLUMNS
        rest = tl.program_id(0) // (CI // COLUMNS)
        first_row = (rest % (CO // ROWS)) * ROWS
        row = first_row + tl.arange(0, ROWS)
        tap = rest // (CO // ROWS)
        place = model.to(tl.int64)
        w += place * w_model * ALIGN
        v += place * w_model * ALIGN
        WIDTH: tl.constexpr = COLUMNS // SLICES
        if AHEAD:
            begun = row[:, None] * (SIDE * SIDE * CI) + tap * CI + first + tl.arange(0, WIDTH)[None, :]
            old, speed = fetch(w, v, begun, now)
        rate = tl.load(lr + model)
        keeps = tl.load(momentum + model)
        decay = tl.load(weight_decay + model)
        pull = tl.load(mu + model)
        start += tl.load(start_row + model).to(tl.int64) * start_model * ALIGN
        mode = 0
        if CORRECTED:
            from_row = tl.load(correction_row + model).to(tl.int64)
            mode = tl.where(from_row >= 0, tl.load(correction_mode + model), 0)
            correction += tl.maximum(from_row, 0) * correction_model * ALIGN
        count = tap_steps(tap, batch, HI, WI, HO, WO, PAD, SIDE, STEP)
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        product = tap_products(x, dy, product, 0, count, model, first_row, first, tap, batch, HI, WI, HO, WO, PAD,
                               CI, CO, SIDE, TURNED, DESCRIBED, ROWS, COLUMNS, STEP, PRECISION)  # fmt: skip
        if COPY:
            plain += place * (CO * SIDE * SIDE * CI)
        if TURN:
            turned += place * (CO * SIDE * SIDE * CI)
        # A slice of the columns after the other: all that belongs to a whole tile would not fit in registers. Where
        # the next slice does, it is on its way before this one is stored, and the first during the products.
        low, high = tl.split(tl.permute(tl.reshape(product, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        if SLICES == 2:
            slices = (low, high)
        else:
            slices = (tl.split(tl.permute(tl.reshape(low, (ROWS, 2, WIDTH)), (0, 2, 1)))
                      + tl.split(tl.permute(tl.reshape(high, (ROWS, 2, WIDTH)), (0, 2, 1))))  # fmt: skip
        for i in tl.static_range(SLICES):
            column = first + i * WIDTH + tl.arange(0, WIDTH)
            at = row[:, None] * (SIDE * SIDE * CI) + tap * CI + column[None, :]
            turned_at = (tap * CI + column)[:, None] * CO + row[None, :]
            if not AHEAD:
                old, speed = fetch(w, v, at, now)
            elif i + 1 < SLICES:
                next_old, next_speed = fetch(w, v, at + WIDTH, now)
            move(slices[i], old, speed, at, turned_at, w, v, start, correction, rate, keeps, decay, pull, mode,
                 plain, turned, CORRECTED, COPY, TURN)  # fmt: skip
            if AHEAD and i + 1 < SLICES:
                old = next_old
                speed = next_speed


def step_tiles(ci: int, co: int, batch: int, width: int, itemsize: int) -> WideTiles:
    """Small enough for two or three programs on a multiprocessor, of which one multiplies while another updates. On
    small maps weights outnumber products, and what counts is how many of them are on their way."""
    rows, columns = cut(co, 128 if width > 4 else 64), cut(ci, 128)
    large = rows * columns >= (64 * 128 if width <= 2 else 128 * 128)
    return WideTiles(rows, columns, min(batch, 128 // itemsize), 8 if large else 4, 3)


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
        tiles = chosen("step", ci, co, size[1], n, batch, x.dtype, precision)
    tiles = tiles or step_tiles(ci, co, batch, width, x.dtype.itemsize)
    o = optimiser.columns(offset, offset + co * side * side * ci)
    strides = [b.stride(0) for b in (o.w, o.start, o.correction) if b is not None]
    assert not any(stride % ALIGN.value for stride in strides)
    assert o.v.stride(0) == o.w.stride(0)
    w_model, start_model, *rest = (stride // ALIGN.value for stride in strides)
    product = tiles.rows * tiles.columns
    ahead = product <= HELD * 32 * tiles.warps
    weight_step_kernel[(side * side * (co // tiles.rows) * (ci // tiles.columns), n)](
        *operands(x, dy, tiles, turned=turned, described=described), o.w, o.v, o.start, o.correction,
        copies.plain, copies.turned, o.lr, o.momentum, o.weight_decay, o.mu, o.start_row, o.steps, o.step,
        o.correction_row, o.correction_mode, w_model, start_model, rest[0] if rest else 0, batch, HI=size[0],
        WI=size[1], HO=height, WO=width, PAD=padding, CI=ci, CO=co, SIDE=side, TURNED=turned,
        DESCRIBED=described, CORRECTED=o.correction is not None, COPY=copies.plain is not None,
        TURN=copies.turned is not None, ROWS=tiles.rows, COLUMNS=tiles.columns, STEP=tiles.step,
        SLICES=2 if ahead else 4, AHEAD=ahead, PRECISION=precision, num_warps=tiles.warps, num_stages=tiles.stages,
        maxnreg=REGISTERS[tiles.warps] if 64 * 128 <= product <= 128 * 128 else None,
    )  # fmt: skip
