"""Forward and backward of n models with wide convolutions (VGG-11, most plain CNNs) on the kernels of `triton.wide`.

Weights lie in the flat rows channels-last, as the products want them; gradients are written straight into the gradient
rows. Which models are taken: `wide_blocks`.

The backward pass needs no dropout masks: an element that was dropped has left as zero, as one that ReLU switched off,
and neither passes a gradient on.
"""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fedentopt.simulation.device import SideStream
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers.wide_blocks import Dropped, WideBlocks, WideConv
from fedentopt.simulation.triton import Kernels, Optimiser

if TYPE_CHECKING:
    from fedentopt.simulation.triton import wide_descriptors, wide_maps, wide_norm, wide_update

COUNT = "num_batches_tracked"
SAMPLES_IN_FLIGHT = 8192  # images times models of a forward pass whose maps nobody keeps


@dataclass
class _Kept:
    """What the backward pass of a layer needs: the maps that entered as the weight gradient wants them (images, where
    the first layer is one kernel), and those that left; `size` and `grown` are the sizes before and after the
    convolution; the weights as the input gradient wants them."""

    entered: torch.Tensor
    left: torch.Tensor
    code: torch.Tensor | None
    size: tuple[int, int]
    grown: tuple[int, int]
    padding: int
    weight: torch.Tensor | None
    normed: wide_norm.Normalised | None


class WideNet:
    """Wide blocks on kernels; see `stacked_nets.StackedNet`. The layout's convolution weights are channels-last.

    Where the kernels' form says so, `step` takes the optimiser's settings and moves the weights itself. It then reads
    copies of them that it keeps from step to step: `reserve` makes room for those, `begin` fills them for a round,
    `refresh` fills them from weights that somebody else has written.

    Of models with BatchNorm, `step` moves the running statistics in `state`, the layout's buffers (n, ...), and rows to
    evaluate have them behind their parameters.
    """

    def __init__(self, blocks: WideBlocks, layout: FlatLayout, kernels: Kernels) -> None:
        assert kernels.wide is not None
        from fedentopt.simulation.triton import wide_forms

        self.blocks, self.kernels, self.products = blocks, kernels, kernels.wide
        self._slots = {slot.name: slot for slot in layout.slots}
        self._width = layout.parameter_width
        self._dtype = torch.bfloat16 if self.products.bf16 else torch.float32
        form = self.products.form
        self._layers = wide_forms.WideLayers(self.products)
        self._turned = self._layers.turned
        first = blocks.convolutions[0]
        self._first_alone = form.first and first.pooled and first.norm is None
        self.updates, self._beside = form.update, SideStream() if form.aside else None
        self._copies: dict[int, wide_update.Copies] = {}
        self._rest = self._rest_of(layout.parameter_width)

    def _rest_of(self, width: int) -> dict[int, list[tuple[int, int]]]:
        """Runs of columns whose parameters the optimiser moves by itself, by the layer that completes them."""
        taken = [self._slots[self.blocks.convolutions[i].weight] for i in self._fused]
        ends = [(slot.offset, slot.offset + slot.size) for slot in taken]
        starts = [0, *(end for _, end in ends)]
        found: dict[int, list[tuple[int, int]]] = {}
        for begin, end in zip(starts, [*(begin for begin, _ in ends), width], strict=True):
            layers = [
                i
                for i, c in enumerate(self.blocks.convolutions)
                for name in (c.bias, None if c.norm is None else c.norm.bias)
                if name is not None and begin <= self._slots[name].offset < end
            ]
            if begin < end:
                found.setdefault(min(layers, default=0), []).append((begin, end))
        return found

    @functools.cached_property
    def _fused(self) -> list[int]:
        """The layers whose weight gradient moves the weights."""
        if not self.updates:
            return []
        from fedentopt.simulation.triton import wide_update

        every = enumerate(self.blocks.convolutions)
        return [i for i, c in every if i and not c.window and wide_update.fuses(c.inputs, c.outputs, c.side**2)]

    def reserve(self, rows: torch.Tensor) -> None:
        """Make room for copies of the weights of as many models."""
        from fedentopt.simulation.triton import wide_update

        def room(*shape: int) -> torch.Tensor:
            return torch.empty((len(rows), *shape), dtype=self._dtype, device=rows.device)

        for i in self._fused:
            c = self.blocks.convolutions[i]
            plain = room(c.outputs, c.side**2, c.inputs) if self.products.bf16 else None
            self._copies[i] = wide_update.Copies(plain, room(c.side**2, c.inputs, c.outputs) if self._turned else None)

    def begin(self, starts: torch.Tensor, start_row: torch.Tensor, rows: torch.Tensor, momentum: torch.Tensor) -> None:
        """Begin a round: row start_row[i] of `starts` is what row i starts from, and nothing moves yet.

        Weights that their gradient moves have no momentum in step 0 whatever its rows hold, so only the others' is
        written.
        """
        from fedentopt.simulation.triton import wide_start

        for i in self._fused:
            begun, weight = (self._weight(r, self.blocks.convolutions[i]) for r in (starts, rows))
            wide_start.start_weights(begun, start_row, weight, self._copies[i])
        for begin, end in itertools.chain(*self._rest.values()):
            torch.index_select(starts[:, begin:end], 0, start_row, out=rows[:, begin:end])
            momentum[:, begin:end].zero_()

    def refresh(self, rows: torch.Tensor) -> None:
        """Copy the weights of all rows again."""
        from fedentopt.simulation.triton import wide_start

        own = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
        for i in self._fused:
            weight = self._weight(rows, self.blocks.convolutions[i])
            wide_start.start_weights(weight, own, weight, self._copies[i])

    def release(self) -> None:
        """Give the copies back."""
        self._copies.clear()

    def describe(self) -> str:
        return f"hand-written backward for wide convolutions on {self.kernels.describe()}"

    def _weight(self, rows: torch.Tensor, block: WideConv) -> torch.Tensor:
        """(n, Co, taps, Ci), sharing memory with the rows; a layer of windows has one tap of all their entries."""
        weight = self._slots[block.weight].view(rows).permute(0, 1, 3, 4, 2).flatten(2, 3)
        return weight.flatten(2)[:, :, None] if block.window else weight

    def _bias(self, rows: torch.Tensor, block: WideConv) -> torch.Tensor:
        assert block.bias is not None
        return self._slots[block.bias].view(rows)

    def _operands(
        self, rows: torch.Tensor, i: int, keep: bool, moving: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights of layer i for the forward product and, with `keep`, for that of the input gradient."""
        from fedentopt.simulation.triton import wide_maps

        block, n = self.blocks.convolutions[i], len(rows)
        weight, back = self._weight(rows, block), keep and i > 0
        if block.window:
            filled = torch.zeros((n, block.outputs, 1, block.window), dtype=self._dtype, device=rows.device)
            filled[..., : weight.shape[3]].copy_(weight)
            return filled, None
        if moving and i in self._copies:
            plain, turned = (None if copy is None else copy[:n] for copy in self._copies[i])
            forward = weight if plain is None else plain
        else:
            bf16, turning = self.products.bf16, back and self._turned
            forward, turned = wide_maps.turn(weight, self._dtype, copy=bf16, turned=turning)
        return forward, (turned if self._turned else forward) if back else None

    def _first_maps(
        self, rows: torch.Tensor, x: torch.Tensor, keep: bool, running: wide_maps.Running | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[_Kept], tuple[int, int]]:
        """The first layer as one kernel: its maps, the same turned, what its backward pass needs, their size."""
        from fedentopt.simulation.triton import wide_first

        block = self.blocks.convolutions[0]
        images = wide_first.batch_last(x, whole=not keep)  # a batch that trains has one size in all of a run
        weight = self._slots[block.weight].view(rows).permute(0, 1, 3, 4, 2).flatten(2)
        maps, maps_t, code, grown = wide_first.forward(
            images, weight, self._bias(rows, block), block.side, block.window, block.padding, self._dtype,
            models=len(rows), keep=keep, turned=keep and self._turned, precision=self.products.precision,
            running=running,
        )  # fmt: skip
        size = (int(x.shape[-2]), int(x.shape[-1]))
        kept = [_Kept(images, maps, code, size, grown, block.padding, None, None)] if keep else []
        return maps, maps_t, kept, (grown[0] // 2, grown[1] // 2)

    def _statistics(self, block: WideConv, rows: torch.Tensor, state: torch.Tensor | None) -> list[torch.Tensor]:
        """Running mean, variance and number of batches, in `state` or else behind the parameters in `rows`."""
        assert block.norm is not None
        slots = [self._slots[f"{block.norm.name}.{kind}"] for kind in ("running_mean", "running_var", COUNT)]
        if state is None:
            return [slot.view(rows) for slot in slots]
        return [replace(slot, offset=slot.offset - self._width).view(state) for slot in slots]

    def _evaluated(self, rows: torch.Tensor, block: WideConv) -> wide_norm.Slope:
        """What BatchNorm makes of a product, to which no bias has been added, by its running statistics."""
        from fedentopt.simulation.triton import wide_norm

        assert block.norm is not None
        mean, var, _ = self._statistics(block, rows, None)
        scale = self._slots[block.norm.weight].view(rows) * (var + block.norm.eps).rsqrt()
        shift = self._slots[block.norm.bias].view(rows) - mean * scale
        return wide_norm.Slope(scale, shift if block.bias is None else shift + self._bias(rows, block) * scale)

    def _normalised(
        self, rows: torch.Tensor, block: WideConv, maps: torch.Tensor, real: torch.Tensor, state: torch.Tensor
    ) -> tuple[wide_norm.Slope, wide_norm.Normalised]:
        """The same by the statistics of the batch, which move the running ones; see `masked_norm` for a lone value.

        The convolution's bias changes the running mean and nothing else.
        """
        from fedentopt.simulation.triton import wide_norm

        assert block.norm is not None
        found = wide_norm.statistics(maps, real)
        alone = found.values < 2  # rows that have finished see padding alone, and stay as they are
        old_mean, old_var, batches = self._statistics(block, rows, state)
        bias = 0.0 if block.bias is None else self._bias(rows, block)
        mean, var = torch.where(alone, old_mean - bias, found.mean), torch.where(alone, old_var, found.var)
        unbiased = found.var * found.values / (found.values - 1).clamp(min=1)
        for old, new in ((old_mean, found.mean + bias), (old_var, unbiased)):
            old.copy_(torch.where(alone, old, old * (1 - block.norm.momentum) + new * block.norm.momentum))
        batches.add_((~alone[:, 0]).to(batches.dtype))
        weight = self._slots[block.norm.weight].view(rows)
        scale = weight * (var + block.norm.eps).rsqrt()
        share = torch.where(alone, 0.0, 1 / found.values.clamp(min=1))
        slope = wide_norm.Slope(scale, self._slots[block.norm.bias].view(rows) - mean * scale)
        return slope, wide_norm.Normalised(maps, real, weight, mean, var, share, block.norm.eps)

    def _maps(
        self, rows: torch.Tensor, x: torch.Tensor, keep: bool, running: wide_maps.Running | None = None,
        real: torch.Tensor | None = None, state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[_Kept]]:  # fmt: skip
        """The last maps (n, H * W, B, C), and with `keep` what the backward pass needs; `running` says that the copies
        of weights are those of `rows`, and which rows are wanted. For BatchNorm: which samples of a batch that trains
        are `real`, and the `state` that it moves."""
        from fedentopt.simulation.triton import wide_maps, wide_norm

        kept: list[_Kept] = []
        first = self.blocks.convolutions[0]
        if self._first_alone:
            maps, maps_t, kept, size = self._first_maps(rows, x, keep, running)
        else:
            maps, maps_t = wide_maps.windows(
                x, first.window, first.side, first.padding, self._dtype, keep and self._turned
            )
            trim = 2 * first.padding - first.side + 1
            size = (int(x.shape[-2]) + trim, int(x.shape[-1]) + trim)
        for i, block in enumerate(self.blocks.convolutions):
            if not i and self._first_alone:
                continue
            weight, back = self._operands(rows, i, keep, running is not None)
            padding = 0 if block.window else block.padding
            trim = 0 if block.window else 2 * padding - block.side + 1
            grown = (size[0] + trim, size[1] + trim)
            normed = None
            if block.norm is None:
                out, out_t, code = self._layers.forward(
                    maps, weight, self._bias(rows, block), size, grown, padding, pooled=block.pooled, keep=keep,
                    running=running,
                )  # fmt: skip
            else:
                product = self._layers.product(maps, weight, size, padding, running)
                if real is None or state is None:
                    slope = self._evaluated(rows, block)
                else:
                    slope, normed = self._normalised(rows, block, product, real, state)
                how = {"pooled": block.pooled, "keep": keep, "turned": keep and self._turned}
                out, out_t, code = wide_norm.activated(product, slope, grown, real, **how)
            if keep:
                entered = maps_t if self._turned else maps
                assert entered is not None
                kept.append(_Kept(entered, out, code, size, grown, padding, back, normed))
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
        optimiser: Optimiser | None = None, state: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `StackedNet`. With an optimiser, the weights in `rows`, which are its own, have moved afterwards, and
        logits of models that have finished mean nothing."""
        from fedentopt.simulation.triton import wide_maps

        n, samples = x.shape[:2]
        rows, gradient = rows[:n], gradient[:n]
        running = None if optimiser is None else wide_maps.Running(optimiser.steps, optimiser.step)
        real = None
        if state is not None:
            real = torch.zeros(n, wide_maps.padded(samples), device=x.device)
            real[:, :samples].copy_(labels >= 0)
            state = state[:n]
        maps, kept = self._maps(rows, x, keep=True, running=running, real=real, state=state)
        *entered, logits = self._linears(rows, self._features(maps, samples), keys)
        upstream, _ = self.kernels.softmax_xent_grad(logits, labels, scale, shift)
        back = self._linears_back(rows, gradient, entered, upstream, drops=keys is not None)
        dy = torch.zeros_like(maps)  # samples that only pad the batch have no gradient
        dy[:, :, :samples].copy_(back.unflatten(2, (maps.shape[3], maps.shape[1])).permute(0, 3, 1, 2))
        self._convolutions_back(gradient, kept, dy, optimiser, running)
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

    def _move_rest(self, optimiser: Optimiser | None, i: int, n: int) -> None:
        """Move the parameters whose gradients are there once those of layer i are."""
        if optimiser is not None:
            for begin, end in self._rest.get(i, []):
                self.kernels.sgd_update(n=n, **optimiser.columns(begin, end)._asdict())

    def _convolutions_back(
        self, gradient: torch.Tensor, kept: list[_Kept], dy: torch.Tensor, optimiser: Optimiser | None,
        running: wide_maps.Running | None,
    ) -> None:  # fmt: skip
        """Write the gradients of the convolutions, given that of the last maps, or move their weights."""
        from fedentopt.simulation.triton import wide_first, wide_forms, wide_maps, wide_norm

        n = len(dy)
        back: torch.Tensor | wide_descriptors.Joined = dy  # a gradient, or what `unpool` would give for it
        lent: list[torch.Tensor] = []  # what is read beside is kept until that has ended
        for i in range(len(kept) - 1, -1, -1):
            block, layer = self.blocks.convolutions[i], kept[i]
            bias = None if block.bias is None else self._bias(gradient, block)
            into = self._weight(gradient, block)
            if not i and self._first_alone:
                assert layer.code is not None
                assert bias is not None
                assert isinstance(back, torch.Tensor)
                wide_first.weight_grad(
                    layer.entered, back, layer.code, into, bias, block.side, block.window, block.padding,
                    precision=self.products.precision,
                )  # fmt: skip
                continue
            passes, turned = i > 0 or not self._turned, self._turned
            sums: torch.Tensor | None = None
            if layer.normed is not None:
                assert isinstance(back, torch.Tensor)
                assert block.norm is not None
                weight, shift = (self._slots[name].view(gradient) for name in (block.norm.weight, block.norm.bias))
                dx, dx_t = wide_norm.gradients(
                    back, layer.left, layer.code, layer.normed, layer.grown, wide_norm.Into(weight, shift, bias),
                    passes=passes, turned=turned,
                )  # fmt: skip
            elif isinstance(back, torch.Tensor):
                dx, dx_t, sums = wide_maps.unpool(
                    back, layer.left, layer.code, layer.grown, passes=passes, turned=turned
                )
            else:
                dx, dx_t, sums = back
            out = dx_t if self._turned else dx
            assert out is not None
            if i:
                assert dx is not None
                assert layer.weight is not None
                under = self.blocks.convolutions[i - 1]
                below = None if under.pooled or under.norm is not None else kept[i - 1].left
                padding = block.side - 1 - block.padding
                back = self._layers.input_grad(dx, layer.weight, layer.grown, padding, below, running)
            # After the input gradient, which wants the weights as they were.
            beside = self._beside if i in self._copies and wide_forms.is_small(layer.size) else None
            if beside is not None:
                lent += [out] if sums is None else [out, sums]
            with nullcontext() if beside is None else beside.fork(out):
                if optimiser is not None and i in self._copies:
                    offset, copies = self._slots[block.weight].offset, self._copies[i]
                    self._layers.weight_step(
                        layer.entered, out, offset, optimiser, copies, layer.size, layer.padding, block.side
                    )
                else:
                    self._layers.weight_grad(layer.entered, out, into, layer.size, layer.padding, running)
                if sums is not None:
                    assert bias is not None
                    wide_maps.add_parts(sums, block.outputs, bias, block.outputs)
                if i:
                    self._move_rest(optimiser, i, n)
        if self._beside is not None:
            self._beside.join(dy)
        self._move_rest(optimiser, 0, n)

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
