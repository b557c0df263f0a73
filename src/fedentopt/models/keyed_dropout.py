"""Dropout whose masks are a function of a key, not of torch's global generator.

A run must give the same masks alone, in a stack, resumed, on CPU and on GPU; a global generator gives none
of that. Here the mask of element i in layer l under the step's key k is

    z_i = mix64(mix64(k + (l + 1) G) + i G),    u_i = (z_i >>> 40) 2^-24,    keep i  <=>  u_i >= p,

with G = 0x9E3779B97F4A7C15 and mix64 the splitmix64 finaliser (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014; constants of Vigna's splitmix64.c). u is a multiple of 2^-24 in
[0, 1), exact in float32, so CPU and GPU agree on every comparison. i counts in row-major order with the
batch first: a sample's mask does not depend on how far the batch is filled after it.

`key_dropout` puts these layers in the place of a model's `nn.Dropout`, `Dropout1d/2d/3d` and torchvision's
`StochasticDepth`. All of one model share one `DropoutKey`; a trainer writes the step's key into it in place,
which a captured CUDA graph sees at its next replay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedentopt.randomness import GOLDEN, mix64_torch, shift_right, signed


def uniform(key: Tensor, layer: int, count: int) -> Tensor:
    """`count` float32 draws in [0, 1) of layer number `layer` under a key of shape ()."""
    start = mix64_torch(key + signed(((layer + 1) * GOLDEN) & ((1 << 64) - 1)))
    elements = torch.arange(count, device=key.device, dtype=torch.int64)
    return shift_right(mix64_torch(start + elements * signed(GOLDEN)), 40).to(torch.float32) * 2.0**-24


class DropoutKey:
    """The key of the current step: an int64 tensor of shape () on the model's device, shared by its layers."""

    def __init__(self) -> None:
        self.value = torch.zeros((), dtype=torch.int64)

    def set(self, key: int | Tensor) -> None:
        """Write the key in place: graphs captured with this tensor see it."""
        if isinstance(key, Tensor):
            self.value.copy_(key)
        else:
            self.value.fill_(signed(key & ((1 << 64) - 1)))


class KeyedDropout(nn.Module):
    """Drops elements, or whole channels (`axes` leading axes share no mask, later ones do), with probability p."""

    def __init__(self, p: float, key: DropoutKey, layer: int, axes: int | None = None, unbatched: int = 0) -> None:
        """`axes`: None for single elements, 2 for channels of a batch; `unbatched`: the number of dimensions
        that means one sample without a batch axis."""
        super().__init__()
        self.p, self.key, self.layer, self.axes, self.unbatched = p, key, layer, axes, unbatched

    def forward(self, x: Tensor) -> Tensor:
        """x in evaluation; in training x / (1 - p) where kept, 0 elsewhere."""
        if not self.training or self.p == 0:
            return x
        axes = x.dim() if self.axes is None else self.axes - (x.dim() == self.unbatched)
        shape = [*x.shape[:axes], *[1] * (x.dim() - axes)]
        count = 1
        for size in shape:
            count *= size
        kept = uniform(self.key.value, self.layer, count).reshape(shape) >= self.p
        return x * kept * (1 / (1 - self.p) if self.p < 1 else 1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # The key is no buffer (buffers are averaged and saved), so it has to follow the model by hand.
        self.key.value = fn(self.key.value)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        return f"p={self.p}, layer={self.layer}"


class KeyedStochasticDepth(KeyedDropout):
    """Drops a residual branch of every sample on its own ("row") or of the whole batch ("batch")."""

    def __init__(self, p: float, key: DropoutKey, layer: int, mode: str) -> None:
        super().__init__(p, key, layer, axes=1 if mode == "row" else 0)


_CHANNELS: dict[type[nn.Module], tuple[int | None, int]] = {
    nn.Dropout: (None, 0),
    nn.Dropout1d: (2, 2),
    nn.Dropout2d: (2, 0),  # torch takes three dimensions as (batch, channels, length) here
    nn.Dropout3d: (2, 4),
}


def key_dropout(model: nn.Module) -> DropoutKey | None:
    """Replace every dropout layer inside `model` by its keyed twin; return their key, None if there is none.

    What else draws is the business of `keyed_draws`.
    """
    # Without torchvision loaded no model can hold its layer, and loading it takes seconds.
    stochastic_depth = getattr(sys.modules.get("torchvision.ops"), "StochasticDepth", ())
    key, count = DropoutKey(), 0
    twins: dict[nn.Module, nn.Module] = {}  # a layer used in two places stays one layer

    def twin(layer: nn.Module) -> nn.Module | None:
        nonlocal count
        if layer in twins:
            return twins[layer]
        if isinstance(layer, stochastic_depth):
            made: nn.Module = KeyedStochasticDepth(layer.p, key, count, layer.mode)
        elif type(layer) in _CHANNELS:
            made = KeyedDropout(layer.p, key, count, *_CHANNELS[type(layer)])  # type: ignore[arg-type]
        else:
            return None
        made.train(layer.training)
        count += 1
        twins[layer] = made
        return made

    def swap(module: nn.Module) -> None:
        for name, child in list(module._modules.items()):  # named_children() hides a layer's second name
            if child is None:
                continue
            made = twin(child)
            if made is None:
                swap(child)
            else:
                setattr(module, name, made)

    swap(model)
    return key if count else None


def dropout_key(model: nn.Module) -> DropoutKey | None:
    """The key that `model`'s dropout layers and its other draws share, None if it draws nothing."""
    for layer in model.modules():
        if isinstance(layer, KeyedDropout):
            return layer.key
    draws = vars(model).get("keyed_draws")  # see that module, which knows this one
    return None if draws is None else draws.key
