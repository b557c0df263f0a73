# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Normalise maps, and whatever follows element by element, in one pass; the way back in two.

With u = w (x - mean) / sqrt(var + eps) + b and an activation f, a layer gives

    y = f(u) [· scale_bc] [· factor_b] [+ residual],

where `scale` is what squeeze-and-excitation makes of a sample's channels and `factor` what stochastic depth makes of
the sample. Backward, u is computed again instead of kept; with x̂ = (x - mean) / sqrt(var + eps)

    du = dy · factor_b · f'(u)    or    (dy · scale_bc + pooled_bc / S) · f'(u),
    db = Σ du,    dw = Σ du x̂,    dx = w / sqrt(var + eps) (du - r_b (db + x̂ dw) / N):

one pass for the two sums (squeeze-and-excitation's own: `norm_excite`), one for dx. r_b / N as in `masked_norm`.
Maps lie channels last (`norm_statistics.Maps`); all is computed in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.norm_statistics import WARPS, Maps, fold

ACTIVATIONS = ("none", "silu", "relu", "relu6")
SIZES = ["rows", "pixels", "channels", "blocks", "span", "parts"]


class Norm(NamedTuple):
    """What maps are normalised by: their statistics (`norm_statistics.statistics`), the layer's weight and bias, if it
    has any, and the activation behind it."""

    statistics: Tensor
    weight: Tensor | None
    bias: Tensor | None
    activation: str


@triton.jit
def normalised(x, statistics, weight, bias, column, known, width, AFFINE: tl.constexpr):
    """x̂ and u of a tile, and w / sqrt(var + eps) of its columns."""
    mean = tl.load(statistics + column, mask=known, other=0.0)
    slope = tl.load(statistics + width + column, mask=known, other=0.0)
    unit = (x - mean[None, :]) * slope[None, :]
    u = unit
    if AFFINE:
        w = tl.load(weight + column, mask=known, other=0.0)
        u = unit * w[None, :] + tl.load(bias + column, mask=known, other=0.0)[None, :]
        slope = slope * w
    return unit, u, slope


@triton.jit
def activated(u, ACT: tl.constexpr):
    if ACT == "silu":
        u = u * tl.sigmoid(u)
    elif ACT == "relu":
        u = tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu6":
        u = tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)
        u = tl.minimum(u, 6.0, propagate_nan=tl.PropagateNan.ALL)
    return u


@triton.jit
def derivative(u, ACT: tl.constexpr):
    """f'(u); at the kinks of ReLU and ReLU6 zero, as torch has it."""
    d = tl.full(u.shape, 1.0, tl.float32)
    if ACT == "silu":
        s = tl.sigmoid(u)
        d = s * (1 + u * (1 - s))
    elif ACT == "relu":
        d = tl.where(u > 0, 1.0, 0.0)
    elif ACT == "relu6":
        d = tl.where((u > 0) & (u < 6), 1.0, 0.0)
    return d


@triton.jit(do_not_specialize=SIZES)
def apply_kernel(x, y, residual, factor, scale, statistics, weight, bias, rows, pixels, channels, blocks,
                 ACT: tl.constexpr, AFFINE: tl.constexpr, SCALED: tl.constexpr, FACTOR: tl.constexpr,
                 RESIDUAL: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    width = channels * UNIT
    first = tl.program_id(0) // blocks * ROWS
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.arange(0, ROWS)
    inside = first + line < rows
    known = column < width
    there = inside[:, None] & known[None, :]
    at = first.to(tl.int64) * width + (line[:, None] * width + column[None, :])
    values = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    _, u, _ = normalised(values, statistics, weight, bias, column, known, width, AFFINE)
    out = activated(u, ACT)
    sample = (first + line) // pixels
    if SCALED:
        out *= tl.load(scale + sample[:, None] * width + column[None, :], mask=there, other=0.0).to(tl.float32)
    if FACTOR:
        out *= tl.load(factor + sample, mask=inside, other=0.0)[:, None]
    if RESIDUAL:
        out += tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=SIZES)
def sums_kernel(x, dy, factor, statistics, weight, bias, sums, rows, pixels, channels, span, parts,
                ACT: tl.constexpr, AFFINE: tl.constexpr, FACTOR: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    part = tl.program_id(0)
    width = channels * UNIT
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < width
    line = tl.arange(0, ROWS)
    first = part * span
    last = tl.minimum(first + span, rows)
    x += first.to(tl.int64) * width
    dy += first.to(tl.int64) * width
    by_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    by_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(first, last, ROWS):
        inside = start + line < last
        there = inside[:, None] & known[None, :]
        at = (start - first + line)[:, None] * width + column[None, :]
        values = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        push = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        unit, u, _ = normalised(values, statistics, weight, bias, column, known, width, AFFINE)
        if FACTOR:
            push *= tl.load(factor + (start + line) // pixels, mask=inside, other=0.0)[:, None]
        # Rows past the end have no push, but what they hold instead of x may be any size.
        du = tl.where(there, push * derivative(u, ACT), 0.0)
        by_bias += du
        by_weight += tl.where(there, du * unit, 0.0)
    at = part * width + column
    tl.store(sums + at, tl.sum(by_bias, axis=0), mask=known)
    tl.store(sums + parts * width + at, tl.sum(by_weight, axis=0), mask=known)


@triton.jit(do_not_specialize=SIZES)
def input_grad_kernel(x, dy, dx, factor, scale, pooled, real, statistics, weight, bias, sums, rows, pixels, channels,
                      blocks, ACT: tl.constexpr, AFFINE: tl.constexpr, SCALED: tl.constexpr, FACTOR: tl.constexpr,
                      MASKED: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
                      COLUMNS: tl.constexpr):  # fmt: skip
    width = channels * UNIT
    first = tl.program_id(0) // blocks * ROWS
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.arange(0, ROWS)
    inside = first + line < rows
    known = column < width
    there = inside[:, None] & known[None, :]
    at = first.to(tl.int64) * width + (line[:, None] * width + column[None, :])
    values = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    du = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
    unit, u, slope = normalised(values, statistics, weight, bias, column, known, width, AFFINE)
    sample = (first + line) // pixels
    if SCALED:
        of_sample = sample[:, None] * width + column[None, :]
        du = du * tl.load(scale + of_sample, mask=there, other=0.0).to(tl.float32)
        du += tl.load(pooled + of_sample, mask=there, other=0.0) / pixels
    if FACTOR:
        du *= tl.load(factor + sample, mask=inside, other=0.0)[:, None]
    du *= derivative(u, ACT)
    share = tl.load(statistics + 2 * width + column, mask=known, other=0.0)
    by_bias = tl.load(sums + column, mask=known, other=0.0) * share
    by_weight = tl.load(sums + width + column, mask=known, other=0.0) * share
    common = by_bias[None, :] + unit * by_weight[None, :]
    if MASKED:
        counts = tl.load(real + sample, mask=inside, other=0) != 0
        common = tl.where(counts[:, None], common, 0.0)
    tl.store(dx + at, (slope[None, :] * (du - common)).to(dx.dtype.element_ty), mask=there)


def empty_maps(x: Tensor) -> Tensor:
    """Memory for maps of the shape and type of x, channels last."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def apply(
    x: Tensor, norm: Norm, *, scale: Tensor | None = None, factor: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """y of the formula above: x, residual and y (B, C, H, W) channels last, scale (B, C), factor (B,) float32."""
    maps, y = Maps.of(x), empty_maps(x)
    lines = maps.lines()
    apply_kernel[(triton.cdiv(maps.rows, lines) * maps.blocks,)](
        x, y, _or(residual, x), _or(factor, norm.statistics), _or(scale, x), norm.statistics, *_affine(norm),
        maps.rows, maps.pixels, maps.channels // maps.unit, maps.blocks, ACT=norm.activation,
        AFFINE=norm.weight is not None, SCALED=scale is not None, FACTOR=factor is not None,
        RESIDUAL=residual is not None, UNIT=maps.unit, ROWS=lines, COLUMNS=maps.columns, num_warps=WARPS,
    )  # fmt: skip
    return y


def sums(x: Tensor, dy: Tensor, norm: Norm, factor: Tensor | None = None) -> Tensor:
    """db and dw, (2, C)."""
    maps = Maps.of(x)
    span, lines = maps.span(), maps.lines()
    parts = triton.cdiv(maps.rows, span)
    out = torch.empty(2, parts, maps.channels, device=x.device)
    sums_kernel[(parts, maps.blocks)](
        x, dy, _or(factor, norm.statistics), norm.statistics, *_affine(norm), out, maps.rows, maps.pixels,
        maps.channels // maps.unit, span, parts, ACT=norm.activation, AFFINE=norm.weight is not None,
        FACTOR=factor is not None, UNIT=maps.unit, ROWS=lines, COLUMNS=maps.columns, num_warps=WARPS,
    )  # fmt: skip
    return fold(out)


def input_grad(
    x: Tensor, dy: Tensor, norm: Norm, both: Tensor, *, real: Tensor | None, scale: Tensor | None = None,
    pooled: Tensor | None = None, factor: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """dx, given db and dw (`both`), and with `scale` what the samples' means have for a gradient (`pooled`), (B, C)."""
    maps, dx = Maps.of(x), empty_maps(x)
    lines = maps.lines()
    input_grad_kernel[(triton.cdiv(maps.rows, lines) * maps.blocks,)](
        x, dy, dx, _or(factor, norm.statistics), _or(scale, x), _or(pooled, norm.statistics),
        norm.statistics if real is None else real.view(torch.uint8), norm.statistics, *_affine(norm), both, maps.rows,
        maps.pixels, maps.channels // maps.unit, maps.blocks, ACT=norm.activation, AFFINE=norm.weight is not None,
        SCALED=scale is not None, FACTOR=factor is not None, MASKED=real is not None, UNIT=maps.unit, ROWS=lines,
        COLUMNS=maps.columns, num_warps=WARPS,
    )  # fmt: skip
    return dx


def _or(given: Tensor | None, other: Tensor) -> Tensor:
    """Something to point at where nothing is read."""
    return other if given is None else given


def _affine(norm: Norm) -> tuple[Tensor, Tensor]:
    return _or(norm.weight, norm.statistics), _or(norm.bias, norm.statistics)
