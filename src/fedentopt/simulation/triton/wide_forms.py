"""The products of one wide convolution, on the kernels that a step's form (`interface.WideForm`) names."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import triton
from torch import Tensor

from fedentopt.simulation.triton import wide, wide_descriptors, wide_lines, wide_maps, wide_pooled, wide_update
from fedentopt.simulation.triton.interface import Optimiser, Products
from fedentopt.simulation.triton.wide_maps import Running, Size

GLUON = ((3, 6), (3, 9))  # first and last version of Triton whose Gluon compiles the kernels written in it
FEW_PIXELS = 16  # of maps whose weights outnumber their products: memory is then what a step waits for


def is_small(size: Size) -> bool:
    return size[0] * size[1] <= FEW_PIXELS


class GluonKernels(NamedTuple):
    """The modules that are written in Gluon (`hopper`); None for one that is not wanted."""

    taps: ModuleType | None
    step_lines: ModuleType | None


@functools.cache
def gluon_kernels() -> GluonKernels | None:
    """Kernels in Gluon, where Triton's version compiles them and its interpreter is not at work."""
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if not GLUON[0] <= version <= GLUON[1] or triton.knobs.runtime.interpret:
        return None
    from fedentopt.simulation.triton import wide_step_lines, wide_taps

    return GluonKernels(wide_taps, wide_step_lines)


class WideLayers:
    """Forward pass and gradients of convolutions; `turned` says that maps and weights are kept transposed, too."""

    def __init__(self, products: Products) -> None:
        form, self.precision = products.form, products.precision
        self.turned = not (form.untransposed and products.bf16)
        self._described, self._joined = form.descriptors, form.joined and form.descriptors
        self._in_gluon = form.gluon and form.descriptors

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
            y = self._join(maps, weight, bias, size, padding, turned=turned, running=running, **settings)
            return y.maps, y.turned, None
        dense = self._convolve(maps, weight, bias, size, padding, running, **settings)
        return wide_maps.pool(dense, grown, pooled=pooled, keep=keep, turned=turned)

    def product(self, maps: Tensor, weight: Tensor, size: Size, padding: int, running: Running | None) -> Tensor:
        """A convolution and nothing behind it; see `forward`."""
        settings: dict[str, Any] = {"models": len(weight), "precision": self.precision}
        return self._convolve(maps, weight, None, size, padding, running, **settings)

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
            return self._join(dy, weight, None, size, padding, **settings)
        return self._convolve(dy, weight, None, size, padding, running, **settings)

    def _convolve(
        self, x: Tensor, w: Tensor, bias: Tensor | None, size: Size, padding: int, running: Running | None,
        **settings: Any,
    ) -> Tensor:  # fmt: skip
        """See `wide.convolution`; kernels that descriptors bring tiles to leave models out that are not running."""
        if self._described:
            return self._join(x, w, bias, size, padding, running=running, **settings).maps
        return wide.convolution(x, w, bias, size, padding, **settings)

    def _join(
        self, x: Tensor, w: Tensor, bias: Tensor | None, size: Size, padding: int, *, models: int, precision: str,
        taps_first: bool = False, inputs_first: bool = False, turned: bool = False, left: Tensor | None = None,
        running: Running | None = None,
    ) -> wide_descriptors.Joined:  # fmt: skip
        """See `wide_descriptors.joined`."""
        taps, order = self._gluon("taps"), {"taps_first": taps_first, "inputs_first": inputs_first}
        if taps is not None and taps.fits(x, w, size, padding, precision=precision, **order):
            made = taps.convolution(x, w, bias, size, models=models, turned=turned, left=left, running=running, **order)
            return wide_descriptors.Joined(*made)
        return wide_descriptors.joined(
            x, w, bias, size, padding, models=models, precision=precision, taps_first=taps_first,
            inputs_first=inputs_first, turned=turned, left=left, running=running,
        )  # fmt: skip

    def _gluon(self, name: str) -> ModuleType | None:
        """One of the modules in Gluon, where the form has them and Triton can compile them."""
        return getattr(gluon_kernels(), name, None) if self._in_gluon else None

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
        """See `wide_update.weight_step`. Steps of small maps run beside other kernels, and need smaller programs than
        those that take three taps at a time."""
        lines = self._gluon("step_lines")
        if lines is not None and not is_small(size):
            ci, batch = x.shape[2:] if self.turned else (x.shape[3], x.shape[2])
            co = dy.shape[2 if self.turned else 3]
            if lines.fits(ci, co, batch, size, side, padding, x.dtype, self.precision):
                lines.weight_step(x, dy, offset, optimiser, copies, size, turned=self.turned)
                return
        wide_update.weight_step(
            x, dy, offset, optimiser, copies, size, padding, side=side, turned=self.turned, described=self._described,
            precision=self.precision,
        )  # fmt: skip
