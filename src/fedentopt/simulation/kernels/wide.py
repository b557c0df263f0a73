# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Stacked convolutions with many channels in Triton: every layer of n models is one launch on tensor cores.

Maps lie pixel by pixel, (n, H * W, B, C): the batch of one pixel is a matrix, and a convolution is a sum of matrix
products, one per pixel and tap. A tap that falls outside the map is left out instead of multiplied by zeros (a quarter
of VGG-11's work on 32x32 images). Tensor cores want the summed axis contiguous in both factors, which for the weight
gradient is the batch: so each map is kept a second time with its matrices transposed, (n, H * W, C, B), which the
kernels between the products write along the way. B is padded to whole tiles with samples that carry no gradient.
Channels come in multiples of 16, but for images: `windows` makes a convolution of few channels one of a single tap.

Products take fp32 maps as TF32 (or as three TF32 products, fp32's accuracy) and bf16 maps as they are; sums are fp32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.kernels.gather import mix64, uniform
from fedentopt.simulation.kernels.interface import DEAD
from fedentopt.simulation.kernels.linear import aligned
from fedentopt.simulation.randomness import GOLDEN, MASK, signed

BATCH_TILE = 64
FILL = 264  # programs that keep every multiprocessor of a large GPU busy
_DEAD = tl.constexpr(DEAD)
_GOLDEN = tl.constexpr(signed(GOLDEN))

Size = tuple[int, int]  # height and width of a map


class WideTiles(NamedTuple):
    """Rows and columns of a program's product, entries summed in a step, warps, pipeline stages."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int


@triton.jit
def convolution_kernel(x, w, bias, y, x_model, w_model, bias_model, batch, HI: tl.constexpr, WI: tl.constexpr,
                       HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
                       SIDE: tl.constexpr, W_COLUMN: tl.constexpr, W_TAP: tl.constexpr, ALIGNED: tl.constexpr,
                       FLIPPED: tl.constexpr, BIASED: tl.constexpr, PIXELS: tl.constexpr, ROWS: tl.constexpr,
                       COLUMNS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    BLOCKS: tl.constexpr = CI // STEP
    TILES: tl.constexpr = CO // COLUMNS
    column = (tl.program_id(0) % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.program_id(0) // TILES
    model = tl.program_id(1).to(tl.int64)
    entry = tl.arange(0, STEP)
    total = HO * WO * batch
    row = tile * ROWS + tl.arange(0, ROWS)  # (output pixel, sample)
    pixel = row // batch
    h = pixel // WO
    v = pixel % WO
    first = tile * ROWS // batch
    last = tl.minimum(tile * ROWS + ROWS - 1, total - 1) // batch
    # Taps that fall outside the map for all rows are left out. A program's rows are a part of one pixel's batch
    # (PIXELS = 1), that many neighbours on one line of the map, or (0) whatever comes.
    top = tl.maximum(0, PAD - last // WO)
    bottom = tl.minimum(SIDE, HI + PAD - first // WO)
    left = 0
    right = SIDE
    if PIXELS > 0:
        left = tl.maximum(0, PAD - last % WO)
        right = tl.minimum(SIDE, WI + PAD - first % WO)
    across = right - left
    x += model * x_model
    w += model * w_model * ALIGNED
    a_at = (((h - PAD) * WI + v - PAD) * batch + row % batch)[:, None] * CI + entry[None, :]
    b_at = column[:, None] * W_COLUMN + entry[None, :]
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range((bottom - top) * across * BLOCKS):
        block = i % BLOCKS
        tap = i // BLOCKS
        ky = top + tap // across
        kx = left + tap % across
        source = x + ((ky * WI + kx) * batch * CI + block * STEP) + a_at
        if PIXELS == 1 or (PAD == 0 and PIXELS > 0):
            a = tl.load(source)
        elif PIXELS > 0:
            place = v + kx - PAD
            a = tl.load(source, mask=((place >= 0) & (place < WI))[:, None], other=0.0)
        else:
            place = v + kx - PAD
            line = h + ky - PAD
            inside = (place >= 0) & (place < WI) & (line >= 0) & (line < HI) & (row < total)
            a = tl.load(source, mask=inside[:, None], other=0.0)
        which = ky * SIDE + kx
        if FLIPPED:
            which = SIDE * SIDE - 1 - which
        b = tl.load(w + (which * W_TAP + block * STEP) + b_at)
        product = tl.dot(a, tl.trans(b), product, input_precision=PRECISION)
    if BIASED:
        product += tl.load(bias + model * bias_model + column)[None, :]
        product = tl.maximum(product, 0.0, propagate_nan=tl.PropagateNan.ALL)
    at = row[:, None] * CO + column[None, :]
    y += model * (HO * WO * CO) * batch
    if PIXELS > 0:
        tl.store(y + at, product.to(y.dtype.element_ty))
    else:
        tl.store(y + at, product.to(y.dtype.element_ty), mask=(row < total)[:, None])


@triton.jit
def weight_grad_kernel(xt, dyt, dw, dw_part, dw_model, batch, HI: tl.constexpr, WI: tl.constexpr, HO: tl.constexpr,
                       WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, SIDE: tl.constexpr,
                       PARTS: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                       STEP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    column = (tl.program_id(0) % (CI // COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    rest = tl.program_id(0) // (CI // COLUMNS)
    row = (rest % (CO // ROWS)) * ROWS + tl.arange(0, ROWS)
    tap = rest // (CO // ROWS)
    part = tl.program_id(1)
    model = tl.program_id(2).to(tl.int64)
    down = tap // SIDE - PAD
    over = tap % SIDE - PAD
    top = tl.maximum(0, -down)  # output pixels whose input under this tap lies inside the map
    left = tl.maximum(0, -over)
    lines = tl.maximum(0, tl.minimum(HO, HI - down) - top)
    across = tl.maximum(0, tl.minimum(WO, WI - over) - left)
    chunks = batch // STEP
    count = lines * across * chunks
    begin = count * part // PARTS
    end = count * (part + 1) // PARTS
    entry = tl.arange(0, STEP)
    xt += model * (HI * WI * CI) * batch
    dyt += model * (HO * WO * CO) * batch
    a_at = row[:, None] * batch + entry[None, :]
    b_at = column[:, None] * batch + entry[None, :]
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(begin, end):
        chunk = i % chunks
        place = i // chunks
        h = top + place // across
        v = left + place % across
        a = tl.load(dyt + ((h * WO + v) * CO * batch + chunk * STEP) + a_at)
        b = tl.load(xt + (((h + down) * WI + v + over) * CI * batch + chunk * STEP) + b_at)
        product = tl.dot(a, tl.trans(b), product, input_precision=PRECISION)
    at = row[:, None] * (SIDE * SIDE * CI) + tap * CI + column[None, :]
    tl.store(dw + (model * dw_model + part * dw_part) * ALIGNED + at, product)


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
                KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
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
    if KEEP:
        tl.store(yt + base + column[:, None] * batch + row[None, :], tl.trans(best).to(yt.dtype.element_ty))


@triton.jit
def unpool_kernel(dy, y, code, dx, dxt, sums, batch, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
                  POOL: tl.constexpr, PASS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
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
                value = tl.where(top == place, grad, 0.0).to(dxt.dtype.element_ty)
                to = (model * (H * W) + corner + (place // 2) * W + place % 2) * matrix
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
    tl.store(sums + (model * tl.num_programs(0) + pixel) * C + column, tl.sum(total, axis=0))


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


def convolution_tiles(ci: int, co: int, batch: int, width: int, kind: torch.dtype, precision: str) -> WideTiles:
    """For the forward pass and the input gradient of maps of this kind, the fastest on an H200."""
    step = cut(ci, 128 // kind.itemsize)
    if width <= 2 and batch >= 64:  # most taps of such a map fall outside, and a tile of one pixel leaves them all out
        return WideTiles(64, cut(co, 64), step, 4, 4)
    columns = cut(co, 128)
    large = batch % 128 == 0 or width % max(1, 128 // batch) == 0 or (batch < 64 and width % (64 // batch) != 0)
    if large and kind == torch.float32 and precision == "tf32" and co % 256 == 0:
        return WideTiles(128, 256, step, 8, 3)
    many = columns > 64 and (ci <= 64 or precision != "tf32")
    return WideTiles(128 if large else 64, columns, step, 8 if many else 4, 3)


def weight_tiles(ci: int, co: int, batch: int, width: int, kind: torch.dtype, precision: str) -> WideTiles:
    """For the weight gradient, likewise. Products in three parts have no registers left for the widest tile."""
    rows, columns = cut(co, 128), cut(ci, 256 if width > 2 and precision == "tf32" else 128)
    step = min(batch, BATCH_TILE, 128 // kind.itemsize)
    return WideTiles(rows, columns, step, 8 if min(rows, columns) >= 128 else 4, 3)


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, size: Size, padding: int, *, models: int, taps_first: bool = False,
    precision: str, tiles: WideTiles | None = None,
) -> Tensor:  # fmt: skip
    """Convolution (stride 1) over maps x (n or 1, H * W, B, Ci) of `size` H, W: (models, H' * W', B, Co).

    w (n, Co, side * side, Ci): with `bias` (n, Co) also bias and ReLU. With `taps_first`, w (n, side * side, Co, Ci)
    holds the turned weights of a layer whose input gradient is wanted, and taps are mirrored.
    """
    batch, ci = x.shape[2:]
    taps, co = (w.shape[1], w.shape[2]) if taps_first else (w.shape[2], w.shape[1])
    side = math.isqrt(taps)
    height, width = (length + 2 * padding - side + 1 for length in size)
    tiles = tiles or convolution_tiles(ci, co, batch, width, x.dtype, precision)
    # How a program's rows lie in the map; see the kernel.
    together = max(1, tiles.rows // batch)
    if batch % min(tiles.rows, batch) or tiles.rows % min(tiles.rows, batch) or width % together:
        together = 0
    w_row, factor = aligned(w.stride(0))
    y = torch.empty((models, height * width, batch, co), dtype=x.dtype, device=x.device)
    convolution_kernel[(co // tiles.columns * triton.cdiv(height * width * batch, tiles.rows), models)](
        x, w, bias, y, 0 if len(x) == 1 else x.stride(0), w_row, 0 if bias is None else bias.stride(0), batch,
        HI=size[0], WI=size[1], HO=height, WO=width, PAD=padding, CI=ci, CO=co, SIDE=side,
        W_COLUMN=w.stride(2 if taps_first else 1), W_TAP=w.stride(1 if taps_first else 2), ALIGNED=factor,
        FLIPPED=taps_first, BIASED=bias is not None, PIXELS=together, ROWS=tiles.rows, COLUMNS=tiles.columns,
        STEP=tiles.step, PRECISION=precision, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y


def weight_grad(
    xt: Tensor, dyt: Tensor, dw: Tensor, size: Size, padding: int, *, precision: str, parts: int | None = None,
    tiles: WideTiles | None = None,
) -> None:  # fmt: skip
    """Gradient of the weights from turned maps xt (n, H * W, Ci, B) of `size` and dyt (n, H' * W', Co, B) into dw
    (n, Co, side * side, up to Ci). `parts` programs share the sum of an entry: as many as it takes to fill a GPU."""
    n, _, ci, batch = xt.shape
    pixels, co = dyt.shape[1:3]
    side = math.isqrt(dw.shape[2])
    height, width = (length + 2 * padding - side + 1 for length in size)
    tiles = tiles or weight_tiles(ci, co, batch, width, xt.dtype, precision)
    programs = side * side * (co // tiles.rows) * (ci // tiles.columns)
    parts = parts or max(1, min(pixels // 4, FILL // (n * programs)))
    direct = parts == 1 and dw.shape[3] == ci
    into = dw if direct else torch.empty((n, parts, co, side * side, ci), dtype=torch.float32, device=xt.device)
    row, factor = aligned(into.stride(0))
    weight_grad_kernel[(programs, parts, n)](
        xt, dyt, into, 0 if direct else into.stride(1) // factor, row, batch, HI=size[0], WI=size[1], HO=height,
        WO=width, PAD=padding, CI=ci, CO=co, SIDE=side, PARTS=parts, ALIGNED=factor, ROWS=tiles.rows,
        COLUMNS=tiles.columns, STEP=tiles.step, PRECISION=precision, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if not direct:
        dw.copy_(into.sum(1)[..., : dw.shape[3]])


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


def pool(x: Tensor, size: Size, *, pooled: bool, keep: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """2x2 max-pool of maps (n, H * W, B, C) that came out of a ReLU, or with `pooled` false the maps as they are.

    Gives the maps and, with `keep`, the turned maps and (if pooled) the arg-max codes, DEAD where nothing is positive.
    """
    n, pixels, batch, c = x.shape
    fewer = (size[0] // 2) * (size[1] // 2) if pooled else pixels
    if not pooled and not keep:
        return x, None, None
    y = torch.empty((n, fewer, batch, c), dtype=x.dtype, device=x.device) if pooled else x
    yt = torch.empty((n, fewer, c, batch), dtype=x.dtype, device=x.device) if keep else None
    code = torch.empty((n, fewer, batch, c), dtype=torch.uint8, device=x.device) if pooled and keep else None
    rows, columns = min(batch, BATCH_TILE), cut(c, 64)
    pool_kernel[(fewer, batch // rows * (c // columns), n)](
        x, y, yt, code, batch, H=size[0], W=size[1], C=c, POOL=pooled, KEEP=keep, ROWS=rows, COLUMNS=columns,
        num_warps=4,
    )  # fmt: skip
    return y, yt, code


def unpool(
    dy: Tensor, y: Tensor, code: Tensor | None, size: Size, *, passes: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Back through `pool` and ReLU: dy is the gradient of `pool`'s result y, `size` that of its input.

    Gives the gradient of the convolution's output (None unless it `passes` on), the same turned, and its sum over
    pixels and samples (n, C), which is the gradient of the bias.
    """
    n, pixels, batch, c = dy.shape
    more = size[0] * size[1]
    # A last line that pooling has left over has no gradient.
    make = torch.zeros if code is not None and more != 4 * pixels else torch.empty
    dx = make((n, more, batch, c), dtype=dy.dtype, device=dy.device) if passes else None
    dxt = make((n, more, c, batch), dtype=dy.dtype, device=dy.device)
    sums = torch.empty((n, pixels, c), dtype=torch.float32, device=dy.device)
    rows, columns = min(batch, BATCH_TILE), cut(c, 64)
    unpool_kernel[(pixels, c // columns, n)](
        dy, y, code, dx, dxt, sums, batch, H=size[0], W=size[1], C=c, POOL=code is not None, PASS=passes, ROWS=rows,
        COLUMNS=columns, num_warps=8,
    )  # fmt: skip
    return dx, dxt, sums.sum(1)


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
