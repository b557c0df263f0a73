# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The first convolution of wide models in Triton, with bias, ReLU and 2x2 max-pool: from images to pooled maps.

Neither the windows of the images nor the dense map reach memory, forward or backward: for VGG-11 on 32x32 images that
is a sixth of all bytes that a step moves. Images are kept with their batch contiguous, (n, Ci, H, W, B): an entry of
the windows of a whole batch is then one line of memory, and the weight gradient, which sums over the batch, finds the
summed axis contiguous.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.interface import DEAD
from fedentopt.simulation.triton.linear import aligned
from fedentopt.simulation.triton.wide_maps import (
    BATCH_TILE,
    NOBODY_WAITS,
    Running,
    Size,
    add_parts,
    cut,
    padded,
    trains,
    turn,
)

_DEAD = tl.constexpr(DEAD)
PARTS = 16  # programs that share the pixels of a model's weight gradient
WARPS = 4  # of the forward kernel; with eight, its registers are held down, so that three programs share a processor


@triton.jit
def window(x, pixel_h, pixel_v, row, batch, H: tl.constexpr, W: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr,
           SIDE: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """The window of one output pixel for the samples `row`, (WIDTH, samples), tap by tap; zeros outside."""
    entry = tl.arange(0, WIDTH)
    h = pixel_h + (entry // CI) // SIDE - PAD
    v = pixel_v + (entry // CI) % SIDE - PAD
    inside = (entry < SIDE * SIDE * CI) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
    at = ((entry % CI * H + h) * W + v)[:, None] * batch + row[None, :]
    return tl.load(x + at, mask=inside[:, None], other=0.0)


@triton.jit
def forward_kernel(x, w, bias, y, yt, code, steps, step, x_model, w_model, bias_model, batch, H: tl.constexpr,
                   W: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr,
                   SIDE: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr, ALIGNED: tl.constexpr, KEEP: tl.constexpr,
                   TURN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    if trains(steps, step, tl.program_id(2)):
        NAN: tl.constexpr = tl.PropagateNan.ALL
        pixel = tl.program_id(0)
        row = (tl.program_id(1) // (C // COLUMNS)) * ROWS + tl.arange(0, ROWS)
        column = (tl.program_id(1) % (C // COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
        model = tl.program_id(2).to(tl.int64)
        x += model * x_model
        entry = tl.arange(0, WIDTH)
        ENTRIES: tl.constexpr = SIDE * SIDE * CI
        at = column[:, None] * ENTRIES + entry[None, :]
        f = tl.load(w + model * w_model * ALIGNED + at, mask=(entry < ENTRIES)[None, :], other=0.0)
        f = tl.trans(f.to(y.dtype.element_ty))
        best = tl.full((ROWS, COLUMNS), float("-inf"), tl.float32)
        top = tl.zeros((ROWS, COLUMNS), tl.int32)
        for place in tl.static_range(4):
            seen = window(x, pixel // WP * 2 + place // 2, pixel % WP * 2 + place % 2, row, batch, H, W, PAD, CI, SIDE,
                          WIDTH)  # fmt: skip
            value = tl.dot(tl.trans(seen).to(y.dtype.element_ty), f, input_precision=PRECISION)
            better = (value > best) | (value != value)  # NaN wins, so that a diverged model shows
            best = tl.where(better, value, best)
            top = tl.where(better, place, top)
        best += tl.load(bias + model * bias_model + column)[None, :]
        top = tl.where(best <= 0, _DEAD, top)
        best = tl.maximum(best, 0.0, propagate_nan=NAN).to(y.dtype.element_ty)
        base = (model * (HP * WP) + pixel) * batch * C
        at = row[:, None] * C + column[None, :]
        tl.store(y + base + at, best)
        if KEEP:
            tl.store(code + base + at, top.to(tl.uint8))
        if TURN:
            tl.store(yt + base + column[:, None] * batch + row[None, :], tl.trans(best))


@triton.jit
def weight_grad_kernel(x, dy, code, sums, biases, x_model, batch, H: tl.constexpr, W: tl.constexpr, HP: tl.constexpr,
                       WP: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, SIDE: tl.constexpr, WIDTH: tl.constexpr,
                       C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    part = tl.program_id(0)
    parts = tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    model = tl.program_id(2).to(tl.int64)
    x += model * x_model
    product = tl.zeros((COLUMNS, WIDTH), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    chunks = batch // ROWS
    begin = HP * WP * part // parts * chunks
    end = HP * WP * (part + 1) // parts * chunks
    for i in range(begin, end):
        pixel = i // chunks
        row = i % chunks * ROWS + tl.arange(0, ROWS)
        at = (model * (HP * WP) + pixel) * batch * C + row[:, None] * C + column[None, :]
        grad = tl.load(dy + at).to(tl.float32)
        top = tl.load(code + at)
        total += tl.where(top == _DEAD, 0.0, grad)
        for place in tl.static_range(4):
            seen = window(x, pixel // WP * 2 + place // 2, pixel % WP * 2 + place % 2, row, batch, H, W, PAD, CI,
                          SIDE, WIDTH)  # fmt: skip
            d = tl.trans(tl.where(top == place, grad, 0.0)).to(dy.dtype.element_ty)
            product = tl.dot(d, tl.trans(seen).to(dy.dtype.element_ty), product, input_precision=PRECISION)
    slot = model * parts + part
    tl.store(sums + (slot * C + column[:, None]) * WIDTH + tl.arange(0, WIDTH)[None, :], product)
    tl.store(biases + slot * C + column, tl.sum(total, axis=0))


def batch_last(x: Tensor, whole: bool = False) -> Tensor:
    """Images (n, B, Ci, H, W) -> (n, Ci, H, W, B), the batch padded with zeros, to `whole` tiles if asked: products of
    fewer rows are another instruction, and an image's bits would then depend on how many are beside it."""
    n, samples, *shape = x.shape
    batch = padded(max(samples, BATCH_TILE) if whole else samples)
    if batch == samples and x[0, 0].numel() % 16 == 0:
        turned = turn(x.reshape(n, batch, 1, -1), x.dtype, copy=False, turned=True)[1]
        assert turned is not None
        return turned.view(n, *shape, batch)
    y = torch.zeros((n, *shape, batch), dtype=x.dtype, device=x.device)
    y[..., :samples].copy_(x.permute(0, 2, 3, 4, 1))
    return y


def forward(
    x: Tensor, w: Tensor, bias: Tensor, side: int, width: int, padding: int, dtype: torch.dtype, *, models: int,
    keep: bool, turned: bool, precision: str, running: Running | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Size]:  # fmt: skip
    """Convolution, bias, ReLU and pool of images from `batch_last` (n or 1, Ci, H, W, B), w (n, Co, entries).

    Pooled maps (models, H' * W', B, Co) in `dtype`; with `keep` the arg-max codes, if asked the maps turned; the size
    of the maps before the pool. Windows have `width` entries, filled up with zeros.
    """
    ci, h, v, batch = x.shape[1:]
    co = w.shape[1]
    grown = (h + 2 * padding - side + 1, v + 2 * padding - side + 1)
    pooled = grown[0] // 2, grown[1] // 2
    shape = (models, pooled[0] * pooled[1], batch, co)
    y = torch.empty(shape, dtype=dtype, device=x.device)
    yt = torch.empty((*shape[:2], co, batch), dtype=dtype, device=x.device) if turned else None
    code = torch.empty(shape, dtype=torch.uint8, device=x.device) if keep else None
    rows, columns = min(batch, BATCH_TILE), cut(co, 64)
    w_row, factor = aligned(w.stride(0))
    forward_kernel[(shape[1], batch // rows * (co // columns), models)](
        x, w, bias, y, yt, code, *(running or NOBODY_WAITS), 0 if len(x) == 1 else x.stride(0),
        w_row, bias.stride(0), batch, H=h, W=v,
        HP=pooled[0], WP=pooled[1], PAD=padding, CI=ci, SIDE=side, WIDTH=width, C=co, ALIGNED=factor, KEEP=keep,
        TURN=turned, ROWS=rows, COLUMNS=columns, PRECISION=precision, num_warps=WARPS,
        maxnreg=80 if WARPS == 8 and precision == "tf32" else None,
    )  # fmt: skip
    return y, yt, code, grown


def weight_grad(
    x: Tensor, dy: Tensor, code: Tensor, dw: Tensor, db: Tensor, side: int, width: int, padding: int, *, precision: str
) -> None:
    """Gradients of `forward`'s weight and bias into dw (n, Co, entries) and db (n, Co), from that of its maps."""
    n, pixels, batch, co = dy.shape
    ci, h, v = x.shape[1:4]
    pooled = (h + 2 * padding - side + 1) // 2, (v + 2 * padding - side + 1) // 2
    parts = min(PARTS, pixels)
    sums = torch.empty((n, parts, co * width), dtype=torch.float32, device=x.device)
    biases = torch.empty((n, parts, co), dtype=torch.float32, device=x.device)
    rows, columns = min(batch, BATCH_TILE), cut(co, 64)
    weight_grad_kernel[(parts, co // columns, n)](
        x, dy, code, sums, biases, x.stride(0), batch, H=h, W=v, HP=pooled[0], WP=pooled[1], PAD=padding, CI=ci,
        SIDE=side, WIDTH=width, C=co, ROWS=rows, COLUMNS=columns, PRECISION=precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    add_parts(sums, width, dw, side * side * ci)
    add_parts(biases, co, db, co)
