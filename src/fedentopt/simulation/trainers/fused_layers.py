"""BatchNorm with what follows it, for autograd, reading and writing maps as seldom as it can (kernels and formulas:
`triton.norm_statistics`, `norm_apply`, `norm_excite`).

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


def takes_maps(x: Tensor) -> bool:
    """Whether the kernels read x: maps of channels that lie side by side, in a type that they know."""
    return x.dim() == 4 and x.dtype in TYPES and x.numel() > 0 and x.is_contiguous(memory_format=torch.channels_last)


def takes_norm(layer: nn.BatchNorm2d) -> bool:
    """Whether the kernels normalise as this layer would in training."""
    tensors = [layer.weight, layer.bias, layer.running_mean, layer.running_var]
    kept = layer.running_mean, layer.running_var, layer.num_batches_tracked
    return (
        all((t is not None) == layer.track_running_stats for t in kept)  # all three move, or there are none
        and (layer.momentum is not None or not layer.track_running_stats)
        and (layer.weight is None) == (layer.bias is None)
        and all(t is None or t.dtype == torch.float32 for t in tensors)
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


def channels_last(dy: Tensor) -> Tensor:
    """An upstream gradient in the order of the maps."""
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
        push = channels_last(dy)
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
        link.dy, link.scale = channels_last(dy), scale
        ds, link.parts = norm_excite.excite_sums(x, link.dy, norm)
        return ds.to(scale.dtype), None, None, None, None, None, None
