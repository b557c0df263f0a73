# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The weight gradient of a wide convolution of 3x3 taps, a line of taps at a time, in Triton.

Three neighbouring taps multiply one and the same gradient with three neighbouring pixels. A program that takes them
together brings the gradient once instead of three times; where a layer has few input channels, bringing tiles is what
bounds its weight gradient. Pixels outside the map come as zeros, which tensor descriptors fill in.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, empty, float32

from fedentopt.simulation.triton.linear import aligned
from fedentopt.simulation.triton.wide_descriptors import described
from fedentopt.simulation.triton.wide_maps import BATCH_TILE, NOBODY_WAITS, Running, Size, add_parts, cut, trains

SIDE = 3
SHARED = 13  # programs that may share the sums of one model's layer: those of ten models then fill a large GPU once
LARGEST = (128, 64)  # outputs and inputs of one program: three such tiles of sums fill the registers of four warps


@triton.jit
def maps_of_pixel(x, line, pixel, column, chunk, TURNED: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """The maps (COLUMNS, STEP) of one pixel and chunk of the batch, zeros outside a line."""
    if TURNED:
        return tl.reshape(x.load([line, pixel, column, chunk * STEP]), (COLUMNS, STEP))
    return tl.trans(tl.reshape(x.load([line, pixel, chunk * STEP, column]), (STEP, COLUMNS)))


@triton.jit
def weight_grad_kernel(x, dy, dw, steps, step, dw_model, batch, HI: tl.constexpr, WI: tl.constexpr, HO: tl.constexpr,
                       WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, PARTS: tl.constexpr,
                       ALIGNED: tl.constexpr, TURNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                       STEP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    if trains(steps, step, tl.program_id(2)):
        column = (tl.program_id(0) % (CI // COLUMNS)) * COLUMNS
        rest = tl.program_id(0) // (CI // COLUMNS)
        row = (rest % (CO // ROWS)) * ROWS
        ky = rest // (CO // ROWS)
        part = tl.program_id(1)
        model = tl.program_id(2)
        down = ky - PAD
        top = tl.maximum(0, -down)  # lines of the output whose input under these taps lies inside the map
        lines = tl.maximum(0, tl.minimum(HO, HI - down) - top)
        chunks = batch // STEP
        count = lines * WO * chunks
        left = tl.zeros((COLUMNS, ROWS), tl.float32)
        middle = tl.zeros((COLUMNS, ROWS), tl.float32)
        right = tl.zeros((COLUMNS, ROWS), tl.float32)
        for i in range(count * part // PARTS, count * (part + 1) // PARTS):
            chunk = i % chunks
            h = top + i // chunks // WO
            v = i // chunks % WO
            pixel = (model * HO + h) * WO + v
            if TURNED:
                d = tl.trans(dy.load([pixel * CO + row, chunk * STEP]))
            else:
                d = dy.load([pixel * batch + chunk * STEP, row])
            line = model * HI + h + down
            at = v - PAD
            a = maps_of_pixel(x, line, at, column, chunk, TURNED, COLUMNS, STEP)
            left = tl.dot(a, d, left, input_precision=PRECISION)
            a = maps_of_pixel(x, line, at + 1, column, chunk, TURNED, COLUMNS, STEP)
            middle = tl.dot(a, d, middle, input_precision=PRECISION)
            a = maps_of_pixel(x, line, at + 2, column, chunk, TURNED, COLUMNS, STEP)
            right = tl.dot(a, d, right, input_precision=PRECISION)
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        to = rows[:, None] * (9 * CI) + ky * 3 * CI + columns[None, :]
        dw += model.to(tl.int64) * dw_model * ALIGNED + part * (CO * 9 * CI)
        tl.store(dw + to, tl.trans(left))
        tl.store(dw + to + CI, tl.trans(middle))
        tl.store(dw + to + 2 * CI, tl.trans(right))


def fits(side: int, precision: str) -> bool:
    """Whether a layer's gradient is taken line by line. Products in three parts have no registers left for it."""
    return side == SIDE and precision == "tf32"


def weight_grad(
    x: Tensor, dy: Tensor, dw: Tensor, size: Size, padding: int, *, turned: bool, precision: str,
    running: Running | None = None,
) -> None:  # fmt: skip
    """See `wide.weight_grad`."""
    n, pixels = dy.shape[:2]
    ci, batch = x.shape[2:] if turned else (x.shape[3], x.shape[2])
    co = dy.shape[2 if turned else 3]
    height, width = (length + 2 * padding - SIDE + 1 for length in size)
    rows, columns = cut(co, LARGEST[0]), cut(ci, LARGEST[1])
    step = min(batch, BATCH_TILE, 128 // x.dtype.itemsize)
    programs = SIDE * (co // rows) * (ci // columns)
    parts = max(1, min(pixels // 4, SHARED // programs))
    direct = parts == 1 and dw.shape[3] == ci
    into = dw if direct else empty((n, parts, co, SIDE**2, ci), dtype=float32, device=x.device)
    model, factor = aligned(into.stride(0))
    of_maps, of_gradient = ((columns, step), (rows, step)) if turned else ((step, columns), (step, rows))
    weight_grad_kernel[(programs, parts, n)](
        described(x.view(n * size[0], size[1], *x.shape[2:]), 1, 1, *of_maps),
        described(dy.view(-1, dy.shape[3]), *of_gradient), into, *(running or NOBODY_WAITS), model, batch,
        HI=size[0], WI=size[1], HO=height, WO=width, PAD=padding, CI=ci, CO=co, PARTS=parts, ALIGNED=factor,
        TURNED=turned, ROWS=rows, COLUMNS=columns, STEP=step, PRECISION=precision, num_warps=4, num_stages=5,
    )  # fmt: skip
    if not direct:
        add_parts(into.flatten(2), ci, dw, dw.shape[3])
