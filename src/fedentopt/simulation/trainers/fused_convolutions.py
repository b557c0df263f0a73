"""Depthwise convolutions in kernels of our own (`triton.depthwise`), for autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedentopt.simulation.trainers.fused_layers import channels_last


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


def depthwise(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """The layer's convolution of x."""
    y: Tensor = _Depthwise.apply(x, layer.weight, layer.stride[0], layer.padding[0])
    return y


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
