"""Local training written down straight, one client at a time, in float64 torch: what every trainer must come to.

And worlds to try it in: uneven clients with partial batches and stragglers, each with terms of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import toy
from fedentopt.models import build, dropout_key
from fedentopt.randomness import GOLDEN, mix64_torch, signed
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.planning import ClientWork
from fedentopt.simulation.trainers import LoopTrainer, StackedTrainer, StreamsTrainer, Trainer, wants_channels_last
from fedentopt.simulation.triton import ops
from fedentopt.simulation.work import LocalCode, Row, Work, build_work

CLASSES, SAMPLES, BATCH = 4, 120, 8
SIZES = {"lenet5": 32, "vgg11": 32, "toy:wide_normed": 4}  # of images; the other toy models take 8
CPU = torch.device("cpu")


@dataclass
class World:
    """A model under one trainer on one device, and what it trains on."""

    name: str
    trainer: Trainer
    layout: FlatLayout
    data: DeviceData
    transform: ImageTransform
    starts: torch.Tensor

    def work(self, rows: list[Row], **settings: object) -> Work:
        """The rows on the device, with a push for those that ask for one."""
        size, width = self.data.images.shape[-1], self.layout.parameter_width
        pushes = [
            0.3 * self.layout.pack(build(self.name, CLASSES, seed=50 + k, image_size=size).state_dict())[:width]
            for k, row in enumerate(rows)
            if row.correction_mode
        ]
        push = torch.stack(pushes).to(self.starts.device) if pushes else None
        return build_work(rows, BATCH, CLASSES, self.starts.device, push, **settings)  # type: ignore[arg-type]

    def models(self) -> list[nn.Module]:
        """The start models as modules in float64."""
        made = []
        for row in self.starts:
            model = build(self.name, CLASSES, seed=5, image_size=self.data.images.shape[-1])
            model.load_state_dict(self.layout.unpack(row))
            made.append(model.double())
        return made


def world(
    name: str, trainer: str, device: torch.device = CPU, *, compiled: bool = True, workers: int = 1, exact: bool = True
) -> World:
    """Three start models of this name, images for them, and a trainer: "loop", "stacked" or "streams"; `exact` says
    that products are fp32's, not TF32's, where the device has both."""
    size = SIZES.get(name, 8)
    data = toy.images(samples=SAMPLES, classes=CLASSES, size=size)
    models = [build(name, CLASSES, seed=seed, image_size=size) for seed in (5, 6, 7)]
    last = wants_channels_last(trainer, models[0], size, device, "fp32-exact" if exact else "fp32")
    layout = FlatLayout(models[0], channels_last=last and compiled)
    place, transform = DeviceData.place(data, device), ImageTransform(data.mean, data.std, 0.2, 0.5, 0.1)
    kernels = ops(device, exact=exact)
    made: Trainer
    if trainer == "loop":
        made = LoopTrainer(models[0], layout, place, transform, workers)
    elif trainer == "stacked":
        made = StackedTrainer(models[0], layout, place, transform, kernels)
    else:
        made = StreamsTrainer(models[0], layout, place, transform, kernels, slots=2)
    starts = torch.stack([layout.pack(model.state_dict()) for model in models]).to(device)
    return World(name, made, layout, place, transform, starts)


def clients(count: int = 7, *, code: Callable[[int], LocalCode | None] = lambda k: None, **same: object) -> list[Row]:
    """Clients of one to forty samples and one to three epochs: FedLC's shift on some, FedRS's scale on others, a
    proximal term, a push."""
    rng = np.random.default_rng(3)
    sizes = [19, 40, 8, 1, 27, 13, 5, 33, 16][:count]
    rows = []
    for k, size in enumerate(sizes):
        own = (11 * k + np.arange(size)) % SAMPLES
        row = Row(
            task=ClientWork(k, own, np.bincount(own % CLASSES, minlength=CLASSES), 1 + k % 3, BATCH), start_row=k % 3,
            order_key=100 + k, augment_key=(200 + k) << 40, dropout_key=(300 + k) << 50, lr=0.02, weight_decay=0.01,
            momentum=0.9, mu=0.3 * (k % 2), logit_scale=rng.uniform(0.3, 1, CLASSES) if k % 3 == 0 else None,
            logit_shift=-3 * rng.uniform(size=CLASSES) if k % 3 == 1 else None, correction_mode=(k // 2) % 3,
            code=code(k),
        )  # fmt: skip
        rows.append(replace(row, **same))  # type: ignore[arg-type]
    return rows


def train(world: World, work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    """Every client of `work` by itself in float64: models (N, width) and losses (N, 2)."""
    models, losses = [], []
    images, labels, index = world.data.images.cpu(), world.data.labels.cpu(), work.index.cpu().long()
    for i in range(work.rows):
        model = world.models()[int(work.start_row[i])].train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        anchor = [p.detach().clone() for p in parameters]
        rates = {name: float(getattr(work, name)[i]) for name in ("lr", "momentum", "weight_decay")}
        mu, mode = float(work.mu[i]), int(work.correction_mode[i])
        push = [torch.zeros_like(p) for p in parameters]
        if mode and work.correction is not None:
            whole = torch.zeros(world.layout.width)
            whole[: world.layout.parameter_width] = work.correction[int(work.correction_row[i])].cpu()
            tensors = world.layout.unpack(whole)
            push = [tensors[name].double() for name, p in model.named_parameters() if p.requires_grad]
        optimiser = torch.optim.SGD(parameters, **rates)
        seen = []
        for t in range(int(work.steps_host[i])):
            chosen = index[t, i][index[t, i] >= 0]
            place = t * BATCH + torch.arange(len(chosen))
            keys = mix64_torch(work.augment_key[i].cpu() + place * signed(GOLDEN))
            x = world.transform.augment(images[chosen], keys).double()
            shared = dropout_key(model)
            if shared is not None:
                shared.set(mix64_torch(work.dropout_key[i].cpu() + torch.tensor(t) * signed(GOLDEN)))
            logits = model(x)
            seen.append(F.cross_entropy(logits, labels[chosen], reduction="none").detach())
            optimiser.zero_grad()
            scale, shift = work.logit_scale[i].cpu().double(), work.logit_shift[i].cpu().double()
            loss = F.cross_entropy(logits * scale + shift, labels[chosen])
            loss = loss + mu / 2 * sum(((p - a) ** 2).sum() for p, a in zip(parameters, anchor, strict=True))
            loss.backward()
            for p, own in zip(parameters, push, strict=True):
                if mode == 1:
                    p.grad += own
            optimiser.step()
            for p, own in zip(parameters, push, strict=True):
                if mode == 2:
                    p.data -= rates["lr"] * own
        every = torch.cat(seen)
        losses.append(torch.stack([every.mean(), every.square().mean().sqrt()]))
        models.append(world.layout.pack(model.state_dict()))
    return torch.stack(models), torch.stack(losses)
