"""The pieces of a stacked step in Triton, behind the interface that `plain` defines."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedentopt.simulation.triton import (
    convolution,
    convolution_input_grad,
    convolution_weight_grad,
    gather,
    linear,
    loss,
    update,
)
from fedentopt.simulation.triton.interface import Products, WideForm
from fedentopt.simulation.triton.windows import Windows

LARGEST_KERNEL = 7


class TritonKernels:
    """See `interface.Kernels`."""

    def __init__(
        self, exact: bool = False, bf16: bool = False, wide: bool = True, form: WideForm | None = None
    ) -> None:
        # "tf32x3" splits an fp32 operand into two TF32 ones: fp32's accuracy from tensor cores.
        self._precision = "tf32x3" if exact else "tf32"
        self._products: dict[str, Any] = {"bf16": bf16, "precision": self._precision}
        self.wide = Products(bf16, self._precision, form or WideForm()) if wide else None

    def describe(self) -> str:
        products = "bf16" if self._products["bf16"] else {"tf32x3": "fp32", "tf32": "TF32"}[self._precision]
        return f"Triton kernels, {products} products"

    def fuses_conv(self, in_channels: int, out_channels: int, kernel: int) -> bool:
        size = Windows(in_channels, out_channels, kernel, 2 * kernel, 2 * kernel)
        return kernel <= LARGEST_KERNEL and size.fits(2 if self._precision == "tf32x3" else 1)

    def conv_relu_pool_forward(self, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return convolution.forward(x, w, b, **self._products)

    def conv_relu_pool_weight_grad(self, x: Tensor, dy: Tensor, argmax: Tensor, dw: Tensor, db: Tensor) -> None:
        convolution_weight_grad.weight_grad(x, dy, argmax, dw, db, **self._products)

    def conv_relu_pool_input_grad(self, dy: Tensor, argmax: Tensor, w: Tensor, size: tuple[int, int]) -> Tensor:
        return convolution_input_grad.input_grad(dy, argmax, w, size, **self._products)

    def linear_forward(self, x: Tensor, w: Tensor, b: Tensor, relu: bool = False) -> Tensor:
        return linear.forward(x, w, b, relu, **self._products)

    def linear_weight_grad(self, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor) -> None:
        linear.weight_grad(x, dy, dw, db, **self._products)

    def linear_input_grad(self, dy: Tensor, w: Tensor, relu_of: Tensor | None = None) -> Tensor:
        return linear.input_grad(dy, w, relu_of, **self._products)

    gather_augment = staticmethod(gather.gather_augment)
    softmax_xent_grad = staticmethod(loss.softmax_xent_grad)
    add_sample_losses = staticmethod(loss.add_sample_losses)
    sgd_update = staticmethod(update.sgd_update)
