# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Stacked convolutions with many channels in Triton: every layer of n models is one launch on tensor cores.

Maps lie pixel by pixel, (n, H * W, B, C): the batch of one pixel is a matrix, and a convolution is a sum of matrix
products, one per pixel and tap. A tap that falls outside the map is left out instead of multiplied by zeros (a quarter
of VGG-11's work on 32x32 images). Tensor cores want the summed axis contiguous in both factors, which for the weight
gradient is the batch: so each map is kept a second time with its matrices transposed, (n, H * W, C, B), which the
kernels between the products write along the way. B is padded to whole tiles with samples that carry no gradient.

Products take fp32 maps as TF32 (or as three TF32 products, fp32's accuracy) and bf16 maps as they are; sums are fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.kernels.interface import DEAD
from fedentopt.simulation.kernels.linear import aligned

BATCH_TILE = 64
FILL = 264  # programs that keep every multiprocessor of a large GPU busy
_DEAD = tl.constexpr(DEAD)


class WideTiles(NamedTuple):
    """Rows and columns of a program's product, entries summed in a step, warps, pipeline stages."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


@triton.jit
def convolution_kernel(x, w, bias, y, x_model, w_model, bias_model, batch, H: tl.constexpr, W: tl.constexpr,
                       CI: tl.constexpr, CO: tl.constexpr, SIDE: tl.constexpr, W_COLUMN: tl.constexpr,
                       W_TAP: tl.constexpr, ALIGNED: tl.constexpr, FLIPPED: tl.constexpr, BIASED: tl.constexpr,
                       PIXELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    HALF: tl.constexpr = SIDE // 2
    BLOCKS: tl.constexpr = CI // STEP
    TILES: tl.constexpr = CO // COLUMNS
    column = (tl.program_id(0) % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.program_id(0) // TILES
    model = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, ROWS)
    entry = tl.arange(0, STEP)
    first = 0
    pixel = tile * PIXELS  # a program's rows are PIXELS neighbours, or a part of one pixel's batch
    if PIXELS == 1:
        first = (tile % (batch // ROWS)) * ROWS
        pixel = tile // (batch // ROWS)
    h = pixel // W
    v = pixel % W
    top = tl.maximum(0, HALF - h)
    bottom = tl.minimum(SIDE, H + HALF - h)
    left = 0
    right = SIDE
    if PIXELS == 1:
        left = tl.maximum(0, HALF - v)
        right = tl.minimum(SIDE, W + HALF - v)
    across = right - left
    x += model * x_model + first * CI
    w += model * w_model * ALIGNED
    a_at = row[:, None] * CI + entry[None, :]
    b_at = column[:, None] * W_COLUMN + entry[None, :]
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range((bottom - top) * across * BLOCKS):
        block = i % BLOCKS
        tap = i // BLOCKS
        ky = top + tap // across
        kx = left + tap % across
        source = pixel + (ky - HALF) * W + kx - HALF
        if PIXELS == 1:
            a = tl.load(x + (source * batch * CI + block * STEP) + a_at)
        else:
            place = v + row // batch + kx - HALF
            inside = (place >= 0) & (place < W)
            a = tl.load(x + (source * batch * CI + block * STEP) + a_at, mask=inside[:, None], other=0.0)
        which = ky * SIDE + kx
        if FLIPPED:
            which = SIDE * SIDE - 1 - which
        b = tl.load(w + (which * W_TAP + block * STEP) + b_at)
        product = tl.dot(a, tl.trans(b), product, input_precision=PRECISION)
    if BIASED:
        product += tl.load(bias + model * bias_model + column)[None, :]
        product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
    y += model * (H * W * CO) * batch
    at = (pixel * batch + first + row)[:, None] * CO + column[None, :]
    tl.store(y + at, product.to(y.dtype.element_ty))


@triton.jit
def weight_grad_kernel(xt, dyt, dw, dw_part, dw_model, batch, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr,
                       CO: tl.constexpr, SIDE: tl.constexpr, PARTS: tl.constexpr, ALIGNED: tl.constexpr,
                       ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    HALF: tl.constexpr = SIDE // 2
    column = (tl.program_id(0) % (CI // COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    rest = tl.program_id(0) // (CI // COLUMNS)
    row = (rest % (CO // ROWS)) * ROWS + tl.arange(0, ROWS)
    tap = rest // (CO // ROWS)
    part = tl.program_id(1)
    model = tl.program_id(2).to(tl.int64)
    down = tap // SIDE - HALF
    over = tap % SIDE - HALF
    top = tl.maximum(0, -down)  # output pixels whose input under this tap lies inside the map
    left = tl.maximum(0, -over)
    across = tl.minimum(W, W - over) - left
    chunks = batch // STEP
    count = (tl.minimum(H, H - down) - top) * across * chunks
    begin = count * part // PARTS
    end = count * (part + 1) // PARTS
    entry = tl.arange(0, STEP)
    xt += model * (H * W * CI) * batch
    dyt += model * (H * W * CO) * batch
    a_at = row[:, None] * batch + entry[None, :]
    b_at = column[:, None] * batch + entry[None, :]
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(begin, end):
        chunk = i % chunks
        place = i // chunks
        pixel = (top + place // across) * W + left + place % across
        source = pixel + down * W + over
        a = tl.load(dyt + (pixel * CO * batch + chunk * STEP) + a_at)
        b = tl.load(xt + (source * CI * batch + chunk * STEP) + b_at)
        product = tl.dot(a, tl.trans(b), product, input_precision=PRECISION)
    at = row[:, None] * (SIDE * SIDE * CI) + tap * CI + column[None, :]
    tl.store(dw + (model * dw_model + part * dw_part) * ALIGNED + at, product)


@triton.jit
def windows_kernel(x, y, yt, x_model, samples, batch, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr,
                   SIDE: tl.constexpr, WIDTH: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    pixel = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    model = tl.program_id(2).to(tl.int64)
    entry = tl.arange(0, WIDTH)
    h = pixel // W + (entry // CI) // SIDE - SIDE // 2
    v = pixel % W + (entry // CI) % SIDE - SIDE // 2
    inside = (entry < SIDE * SIDE * CI) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
    at = row[:, None] * (CI * H * W) + (entry % CI * (H * W) + h * W + v)[None, :]
    value = tl.load(x + model * x_model + at, mask=(row < samples)[:, None] & inside[None, :], other=0.0)
    value = value.to(y.dtype.element_ty)
    base = (model * H * W + pixel) * batch * WIDTH
    tl.store(y + base + row[:, None] * WIDTH + entry[None, :], value)
    if KEEP:
        tl.store(yt + base + entry[:, None] * batch + row[None, :], tl.trans(value))


@triton.jit
def pool_kernel(x, y, yt, code, batch, W: tl.constexpr, PIXELS: tl.constexpr, C: tl.constexpr, POOL: tl.constexpr,
                KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    pixel = tl.program_id(0)
    row = (tl.program_id(1) // (C // COLUMNS)) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) % (C // COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    model = tl.program_id(2).to(tl.int64)
    at = row[:, None] * C + column[None, :]
    matrix = C * batch
    base = (model * PIXELS + pixel) * matrix
    if POOL:
        corner = (pixel // (W // 2)) * 2 * W + (pixel % (W // 2)) * 2
        x += (model * (4 * PIXELS) + corner) * matrix
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
    if KEEP:
        tl.store(yt + base + column[:, None] * batch + row[None, :], tl.trans(best).to(yt.dtype.element_ty))


@triton.jit
def unpool_kernel(dy, y, code, dx, dxt, sums, batch, W: tl.constexpr, PIXELS: tl.constexpr, C: tl.constexpr,
                  POOL: tl.constexpr, PASS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    pixel = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    model = tl.program_id(2).to(tl.int64)
    matrix = C * batch
    base = (model * PIXELS + pixel) * matrix
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
                value = tl.where(top == place, grad, 0.0).to(dxt.dtype.element_ty)
                to = (model * (4 * PIXELS) + corner + (place // 2) * W + place % 2) * matrix
                if PASS:
                    tl.store(dx + to + at, value)
                tl.store(dxt + to + turned, tl.trans(value))
        else:
            grad = tl.where(tl.load(y + base + at).to(tl.float32) <= 0, 0.0, grad)
            total += grad
            value = grad.to(dxt.dtype.element_ty)
            if PASS:
                tl.store(dx + base + at, value)
            tl.store(dxt + base + turned, tl.trans(value))
    tl.store(sums + (model * PIXELS + pixel) * C + column, tl.sum(total, axis=0))


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


def padded(batch: int) -> int:
    """The batch with its padding."""
    return -(-batch // BATCH_TILE) * BATCH_TILE


def convolution_tiles(ci: int, co: int, batch: int, width: int, size: int) -> WideTiles:
    """For the forward pass and the input gradient, the fastest on an H200; `size` is the bytes of an entry."""
    step = min(ci, 128 // size)
    if width <= 2:  # most taps of such a map fall outside, and a tile of one pixel leaves them all out
        return WideTiles(64, 64, step, 4, 4)
    pair = batch % 128 == 0 or (batch == BATCH_TILE and width % 2 == 0)
    columns = 128 if co % 128 == 0 else 64
    if pair and size == 4 and co % 256 == 0:
        return WideTiles(128, 256, step, 8, 3)
    return WideTiles(128 if pair else 64, columns, step, 8 if ci <= 64 < columns else 4, 3)


def weight_tiles(ci: int, co: int, width: int, size: int) -> WideTiles:
    """For the weight gradient, likewise."""
    columns = next(c for c in (256 if width > 2 else 128, 128, 64, 32) if ci % c == 0)
    rows = 128 if co % 128 == 0 else 64
    return WideTiles(rows, columns, min(BATCH_TILE, 128 // size), 8 if min(rows, columns) >= 128 else 4, 3)


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, height: int, *, models: int, taps_first: bool = False, precision: str,
    tiles: WideTiles | None = None,
) -> Tensor:  # fmt: skip
    """Convolution over maps x (n or 1, H * W, B, Ci) with zero padding: (models, H * W, B, Co).

    w (n, Co, side * side, Ci): with `bias` (n, Co) also bias and ReLU. With `taps_first`, w (n, side * side, Co, Ci)
    holds the turned weights of a layer whose input gradient is wanted, and taps are mirrored.
    """
    pixels, batch, ci = x.shape[1:]
    width = pixels // height
    taps, co = (w.shape[1], w.shape[2]) if taps_first else (w.shape[2], w.shape[1])
    side = 3 if taps == 9 else 1
    tiles = tiles or convolution_tiles(ci, co, batch, width, x.element_size())
    together = max(1, tiles.rows // batch)
    w_row, factor = aligned(w.stride(0))
    y = torch.empty((models, pixels, batch, co), dtype=x.dtype, device=x.device)
    convolution_kernel[(co // tiles.columns * (pixels * batch // tiles.rows), models)](
        x, w, bias, y, 0 if len(x) == 1 else x.stride(0), w_row, 0 if bias is None else bias.stride(0), batch,
        H=height, W=width, CI=ci, CO=co, SIDE=side, W_COLUMN=w.stride(2 if taps_first else 1),
        W_TAP=w.stride(1 if taps_first else 2), ALIGNED=factor, FLIPPED=taps_first, BIASED=bias is not None,
        PIXELS=together, ROWS=tiles.rows, COLUMNS=tiles.columns, STEP=tiles.step, PRECISION=precision,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y


def weight_grad(
    xt: Tensor, dyt: Tensor, dw: Tensor, height: int, *, precision: str, parts: int | None = None,
    tiles: WideTiles | None = None,
) -> None:  # fmt: skip
    """Gradient of the weights from turned maps xt (n, H * W, Ci, B) and dyt (n, H * W, Co, B) into dw
    (n, Co, 1 or 9 taps, up to Ci). `parts` programs share the sum of an entry: as many as it takes to fill a GPU."""
    n, pixels, ci, batch = xt.shape
    co = dyt.shape[2]
    side = 3 if dw.shape[2] == 9 else 1
    tiles = tiles or weight_tiles(ci, co, pixels // height, xt.element_size())
    programs = side * side * (co // tiles.rows) * (ci // tiles.columns)
    parts = parts or max(1, min(pixels // 4, FILL // (n * programs)))
    direct = parts == 1 and dw.shape[3] == ci
    into = dw if direct else torch.empty((n, parts, co, side * side, ci), dtype=torch.float32, device=xt.device)
    row, factor = aligned(into.stride(0))
    weight_grad_kernel[(programs, parts, n)](
        xt, dyt, into, 0 if direct else into.stride(1) // factor, row, batch, H=height, W=pixels // height, CI=ci,
        CO=co, SIDE=side, PARTS=parts, ALIGNED=factor, ROWS=tiles.rows, COLUMNS=tiles.columns, STEP=tiles.step,
        PRECISION=precision, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if not direct:
        dw.copy_(into.sum(1)[..., : dw.shape[3]])


def windows(x: Tensor, width: int, side: int, dtype: torch.dtype, keep: bool) -> tuple[Tensor, Tensor | None]:
    """Images (n, B, Ci, H, W) -> the window of every pixel, tap by tap, filled with zeros to `width` entries.

    (n, H * W, B, width) and, with `keep`, turned (n, H * W, width, B). It makes a convolution of few channels one of a
    single tap.
    """
    n, samples, ci, h, w = x.shape
    batch = padded(samples)
    y = torch.empty((n, h * w, batch, width), dtype=dtype, device=x.device)
    yt = torch.empty((n, h * w, width, batch), dtype=dtype, device=x.device) if keep else None
    windows_kernel[(h * w, batch // BATCH_TILE, n)](
        x, y, yt, x.stride(0), samples, batch, H=h, W=w, CI=ci, SIDE=side, WIDTH=width, KEEP=keep, ROWS=BATCH_TILE,
        num_warps=4,
    )  # fmt: skip
    return y, yt


def pool(x: Tensor, height: int, *, pooled: bool, keep: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """2x2 max-pool of maps (n, H * W, B, C) that came out of a ReLU, or with `pooled` false the maps as they are.

    Gives the maps and, with `keep`, the turned maps and (if pooled) the arg-max codes, DEAD where nothing is positive.
    """
    n, pixels, batch, c = x.shape
    fewer = pixels // 4 if pooled else pixels
    if not pooled and not keep:
        return x, None, None
    y = torch.empty((n, fewer, batch, c), dtype=x.dtype, device=x.device) if pooled else x
    yt = torch.empty((n, fewer, c, batch), dtype=x.dtype, device=x.device) if keep else None
    code = torch.empty((n, fewer, batch, c), dtype=torch.uint8, device=x.device) if pooled and keep else None
    columns = min(c, 64)
    pool_kernel[(fewer, batch // BATCH_TILE * (c // columns), n)](
        x, y, yt, code, batch, W=pixels // height, PIXELS=fewer, C=c, POOL=pooled, KEEP=keep, ROWS=BATCH_TILE,
        COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return y, yt, code


def unpool(
    dy: Tensor, y: Tensor, code: Tensor | None, height: int, *, passes: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Back through `pool` and ReLU: dy is the gradient of `pool`'s result y, `height` that of its input.

    Gives the gradient of the convolution's output (None unless it `passes` on), the same turned, and its sum over
    pixels and samples (n, C), which is the gradient of the bias.
    """
    n, pixels, batch, c = dy.shape
    more = pixels if code is None else 4 * pixels
    dx = torch.empty((n, more, batch, c), dtype=dy.dtype, device=dy.device) if passes else None
    dxt = torch.empty((n, more, c, batch), dtype=dy.dtype, device=dy.device)
    sums = torch.empty((n, pixels, c), dtype=torch.float32, device=dy.device)
    columns = min(c, 64)
    unpool_kernel[(pixels, c // columns, n)](
        dy, y, code, dx, dxt, sums, batch, W=more // height, PIXELS=pixels, C=c, POOL=code is not None, PASS=passes,
        ROWS=BATCH_TILE, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    return dx, dxt, sums.sum(1)


def turn(w: Tensor, dtype: torch.dtype, *, copy: bool, turned: bool) -> tuple[Tensor, Tensor | None]:
    """Weights (n, Co, taps, Ci) in `dtype` (a copy only if asked) and, if asked, turned: (n, taps, Ci, Co)."""
    n, co, taps, ci = w.shape
    plain = torch.empty((n, co, taps, ci), dtype=dtype, device=w.device) if copy else w
    to = torch.empty((n, taps, ci, co), dtype=dtype, device=w.device) if turned else None
    if copy or turned:
        row, factor = aligned(w.stride(0))
        turn_kernel[(taps * ci // 64, co // 64, n)](
            w, plain, to, row, ALIGNED=factor, ROWS_ALL=co, COLUMNS_ALL=taps * ci, COPY=copy, TURN=turned, ROWS=64,
            COLUMNS=64, num_warps=4,
        )  # fmt: skip
    return plain, to
