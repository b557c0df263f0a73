"""Layers of a step that read and write maps as seldom as they can, for autograd: BatchNorm with what follows it, and
depthwise convolutions (kernels and formulas: `triton.norm_statistics`, `norm_apply`, `norm_excite`, `depthwise`).

BatchNorm's statistics leave padding rows out as in `masked_norm`. What goes to the backward pass is a layer's input
and a few numbers per channel; the rest is computed again there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

KINDS: dict[type[nn.Module], str] = {nn.SiLU: "silu", nn.ReLU: "relu", nn.ReLU6: "relu6"}
TYPES = (torch.float32, torch.bfloat16)
LONG = 4096  # pixels of a batch from which on the gradient of a pointwise weight is summed in parts
PARTS, PARTIAL = 64, 1 << 22  # so many of them, as long as they have no more numbers than this together


def takes_maps(x: Tensor) -> bool:
    """Whether the kernels read x: maps of channels that lie side by side, in a type that they know."""
    return x.dim() == 4 and x.dtype in TYPES and x.numel() > 0 and x.is_contiguous(memory_format=torch.channels_last)


def takes_norm(layer: nn.BatchNorm2d) -> bool:
    """Whether the kernels normalise as this layer would in training."""
    tensors = [layer.weight, layer.bias, layer.running_mean, layer.running_var]
    return (
        (layer.running_mean is None or layer.momentum is not None)
        and (layer.weight is None) == (layer.bias is None)
        and all(t is None or t.dtype == torch.float32 for t in tensors)
    )


def takes_depthwise(layer: nn.Conv2d) -> bool:
    """Whether the kernels know this convolution: depthwise, with filters of 3x3 or 5x5 and without a bias."""
    side, stride, padding = layer.kernel_size[0], layer.stride[0], layer.padding[0]
    return (
        layer.groups == layer.in_channels == layer.out_channels > 1
        and side in (3, 5)
        and stride in (1, 2)
        and layer.kernel_size == (side, side)
        and layer.stride == (stride, stride)
        and layer.padding == (padding, padding)
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and layer.bias is None
        and layer.weight.dtype == torch.float32
    )


def takes_pointwise(layer: nn.Conv2d) -> bool:
    """Whether this convolution is a product of pixels' channels with one matrix."""
    return (
        layer.kernel_size == (1, 1)
        and layer.stride == (1, 1)
        and layer.padding in ((0, 0), "valid", "same")
        and layer.groups == 1
    )


def normalise(
    layer: nn.BatchNorm2d, x: Tensor, real: Tensor | None, activation: str = "none", *,
    factor: Tensor | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """f(BatchNorm(x)) · factor_b + residual; factor (B,), residual as x. Moves the layer's statistics."""
    from fedentopt.simulation.triton import norm_statistics

    statistics = norm_statistics.statistics(layer, x.detach(), real)
    y: Tensor = _Normalise.apply(x, layer.weight, layer.bias, residual, statistics, real, factor, activation)
    return y


def excite(
    layer: nn.BatchNorm2d, x: Tensor, real: Tensor | None, activation: str, gate: Callable[[Tensor], Tensor]
) -> Tensor:
    """a · gate(mean of a over the pixels) with a = f(BatchNorm(x)); gate takes and gives (B, C, 1, 1)."""
    from fedentopt.simulation.triton import norm_statistics

    statistics = norm_statistics.statistics(layer, x.detach(), real)
    link = _Link()
    means: Tensor = _Squeeze.apply(x, layer.weight, layer.bias, statistics, real, activation, link)
    scale = gate(means[:, :, None, None])
    affine = [None if t is None else t.detach() for t in (layer.weight, layer.bias)]
    y: Tensor = _Excite.apply(scale.flatten(1), x.detach(), *affine, statistics, activation, link)
    return y


def depthwise(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """The layer's convolution of x."""
    y: Tensor = _Depthwise.apply(x, layer.weight, layer.stride[0], layer.padding[0])
    return y


def pointwise(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """The layer's convolution of x as a matrix product, which nobody has to time algorithms for."""
    if layer.bias is None and x.numel() // x.shape[1] >= LONG:
        y: Tensor = _Pointwise.apply(x, layer.weight)
        return y
    y = nn.functional.linear(x.permute(0, 2, 3, 1), layer.weight.flatten(1), layer.bias)
    return y.permute(0, 3, 1, 2)


def _last(dy: Tensor) -> Tensor:
    return dy.contiguous(memory_format=torch.channels_last)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, statistics: Tensor,
        real: Tensor | None, factor: Tensor | None, activation: str,
    ) -> Tensor:  # fmt: skip
        from fedentopt.simulation.triton import norm_apply

        ctx.save_for_backward(x, weight, bias, statistics, real, factor)
        ctx.activation = activation
        norm = norm_apply.Norm(statistics, weight, bias, activation)
        return norm_apply.apply(x, norm, factor=factor, residual=residual)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedentopt.simulation.triton import norm_apply

        x, weight, bias, statistics, real, factor = ctx.saved_tensors
        norm = norm_apply.Norm(statistics, weight, bias, ctx.activation)
        push = _last(dy)
        both = norm_apply.sums(x, push, norm, factor)
        dx = norm_apply.input_grad(x, push, norm, both, real=real, factor=factor) if ctx.needs_input_grad[0] else None
        db, dw = both if weight is not None else (None, None)
        return dx, dw, db, dy if ctx.needs_input_grad[3] else None, None, None, None, None


class _Link:
    """What the backward pass of `_Excite` hands to that of `_Squeeze`, which comes after it: the gate between them
    makes the gradient of the means out of its own."""

    def __init__(self) -> None:
        self.dy: Tensor | None = None
        self.scale: Tensor | None = None
        self.parts: Tensor | None = None

    def take(self) -> tuple[Tensor, Tensor, Tensor]:
        taken = self.dy, self.scale, self.parts
        self.dy = self.scale = self.parts = None
        assert taken[0] is not None
        assert taken[1] is not None
        assert taken[2] is not None
        return taken  # type: ignore[return-value]


class _Squeeze(torch.autograd.Function):
    """The means over a sample's pixels, (B, C); its backward pass is that of both functions for x, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, real: Tensor | None,
        activation: str, link: _Link,
    ) -> Tensor:  # fmt: skip
        from fedentopt.simulation.triton import norm_apply, norm_excite

        ctx.save_for_backward(x, weight, bias, statistics, real)
        ctx.activation, ctx.link = activation, link
        return norm_excite.means(x, norm_apply.Norm(statistics, weight, bias, activation))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, pooled: Tensor) -> tuple[Tensor | None, ...]:
        from fedentopt.simulation.triton import norm_apply, norm_excite

        x, weight, bias, statistics, real = ctx.saved_tensors
        norm = norm_apply.Norm(statistics, weight, bias, ctx.activation)
        dy, scale, parts = ctx.link.take()
        pooled = pooled.contiguous()
        both = norm_excite.fold_sums(parts, scale, pooled, x.shape[2] * x.shape[3])
        dx = norm_apply.input_grad(x, dy, norm, both, real=real, scale=scale, pooled=pooled)
        db, dw = both if weight is not None else (None, None)
        return dx, dw, db, None, None, None, None


class _Excite(torch.autograd.Function):
    """a · scale, of which the backward pass gives the gradient of scale alone."""

    @staticmethod
    def forward(
        ctx: Any, scale: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor,
        activation: str, link: _Link,
    ) -> Tensor:  # fmt: skip
        from fedentopt.simulation.triton import norm_apply

        scale = scale.contiguous()
        ctx.save_for_backward(scale, x, weight, bias, statistics)
        ctx.activation, ctx.link = activation, link
        return norm_apply.apply(x, norm_apply.Norm(statistics, weight, bias, activation), scale=scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedentopt.simulation.triton import norm_apply, norm_excite

        scale, x, weight, bias, statistics = ctx.saved_tensors
        norm = norm_apply.Norm(statistics, weight, bias, ctx.activation)
        link = ctx.link
        link.dy, link.scale = _last(dy), scale
        ds, link.parts = norm_excite.excite_sums(x, link.dy, norm)
        return ds.to(scale.dtype), None, None, None, None, None, None


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        from fedentopt.simulation.triton import depthwise

        taps = depthwise.by_tap(weight)
        ctx.save_for_backward(x, taps)
        ctx.geometry = stride, padding
        return depthwise.forward(x, taps, stride, padding)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from fedentopt.simulation.triton import depthwise

        x, taps = ctx.saved_tensors
        push = _last(dy)
        size = x.shape[2], x.shape[3]
        dx = depthwise.input_grad(push, taps, size, *ctx.geometry) if ctx.needs_input_grad[0] else None
        dw = depthwise.weight_grad(x, push, len(taps), *ctx.geometry) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None


class _Pointwise(torch.autograd.Function):
    """A product with all pixels of a batch. The weight's gradient has few numbers, each a sum over all pixels: a single
    product would leave most of a GPU idle, so there is one for each of several parts, added in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        matrix = weight.flatten(1).to(x.dtype)
        ctx.save_for_backward(x, matrix)
        y = _empty_last(x, len(matrix))
        torch.mm(_rows(x), matrix.t(), out=_rows(y))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        push = _rows(_last(dy))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _empty_last(x, x.shape[1])
            torch.mm(push, matrix, out=_rows(dx))
        parts = PARTS
        while parts > 1 and (len(push) % parts or parts * matrix.numel() > PARTIAL):
            parts //= 2
        sums = push.unflatten(0, (parts, -1)).transpose(1, 2) @ _rows(x).unflatten(0, (parts, -1))
        return dx, sums.sum(0, dtype=torch.float32)[:, :, None, None]


def _rows(x: Tensor) -> Tensor:
    """Maps as a matrix with a row per pixel."""
    return x.permute(0, 2, 3, 1).view(-1, x.shape[1])


def _empty_last(x: Tensor, channels: int) -> Tensor:
    shape = x.shape[0], channels, *x.shape[2:]
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
