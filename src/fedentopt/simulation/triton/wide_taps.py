# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The weight gradient of a wide 3x3 convolution with few input channels, in Triton: three taps to a program.

With 64 input channels a tile of one tap is narrow, and most of what it reads is the layer's gradient. The three taps of
one line of the kernel want the same gradient, so one program takes them together and reads it once: half of what three
programs would read. Maps come through tensor descriptors with one line of the map as a dimension, so what lies beside
the line is zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.wide import WideTiles
from fedentopt.simulation.triton.wide_descriptors import described
from fedentopt.simulation.triton.wide_maps import Size, add_parts, cut

WIDEST = 64  # input channels of which three tiles fit in registers
PARTS = 4  # programs that share the sum of an entry


@triton.jit
def tap(x, line, pixel, column, sample, batch, TURNED: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Samples of a pixel of one line of a map, (STEP, COLUMNS); zeros beside the line."""
    if TURNED:
        found = tl.trans(tl.reshape(x.load([line, pixel, column, sample]), (COLUMNS, STEP)))
    else:
        found = tl.reshape(x.load([line, pixel * batch + sample, column]), (STEP, COLUMNS))
    return found


@triton.jit
def weight_grad_kernel(x, dy, sums, batch, HI: tl.constexpr, WI: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
                       PAD: tl.constexpr, CI: tl.constexpr, CO: tl.constexpr, TURNED: tl.constexpr,
                       ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
                       PRECISION: tl.constexpr):  # fmt: skip
    ky = tl.program_id(0) % 3
    rest = tl.program_id(0) // 3
    column = rest % (CI // COLUMNS) * COLUMNS
    row = rest // (CI // COLUMNS) * ROWS
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    model = tl.program_id(2)
    top = tl.maximum(0, PAD - ky)  # output lines whose input under these taps lies inside the map
    lines = tl.maximum(0, tl.minimum(HO, HI + PAD - ky) - top)
    chunks = batch // STEP
    count = lines * WO * chunks
    left = tl.zeros((ROWS, COLUMNS), tl.float32)
    middle = tl.zeros((ROWS, COLUMNS), tl.float32)
    right = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in range(count * part // parts, count * (part + 1) // parts):
        sample = i % chunks * STEP
        h = top + i // chunks // WO
        v = i // chunks % WO
        pixel = model * (HO * WO) + h * WO + v
        a = dy.load([pixel * CO + row, sample]) if TURNED else tl.trans(dy.load([pixel * batch + sample, row]))
        line = model * HI + h + ky - PAD
        left = tl.dot(a, tap(x, line, v - PAD, column, sample, batch, TURNED, COLUMNS, STEP), left,
                      input_precision=PRECISION)  # fmt: skip
        middle = tl.dot(a, tap(x, line, v - PAD + 1, column, sample, batch, TURNED, COLUMNS, STEP), middle,
                        input_precision=PRECISION)  # fmt: skip
        right = tl.dot(a, tap(x, line, v - PAD + 2, column, sample, batch, TURNED, COLUMNS, STEP), right,
                       input_precision=PRECISION)  # fmt: skip
    at = (row + tl.arange(0, ROWS))[:, None] * (9 * CI) + (ky * 3 * CI + column + tl.arange(0, COLUMNS))[None, :]
    sums += (model.to(tl.int64) * parts + part) * (CO * 9 * CI)
    tl.store(sums + at, left)
    tl.store(sums + at + CI, middle)
    tl.store(sums + at + 2 * CI, right)


def fits(ci: int, side: int, precision: str) -> bool:
    """Whether the layer is narrow, its kernel one of three taps by three, and its tiles have registers."""
    return side == 3 and cut(ci, 2 * WIDEST) <= WIDEST and precision == "tf32"


def weight_grad(
    x: Tensor, dy: Tensor, dw: Tensor, size: Size, padding: int, *, precision: str, turned: bool = True,
    parts: int = PARTS, tiles: WideTiles | None = None,
) -> None:  # fmt: skip
    """See `wide.weight_grad`; side is 3."""
    n = len(x)
    ci, batch = x.shape[2:] if turned else (x.shape[3], x.shape[2])
    co = dy.shape[2 if turned else 3]
    height, width = (length + 2 * padding - 2 for length in size)
    if tiles is None:
        rows = cut(co, 128)
        tiles = WideTiles(rows, cut(ci, WIDEST), min(batch, 128 // x.dtype.itemsize), 8 if rows == 128 else 4, 4)
    rows, columns, step = tiles[:3]
    if turned:
        maps = described(x.view(n * size[0], size[1], ci, batch), 1, 1, columns, step)
        gradient = described(dy.view(-1, batch), rows, step)
    else:
        maps = described(x.view(n * size[0], size[1] * batch, ci), 1, step, columns)
        gradient = described(dy.view(-1, co), step, rows)
    sums = torch.empty((n, parts, co * 9 * ci), dtype=torch.float32, device=x.device)
    weight_grad_kernel[(3 * (co // rows) * (ci // columns), parts, n)](
        maps, gradient, sums, batch, HI=size[0], WI=size[1], HO=height, WO=width, PAD=padding, CI=ci, CO=co,
        TURNED=turned, ROWS=rows, COLUMNS=columns, STEP=step, PRECISION=precision, num_warps=tiles.warps,
        num_stages=tiles.stages,
    )  # fmt: skip
    add_parts(sums, ci, dw, ci)
