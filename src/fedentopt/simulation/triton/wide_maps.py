# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""What happens to the maps of `triton.wide` between its products, and to its weights before them, in Triton.

Everything here reads once and writes what the next products want, in both orders: images as windows, pooling, the way
back through pooling and ReLU with the sums that are the bias gradient, turned weights, dropout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.randomness import GOLDEN, MASK, signed
from fedentopt.simulation.triton.gather import mix64, uniform
from fedentopt.simulation.triton.interface import DEAD
from fedentopt.simulation.triton.linear import aligned

BATCH_TILE = 64
_DEAD = tl.constexpr(DEAD)
_GOLDEN = tl.constexpr(signed(GOLDEN))

Size = tuple[int, int]  # height and width of a map


class Running(NamedTuple):
    """Which models of a stack still train in step number `step` (1,): those with more `steps` (n,). Nothing is made for
    the others, which have finished or only fill the stack up: their rows of new tensors hold whatever memory held."""

    steps: Tensor
    step: Tensor


NOBODY_WAITS = (None, None)  # instead of `Running`, where all models are wanted


@triton.jit
def trains(steps, step, model):
    """Whether a model is among those that `Running` names; all are where there is none."""
    if steps is None:
        return True
    else:  # noqa: RET505  (Triton compiles one of two branches)
        return tl.load(steps + model) > tl.load(step)


@triton.jit
def windows_kernel(x, y, yt, x_model, samples, batch, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr,
                   WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, SIDE: tl.constexpr, WIDTH: tl.constexpr,
                   KEEP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    pixel = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    model = tl.program_id(2).to(tl.int64)
    entry = tl.arange(0, WIDTH)
    h = pixel // WO + (entry // CI) // SIDE - PAD
    v = pixel % WO + (entry // CI) % SIDE - PAD
    inside = (entry < SIDE * SIDE * CI) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
    at = row[:, None] * (CI * H * W) + (entry % CI * (H * W) + h * W + v)[None, :]
    value = tl.load(x + model * x_model + at, mask=(row < samples)[:, None] & inside[None, :], other=0.0)
    value = value.to(y.dtype.element_ty)
    base = (model * (HO * WO) + pixel) * batch * WIDTH
    tl.store(y + base + row[:, None] * WIDTH + entry[None, :], value)
    if KEEP:
        tl.store(yt + base + entry[:, None] * batch + row[None, :], tl.trans(value))


@triton.jit
def pool_kernel(x, y, yt, code, batch, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, POOL: tl.constexpr,
                KEEP: tl.constexpr, TURN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    pixel = tl.program_id(0)
    row = (tl.program_id(1) // (C // COLUMNS)) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) % (C // COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    model = tl.program_id(2).to(tl.int64)
    at = row[:, None] * C + column[None, :]
    matrix = C * batch
    base = (model * tl.num_programs(0) + pixel) * matrix
    if POOL:
        corner = (pixel // (W // 2)) * 2 * W + (pixel % (W // 2)) * 2
        x += (model * (H * W) + corner) * matrix
        best = tl.load(x + at).to(tl.float32)
        top = tl.zeros((ROWS, COLUMNS), tl.int32)
        for place in tl.static_range(1, 4):
            value = tl.load(x + ((place // 2) * W + place % 2) * matrix + at).to(tl.float32)
            better = (value > best) | (value != value)  # NaN wins, so that a diverged model shows
            best = tl.where(better, value, best)
            top = tl.where(better, place, top)
        tl.store(y + base + at, best.to(y.dtype.element_ty))
        if KEEP:
            tl.store(code + base + at, tl.where(best <= 0, _DEAD, top).to(tl.uint8))
    else:
        best = tl.load(x + base + at)
    if TURN:
        tl.store(yt + base + column[:, None] * batch + row[None, :], tl.trans(best).to(yt.dtype.element_ty))


@triton.jit
def unpool_kernel(dy, y, code, dx, dxt, sums, batch, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
                  POOL: tl.constexpr, PASS: tl.constexpr, TURN: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    pixel = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    model = tl.program_id(2).to(tl.int64)
    matrix = C * batch
    base = (model * tl.num_programs(0) + pixel) * matrix
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, batch, ROWS):
        row = first + tl.arange(0, ROWS)
        at = row[:, None] * C + column[None, :]
        turned = column[:, None] * batch + row[None, :]
        grad = tl.load(dy + base + at).to(tl.float32)
        if POOL:
            top = tl.load(code + base + at)
            total += tl.where(top == _DEAD, 0.0, grad)
            corner = (pixel // (W // 2)) * 2 * W + (pixel % (W // 2)) * 2
            for place in tl.static_range(4):
                value = tl.where(top == place, grad, 0.0).to(dy.dtype.element_ty)
                to = (model * (H * W) + corner + (place // 2) * W + place % 2) * matrix
                if PASS:
                    tl.store(dx + to + at, value)
                if TURN:
                    tl.store(dxt + to + turned, tl.trans(value))
        else:
            grad = tl.where(tl.load(y + base + at).to(tl.float32) <= 0, 0.0, grad)
            total += grad
            value = grad.to(dy.dtype.element_ty)
            if PASS:
                tl.store(dx + base + at, value)
            if TURN:
                tl.store(dxt + base + turned, tl.trans(value))
    tl.store(sums + (model * tl.num_programs(0) + pixel) * C + column, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["parts"])
def add_parts_kernel(x, y, y_model, parts, SIZE: tl.constexpr, WIDTH: tl.constexpr, KEPT: tl.constexpr,
                     AT_ONCE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    model = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wanted = (entry < SIZE) & (entry % WIDTH < KEPT)
    x += model * parts * SIZE
    total = tl.zeros((AT_ONCE, BLOCK), tl.float32)
    for first in range(0, parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        there = (part < parts)[:, None] & wanted[None, :]
        total += tl.load(x + part[:, None] * SIZE + entry[None, :], mask=there, other=0.0)
    tl.store(y + model * y_model + entry // WIDTH * KEPT + entry % WIDTH, tl.sum(total, axis=0), mask=wanted)


@triton.jit
def turn_kernel(w, plain, turned, w_model, ALIGNED: tl.constexpr, ROWS_ALL: tl.constexpr, COLUMNS_ALL: tl.constexpr,
                COPY: tl.constexpr, TURN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    model = tl.program_id(2).to(tl.int64)
    at = row[:, None] * COLUMNS_ALL + column[None, :]
    value = tl.load(w + model * w_model * ALIGNED + at)
    base = model * (ROWS_ALL * COLUMNS_ALL)
    if COPY:
        tl.store(plain + base + at, value.to(plain.dtype.element_ty))
    if TURN:
        to = column[:, None] * ROWS_ALL + row[None, :]
        tl.store(turned + base + to, tl.trans(value).to(turned.dtype.element_ty))


@triton.jit
def dropout_kernel(x, y, keys, size, chance, factor, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    model = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = mix64(tl.load(keys + model) + LAYER)
    draw = uniform(start + at.to(tl.int64) * _GOLDEN)
    value = tl.load(x + model * size + at, mask=at < size, other=0.0)
    tl.store(y + model * size + at, tl.where(draw >= chance, value, value * 0.0) * factor, mask=at < size)


def padded(batch: int) -> int:
    """The batch with its padding: 16, 32 or whole tiles."""
    return next((few for few in (16, 32) if batch <= few), -(-batch // BATCH_TILE) * BATCH_TILE)


def cut(size: int, most: int) -> int:
    """The largest power of two up to `most` that divides `size`."""
    return min(most, size & -size)


def windows(
    x: Tensor, width: int, side: int, padding: int, dtype: torch.dtype, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Images (n, B, Ci, H, W) -> the window of every output pixel, tap by tap, filled with zeros to `width` entries.

    (n, H' * W', B, width) and, with `keep`, turned (n, H' * W', width, B). It makes a convolution of few channels one
    of a single tap.
    """
    n, samples, ci, h, w = x.shape
    batch = padded(samples)
    height, across = h + 2 * padding - side + 1, w + 2 * padding - side + 1
    y = torch.empty((n, height * across, batch, width), dtype=dtype, device=x.device)
    yt = torch.empty((n, height * across, width, batch), dtype=dtype, device=x.device) if keep else None
    rows = min(batch, BATCH_TILE)
    windows_kernel[(height * across, batch // rows, n)](
        x, y, yt, x.stride(0), samples, batch, H=h, W=w, HO=height, WO=across, PAD=padding, CI=ci, SIDE=side,
        WIDTH=width, KEEP=keep, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return y, yt


def pool(
    x: Tensor, size: Size, *, pooled: bool, keep: bool, turned: bool | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """2x2 max-pool of maps (n, H * W, B, C) that came out of a ReLU, or with `pooled` false the maps as they are.

    Gives the maps and, with `keep`, the turned maps (unless told otherwise) and, if pooled, the arg-max codes, DEAD
    where nothing is positive.
    """
    turned = keep if turned is None else turned
    n, pixels, batch, c = x.shape
    fewer = (size[0] // 2) * (size[1] // 2) if pooled else pixels
    if not pooled and not turned:
        return x, None, None
    y = torch.empty((n, fewer, batch, c), dtype=x.dtype, device=x.device) if pooled else x
    yt = torch.empty((n, fewer, c, batch), dtype=x.dtype, device=x.device) if turned else None
    code = torch.empty((n, fewer, batch, c), dtype=torch.uint8, device=x.device) if pooled and keep else None
    rows, columns = min(batch, BATCH_TILE), cut(c, 64)
    pool_kernel[(fewer, batch // rows * (c // columns), n)](
        x, y, yt, code, batch, H=size[0], W=size[1], C=c, POOL=pooled, KEEP=keep, TURN=turned, ROWS=rows,
        COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return y, yt, code


def unpool(
    dy: Tensor, y: Tensor, code: Tensor | None, size: Size, *, passes: bool, turned: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Back through `pool` and ReLU: dy is the gradient of `pool`'s result y, `size` that of its input.

    Gives the gradient of the convolution's output (None unless it `passes` on), the same `turned`, and its sum over
    samples (n, pixels, C), whose sum over pixels (`add_parts`) is the gradient of the bias.
    """
    n, pixels, batch, c = dy.shape
    more = size[0] * size[1]
    # A last line that pooling has left over has no gradient.
    make = torch.zeros if code is not None and more != 4 * pixels else torch.empty
    dx = make((n, more, batch, c), dtype=dy.dtype, device=dy.device) if passes else None
    dxt = make((n, more, c, batch), dtype=dy.dtype, device=dy.device) if turned else None
    sums = torch.empty((n, pixels, c), dtype=torch.float32, device=dy.device)
    rows, columns = min(batch, BATCH_TILE), cut(c, 64)
    unpool_kernel[(pixels, c // columns, n)](
        dy, y, code, dx, dxt, sums, batch, H=size[0], W=size[1], C=c, POOL=code is not None, PASS=passes,
        TURN=turned, ROWS=rows, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    return dx, dxt, sums


def add_parts(x: Tensor, width: int, y: Tensor, kept: int) -> None:
    """Sums of x (n, parts, size) over its parts into y (n, ...), in an order that `parts` alone decides.

    Lines of `width` entries in x are lines of `kept` in y; the rest of a line is left out.
    """
    n, parts, size = x.shape
    at_once = min(32, triton.next_power_of_2(parts))
    block = 1024 // at_once
    add_parts_kernel[(triton.cdiv(size, block), n)](
        x, y, y.stride(0), parts, SIZE=size, WIDTH=width, KEPT=kept, AT_ONCE=at_once, BLOCK=block, num_warps=4
    )


def turn(w: Tensor, dtype: torch.dtype, *, copy: bool, turned: bool) -> tuple[Tensor, Tensor | None]:
    """Weights (n, Co, taps, Ci) in `dtype` (a copy only if asked) and, if asked, turned: (n, taps, Ci, Co)."""
    n, co, taps, ci = w.shape
    plain = torch.empty((n, co, taps, ci), dtype=dtype, device=w.device) if copy else w
    to = torch.empty((n, taps, ci, co), dtype=dtype, device=w.device) if turned else None
    if copy or turned:
        row, factor = aligned(w.stride(0))
        rows, columns = cut(co, 64), cut(taps * ci, 64)
        turn_kernel[(taps * ci // columns, co // rows, n)](
            w, plain, to, row, ALIGNED=factor, ROWS_ALL=co, COLUMNS_ALL=taps * ci, COPY=copy, TURN=turned, ROWS=rows,
            COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return plain, to


def dropout(x: Tensor, keys: Tensor, layer: int, chance: float) -> Tensor:
    """x (n, B, F) with the masks that `models.keyed_dropout` draws for a layer under the keys (n,) of this step."""
    size = x[0].numel()
    y = torch.empty_like(x)
    offset = signed(((layer + 1) * GOLDEN) & MASK)
    dropout_kernel[(triton.cdiv(size, 1024), len(x))](
        x, y, keys, size, chance, scale_kept(chance), LAYER=offset, BLOCK=1024, num_warps=4
    )
    return y


def scale_kept(chance: float) -> float:
    """What dropout multiplies the values it keeps with."""
    return 1.0 / (1.0 - chance) if chance < 1 else 1.0
