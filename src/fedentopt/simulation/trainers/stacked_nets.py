"""Forward and backward of n models at once, written out for plain convolutional nets, by vmap for the rest.

`LoweredNet` takes a Sequential made of convolution + ReLU + 2x2 max-pool blocks followed by linear layers (LeNet-5 and
its kin) and runs it on the stacked kernels, gradients written straight into the flat gradient rows. `VmapNet` takes
any module without BatchNorm or dropout through `torch.func`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.func import functional_call, vmap

from fedentopt.simulation.device import SideStream
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.lowering import ConvBlock, LinearBlock
from fedentopt.simulation.trainers.bound_model import mixes_samples
from fedentopt.simulation.triton import Kernels


class StackedNet(Protocol):
    """n models of one architecture over the first n rows of a flat buffer."""

    def describe(self) -> str: ...

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, labels: torch.Tensor,
        scale: torch.Tensor | None, shift: torch.Tensor | None, keys: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write the gradient of every model's loss on x (n, B, 3, H, W) into `gradient`'s first n rows.

        `keys` (n,), of this step, decide what a model with dropout drops. Returns the plain logits (n, B, C).
        """

    def logits(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Logits (n, B, C) for x (n, B, 3, H, W) or, the same for all models, (1, B, 3, H, W)."""


class LoweredNet:
    """Blocks on kernels."""

    def __init__(self, blocks: list[ConvBlock | LinearBlock], layout: FlatLayout, kernels: Kernels) -> None:
        self.blocks, self.layout, self.kernels = blocks, layout, kernels
        self._slots = {slot.name: slot for slot in layout.parameters}
        self._beside = SideStream()

    def describe(self) -> str:
        return f"hand-written backward on {self.kernels.describe()}"

    def _view(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return self._slots[name].view(rows)

    def _forward(self, rows: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, list[tuple[torch.Tensor, Any]]]:
        """Logits, and per block its input and what its backward needs."""
        kept: list[tuple[torch.Tensor, Any]] = []
        for block in self.blocks:
            weight, bias = self._view(rows, block.weight), self._view(rows, block.bias)
            if isinstance(block, ConvBlock):
                y, argmax = self.kernels.conv_relu_pool_forward(x, weight, bias)
                kept.append((x, argmax))
            else:
                if x.dim() > 3:
                    x = x.flatten(2)
                y = self.kernels.linear_forward(x, weight, bias, block.relu)
                kept.append((x, None))
            x = y
        return x, kept

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, labels: torch.Tensor,
        scale: torch.Tensor | None, shift: torch.Tensor | None, keys: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `StackedNet`."""
        n = len(x)
        rows, gradient = rows[:n], gradient[:n]
        logits, kept = self._forward(rows, x)
        upstream, _ = self.kernels.softmax_xent_grad(logits, labels, scale, shift)
        # Only the optimiser waits for a weight's gradient, the next block only for its input's.
        gradients = []
        for i in range(len(self.blocks) - 1, -1, -1):
            block, (entered, argmax) = self.blocks[i], kept[i]
            weight = self._view(rows, block.weight)
            into, into_bias = self._view(gradient, block.weight), self._view(gradient, block.bias)
            if isinstance(block, ConvBlock):
                upstream = upstream.reshape(argmax.shape)
            gradients.append(upstream)  # until `join`
            with self._beside.fork(x):
                if isinstance(block, ConvBlock):
                    self.kernels.conv_relu_pool_weight_grad(entered, upstream, argmax, into, into_bias)
                else:
                    self.kernels.linear_weight_grad(entered, upstream, into, into_bias)
            if not i:
                break
            if isinstance(block, ConvBlock):
                size = (int(entered.shape[-2]), int(entered.shape[-1]))
                upstream = self.kernels.conv_relu_pool_input_grad(upstream, argmax, weight, size)
            else:
                before = self.blocks[i - 1]
                relu_of = entered if isinstance(before, LinearBlock) and before.relu else None
                upstream = self.kernels.linear_input_grad(upstream, weight, relu_of)
        self._beside.join(x)
        return logits

    def logits(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._forward(rows, self._for_all(rows, x))[0]

    def features(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What enters the last linear layer, (n, B, F)."""
        return self._forward(rows, self._for_all(rows, x))[1][-1][0]

    @staticmethod
    def _for_all(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """A batch of one's own for each model, or one for all: the kernels read the same memory for each."""
        return x.contiguous().expand(len(rows), -1, -1, -1, -1)


class VmapNet:
    """Any module whose forward is a function of parameters and input alone, through torch.func: `padding_trial.can_map`
    tells. It trains in training mode and is asked for logits in evaluation mode."""

    def __init__(self, model: nn.Module, layout: FlatLayout) -> None:
        self.layout = layout
        self._model = model

        def one(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = functional_call(model, parameters, (x,))
            return result

        self._all = vmap(one, in_dims=(0, 0), randomness="error")
        self._shared = vmap(one, in_dims=(0, None), randomness="error")

    def describe(self) -> str:
        return "torch.func.vmap"

    def step(
        self, rows: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, labels: torch.Tensor,
        scale: torch.Tensor | None, shift: torch.Tensor | None, keys: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `StackedNet`."""
        n = len(x)
        if not self._model.training:
            self._model.train()
        leaves = {name: view.detach().requires_grad_() for name, view in self.layout.parameter_views(rows[:n]).items()}
        logits = self._all(leaves, x)
        z = logits if scale is None or shift is None else logits * scale[:, None] + shift[:, None]
        real = labels >= 0
        picked = z.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        losses = -(picked * real).sum(1) / real.sum(1).clamp(min=1)
        # A parameter that the forward pass leaves out has gradient zero.
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
        for view, grad in zip(self.layout.parameter_views(gradient[:n]).values(), grads, strict=True):
            view.copy_(grad)
        return logits.detach()

    def logits(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self._model.eval()
        with torch.no_grad():
            parameters = self.layout.parameter_views(rows)
            if len(x) == 1:
                result: torch.Tensor = self._shared(parameters, x[0])
            else:
                result = self._all(parameters, x)
        return result


def can_stack(model: nn.Module) -> bool:
    """Whether a model's layers let a step be a function of trained parameters and input, sample by sample: no buffers,
    nothing frozen, no BatchNorm (which would see the padding of a batch, even without statistics of its own), no
    dropout. What its `forward` does besides, `padding_trial.can_map` tries."""
    from fedentopt.models import dropout_key

    mixes = mixes_samples(model) or any(True for _ in model.buffers())
    return not mixes and all(p.requires_grad for p in model.parameters()) and dropout_key(model) is None
