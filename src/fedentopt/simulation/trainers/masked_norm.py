"""BatchNorm over the real samples of a padded batch, so that one captured step serves last batches of many sizes.

A batch of B rows holds n real samples, then padding, and a map has S pixels per channel. With r_b = 1 for real rows, 0
for padding, and N = n S, per channel:

    mean = Σ r x / N,    var = Σ r (x - mean)² / N,    y = w (x - mean) / sqrt(var + eps) + b,

the running variance moves towards var N / (N - 1), and with x̂ = (x - mean) / sqrt(var + eps)

    dw = Σ dy x̂,    db = Σ dy,    dx_b = w / sqrt(var + eps) (dy - r_b (db + x̂ dw) / N).

Nothing of a padding row enters statistics; where its dy is zero, as it is behind a loss that leaves it out, its dx is
zero too, and so nothing of it enters any gradient. n is a number on the device: the host never waits for it.
N below 2 has no variance: then a layer does what `bound_model` makes it do with a lone value, which is to normalise by
its running statistics and to leave those alone (to give the bias where it keeps none).

Variance is that of the pixels within each sample plus that of the samples' means, so no large sums cancel.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

MASKED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Padding:
    """Which rows of the batch at hand are real, for all layers of one module; None where all are."""

    def __init__(self) -> None:
        self.real: Tensor | None = None

    @contextlib.contextmanager
    def masking(self, real: Tensor | None) -> Iterator[None]:
        """Inside, a forward pass leaves rows out of its statistics where `real` (B,) is False."""
        self.real = real
        try:
            yield
        finally:
            self.real = None


def mask_norms(module: nn.Module) -> Padding:
    """Let every BatchNorm layer of `module` look at the padding returned here; without any it runs as ever."""
    padding = Padding()
    for layer in module.modules():
        if isinstance(layer, _BatchNorm):
            layer.forward = partial(_forward, layer, layer.forward, padding)  # type: ignore[method-assign]
    return padding


def _forward(layer: _BatchNorm, forward: Callable[[Tensor], Tensor], padding: Padding, x: Tensor) -> Tensor:
    if padding.real is None or not layer.training:
        return forward(x)
    return masked_batch_norm(layer, x, padding.real)


def masked_batch_norm(layer: _BatchNorm, x: Tensor, real: Tensor) -> Tensor:
    """A layer in training mode on x (B, C, ...), of which the rows with `real` (B,) count; moves its statistics.

    Values of padding rows must be finite. Refused: a first axis that is not the batch's, since nobody knows which of
    its rows are padding.
    """
    if len(x) != len(real):
        raise ValueError(f"BatchNorm over {len(x)} rows of a batch of {len(real)}")
    with torch.no_grad():
        mean, var, values = _statistics(x, real)
        alone = values < 2
        unbiased = var * values / (values - 1).clamp(min=1)
        if layer.running_mean is None:
            var = var.masked_fill(alone, 1 - layer.eps)  # what is at the mean is passed on with its gradient
            own = mean.masked_fill(~alone, 0)
            mean = mean - own
        else:
            assert layer.running_var is not None
            before = layer.running_mean, layer.running_var
            used = [torch.where(alone, old, new) for old, new in zip(before, (mean, var), strict=True)]
            _move(layer, mean, unbiased, alone)
            mean, var = used
        share = (real & ~alone).to(var.dtype) / values.clamp(min=1)
    if layer.running_mean is None:  # and is the bias to the last bit, or a ReLU behind it might let rounding decide
        x = x - own.to(x.dtype).view(-1, *(1,) * (x.dim() - 2))
    y: Tensor = _Normalise.apply(x, layer.weight, layer.bias, mean, var, share, layer.eps)
    return y


def _statistics(x: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance (C,) of the real rows' values, and their number (), in the type of these."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    pixels = tuple(range(2, x.dim()))
    if pixels:
        within, means = torch.var_mean(wide, pixels, correction=0)
    else:
        within, means = torch.zeros_like(wide), wide
    number = real.sum()
    share = (real.to(wide.dtype) / number.clamp(min=1))[:, None]
    mean = (means * share).sum(0)
    var = ((within + (means - mean).square()) * share).sum(0)
    return mean, var, (number * math.prod(x.shape[2:])).to(wide.dtype)


def _move(layer: _BatchNorm, mean: Tensor, var: Tensor, alone: Tensor) -> None:
    """Running statistics and the count of batches, unless the batch has a lone value."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    assert layer.momentum is not None
    layer.num_batches_tracked.add_(~alone)
    for running, new in ((layer.running_mean, mean), (layer.running_var, var)):
        moved = running * (1 - layer.momentum) + new * layer.momentum
        running.copy_(torch.where(alone, running, moved))


class _Normalise(torch.autograd.Function):
    """y and the gradients of the formula above; `share` (B,) is r_b / N, or 0 where the statistics were not x's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, share: Tensor,
        eps: float,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, mean, var, share)
        ctx.eps, ctx.biased = eps, bias is not None
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, share = ctx.saved_tensors
        inverse = (var + ctx.eps).rsqrt()
        scale = torch.ones_like(inverse) if weight is None else weight
        # The backward pass of evaluation mode is just the two sums, in one kernel; dx takes more than it knows of.
        _, dw, db = torch.ops.aten.native_batch_norm_backward(
            dy, x, scale, mean, var, mean, inverse, False, ctx.eps, [False, True, True]
        )
        slope = scale * inverse
        pixels = (1,) * (x.dim() - 2)
        by_x = -slope * inverse * dw
        rest = -slope * db - by_x * mean

        def per_row(values: Tensor) -> Tensor:
            both: Tensor = share[:, None] * values
            return both.reshape(*both.shape, *pixels)

        dx = torch.addcmul(per_row(rest), x.to(mean.dtype), per_row(by_x))
        dx = dx.addcmul_(dy.to(mean.dtype), slope.view(1, -1, *pixels)).to(x.dtype)
        return dx, None if weight is None else dw, db if ctx.biased else None, None, None, None, None
