"""What a stacked training step is made of: one method per piece, the same for plain torch and for Triton.

n models of one architecture train side by side. Their parameters are the rows of one flat buffer, so a layer's weight
is a view whose first stride is the row length and which is contiguous inside; gradients are written into such views of
the gradient buffer. Every method works on the first n rows, never waits for the device and never reads a value back
to the host, so all of them can be captured in a CUDA graph. The real samples of a batch carry a label of 0 or more;
padding slots carry -1, an all-zero image, and no gradient.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from fedentopt.simulation.augment import ImageTransform

NO_CORRECTION, IN_GRADIENT, AFTER_STEP = range(3)  # a row's correction mode in `sgd_update`
DEAD = 4  # the arg-max code of a pooled pixel that ReLU switched off; 0..3 are its positions in row-major order


class Kernels(Protocol):
    """The pieces of a stacked step. `describe` says in one line which implementation runs; `wide` says how the wide
    convolutions of `triton.wide` multiply, None where those do not run."""

    wide: Products | None

    def describe(self) -> str: ...

    def fuses_conv(self, in_channels: int, out_channels: int, kernel: int) -> bool:
        """Whether `conv_relu_pool_*` takes this layer (square kernel, stride 1, no padding)."""
        ...

    def conv_relu_pool_forward(self, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Valid convolution, bias, ReLU and 2x2 max-pool (stride 2, odd sizes floor) of every model's batch.

        x (n, B, Ci, H, W), w (n, Co, Ci, k, k), b (n, Co) -> y (n, B, Co, Hp, Wp) and the arg-max codes, uint8 of the
        same shape: which of the four positions won (the first in row-major order on a tie), or DEAD. x may be one
        batch expanded over the models (stride 0); otherwise it is contiguous.
        """
        ...

    def conv_relu_pool_weight_grad(self, x: Tensor, dy: Tensor, argmax: Tensor, dw: Tensor, db: Tensor) -> None:
        """Write the gradients of the weight and the bias into dw (n, Co, Ci, k, k) and db (n, Co)."""
        ...

    def conv_relu_pool_input_grad(self, dy: Tensor, argmax: Tensor, w: Tensor, size: tuple[int, int]) -> Tensor:
        """The gradient of x, (n, B, Ci, *size); `size` is x's height and width, which pooling may have floored away."""
        ...

    def linear_forward(self, x: Tensor, w: Tensor, b: Tensor, relu: bool = False) -> Tensor:
        """x (n, B, I), w (n, O, I), b (n, O) -> x w' + b of shape (n, B, O), through ReLU if asked.

        x may be one batch expanded over the models, as in `conv_relu_pool_forward`.
        """
        ...

    def linear_weight_grad(self, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor) -> None:
        """Write the gradients of the weight and the bias into dw (n, O, I) and db (n, O)."""
        ...

    def linear_input_grad(self, dy: Tensor, w: Tensor, relu_of: Tensor | None = None) -> Tensor:
        """dy w (n, B, I), zero where `relu_of` (the layer's input, when it came out of a ReLU) is not positive."""
        ...

    def gather_augment(
        self,
        images: Tensor,
        labels: Tensor,
        plan: Tensor,
        keys: Tensor,
        step: Tensor,
        transform: ImageTransform,
        n: int,
    ) -> tuple[Tensor, Tensor]:
        """Batch number `step` of the first n models: augmented images (n, B, 3, H, W) and labels (n, B).

        images uint8 (m, 1 or 3, H, W), labels int64 or int32 (m,), plan int32 (T, N, B) with -1 for padding, keys int64
        (N,), step an int64 tensor of one element on the device. Slot j of a batch is sample number step * B + j of its
        client, and its key is mix64(keys[client] + (step * B + j) * GOLDEN). Labels come out int64.
        """
        ...

    def softmax_xent_grad(
        self, logits: Tensor, labels: Tensor, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cross-entropy of scale * logits + shift, averaged over each model's real samples.

        logits (n, B, C), labels (n, B), scale and shift (n, C) -> gradient with respect to `logits` and loss (n,);
        both zero for a batch without real samples.
        """
        ...

    def add_sample_losses(self, logits: Tensor, labels: Tensor, sums: Tensor) -> None:
        """Add each model's sum and sum of squares of its real samples' cross-entropies to sums (N, 2), float64.

        logits (n, B, C), plain, without scale and shift, and labels (n, B). Rows of `sums` from n on stay as they are,
        and so do those of models that have finished, whose batches are all padding.
        """
        ...

    def sgd_update(
        self,
        w: Tensor,
        v: Tensor,
        g: Tensor,
        *,
        n: int,
        lr: Tensor,
        momentum: Tensor,
        weight_decay: Tensor,
        mu: Tensor,
        start: Tensor,
        start_row: Tensor,
        steps: Tensor,
        step: Tensor,
        correction: Tensor | None = None,
        correction_row: Tensor | None = None,
        correction_mode: Tensor | None = None,
    ) -> None:
        """One SGD step of the first n rows of w, in place; w, v, g (N, P), everything per row has at least n entries.

        d = g + weight_decay * w + mu * (w - start[start_row]) [+ c, IN_GRADIENT]; v = momentum * v + d;
        w = w - lr * v [- lr * c, AFTER_STEP], where c = correction[correction_row] for rows whose `correction_row` is
        not negative. Rows that have finished (steps[row] <= step) keep w and v bit for bit. start_row, steps,
        correction_row and correction_mode are int32; `step` is an int64 tensor of one element on the device.
        """
        ...


class Optimiser(NamedTuple):
    """What `Kernels.sgd_update` is told, but for the number of rows: parameters, momentum and gradients (N, P), and
    the settings of every row."""

    w: Tensor
    v: Tensor
    g: Tensor
    lr: Tensor
    momentum: Tensor
    weight_decay: Tensor
    mu: Tensor
    start: Tensor
    start_row: Tensor
    steps: Tensor
    step: Tensor
    correction: Tensor | None
    correction_row: Tensor
    correction_mode: Tensor

    def columns(self, begin: int, end: int) -> Optimiser:
        """The same for the parameters from `begin` to `end` alone."""
        cut = {name: getattr(self, name)[:, begin:end] for name in ("w", "v", "g", "start")}
        return self._replace(correction=None if self.correction is None else self.correction[:, begin:end], **cut)


class WideForm(NamedTuple):
    """In which form a step of wide convolutions runs; what it computes is the same.

    `first`: convolution, bias, ReLU and pool of the images are one kernel each way (`triton.wide_first`). `update`: the
    optimiser rides along with the weight gradients (`triton.wide_update`), and models that have finished are left out
    of what `descriptors` and `first` make. `untransposed`: bf16 products read maps and weights as they lie, which
    tensor cores allow for 16 bits alone, instead of transposed copies; fp32 products do as ever. `descriptors`: the
    copy engine of a Hopper GPU brings the products' tiles (`triton.wide_descriptors`, `triton.wide_lines`). `aside`,
    with `update`: weights whose maps have few pixels move beside the gradients of the layers below. `joined`, with
    `descriptors`: bias, ReLU, pool, transposed copies and the way back through ReLU happen in the convolutions'
    epilogues (`triton.wide_pooled`, `triton.wide_descriptors.joined`). `gluon`, with `descriptors`: what neighbouring
    taps share is brought once, by kernels in Gluon (`triton.wide_taps`, `triton.wide_step_lines`) where they fit a
    layer and Triton's version.
    """

    first: bool = False
    update: bool = False
    untransposed: bool = False
    descriptors: bool = False
    aside: bool = False
    joined: bool = False
    gluon: bool = False


EVERY = WideForm(*[True] * len(WideForm._fields))  # all of it together: the form of Hopper GPUs


class Products(NamedTuple):
    """Operands of matrix products in bf16 or fp32, how tensor cores take fp32 ("tf32", or "tf32x3" for fp32's
    accuracy), and the form of wide convolutions."""

    bf16: bool
    precision: str
    form: WideForm = WideForm()
