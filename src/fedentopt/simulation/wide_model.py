"""Forward and backward of n models with wide convolutions (VGG-11 and its kin) on the kernels of `kernels.wide`.

A Sequential of 3x3 convolutions with zero padding, each followed by ReLU and perhaps a 2x2 max-pool, then one linear
layer. Weights lie in the flat rows channels-last, as the products want them; gradients are written straight into the
gradient rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fedentopt.simulation.kernels import Kernels
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.lowering import flatten, is_pool2

NARROW = 32  # entries of a first layer's window, zero-padded
CHANNELS = 64  # wide layers have multiples of this
SAMPLES_IN_FLIGHT = 8192  # images times models of a forward pass whose maps nobody keeps


@dataclass(frozen=True)
class WideConv:
    """Convolution and ReLU, with the max-pool that follows if one does, by the names of weight and bias."""

    weight: str
    bias: str
    inputs: int
    outputs: int
    pooled: bool


@dataclass(frozen=True)
class WideBlocks:
    """A whole model: its convolutions, then its linear layer."""

    convolutions: tuple[WideConv, ...]
    weight: str
    bias: str


def wide_blocks(model: nn.Module, image_size: int) -> WideBlocks | None:
    """The model as wide convolutions and a linear layer, or None if a layer does not fit or a pooled map is odd."""
    layers = flatten(model)
    if layers is None:
        return None
    size = image_size
    convolutions: list[WideConv] = []
    rest = list(layers)
    while rest and isinstance(rest[0][1], nn.Conv2d):
        name, conv = rest[0][0], rest[0][1]
        channels = conv.in_channels if convolutions else CHANNELS
        narrow = bool(convolutions) or 9 * conv.in_channels <= NARROW
        if not (_padded3(conv) and narrow and channels % CHANNELS == 0 and conv.out_channels % CHANNELS == 0):
            return None
        after = [layer for _, layer in rest[1:3]]
        if after and is_pool2(after[0]):
            after.reverse()  # ReLU and max-pool commute
        if not after or not isinstance(after[0], nn.ReLU):
            return None
        pooled = len(after) == 2 and is_pool2(after[1])
        if pooled and size % 2:
            return None
        size = size // 2 if pooled else size
        convolutions.append(WideConv(f"{name}.weight", f"{name}.bias", conv.in_channels, conv.out_channels, pooled))
        rest = rest[3:] if pooled else rest[2:]
    if not convolutions or len(rest) != 2:
        return None
    (_, flat), (name, linear) = rest
    if not isinstance(flat, nn.Flatten) or (flat.start_dim, flat.end_dim) != (1, -1):
        return None
    if not isinstance(linear, nn.Linear) or linear.bias is None:
        return None
    return WideBlocks(tuple(convolutions), f"{name}.weight", f"{name}.bias")


def _padded3(conv: nn.Conv2d) -> bool:
    """A plain 3x3 convolution that keeps the size of its maps, with a bias."""
    return (
        conv.kernel_size == (3, 3)
        and conv.stride == (1, 1)
        and conv.padding in ((1, 1), "same")
        and conv.padding_mode == "zeros"
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.bias is not None
    )


@dataclass
class _Kept:
    """What the backward pass of a layer needs."""

    entered: torch.Tensor  # turned
    left: torch.Tensor
    code: torch.Tensor | None
    height: int


class WideNet:
    """Wide blocks on kernels; see `stacked_model.StackedNet`. The layout's convolution weights are channels-last."""

    def __init__(self, blocks: WideBlocks, layout: FlatLayout, kernels: Kernels) -> None:
        assert kernels.wide is not None
        self.blocks, self.kernels, self.products = blocks, kernels, kernels.wide
        self._slots = {slot.name: slot for slot in layout.parameters}
        self._dtype = torch.bfloat16 if self.products.bf16 else torch.float32

    def describe(self) -> str:
        return f"hand-written backward for wide convolutions on {self.kernels.describe()}"

    def _weight(self, rows: torch.Tensor, block: WideConv) -> torch.Tensor:
        """(n, Co, 9, Ci), sharing memory with the rows."""
        return self._slots[block.weight].view(rows).permute(0, 1, 3, 4, 2).flatten(2, 3)

    def _forward(
        self, rows: torch.Tensor, x: torch.Tensor, keep: bool
    ) -> tuple[torch.Tensor, list[_Kept], list[torch.Tensor | None]]:
        """Features (n, B, F), and with `keep` what the backward pass needs: maps, and turned weights."""
        from fedentopt.simulation.kernels import wide

        n, samples, height = len(rows), x.shape[1], x.shape[-2]
        kept: list[_Kept] = []
        turned: list[torch.Tensor | None] = []
        maps, maps_t = wide.windows(x, NARROW, 3, self._dtype, keep)
        for i, block in enumerate(self.blocks.convolutions):
            weight = self._weight(rows, block)
            if i == 0:
                filled = torch.zeros((n, block.outputs, 1, NARROW), dtype=self._dtype, device=x.device)
                filled[..., : 9 * block.inputs].copy_(weight.flatten(2)[:, :, None])
                weight, weight_t = filled, None
            else:
                weight, weight_t = wide.turn(weight, self._dtype, copy=self.products.bf16, turned=keep)
            turned.append(weight_t)
            bias = self._slots[block.bias].view(rows)
            y = wide.convolution(maps, weight, bias, height, models=n, precision=self.products.precision)
            out, out_t, code = wide.pool(y, height, pooled=block.pooled, keep=keep)
            if keep:
                assert maps_t is not None
                kept.append(_Kept(maps_t, out, code, height))
            maps, maps_t = out, out_t
            height = height // 2 if block.pooled else height
        features = maps[:, :, :samples].permute(0, 2, 3, 1).flatten(2).float().contiguous()
        return features, kept, turned

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, labels: torch.Tensor,
        scale: torch.Tensor | None, shift: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """See `StackedNet`."""
        from fedentopt.simulation.kernels import wide

        n, samples = x.shape[:2]
        rows, gradient = rows[:n], gradient[:n]
        features, kept, turned = self._forward(rows, x, keep=True)
        linear, linear_bias = (self._slots[name] for name in (self.blocks.weight, self.blocks.bias))
        logits = self.kernels.linear_forward(features, linear.view(rows), linear_bias.view(rows))
        upstream, _ = self.kernels.softmax_xent_grad(logits, labels, scale, shift)
        self.kernels.linear_weight_grad(features, upstream, linear.view(gradient), linear_bias.view(gradient))
        back = self.kernels.linear_input_grad(upstream, linear.view(rows))
        left = kept[-1].left
        dy = torch.zeros_like(left)  # samples that only pad the batch have no gradient
        dy[:, :, :samples].copy_(back.unflatten(2, (left.shape[3], left.shape[1])).permute(0, 3, 1, 2))
        for i in range(len(kept) - 1, -1, -1):
            block, layer = self.blocks.convolutions[i], kept[i]
            dx, dx_t, sums = wide.unpool(dy, layer.left, layer.code, layer.height, passes=i > 0)
            self._slots[block.bias].view(gradient).copy_(sums)
            into = self._weight(gradient, block)
            if i == 0:
                into = into.flatten(2)[:, :, None]
            wide.weight_grad(layer.entered, dx_t, into, layer.height, precision=self.products.precision)
            if i:
                weight_t = turned[i]
                assert dx is not None
                assert weight_t is not None
                dy = wide.convolution(
                    dx, weight_t, None, layer.height, models=n, taps_first=True, precision=self.products.precision
                )

    def features(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What enters the linear layer, (n, B, F); x as for `logits`."""
        room = max(1, SAMPLES_IN_FLIGHT // x.shape[1])
        parts = zip(rows.split(room), [x] * len(rows) if len(x) == 1 else x.split(room), strict=False)
        return torch.cat([self._forward(r, part, keep=False)[0] for r, part in parts])

    def logits(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `StackedNet`."""
        weight, bias = (self._slots[name].view(rows) for name in (self.blocks.weight, self.blocks.bias))
        return self.kernels.linear_forward(self.features(rows, x), weight, bias)
