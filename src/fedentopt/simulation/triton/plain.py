"""The pieces of a stacked step in plain torch: the reference that defines them, the CPU path and the fallback.

Works in any float type, so the tests run it in float64. With `bf16` the operands of every product are rounded to
bfloat16 and multiplied in the type they came in, which is what a tensor core does with bfloat16 operands.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from fedentopt.randomness import GOLDEN, mix64_torch, signed
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.triton.interface import AFTER_STEP, DEAD, IN_GRADIENT, Products


class PlainKernels:
    """See `interface.Kernels`; convolutions of all models are one grouped convolution."""

    def __init__(self, bf16: bool = False) -> None:
        self._bf16 = bf16
        self.wide: Products | None = None

    def describe(self) -> str:
        return "plain torch" + (", bf16 products" if self._bf16 else "")

    def fuses_conv(self, in_channels: int, out_channels: int, kernel: int) -> bool:
        return True

    def _operand(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype) if self._bf16 else x

    def conv_relu_pool_forward(self, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        n = x.shape[0]
        inputs, filters = _groups(self._operand(x)), _filters(self._operand(w))
        dense = _models(F.conv2d(inputs, filters, b.reshape(-1), groups=n), n)
        # relu(max_pool(.)) is max_pool(relu(.)) with a quarter of the work.
        pooled, index = F.max_pool2d(dense.flatten(0, 1), 2, return_indices=True)
        width = dense.shape[-1]
        code = (index // width % 2) * 2 + index % width % 2
        code = torch.where(pooled <= 0, DEAD, code).to(torch.uint8)
        return pooled.relu_().view(*dense.shape[:3], *pooled.shape[2:]), code.view(*dense.shape[:3], *pooled.shape[2:])

    def conv_relu_pool_weight_grad(self, x: Tensor, dy: Tensor, argmax: Tensor, dw: Tensor, db: Tensor) -> None:
        n, k = x.shape[0], dw.shape[-1]
        dense = _unpool(dy, argmax, (x.shape[-2] - k + 1, x.shape[-1] - k + 1))
        inputs, grads = _groups(self._operand(x)), _groups(self._operand(dense))
        grad = conv2d_weight(inputs, (n * dw.shape[1], *dw.shape[2:]), grads, groups=n)
        dw.copy_(grad.view(dw.shape))
        db.copy_(dense.sum(dim=(1, 3, 4)))

    def conv_relu_pool_input_grad(self, dy: Tensor, argmax: Tensor, w: Tensor, size: tuple[int, int]) -> Tensor:
        n, k = w.shape[0], w.shape[-1]
        dense = _unpool(dy, argmax, (size[0] - k + 1, size[1] - k + 1))
        grads, filters = _groups(self._operand(dense)), _filters(self._operand(w))
        return _models(F.conv_transpose2d(grads, filters, groups=n), n)

    def linear_forward(self, x: Tensor, w: Tensor, b: Tensor, relu: bool = False) -> Tensor:
        y = torch.baddbmm(b.unsqueeze(1), self._operand(x), self._operand(w).transpose(1, 2))
        return y.relu_() if relu else y

    def linear_weight_grad(self, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor) -> None:
        dw.copy_(torch.bmm(self._operand(dy).transpose(1, 2), self._operand(x)))
        db.copy_(dy.sum(dim=1))

    def linear_input_grad(self, dy: Tensor, w: Tensor, relu_of: Tensor | None = None) -> Tensor:
        dx = torch.bmm(self._operand(dy), self._operand(w))
        return dx if relu_of is None else dx * (relu_of > 0)

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
        batch = plan.shape[2]
        index = plan.index_select(0, step.view(1))[0, :n].to(torch.int64)
        real = index >= 0
        position = step.view(1) * batch + torch.arange(batch, device=plan.device)
        sample_keys = mix64_torch(keys[:n, None] + position * signed(GOLDEN))
        taken = index.clamp(min=0).view(-1)
        x = transform.augment(images[taken], sample_keys.view(-1)).view(n, batch, 3, *images.shape[2:])
        y = labels[taken].view(n, batch).to(torch.int64)
        return x * real.view(n, batch, 1, 1, 1), torch.where(real, y, -1)

    def softmax_xent_grad(
        self, logits: Tensor, labels: Tensor, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        z = logits if scale is None else logits * scale.unsqueeze(1)
        z = z if shift is None else z + shift.unsqueeze(1)
        log_p = F.log_softmax(z, dim=2)
        real = (labels >= 0).unsqueeze(2)
        share = 1.0 / real.sum(dim=1, keepdim=True).clamp(min=1).to(z.dtype)
        target = labels.clamp(min=0).unsqueeze(2)
        loss = -torch.where(real, log_p.gather(2, target) * share, 0.0).sum(dim=(1, 2))
        grad = (log_p.exp() - torch.zeros_like(log_p).scatter_(2, target, 1.0)) * share
        grad = grad if scale is None else grad * scale.unsqueeze(1)
        return torch.where(real, grad, 0.0), loss

    def add_sample_losses(self, logits: Tensor, labels: Tensor, sums: Tensor) -> None:
        picked = F.log_softmax(logits, dim=2).gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
        losses = torch.where(labels >= 0, -picked, 0.0).double()
        sums[: len(logits)] += torch.stack([losses.sum(1), losses.square().sum(1)], 1)

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
        def per_row(values: Tensor) -> Tensor:
            return values[:n].unsqueeze(1)

        old_w, old_v = w[:n], v[:n]
        d = g[:n] + per_row(weight_decay) * old_w
        pull = old_w - start.index_select(0, start_row[:n].to(torch.int64))
        d = d + torch.where(per_row(mu) == 0, 0.0, per_row(mu) * pull)
        late: Tensor | float = 0.0
        if correction is not None and correction_row is not None and correction_mode is not None:
            c = correction.index_select(0, correction_row[:n].clamp(min=0).to(torch.int64))
            mode = torch.where(correction_row[:n] < 0, 0, correction_mode[:n]).unsqueeze(1)
            d = d + torch.where(mode == IN_GRADIENT, c, 0.0)
            late = torch.where(mode == AFTER_STEP, c, 0.0)
        new_v = per_row(momentum) * old_v + d
        new_w = old_w - per_row(lr) * (new_v + late)
        active = per_row(steps) > step
        w[:n] = torch.where(active, new_w, old_w)
        v[:n] = torch.where(active, new_v, old_v)


def _groups(x: Tensor) -> Tensor:
    """(n, B, C, H, W) -> (B, n*C, H, W): every model a group of channels."""
    return x.transpose(0, 1).flatten(1, 2)


def _models(x: Tensor, n: int) -> Tensor:
    """(B, n*C, H, W) -> (n, B, C, H, W), contiguous."""
    return x.view(x.shape[0], n, -1, *x.shape[2:]).transpose(0, 1).contiguous()


def _filters(w: Tensor) -> Tensor:
    return w.reshape(-1, *w.shape[2:])


def _unpool(dy: Tensor, argmax: Tensor, size: tuple[int, int]) -> Tensor:
    """The gradient of the convolution's dense output (n, B, Co, *size): dy at the arg-max, zero elsewhere."""
    dense = dy.new_zeros(*dy.shape[:3], *size)
    rows, columns = 2 * dy.shape[3], 2 * dy.shape[4]
    for position in range(4):
        dense[..., position // 2 : rows : 2, position % 2 : columns : 2] = dy * (argmax == position)
    return dense
