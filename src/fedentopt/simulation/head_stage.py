"""The second stage of one run: frozen encoders side by side, one new linear layer on top.

`second_stage` trains and evaluates the new layers of all runs together. `algorithms.fedconcat` is a method with one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from fedentopt.algorithms import ModelSizes
from fedentopt.models import find_head, head_name
from fedentopt.randomness import key
from fedentopt.simulation.device import to_device
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers import BoundModel, LoweredNet, WideNet

FEATURE_BATCH = 2048
COPIED = 2**26  # floats of encoders that runs taken together may have


def last_layer(model: nn.Module) -> nn.Linear:
    """The layer that the new one replaces."""
    head = model.get_submodule(head_name(model))
    assert isinstance(head, nn.Linear)
    return head


def model_sizes(model: nn.Module) -> ModelSizes | None:
    """Numbers of parameters, features and classes; None for a model without a last linear layer."""
    if find_head(model) is None:
        return None
    head = last_layer(model)
    total = sum(p.numel() for p in model.parameters())
    own = sum(p.numel() for p in head.parameters())
    return ModelSizes(total, total - own, head.in_features, head.out_features)


class Encoders(Protocol):
    """Takes images through frozen models, to what enters their last linear layer."""

    def features(self, rows: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Each run's images through that run's encoders.

        rows: one (clusters, width) matrix of models per run, all of one shape; x (runs, M, 3, H, W) -> (runs, M,
        clusters * F).
        """


class ModuleEncoders:
    """Any model, as an ordinary module: one encoder after the other."""

    def __init__(self, model: nn.Module, layout: FlatLayout, device: torch.device) -> None:
        self._bound = BoundModel(model, layout, device)
        self._seen: torch.Tensor | None = None
        last_layer(self._bound.module).register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._seen = inputs[0]

    def features(self, rows: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """See `Encoders`."""
        return torch.stack([self._features(own, images) for own, images in zip(rows, x, strict=True)])

    def _features(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        columns = []
        for row in rows:
            self._bound.load(row)
            parts = []
            for part in x.split(FEATURE_BATCH):
                self._bound.logits(part)
                assert self._seen is not None
                parts.append(self._seen.float())
            columns.append(joined(parts))
        return torch.cat(columns, dim=1)


class StackedEncoders:
    """Models that the stacked kernels know: the encoders of one run in one pass, or one encoder each of many runs.

    Many runs take as many passes as a run has encoders, and none of their images is copied. Large encoders are not
    worth laying side by side: one run's images fill the GPU.
    """

    def __init__(self, net: LoweredNet | WideNet) -> None:
        self._net = net

    def features(self, rows: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """See `Encoders`."""
        together = max(1, COPIED // rows[0].numel())
        cuts = range(0, len(rows), together)
        parts = [self._features(rows[i : i + together], x[i : i + together]) for i in cuts]
        return joined(parts)

    def _features(self, rows: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if len(rows) == 1:
            return self._pass(rows[0], x).permute(1, 0, 2).flatten(1)[None]
        turns = torch.stack(list(rows), dim=1)  # (clusters, runs, width)
        return torch.cat([self._pass(encoders, x) for encoders in turns], dim=2)

    def _pass(self, models: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return joined([self._net.features(models, part) for part in x.split(FEATURE_BATCH, dim=1)], dim=1)


def joined(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Concatenated, without a copy where there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


@dataclass(frozen=True)
class TestFeatures:
    """The features of the test split: line `line` of `block` (runs, M, inputs), which runs share."""

    block: torch.Tensor
    line: int


class HeadStage:
    """One run in its second stage: its encoders, its new layer, the features of the test split once there are any.

    `sound` says, on the device, whether the last round's new layer was finite; one that was not is not kept.
    """

    def __init__(self, encoders: torch.Tensor, inputs: int, classes: int, head: torch.Tensor, batches: int) -> None:
        """`encoders` (groups, width); `inputs` of the new layer, all encoders' features together; `batches` that a
        client trains it on in a round."""
        self.encoders, self.inputs, self.classes, self.batches = encoders, inputs, classes, batches
        self.head = to_device(head, encoders.device)
        self.sound = torch.isfinite(self.head).all()
        self.test: TestFeatures | None = None

    def views(self, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights (n, classes, inputs) and biases (n, classes) of new layers (n, size) like this run's."""
        size = self.classes * self.inputs
        weight, bias = heads[:, :size], heads[:, size:]
        return weight.unflatten(1, (self.classes, self.inputs)), bias

    def state(self, layout: FlatLayout) -> dict[str, torch.Tensor]:
        """The finished model: every encoder under `encoder.<cluster>.`, the new layer as `head`."""
        tensors = {
            f"encoder.{i}.{name}": value
            for i, row in enumerate(self.encoders)
            for name, value in layout.unpack(row).items()
        }
        weight, bias = self.views(self.head[None])
        return tensors | {"head.weight": weight[0].cpu().clone(), "head.bias": bias[0].cpu().clone()}


def fresh_head(inputs: int, classes: int, seed: int) -> torch.Tensor:
    """torch's default for a linear layer: uniform within 1/sqrt(inputs), here from a key."""
    generator = torch.Generator().manual_seed(key(seed, "concat-head") >> 1)
    bound = 1.0 / math.sqrt(inputs)
    return (torch.rand((inputs + 1) * classes, generator=generator) * 2 - 1) * bound
