"""FedConcat's second stage: frozen encoders side by side, one new linear layer trained on top.

Per run and without stacking: three small batches a client and round leave nothing to gain. See
`algorithms.fedconcat` for the method.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from fedentopt.algorithms.fedconcat import LOCAL_BATCHES
from fedentopt.models import head_name
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.bound_model import BoundModel
from fedentopt.simulation.device_data import DeviceData
from fedentopt.simulation.kernels import Kernels
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.randomness import key
from fedentopt.simulation.stacked_model import LoweredNet, StackedNet
from fedentopt.simulation.wide_model import WideNet
from fedentopt.simulation.work import Work

FEATURE_BATCH = 2048


def head_sizes(model: nn.Module, clusters: int) -> tuple[int, int, int]:
    """Parameters of the model, of its encoder (without the last linear layer) and of the new layer."""
    head = model.get_submodule(head_name(model))
    assert isinstance(head, nn.Linear)
    whole = sum(p.numel() for p in model.parameters())
    own = sum(p.numel() for p in head.parameters())
    return whole, whole - own, (clusters * head.in_features + 1) * head.out_features


class Encoders:
    """The features of several frozen models: what enters their last linear layer."""

    def __init__(self, model: nn.Module, layout: FlatLayout, rows: torch.Tensor) -> None:
        self.rows = rows
        self._bound = BoundModel(model, layout, rows.device)
        self._head = self._bound.module.get_submodule(head_name(model))
        self._seen: torch.Tensor | None = None
        self._head.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._seen = inputs[0]

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Float images (M, 3, H, W) -> (M, clusters * F)."""
        columns = []
        for row in self.rows:
            self._bound.load(row)
            parts = []
            for part in x.split(FEATURE_BATCH):
                self._bound.logits(part)
                assert self._seen is not None
                parts.append(self._seen.float())
            columns.append(torch.cat(parts))
        return torch.cat(columns, dim=1)


class StackedEncoders:
    """The same through the stacked kernels: all encoders in one pass."""

    def __init__(self, net: LoweredNet | WideNet, layout: FlatLayout, rows: torch.Tensor) -> None:
        self.rows, self._net = rows, net
        self._parameters = rows[:, : layout.parameter_width].contiguous()

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Float images (M, 3, H, W) -> (M, clusters * F)."""
        parts = [self._net.features(self._parameters, part[None]) for part in x.split(FEATURE_BATCH)]
        return torch.cat(parts, dim=1).permute(1, 0, 2).flatten(1)


class ConcatStage:
    """The new layer of one run: its training, its predictions, its checkpoint."""

    def __init__(
        self, model: nn.Module, layout: FlatLayout, rows: torch.Tensor, data: DeviceData, transform: ImageTransform,
        seed: int, kernels: Kernels, net: StackedNet | None,
    ) -> None:  # fmt: skip
        """`net`: the stacked form of the model, which runs all encoders at once, where there is one."""
        self.encoders: Encoders | StackedEncoders = Encoders(model, layout, rows)
        if isinstance(net, LoweredNet | WideNet):
            self.encoders = StackedEncoders(net, layout, rows)
        self.data, self.transform = data, transform
        head = model.get_submodule(head_name(model))
        assert isinstance(head, nn.Linear)
        self.inputs, self.classes = head.in_features * len(rows), data.num_classes
        self.weight_size = self.inputs * self.classes
        self.head = self._fresh(seed).to(rows.device)
        self._kernels = kernels
        self._test: torch.Tensor | None = None

    def _fresh(self, seed: int) -> torch.Tensor:
        """torch's default for a linear layer: uniform within 1/sqrt(inputs), here from a key."""
        generator = torch.Generator().manual_seed(key(seed, "concat-head") >> 1)
        bound = 1.0 / math.sqrt(self.inputs)
        return (torch.rand(self.weight_size + self.classes, generator=generator) * 2 - 1) * bound

    def _views(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight, bias = flat[:, : self.weight_size], flat[:, self.weight_size :]
        return weight.unflatten(1, (self.classes, self.inputs)), bias

    def train(self, work: Work) -> None:
        """One round: a few batches on every client of `work`, then the plain mean of their new layers."""
        device, n = self.head.device, work.rows
        w = self.head.expand(n, -1).clone()
        v, g = torch.zeros_like(w), torch.zeros_like(w)
        limit = work.steps.clamp(max=LOCAL_BATCHES)
        start_row = torch.zeros(n, dtype=torch.int32, device=device)
        start = self.head[None].clone()
        for t in range(min(int(work.steps_host[0]), LOCAL_BATCHES)):
            step = torch.full((1,), t, dtype=torch.int64, device=device)
            x, labels = self._kernels.gather_augment(
                self.data.images, self.data.labels, work.index, work.augment_key, step, self.transform, n
            )
            features = self.encoders.features(x.flatten(0, 1)).unflatten(0, (n, -1))
            weight, bias = self._views(w)
            logits = self._kernels.linear_forward(features, weight, bias)
            upstream, _ = self._kernels.softmax_xent_grad(logits, labels)
            into, into_bias = self._views(g)
            self._kernels.linear_weight_grad(features, upstream, into, into_bias)
            self._kernels.sgd_update(
                w, v, g, n=n, start=start, start_row=start_row, steps=limit, step=step,
                lr=work.lr, weight_decay=work.weight_decay, momentum=work.momentum, mu=work.mu,
            )  # fmt: skip
        self.head = w.mean(0)

    def test_logits(self) -> torch.Tensor:
        """Logits of the test split; its features never change, so they are computed once."""
        if self._test is None:
            parts = [self.encoders.features(self.transform.standardise(p)) for p in self.data.test_images.split(1024)]
            self._test = torch.cat(parts)
        weight, bias = self._views(self.head[None])
        return torch.addmm(bias[0], self._test, weight[0].t())

    def state(self, layout: FlatLayout) -> dict[str, torch.Tensor]:
        """The finished model: every encoder under `encoder.<cluster>.`, the new layer as `head`."""
        tensors = {
            f"encoder.{i}.{name}": value
            for i, row in enumerate(self.encoders.rows)
            for name, value in layout.unpack(row).items()
        }
        weight, bias = self._views(self.head[None])
        return tensors | {"head.weight": weight[0].cpu().clone(), "head.bias": bias[0].cpu().clone()}

