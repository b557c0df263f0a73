# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""BatchNorm, activation and squeeze-and-excitation (Hu et al., 2018) without a map in between.

With a = f(u) as in `norm_apply`, m_bc the mean of a over a sample's pixels and s = excite(m), a block gives y = a s.
a is computed twice forward (for m, and for y) and never written. Backward one pass over x and dy gives, per sample and
channel, all that sums over pixels are needed for:

    ds = Σ dy a,    p = Σ dy f',    q = Σ f',    p̂ = Σ dy f' x̂,    q̂ = Σ f' x̂.

For du = (dy s + dm / S) f' with dm, which excite's own backward pass makes of ds, follow

    db = Σ_b (s p + dm q / S),    dw = Σ_b (s p̂ + dm q̂ / S)

without another pass; dx is `norm_apply.input_grad`'s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.norm_apply import Norm, _affine, activated, derivative, normalised
from fedentopt.simulation.triton.norm_statistics import COLUMNS, LINES, WARPS, Maps

TILE = 1024  # five sums beside it
SIZES = ["pixels", "channels", "blocks", "cuts", "span", "lines", "width"]


@triton.jit(do_not_specialize=SIZES)
def means_kernel(x, statistics, weight, bias, out, pixels, channels, blocks, cuts, span, ACT: tl.constexpr,
                 AFFINE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    width = channels * UNIT
    part = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    known = column < width
    line = tl.arange(0, ROWS)
    first = part % cuts * span
    last = tl.minimum(first + span, pixels)
    x += (part // cuts).to(tl.int64) * pixels * width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        there = (start + line < last)[:, None] & known[None, :]
        at = (start + line)[:, None] * width + column[None, :]
        values = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        _, u, _ = normalised(values, statistics, weight, bias, column, known, width, AFFINE)
        total += tl.where(there, activated(u, ACT), 0.0)
    tl.store(out + part * width + column, tl.sum(total, axis=0) / pixels, mask=known)


@triton.jit(do_not_specialize=SIZES)
def excite_kernel(x, dy, statistics, weight, bias, out, pixels, channels, blocks, cuts, span, lines,
                  ACT: tl.constexpr, AFFINE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    width = channels * UNIT
    part = tl.program_id(0) // blocks
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    known = column < width
    line = tl.arange(0, ROWS)
    first = part % cuts * span
    last = tl.minimum(first + span, pixels)
    x += (part // cuts).to(tl.int64) * pixels * width
    dy += (part // cuts).to(tl.int64) * pixels * width
    ds = tl.zeros((ROWS, COLUMNS), tl.float32)
    p = tl.zeros((ROWS, COLUMNS), tl.float32)
    q = tl.zeros((ROWS, COLUMNS), tl.float32)
    p_unit = tl.zeros((ROWS, COLUMNS), tl.float32)
    q_unit = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        there = (start + line < last)[:, None] & known[None, :]
        at = (start + line)[:, None] * width + column[None, :]
        values = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        push = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        unit, u, _ = normalised(values, statistics, weight, bias, column, known, width, AFFINE)
        unit = tl.where(there, unit, 0.0)
        d = tl.where(there, derivative(u, ACT), 0.0)
        ds += tl.where(there, push * activated(u, ACT), 0.0)
        p += push * d
        q += d
        p_unit += push * d * unit
        q_unit += d * unit
    at = part * width + column
    size = lines * width
    tl.store(out + at, tl.sum(ds, axis=0), mask=known)
    tl.store(out + size + at, tl.sum(p, axis=0), mask=known)
    tl.store(out + 2 * size + at, tl.sum(q, axis=0), mask=known)
    tl.store(out + 3 * size + at, tl.sum(p_unit, axis=0), mask=known)
    tl.store(out + 4 * size + at, tl.sum(q_unit, axis=0), mask=known)


@triton.jit(do_not_specialize=SIZES)
def excite_fold_kernel(parts, scale, pooled, out, lines, cuts, pixels, width, ROWS: tl.constexpr,
                       COLUMNS: tl.constexpr):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < width
    line = tl.arange(0, ROWS)
    size = lines * width
    by_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    by_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, lines, ROWS):
        there = (first + line < lines)[:, None] & known[None, :]
        at = (first + line)[:, None] * width + column[None, :]
        of_sample = ((first + line) // cuts)[:, None] * width + column[None, :]
        s = tl.load(scale + of_sample, mask=there, other=0.0).to(tl.float32)
        m = tl.load(pooled + of_sample, mask=there, other=0.0) / pixels
        by_bias += s * tl.load(parts + size + at, mask=there, other=0.0)
        by_bias += m * tl.load(parts + 2 * size + at, mask=there, other=0.0)
        by_weight += s * tl.load(parts + 3 * size + at, mask=there, other=0.0)
        by_weight += m * tl.load(parts + 4 * size + at, mask=there, other=0.0)
    tl.store(out + column, tl.sum(by_bias, axis=0), mask=known)
    tl.store(out + width + column, tl.sum(by_weight, axis=0), mask=known)


def means(x: Tensor, norm: Norm) -> Tensor:
    """m, (B, C) float32."""
    maps = Maps.of(x)
    span, lines = maps.cut(), maps.lines()
    cuts = triton.cdiv(maps.pixels, span)
    out = torch.empty(maps.samples, cuts, maps.channels, device=x.device)
    means_kernel[(maps.samples * cuts * maps.blocks,)](
        x, norm.statistics, *_affine(norm), out, maps.pixels, maps.channels // maps.unit, maps.blocks, cuts, span,
        ACT=norm.activation, AFFINE=norm.weight is not None, UNIT=maps.unit, ROWS=lines, COLUMNS=maps.columns,
        num_warps=WARPS,
    )  # fmt: skip
    return _joined(out)


def excite_sums(x: Tensor, dy: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """ds, (B, C), and all five sums, (5, B cuts, C), which `fold_sums` takes."""
    maps = Maps.of(x)
    span, lines = maps.cut(TILE), maps.lines(TILE)
    cuts = triton.cdiv(maps.pixels, span)
    parts = torch.empty(5, maps.samples * cuts, maps.channels, device=x.device)
    excite_kernel[(maps.samples * cuts * maps.blocks,)](
        x, dy, norm.statistics, *_affine(norm), parts, maps.pixels, maps.channels // maps.unit, maps.blocks, cuts, span,
        maps.samples * cuts, ACT=norm.activation, AFFINE=norm.weight is not None, UNIT=maps.unit, ROWS=lines,
        COLUMNS=maps.columns, num_warps=WARPS,
    )  # fmt: skip
    return _joined(parts[0].view(maps.samples, cuts, maps.channels)), parts


def fold_sums(parts: Tensor, scale: Tensor, pooled: Tensor, pixels: int) -> Tensor:
    """db and dw, (2, C), from the five sums, s and dm (B, C)."""
    _, lines, width = parts.shape
    out = torch.empty(2, width, device=parts.device)
    excite_fold_kernel[(triton.cdiv(width, COLUMNS),)](
        parts, scale, pooled, out, lines, lines // len(scale), pixels, width, ROWS=LINES, COLUMNS=COLUMNS,
        num_warps=WARPS,
    )  # fmt: skip
    return out


def _joined(parts: Tensor) -> Tensor:
    """(B, cuts, C) -> (B, C): the sum over a sample's cuts."""
    return parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)
