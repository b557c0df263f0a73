"""Local training of one client, as the engine does it, for programs that bring their own rounds (Flower)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedentopt.algorithms import Algorithm, Client, overrides
from fedentopt.errors import InputError
from fedentopt.models import keeps_order
from fedentopt.randomness import key
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.methods import build_algorithm
from fedentopt.simulation.planning import ClientWork
from fedentopt.simulation.trainers import Worker
from fedentopt.simulation.work import Row, build_work


@dataclass(frozen=True)
class LocalResult:
    """What training did: steps taken and samples held. The model was changed in place."""

    steps: int
    samples: int


def train_client(
    model: nn.Module,
    images: np.ndarray,
    labels: np.ndarray,
    *,
    config: RunConfig,
    round_: int,
    client: int,
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    epochs: int | None = None,
) -> LocalResult:
    """Train `model` in place on one client's uint8 images (n, 1 or 3, H, W) and labels (n,), on the CPU.

    With the same config, round, client number and samples in the same order, the result equals the engine's loop
    trainer bit for bit: same sample order, same augmentation, same optimiser. Learning rate, weight decay, momentum,
    batch size and augmentation come from `config`; of the algorithm only the local half applies (FedProx's term,
    FedRS's and FedLC's logits). An algorithm with control variates (SCAFFOLD) needs the engine. Round 0 is a census.
    """
    algorithm: Algorithm = build_algorithm(config)
    for hook, what in (("push", "keeps vectors between rounds"), ("local_loss", "has a local objective of its own")):
        if overrides(algorithm, hook):
            raise InputError(f"algorithm: {config.algorithm!r} {what}; local training alone cannot do it")
    counts = np.bincount(labels, minlength=num_classes)
    terms = algorithm.local_terms(Client(client, counts))
    batch_size = max(1, min(config.batch_size, len(labels)))  # room for no more than all samples
    task = ClientWork(client, np.arange(len(labels)), counts, epochs or config.epochs, batch_size)
    row = Row(
        task=task,
        start_row=0,
        order_key=key(config.seed, "order", round_, client),
        augment_key=key(config.seed, "augment", round_, client),
        dropout_key=key(config.seed, "layer-dropout", round_, client),
        lr=config.lr * config.lr_decay ** max(round_ - 1, 0),
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        mu=terms.mu,
        logit_scale=terms.logit_scale,
        logit_shift=terms.logit_shift,
    )
    pixels, truth = torch.from_numpy(np.array(images)), torch.from_numpy(np.asarray(labels, dtype=np.int64))
    data = DeviceData(pixels, truth, pixels[:0], truth[:0], num_classes)
    transform = ImageTransform(mean, std, config.jitter, config.flip, config.grayscale)
    layout = FlatLayout(model, channels_last=not keeps_order(model))
    start = layout.pack(model.state_dict())
    out = torch.empty_like(start)
    work = build_work([row], batch_size, num_classes, torch.device("cpu"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        Worker(model, layout).train(start, work, 0, data, transform, out, config.precision == "bf16")
    finally:
        torch.set_num_threads(threads)
    model.load_state_dict(layout.unpack(out))
    return LocalResult(task.steps, len(labels))
