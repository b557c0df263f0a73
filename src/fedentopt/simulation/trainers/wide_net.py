"""Forward and backward of n models with wide convolutions (VGG-11, most plain CNNs) on the kernels of `triton.wide`.

Weights lie in the flat rows channels-last, as the products want them; gradients are written straight into the gradient
rows. Which models are taken: `wide_blocks`.

The backward pass needs no dropout masks: an element that was dropped has left as zero, as one that ReLU switched off,
and neither passes a gradient on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers.wide_blocks import Dropped, WideBlocks, WideConv
from fedentopt.simulation.triton import Kernels

SAMPLES_IN_FLIGHT = 8192  # images times models of a forward pass whose maps nobody keeps


@dataclass
class _Kept:
    """What the backward pass of a layer needs; maps that entered are turned, `size` and `grown` are those of the maps
    before and after the convolution."""

    entered: torch.Tensor
    left: torch.Tensor
    code: torch.Tensor | None
    size: tuple[int, int]
    grown: tuple[int, int]
    padding: int
    weight: torch.Tensor | None


class WideNet:
    """Wide blocks on kernels; see `stacked_nets.StackedNet`. The layout's convolution weights are channels-last."""

    def __init__(self, blocks: WideBlocks, layout: FlatLayout, kernels: Kernels) -> None:
        assert kernels.wide is not None
        self.blocks, self.kernels, self.products = blocks, kernels, kernels.wide
        self._slots = {slot.name: slot for slot in layout.parameters}
        self._dtype = torch.bfloat16 if self.products.bf16 else torch.float32

    def describe(self) -> str:
        return f"hand-written backward for wide convolutions on {self.kernels.describe()}"

    def _weight(self, rows: torch.Tensor, block: WideConv) -> torch.Tensor:
        """(n, Co, taps, Ci), sharing memory with the rows; a layer of windows has one tap of all their entries."""
        weight = self._slots[block.weight].view(rows).permute(0, 1, 3, 4, 2).flatten(2, 3)
        return weight.flatten(2)[:, :, None] if block.window else weight

    def _maps(self, rows: torch.Tensor, x: torch.Tensor, keep: bool) -> tuple[torch.Tensor, list[_Kept]]:
        """The last maps (n, H * W, B, C), and with `keep` what the backward pass needs."""
        from fedentopt.simulation.triton import wide, wide_maps

        n = len(rows)
        kept: list[_Kept] = []
        first = self.blocks.convolutions[0]
        maps, maps_t = wide_maps.windows(x, first.window, first.side, first.padding, self._dtype, keep)
        trim = 2 * first.padding - first.side + 1
        size = (int(x.shape[-2]) + trim, int(x.shape[-1]) + trim)
        for i, block in enumerate(self.blocks.convolutions):
            weight, turned = self._weight(rows, block), None
            padding = 0 if block.window else block.padding
            if block.window:
                filled = torch.zeros((n, block.outputs, 1, block.window), dtype=self._dtype, device=x.device)
                filled[..., : weight.shape[3]].copy_(weight)
                weight = filled
            else:
                weight, turned = wide_maps.turn(weight, self._dtype, copy=self.products.bf16, turned=keep and i > 0)
            bias = self._slots[block.bias].view(rows)
            y = wide.convolution(maps, weight, bias, size, padding, models=n, precision=self.products.precision)
            trim = 0 if block.window else 2 * padding - block.side + 1
            grown = (size[0] + trim, size[1] + trim)
            out, out_t, code = wide_maps.pool(y, grown, pooled=block.pooled, keep=keep)
            if keep:
                assert maps_t is not None
                kept.append(_Kept(maps_t, out, code, size, grown, padding, turned))
            maps, maps_t = out, out_t
            size = (grown[0] // 2, grown[1] // 2) if block.pooled else grown
        return maps, kept

    def _features(self, maps: torch.Tensor, samples: int) -> torch.Tensor:
        """Maps as torch flattens them, (n, B, F)."""
        return maps[:, :, :samples].permute(0, 2, 3, 1).flatten(2).float().contiguous()

    def _linears(self, rows: torch.Tensor, features: torch.Tensor, keys: torch.Tensor | None) -> list[torch.Tensor]:
        """What enters every linear layer, and last the logits; with dropout under `keys`, without it where None."""
        entered = [self._drop(features, self.blocks.dropped, keys)]
        for i, block in enumerate(self.blocks.linears):
            weight, bias = (self._slots[name].view(rows) for name in (block.weight, block.bias))
            last = i == len(self.blocks.linears) - 1
            y = self.kernels.linear_forward(entered[-1], weight, bias, not last)
            entered.append(self._drop(y, block.dropped, keys))
        return entered

    @staticmethod
    def _drop(x: torch.Tensor, dropped: Dropped | None, keys: torch.Tensor | None) -> torch.Tensor:
        from fedentopt.simulation.triton import wide_maps

        return x if dropped is None or keys is None else wide_maps.dropout(x, keys, dropped.layer, dropped.chance)

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, labels: torch.Tensor,
        scale: torch.Tensor | None, shift: torch.Tensor | None, keys: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `StackedNet`."""
        n, samples = x.shape[:2]
        rows, gradient = rows[:n], gradient[:n]
        maps, kept = self._maps(rows, x, keep=True)
        *entered, logits = self._linears(rows, self._features(maps, samples), keys)
        upstream, _ = self.kernels.softmax_xent_grad(logits, labels, scale, shift)
        back = self._linears_back(rows, gradient, entered, upstream, drops=keys is not None)
        dy = torch.zeros_like(maps)  # samples that only pad the batch have no gradient
        dy[:, :, :samples].copy_(back.unflatten(2, (maps.shape[3], maps.shape[1])).permute(0, 3, 1, 2))
        self._convolutions_back(gradient, kept, dy)
        return logits

    def _linears_back(
        self, rows: torch.Tensor, gradient: torch.Tensor, entered: list[torch.Tensor], upstream: torch.Tensor, *,
        drops: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Write the gradients of the linear layers; the gradient of the features."""
        from fedentopt.simulation.triton import wide_maps

        for i in range(len(self.blocks.linears) - 1, -1, -1):
            block = self.blocks.linears[i]
            weight, into, into_bias = (
                self._slots[block.weight].view(rows), self._slots[block.weight].view(gradient),
                self._slots[block.bias].view(gradient),
            )  # fmt: skip
            self.kernels.linear_weight_grad(entered[i], upstream, into, into_bias)
            upstream = self.kernels.linear_input_grad(upstream, weight, entered[i])
            before = self.blocks.linears[i - 1].dropped if i else self.blocks.dropped
            if before is not None and drops:
                upstream = upstream * wide_maps.scale_kept(before.chance)
        return upstream

    def _convolutions_back(self, gradient: torch.Tensor, kept: list[_Kept], dy: torch.Tensor) -> None:
        """Write the gradients of the convolutions, given that of the last maps."""
        from fedentopt.simulation.triton import wide, wide_maps

        precision = self.products.precision
        for i in range(len(kept) - 1, -1, -1):
            block, layer = self.blocks.convolutions[i], kept[i]
            dx, dx_t, sums = wide_maps.unpool(dy, layer.left, layer.code, layer.grown, passes=i > 0)
            wide_maps.add_parts(sums, block.outputs, self._slots[block.bias].view(gradient), block.outputs)
            into = self._weight(gradient, block)
            wide.weight_grad(layer.entered, dx_t, into, layer.size, layer.padding, precision=precision)
            if i:
                assert dx is not None
                assert layer.weight is not None
                dy = wide.convolution(
                    dx, layer.weight, None, layer.grown, block.side - 1 - block.padding, models=len(dx),
                    taps_first=True, precision=precision,
                )  # fmt: skip

    def _forward(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What enters the first linear layer, a few models at a time."""
        room = max(1, SAMPLES_IN_FLIGHT // x.shape[1])
        parts = zip(rows.split(room), [x] * len(rows) if len(x) == 1 else x.split(room), strict=False)
        return torch.cat([self._features(self._maps(r, part, keep=False)[0], x.shape[1]) for r, part in parts])

    def features(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What enters the last linear layer, (n, B, F); x as for `logits`."""
        return self._linears(rows, self._forward(rows, x), None)[-2]

    def logits(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `StackedNet`."""
        return self._linears(rows, self._forward(rows, x), None)[-1]
