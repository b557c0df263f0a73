"""The products of one wide convolution, on the kernels that a step's form (`interface.WideForm`) names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedentopt.simulation.triton import wide, wide_descriptors, wide_lines, wide_maps, wide_pooled, wide_update
from fedentopt.simulation.triton.interface import Optimiser, Products
from fedentopt.simulation.triton.wide_maps import Running, Size


class WideLayers:
    """Forward pass and gradients of convolutions; `turned` says that maps and weights are kept transposed, too."""

    def __init__(self, products: Products) -> None:
        form, self.precision = products.form, products.precision
        self.turned = not (form.untransposed and products.bf16)
        self._described, self._joined = form.descriptors, form.joined and form.descriptors
        self._convolve: Callable[..., Tensor] = wide_descriptors.convolution if form.descriptors else wide.convolution

    def forward(
        self, maps: Tensor, weight: Tensor, bias: Tensor, size: Size, grown: Size, padding: int, *, pooled: bool,
        keep: bool, running: Running | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Convolution of maps of `size` to `grown`, bias, ReLU and perhaps a pool: see `wide_maps.pool`. Of models that
        are not `running` nothing is wanted."""
        turned, models = keep and self.turned, len(weight)
        if self._joined and pooled and wide_pooled.fits(maps.shape[2], grown):
            return wide_pooled.forward(
                maps, weight, bias, size, padding, models=models, keep=keep, turned=turned, precision=self.precision,
                running=running,
            )  # fmt: skip
        settings: dict[str, Any] = {"models": models, "precision": self.precision}
        if self._joined and not pooled:
            y = wide_descriptors.joined(maps, weight, bias, size, padding, turned=turned, running=running, **settings)
            return y.maps, y.turned, None
        dense = self._convolve(maps, weight, bias, size, padding, **settings, **self._only(running))
        return wide_maps.pool(dense, grown, pooled=pooled, keep=keep, turned=turned)

    def input_grad(
        self, dy: Tensor, weight: Tensor, size: Size, padding: int, left: Tensor | None,
        running: Running | None = None,
    ) -> Tensor | wide_descriptors.Joined:  # fmt: skip
        """The gradient of a layer's input, given that of its output, of `size`, and weights as the form keeps them.

        Where the maps `left` by the layer below have come out of a ReLU alone, without a pool, and the form says so,
        the way back through that ReLU is made as well: all that `wide_maps.unpool` would give.
        """
        settings: dict[str, Any] = {
            "models": len(dy), "taps_first": self.turned, "inputs_first": not self.turned, "precision": self.precision,
        }  # fmt: skip
        if self._joined and left is not None:
            settings |= {"turned": self.turned, "left": left, "running": running}
            return wide_descriptors.joined(dy, weight, None, size, padding, **settings)
        return self._convolve(dy, weight, None, size, padding, **settings, **self._only(running))

    def _only(self, running: Running | None) -> dict[str, Any]:
        """For kernels that leave models out: those that descriptors bring tiles to."""
        return {"running": running} if self._described else {}

    def weight_grad(
        self, x: Tensor, dy: Tensor, dw: Tensor, size: Size, padding: int, running: Running | None = None
    ) -> None:
        """See `wide.weight_grad`."""
        settings: dict[str, Any] = {"turned": self.turned, "precision": self.precision}
        if self._described and wide_lines.fits(math.isqrt(dw.shape[2]), self.precision):
            wide_lines.weight_grad(x, dy, dw, size, padding, running=running, **settings)
        else:
            wide.weight_grad(x, dy, dw, size, padding, described=self._described, **settings)

    def weight_step(
        self, x: Tensor, dy: Tensor, offset: int, optimiser: Optimiser, copies: wide_update.Copies, size: Size,
        padding: int, side: int,
    ) -> None:  # fmt: skip
        """See `wide_update.weight_step`."""
        wide_update.weight_step(
            x, dy, offset, optimiser, copies, size, padding, side=side, turned=self.turned, described=self._described,
            precision=self.precision,
        )  # fmt: skip
