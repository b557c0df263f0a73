# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Stacked convolutions with many channels in Triton: every layer of n models is one launch on tensor cores.

Maps lie pixel by pixel, (n, H * W, B, C): the batch of one pixel is a matrix, and a convolution is a sum of matrix
products, one per pixel and tap. A tap that falls outside the map is left out instead of multiplied by zeros (a quarter
of VGG-11's work on 32x32 images). Tensor cores want the summed axis contiguous in both factors, which for the weight
gradient is the batch: so each map is kept a second time with its matrices transposed, (n, H * W, C, B), which the
kernels between the products write along the way. B is padded to whole tiles with samples that carry no gradient.
Channels come in multiples of 16, but for images: `windows` makes a convolution of few channels one of a single tap.

Products take fp32 maps as TF32 (or as three TF32 products, fp32's accuracy) and bf16 maps as they are; sums are fp32.

A model's results have the same bits whatever trains beside it: the order of every sum follows from the layer's shape.
The number of models decides only which rows and columns one program takes, never what it adds in which order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.linear import aligned
from fedentopt.simulation.triton.wide_maps import BATCH_TILE, Size, add_parts, cut
from fedentopt.simulation.triton.wide_tiles import WideTiles

SHARED = 26  # programs that may share the sums of one model's layer: those of ten models then fill a large GPU
FEW_PROGRAMS = 132  # with fewer than this, multiprocessors of a large GPU have nothing to do


@triton.jit
def convolution_kernel(x, w, bias, y, x_model, w_model, bias_model, batch, HI: tl.constexpr, WI: tl.constexpr,
                       HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr,
                       SIDE: tl.constexpr, W_COLUMN: tl.constexpr, W_TAP: tl.constexpr, W_ENTRY: tl.constexpr,
                       ALIGNED: tl.constexpr, FLIPPED: tl.constexpr, BIASED: tl.constexpr, PIXELS: tl.constexpr,
                       ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
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
    b_at = column[:, None] * W_COLUMN + entry[None, :] * W_ENTRY
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
        b = tl.load(w + (which * W_TAP + block * STEP * W_ENTRY) + b_at)
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
def tap_steps(tap, batch, HI: tl.constexpr, WI: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr,
              SIDE: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """How many steps a tap's sum over pixels and samples has: pixels whose input lies inside the map, in chunks."""
    down = tap // SIDE - PAD
    over = tap % SIDE - PAD
    lines = tl.maximum(0, tl.minimum(HO, HI - down) - tl.maximum(0, -down))
    across = tl.maximum(0, tl.minimum(WO, WI - over) - tl.maximum(0, -over))
    return lines * across * (batch // STEP)


@triton.jit
def tap_products(x, dy, product, begin, end, model, first_row, first_column, tap, batch, HI: tl.constexpr,
                 WI: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr,
                 CO: tl.constexpr, SIDE: tl.constexpr, TURNED: tl.constexpr, DESCRIBED: tl.constexpr,
                 ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """`product` (ROWS, COLUMNS) and steps `begin` to `end` of the sum of dy' x over pixels and samples for one tap.

    Maps come as pointers or, if DESCRIBED, as descriptors of all models' maps as one matrix, with the batch or, unless
    TURNED, the channels in its lines.
    """
    down = tap // SIDE - PAD
    over = tap % SIDE - PAD
    top = tl.maximum(0, -down)  # output pixels whose input under this tap lies inside the map
    left = tl.maximum(0, -over)
    across = tl.maximum(0, tl.minimum(WO, WI - over) - left)
    chunks = batch // STEP
    entry = tl.arange(0, STEP)
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    if not DESCRIBED:
        x += model.to(tl.int64) * (HI * WI * CI) * batch
        dy += model.to(tl.int64) * (HO * WO * CO) * batch
    if TURNED:
        a_at = row[:, None] * batch + entry[None, :]
        b_at = column[:, None] * batch + entry[None, :]
    else:
        a_at = entry[:, None] * CO + row[None, :]
        b_at = entry[:, None] * CI + column[None, :]
    for i in range(begin, end):
        chunk = i % chunks
        place = i // chunks
        h = top + place // across
        v = left + place % across
        dy_pixel = h * WO + v
        x_pixel = (h + down) * WI + v + over
        if DESCRIBED:
            dy_pixel += model * (HO * WO)
            x_pixel += model * (HI * WI)
            if TURNED:
                a = dy.load([dy_pixel * CO + first_row, chunk * STEP])
                b = x.load([x_pixel * CI + first_column, chunk * STEP])
            else:
                a = dy.load([dy_pixel * batch + chunk * STEP, first_row])
                b = x.load([x_pixel * batch + chunk * STEP, first_column])
        elif TURNED:
            a = tl.load(dy + dy_pixel * CO * batch + chunk * STEP + a_at)
            b = tl.load(x + x_pixel * CI * batch + chunk * STEP + b_at)
        else:
            a = tl.load(dy + dy_pixel * CO * batch + chunk * STEP * CO + a_at)
            b = tl.load(x + x_pixel * CI * batch + chunk * STEP * CI + b_at)
        if TURNED:
            product = tl.dot(a, tl.trans(b), product, input_precision=PRECISION)
        else:
            product = tl.dot(tl.trans(a), b, product, input_precision=PRECISION)
    return product


@triton.jit
def weight_grad_kernel(x, dy, dw, dw_part, dw_model, batch, HI: tl.constexpr, WI: tl.constexpr, HO: tl.constexpr,
                       WO: tl.constexpr, PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, SIDE: tl.constexpr,
                       PARTS: tl.constexpr, ALIGNED: tl.constexpr, TURNED: tl.constexpr, DESCRIBED: tl.constexpr,
                       ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    column = (tl.program_id(0) % (CI // COLUMNS)) * COLUMNS
    rest = tl.program_id(0) // (CI // COLUMNS)
    row = (rest % (CO // ROWS)) * ROWS
    tap = rest // (CO // ROWS)
    part = tl.program_id(1)
    model = tl.program_id(2)
    steps = tap_steps(tap, batch, HI, WI, HO, WO, PAD, SIDE, STEP)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    product = tap_products(x, dy, product, steps * part // PARTS, steps * (part + 1) // PARTS, model, row, column, tap,
                           batch, HI, WI, HO, WO, PAD, CI, CO, SIDE, TURNED, DESCRIBED, ROWS, COLUMNS, STEP,
                           PRECISION)  # fmt: skip
    rows = row + tl.arange(0, ROWS)
    at = rows[:, None] * (SIDE * SIDE * CI) + tap * CI + (column + tl.arange(0, COLUMNS))[None, :]
    tl.store(dw + (model.to(tl.int64) * dw_model + part * dw_part) * ALIGNED + at, product)


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


def pixels_together(rows: int, batch: int, width: int) -> int:
    """How a program's rows lie in a map: 1 for a part of one pixel's batch, more for that many neighbours on one line,
    0 for anything else."""
    together = max(1, rows // batch)
    return 0 if batch % min(rows, batch) or rows % min(rows, batch) or width % together else together


def weight_tiles(ci: int, co: int, batch: int, width: int, kind: torch.dtype, precision: str) -> WideTiles:
    """For the weight gradient, likewise. Products in three parts have no registers left for the widest tile."""
    rows, columns = cut(co, 128), cut(ci, 256 if width > 2 and precision == "tf32" else 128)
    step = min(batch, BATCH_TILE, 128 // kind.itemsize)
    return WideTiles(rows, columns, step, 8 if min(rows, columns) >= 128 else 4, 3)


def convolution(
    x: Tensor, w: Tensor, bias: Tensor | None, size: Size, padding: int, *, models: int, taps_first: bool = False,
    inputs_first: bool = False, precision: str, tiles: WideTiles | None = None,
) -> Tensor:  # fmt: skip
    """Convolution (stride 1) over maps x (n or 1, H * W, B, Ci) of `size` H, W: (models, H' * W', B, Co).

    w (n, Co, side * side, Ci): with `bias` (n, Co) also bias and ReLU. The weights of a layer whose input gradient is
    wanted come turned, with `taps_first` (n, side * side, Co, Ci), or as they lie, with `inputs_first` (n, Ci, side *
    side, Co); taps are then mirrored.
    """
    batch, ci = x.shape[2:]
    taps, co = (w.shape[1], w.shape[2]) if taps_first else (w.shape[2], w.shape[3 if inputs_first else 1])
    columns, tap, entries = (2, 1, 3) if taps_first else (3, 2, 1) if inputs_first else (1, 2, 3)
    side = math.isqrt(taps)
    height, width = (length + 2 * padding - side + 1 for length in size)
    tiles = tiles or convolution_tiles(ci, co, batch, width, x.dtype, precision)
    together = pixels_together(tiles.rows, batch, width)
    w_row, factor = aligned(w.stride(0))
    y = torch.empty((models, height * width, batch, co), dtype=x.dtype, device=x.device)
    convolution_kernel[(co // tiles.columns * triton.cdiv(height * width * batch, tiles.rows), models)](
        x, w, bias, y, 0 if len(x) == 1 else x.stride(0), w_row, 0 if bias is None else bias.stride(0), batch,
        HI=size[0], WI=size[1], HO=height, WO=width, PAD=padding, CI=ci, CO=co, SIDE=side,
        W_COLUMN=w.stride(columns), W_TAP=w.stride(tap), W_ENTRY=w.stride(entries), ALIGNED=factor,
        FLIPPED=taps_first or inputs_first, BIASED=bias is not None, PIXELS=together, ROWS=tiles.rows,
        COLUMNS=tiles.columns, STEP=tiles.step, PRECISION=precision, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y


def operands(x: Tensor, dy: Tensor, tiles: WideTiles, *, turned: bool, described: bool) -> tuple[Any, Any]:
    """Maps and gradients as `tap_products` takes them."""
    if not described:
        return x, dy
    from triton.tools.tensor_descriptor import TensorDescriptor

    def made(maps: Tensor, channels: int) -> Any:
        matrix = maps.view(-1, maps.shape[3])
        block = [channels, tiles.step] if turned else [tiles.step, channels]
        return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block)

    return made(x, tiles.columns), made(dy, tiles.rows)


def weight_grad(
    x: Tensor, dy: Tensor, dw: Tensor, size: Size, padding: int, *, precision: str, turned: bool = True,
    described: bool = False, parts: int | None = None, tiles: WideTiles | None = None,
) -> None:  # fmt: skip
    """Gradient of the weights from turned maps x (n, H * W, Ci, B) of `size` and dy (n, H' * W', Co, B), or from maps
    as they lie, into dw (n, Co, side * side, up to Ci), through tensor descriptors if `described`.

    `parts` programs share the sum of an entry, by default as many as the layer's shape says.
    """
    n, pixels = dy.shape[:2]
    ci, batch = x.shape[2:] if turned else (x.shape[3], x.shape[2])
    co = dy.shape[2 if turned else 3]
    side = math.isqrt(dw.shape[2])
    height, width = (length + 2 * padding - side + 1 for length in size)
    if tiles is None:
        tiles = weight_tiles(ci, co, batch, width, x.dtype, precision)
        programs = side * side * (co // tiles.rows) * (ci // tiles.columns)
        parts = parts or max(1, min(pixels // 4, SHARED // programs))
        if n * parts * programs < FEW_PROGRAMS:
            tiles = tiles._replace(rows=min(tiles.rows, 64), columns=min(tiles.columns, 128), warps=4)
    programs = side * side * (co // tiles.rows) * (ci // tiles.columns)
    parts = parts or max(1, min(pixels // 4, SHARED // programs))
    direct = parts == 1 and dw.shape[3] == ci
    into = dw if direct else torch.empty((n, parts, co, side * side, ci), dtype=torch.float32, device=x.device)
    row, factor = aligned(into.stride(0))
    weight_grad_kernel[(programs, parts, n)](
        *operands(x, dy, tiles, turned=turned, described=described), into,
        0 if direct else into.stride(1) // factor, row, batch, HI=size[0], WI=size[1], HO=height, WO=width, PAD=padding,
        CI=ci, CO=co, SIDE=side, PARTS=parts, ALIGNED=factor, TURNED=turned, DESCRIBED=described,
        ROWS=tiles.rows, COLUMNS=tiles.columns, STEP=tiles.step, PRECISION=precision, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    if not direct:
        add_parts(into.flatten(2), ci, dw, dw.shape[3])
