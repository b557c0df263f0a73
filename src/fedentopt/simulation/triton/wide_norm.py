# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""BatchNorm between the products of `wide`, for many models at once, in Triton.

A model's maps z hold P pixels of B samples, of which n are real and the rest padding. Statistics are per model and
channel over the N = n P real values, gradients those of `masked_norm`, whose formulas these are. What a layer does
behind its product is one pass: normalise, ReLU, pool, turned copy. Its way back is two: the sums that are the gradients
of weight and bias, then the gradient of z, which every value of a channel has a part in, those that a pool has left
over included.

Sums are taken pixel by pixel, then over pixels, in an order that the number of models has no part in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.simulation.triton.interface import DEAD
from fedentopt.simulation.triton.wide_maps import BATCH_TILE, Size, add_parts, cut

_DEAD = tl.constexpr(DEAD)


class Statistics(NamedTuple):
    """Mean and variance (n, C) of the real values, and how many these are, (n, 1)."""

    mean: Tensor
    var: Tensor
    values: Tensor


class Slope(NamedTuple):
    """y = `scale` z + `shift` for the maps z of a layer, both (n, C)."""

    scale: Tensor
    shift: Tensor


class Normalised(NamedTuple):
    """What a batch's way back needs: the `maps` (n, P, B, C) that were normalised and which of their samples are `real`
    (n, B), the layer's `weight`, the `mean` and `var` that were taken (n, C), and a value's `share` (n, 1) in these,
    which is 1 / N, or 0 where they were not the batch's own."""

    maps: Tensor
    real: Tensor
    weight: Tensor
    mean: Tensor
    var: Tensor
    share: Tensor
    eps: float


class Into(NamedTuple):
    """Where gradients go (n, C): of the layer's weight and bias, and of the bias of the product before it."""

    weight: Tensor
    bias: Tensor
    product: Tensor | None


@triton.jit
def moments_kernel(z, real, sums, squares, batch, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    pixel = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    model = tl.program_id(2).to(tl.int64)
    part = model * tl.num_programs(0) + pixel
    z += part * (C * batch)
    real += model * batch
    total = tl.zeros((COLUMNS,), tl.float32)
    number = 0.0
    for first in range(0, batch, ROWS):
        row = first + tl.arange(0, ROWS)
        counts = tl.load(real + row)
        value = tl.load(z + row[:, None] * C + column[None, :]).to(tl.float32)
        total += tl.sum(tl.where(counts[:, None] > 0, value, 0.0), axis=0)
        number += tl.sum(counts, axis=0)
    mean = total / tl.maximum(number, 1.0)
    apart = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, batch, ROWS):
        row = first + tl.arange(0, ROWS)
        counts = tl.load(real + row)
        value = tl.load(z + row[:, None] * C + column[None, :]).to(tl.float32) - mean[None, :]
        apart += tl.sum(tl.where(counts[:, None] > 0, value * value, 0.0), axis=0)
    tl.store(sums + part * C + column, total)
    tl.store(squares + part * C + column, apart)


@triton.jit
def activate(z, at, scale, shift):
    """ReLU of the normalised values, rounded as maps are kept; NaN stays, so that a diverged model shows."""
    value = tl.load(z + at).to(tl.float32) * scale[None, :] + shift[None, :]
    return tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL).to(z.dtype.element_ty).to(tl.float32)


@triton.jit
def activate_kernel(z, real, scale, shift, y, yt, code, batch, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
                    POOL: tl.constexpr, KEEP: tl.constexpr, TURN: tl.constexpr, ROWS: tl.constexpr,
                    COLUMNS: tl.constexpr):  # fmt: skip
    pixel = tl.program_id(0)
    row = (tl.program_id(1) // (C // COLUMNS)) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) % (C // COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    model = tl.program_id(2).to(tl.int64)
    at = row[:, None] * C + column[None, :]
    matrix = C * batch
    base = (model * tl.num_programs(0) + pixel) * matrix
    by = tl.load(scale + model * C + column)
    onto = tl.load(shift + model * C + column)
    if POOL:
        corner = (pixel // (W // 2)) * 2 * W + (pixel % (W // 2)) * 2
        z += (model * (H * W) + corner) * matrix
        best = activate(z, at, by, onto)
        top = tl.zeros((ROWS, COLUMNS), tl.int32)
        for place in tl.static_range(1, 4):
            value = activate(z, ((place // 2) * W + place % 2) * matrix + at, by, onto)
            better = (value > best) | (value != value)
            best = tl.where(better, value, best)
            top = tl.where(better, place, top)
        if KEEP:
            tl.store(code + base + at, tl.where(best <= 0, _DEAD, top).to(tl.uint8))
    else:
        best = activate(z, base + at, by, onto)
    if real is not None:
        best = tl.where(tl.load(real + model * batch + row)[:, None] > 0, best, 0.0)
    tl.store(y + base + at, best.to(y.dtype.element_ty))
    if TURN:
        tl.store(yt + base + column[:, None] * batch + row[None, :], tl.trans(best).to(yt.dtype.element_ty))


@triton.jit
def upstream(dy, y, code, base, at, place, POOL: tl.constexpr):
    """The gradient that comes back to a value through ReLU and pool; `base` and `at` say where its result lies."""
    grad = tl.load(dy + base + at).to(tl.float32)
    if POOL:
        return tl.where(tl.load(code + base + at) == place, grad, 0.0)
    else:  # noqa: RET505  (Triton compiles one of two branches)
        return tl.where(tl.load(y + base + at).to(tl.float32) <= 0, 0.0, grad)


@triton.jit
def gradient_sums_kernel(dy, y, code, z, mean, inverse, sums, by_x, batch, H: tl.constexpr, W: tl.constexpr,
                         C: tl.constexpr, POOL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    pixel = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    model = tl.program_id(2).to(tl.int64)
    matrix = C * batch
    part = model * tl.num_programs(0) + pixel
    middle = tl.load(mean + model * C + column)[None, :]
    per_deviation = tl.load(inverse + model * C + column)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    times_x = tl.zeros((ROWS, COLUMNS), tl.float32)
    corner = (pixel // (W // 2)) * 2 * W + (pixel % (W // 2)) * 2 if POOL else pixel
    for first in range(0, batch, ROWS):
        at = (first + tl.arange(0, ROWS))[:, None] * C + column[None, :]
        for place in tl.static_range(4 if POOL else 1):
            grad = upstream(dy, y, code, part * matrix, at, place, POOL)
            there = (model * (H * W) + corner + (place // 2) * W + place % 2) * matrix
            x = (tl.load(z + there + at).to(tl.float32) - middle) * per_deviation
            total += grad
            times_x += grad * x
    tl.store(sums + part * C + column, tl.sum(total, axis=0))
    tl.store(by_x + part * C + column, tl.sum(times_x, axis=0))


@triton.jit
def gradient_kernel(dy, y, code, z, real, slope, per_value, rest, dz, dzt, batch, H: tl.constexpr, W: tl.constexpr,
                    C: tl.constexpr, POOL: tl.constexpr, PASS: tl.constexpr, TURN: tl.constexpr, ROWS: tl.constexpr,
                    COLUMNS: tl.constexpr):  # fmt: skip
    pixel = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    model = tl.program_id(2).to(tl.int64)
    matrix = C * batch
    base = (model * (H * W) + pixel) * matrix
    of_grad = tl.load(slope + model * C + column)[None, :]
    of_value = tl.load(per_value + model * C + column)[None, :]
    alone = tl.load(rest + model * C + column)[None, :]
    h = pixel // W
    v = pixel % W
    if POOL:
        inside = (h < H // 2 * 2) & (v < W // 2 * 2)  # a last line that pooling leaves over has no gradient of its own
        under = tl.minimum(h // 2, H // 2 - 1) * (W // 2) + tl.minimum(v // 2, W // 2 - 1)
        source = (model * (H // 2 * (W // 2)) + under) * matrix
    else:
        inside = h < H
        source = base
    place = h % 2 * 2 + v % 2
    for first in range(0, batch, ROWS):
        row = first + tl.arange(0, ROWS)
        at = row[:, None] * C + column[None, :]
        counts = tl.load(real + model * batch + row)[:, None]
        grad = tl.where(inside, upstream(dy, y, code, source, at, place, POOL), 0.0)
        value = tl.load(z + base + at).to(tl.float32)
        made = of_grad * grad + tl.where(counts > 0, of_value * value + alone, 0.0)
        made = made.to(dz.dtype.element_ty)
        if PASS:
            tl.store(dz + base + at, made)
        if TURN:
            tl.store(dzt + base + column[:, None] * batch + row[None, :], tl.trans(made))


def statistics(z: Tensor, real: Tensor) -> Statistics:
    """Of maps z (n, P, B, C), of whose samples those with `real` (n, B) above zero count."""
    n, pixels, batch, c = z.shape
    sums, squares = (torch.empty((n, pixels, c), dtype=torch.float32, device=z.device) for _ in range(2))
    rows, columns = min(batch, BATCH_TILE), cut(c, 64)
    moments_kernel[(pixels, c // columns, n)](
        z, real, sums, squares, batch, C=c, ROWS=rows, COLUMNS=columns, num_warps=4
    )
    number = real.sum(1, keepdim=True)
    values = number * pixels
    mean = _added(sums) / values.clamp(min=1)
    # Within each pixel plus that of the pixels' means, so that no large sums cancel.
    between = (sums / number.clamp(min=1)[:, None] - mean[:, None]).square() * number[:, None]
    return Statistics(mean, _added(squares + between) / values.clamp(min=1), values)


def _added(parts: Tensor) -> Tensor:
    """(n, parts, C) -> (n, C)."""
    total = torch.empty_like(parts[:, 0])
    add_parts(parts, parts.shape[2], total, parts.shape[2])
    return total


def activated(
    z: Tensor, by: Slope, size: Size, real: Tensor | None = None, *, pooled: bool, keep: bool, turned: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Normalised maps of `size` through ReLU and perhaps a 2x2 max-pool: what `wide_maps.pool` gives.

    Samples that are not `real`, if that is told, leave as zeros. Statistics without them may put them at any distance,
    and what grows with every layer would reach infinity, which a gradient of zero makes NaN of the weights' gradients.
    """
    n, pixels, batch, c = z.shape
    fewer = (size[0] // 2) * (size[1] // 2) if pooled else pixels
    y = torch.empty((n, fewer, batch, c), dtype=z.dtype, device=z.device)
    yt = torch.empty((n, fewer, c, batch), dtype=z.dtype, device=z.device) if turned else None
    code = torch.empty((n, fewer, batch, c), dtype=torch.uint8, device=z.device) if pooled and keep else None
    rows, columns = min(batch, BATCH_TILE), cut(c, 64)
    activate_kernel[(fewer, batch // rows * (c // columns), n)](
        z, real, by.scale.contiguous(), by.shift.contiguous(), y, yt, code, batch, H=size[0], W=size[1], C=c,
        POOL=pooled, KEEP=code is not None, TURN=turned, ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return y, yt, code


def gradients(
    dy: Tensor, y: Tensor, code: Tensor | None, seen: Normalised, size: Size, into: Into, *, passes: bool, turned: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Back through `activated` and the statistics behind it: the gradient of the maps, and the same turned.

    That of the product's bias is zero where statistics are the batch's own: what it adds to all values, their mean
    takes away.
    """
    z, real = seen.maps, seen.real
    n, pixels, batch, c = z.shape
    fewer = dy.shape[1]
    inverse = (seen.var + seen.eps).rsqrt()
    sums, by_x = (torch.empty((n, fewer, c), dtype=torch.float32, device=z.device) for _ in range(2))
    rows, columns = min(batch, BATCH_TILE), cut(c, 64)
    common = {"H": size[0], "W": size[1], "C": c, "POOL": code is not None, "ROWS": rows, "COLUMNS": columns}
    gradient_sums_kernel[(fewer, c // columns, n)](
        dy, y, code, z, seen.mean, inverse, sums, by_x, batch, **common, num_warps=8
    )
    add_parts(sums, c, into.bias, c)
    add_parts(by_x, c, into.weight, c)
    slope = seen.weight * inverse
    per_value = -slope * inverse * into.weight * seen.share
    rest = -slope * into.bias * seen.share - per_value * seen.mean
    if into.product is not None:
        into.product.copy_(torch.where(seen.share > 0, 0.0, slope * into.bias))
    dz = torch.empty_like(z) if passes else None
    dzt = torch.empty((n, pixels, c, batch), dtype=z.dtype, device=z.device) if turned else None
    gradient_kernel[(pixels, c // columns, n)](
        dy, y, code, z, real, slope, per_value, rest, z if dz is None else dz, dzt, batch, **common, PASS=passes,
        TURN=turned, num_warps=8,
    )  # fmt: skip
    return dz, dzt
