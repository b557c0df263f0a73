# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Mean and variance of BatchNorm's maps over the real samples, in one pass over them, and the statistics it keeps.

Maps lie channels last: a matrix of B S rows (S pixels of each of B samples) and C columns. A program takes a block of
columns and a span of rows, and sums x - k and (x - k)² of the rows that count, where k is the mean of the span's first
few: sums around a value so close lose next to nothing. A second kernel joins the spans by

    N = Σ n_i,    mean = Σ n_i mean_i / N,    Σ (x - mean)² = Σ (m_i + n_i (mean_i - mean)²).

The cuts depend on the maps' shape alone and every sum has a fixed order: the same bits from run to run. What happens
with fewer than two values, and what a layer keeps, is `trainers.masked_norm`'s.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedentopt.simulation.triton.windows import WAVE

TILE = 2048  # elements of the maps that a program holds at once, 16 per thread
LINES, COLUMNS = 128, 8  # of partial sums that a program adds at once: few steps, each as long as a load takes
WARPS = 4
SIZES = ["rows", "pixels", "channels", "span", "parts", "lines", "width"]  # other shapes take no other program


class Maps(NamedTuple):
    """How maps (B, C, H, W) in channels-last order are cut: `columns` channels and `lines` rows at a time."""

    samples: int
    pixels: int
    channels: int

    @classmethod
    def of(cls, x: Tensor) -> Maps:
        return cls(x.shape[0], x.shape[2] * x.shape[3], x.shape[1])

    @property
    def rows(self) -> int:
        return self.samples * self.pixels

    @property
    def columns(self) -> int:
        """The same for all shapes: other ones would have to be compiled for themselves, and with more of them more
        threads would be idle where channels are few."""
        return 32

    @property
    def blocks(self) -> int:
        return -(-self.channels // self.columns)

    @property
    def unit(self) -> int:
        """What the number of channels is counted in: with eight the compiler knows that rows begin at 16 bytes."""
        return 8 if self.channels % 8 == 0 else 1

    def lines(self, tile: int = TILE) -> int:
        return tile // self.columns

    def span(self, programs: int = WAVE) -> int:
        """Rows of a program that sums over all: as many programs as a GPU runs at once."""
        return _share(self.rows, programs // self.blocks, self.lines())

    def cut(self, tile: int = TILE) -> int:
        """Pixels of a program that sums over one sample, in the same way."""
        return _share(self.pixels, 2 * WAVE // (self.blocks * self.samples), self.lines(tile))


def _share(total: int, programs: int, lines: int) -> int:
    """Rows per program, a multiple of `lines`, so that at most `programs` of them (one at least) share `total`."""
    each = -(-total // max(1, programs))
    return -(-each // lines) * lines


@triton.jit(do_not_specialize=SIZES)
def statistics_kernel(x, real, counts, means, squares, rows, pixels, channels, span, MASKED: tl.constexpr,
                      UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    part = tl.program_id(0)
    width = channels * UNIT
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = (column < width)[None, :]
    first = part * span
    last = tl.minimum(first + span, rows)
    line = tl.arange(0, ROWS)
    x += first.to(tl.int64) * width + column[None, :]
    at = line[:, None] * width
    keep = first + line < last
    if MASKED:
        keep = keep & (tl.load(real + (first + line) // pixels, mask=keep, other=0) != 0)
    values = tl.load(x + at, mask=keep[:, None] & known, other=0.0).to(tl.float32)
    near = tl.sum(values, axis=0) / tl.maximum(tl.sum(keep.to(tl.float32), axis=0), 1.0)
    count = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    square = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        keep = start + line < last
        if MASKED:
            keep = keep & (tl.load(real + (start + line) // pixels, mask=keep, other=0) != 0)
        values = tl.load(x + (start - first) * width + at, mask=keep[:, None] & known, other=0.0).to(tl.float32)
        values = tl.where(keep[:, None], values - near[None, :], 0.0)
        count += keep.to(tl.float32)
        total += values
        square += values * values
    n = tl.sum(count, axis=0)
    off = tl.sum(total, axis=0) / tl.maximum(n, 1.0)
    spread = tl.maximum(tl.sum(square, axis=0) - n * off * off, 0.0, propagate_nan=tl.PropagateNan.ALL)
    at = part * width + column
    tl.store(counts + part, n, mask=tl.program_id(1) == 0)
    tl.store(means + at, near + off, mask=column < width)
    tl.store(squares + at, spread, mask=column < width)


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=["batches"])
def join_kernel(counts, means, squares, parts, channels, running_mean, running_var, batches, momentum, eps, out,
                TRACKED: tl.constexpr, LINES: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < channels
    line = tl.arange(0, LINES)
    number = tl.zeros((LINES,), tl.float32)
    total = tl.zeros((LINES, COLUMNS), tl.float32)
    for first in range(0, parts, LINES):
        there = first + line < parts
        n = tl.load(counts + first + line, mask=there, other=0.0)
        at = (first + line)[:, None] * channels + column[None, :]
        number += n
        total += n[:, None] * tl.load(means + at, mask=there[:, None] & known[None, :], other=0.0)
    values = tl.sum(number, axis=0)
    mean = tl.sum(total, axis=0) / tl.maximum(values, 1.0)
    spread = tl.zeros((LINES, COLUMNS), tl.float32)
    for first in range(0, parts, LINES):
        there = first + line < parts
        n = tl.load(counts + first + line, mask=there, other=0.0)
        at = (first + line)[:, None] * channels + column[None, :]
        inside = there[:, None] & known[None, :]
        off = tl.load(means + at, mask=inside, other=0.0) - mean[None, :]
        spread += tl.where(inside, tl.load(squares + at, mask=inside, other=0.0) + n[:, None] * off * off, 0.0)
    square = tl.sum(spread, axis=0)
    alone = values < 2
    var = square / tl.maximum(values, 1.0)
    if TRACKED:
        old_mean = tl.load(running_mean + column, mask=known, other=0.0)
        old_var = tl.load(running_var + column, mask=known, other=0.0)
        unbiased = square / tl.maximum(values - 1, 1.0)
        new_mean = old_mean * (1 - momentum) + mean * momentum
        new_var = old_var * (1 - momentum) + unbiased * momentum
        tl.store(running_mean + column, tl.where(alone, old_mean, new_mean), mask=known)
        tl.store(running_var + column, tl.where(alone, old_var, new_var), mask=known)
        mean = tl.where(alone, old_mean, mean)
        var = tl.where(alone, old_var, var)
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + tl.where(alone, 0, 1))
    else:
        var = tl.where(alone, 1 - eps, var)
    tl.store(out + column, mean, mask=known)
    tl.store(out + channels + column, tl.div_rn(1.0, tl.sqrt_rn(var + eps)), mask=known)
    share = tl.where(alone, 0.0, 1 / tl.maximum(values, 1.0)) + tl.zeros((COLUMNS,), tl.float32)
    tl.store(out + 2 * channels + column, share, mask=known)


def statistics(layer: _BatchNorm, x: Tensor, real: Tensor | None) -> Tensor:
    """Mean, 1 / sqrt(var + eps) and what a value counts in them, (3, C), of the rows of x where `real` (B,) says so, or
    of all; moves what the layer keeps. x is channels last, float32 or bf16; all that is summed is float32."""
    maps = Maps.of(x)
    span, lines = maps.span(WAVE * 3 // 2), maps.lines()
    parts = triton.cdiv(maps.rows, span)
    counts = torch.empty(parts, device=x.device)
    means, squares = torch.empty(2, parts, maps.channels, device=x.device)
    mask = x if real is None else real.view(torch.uint8)
    statistics_kernel[(parts, maps.blocks)](
        x, mask, counts, means, squares, maps.rows, maps.pixels, maps.channels // maps.unit, span,
        MASKED=real is not None, UNIT=maps.unit, ROWS=lines, COLUMNS=maps.columns, num_warps=WARPS,
    )  # fmt: skip
    out = torch.empty(3, maps.channels, device=x.device)
    tracked = layer.running_mean is not None
    kept = (layer.running_mean, layer.running_var, layer.num_batches_tracked) if tracked else (out, out, out)
    join_kernel[(triton.cdiv(maps.channels, COLUMNS),)](
        counts, means, squares, parts, maps.channels, *kept, layer.momentum or 0.0, layer.eps, out, TRACKED=tracked,
        LINES=LINES, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=SIZES)
def fold_kernel(parts, out, lines, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < width
    line = tl.arange(0, ROWS)
    parts += tl.program_id(1) * lines * width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, lines, ROWS):
        at = (first + line)[:, None] * width + column[None, :]
        total += tl.load(parts + at, mask=(first + line < lines)[:, None] & known[None, :], other=0.0)
    tl.store(out + tl.program_id(1) * width + column, tl.sum(total, axis=0), mask=known)


def fold(parts: Tensor) -> Tensor:
    """(n, lines, C) -> (n, C): sums over the middle in a fixed order."""
    n, lines, width = parts.shape
    out = torch.empty(n, width, device=parts.device)
    fold_kernel[(triton.cdiv(width, COLUMNS), n)](
        parts, out, lines, width, ROWS=LINES, COLUMNS=COLUMNS, num_warps=WARPS
    )
    return out
