"""Convolutions of a step that need no algorithm chosen by timing, for autograd: depthwise ones in kernels of our own
(`triton.depthwise`), pointwise ones as matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedentopt.simulation.trainers.fused_layers import channels_last

LONG = 4096  # pixels of a batch from which on the gradient of a pointwise weight is summed in parts
PARTS, PARTIAL = 64, 1 << 22  # so many of them, as long as they have no more numbers than this together


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
        push = channels_last(dy)
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
        push = _rows(channels_last(dy))
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
