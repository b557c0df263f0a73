"""Whole federated runs written out in float64, one client after the other, with torch's own SGD.

A method's reference is a loop over rounds that reads like its definition; `World` holds what all of them share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import toy
from fedentopt.datasets import Dataset
from fedentopt.models import build
from fedentopt.partition import parse, partition
from fedentopt.randomness import key
from fedentopt.results.records import Outcome
from fedentopt.simulation.config import RunConfig
from sample_order import batches

TRAINERS = ("loop", "stacked", "streams")
HARD: dict[str, object] = {
    "clients": 5, "cohort": "2", "rounds": 5, "epochs": 2, "batch_size": 16, "lr": 0.05, "lr_decay": 0.9,
    "weight_decay": 1e-2, "momentum": 0.9, "partition": "dir:0.3", "seed": 5, **toy.PLAIN,
}  # fmt: skip
"""More clients than train in a round, uneven sizes, partial batches, momentum, weight decay, a decaying rate."""


@dataclass(frozen=True)
class Trained:
    """Where a client got to, (P,), in how many steps, and the plain cross-entropy of every sample it saw on the way."""

    w: torch.Tensor
    steps: int
    losses: torch.Tensor


class World:
    """The clients, data and start model of a run without augmentation; models are flat float64 vectors."""

    def __init__(self, cfg: RunConfig, data: Dataset) -> None:
        self.cfg = cfg
        self.parts = partition(
            data.y_train, parse(cfg.partition), cfg.clients, cfg.seed, num_classes=data.num_classes,
            min_samples=cfg.least_samples,
        )  # fmt: skip
        self.counts = torch.from_numpy(self.parts.counts).double()
        self.x = ((torch.from_numpy(data.x_train).double() / 255) - 0.4) / 0.25
        self.y = torch.from_numpy(data.y_train)
        self.model = build(cfg.model, data.num_classes, seed=key(cfg.seed, "model") >> 1, image_size=8).double()
        self.start = parameters_to_vector(self.model.parameters()).detach().clone()

    def another(self, purpose: str) -> torch.Tensor:
        """A network of the same kind, drawn for another purpose than to start from."""
        network = build(self.cfg.model, len(self.counts[0]), seed=key(self.cfg.seed, purpose) >> 1, image_size=8)
        return parameters_to_vector(network.double().parameters()).detach().clone()

    def lr(self, round_: int) -> float:
        return self.cfg.lr * self.cfg.lr_decay ** (round_ - 1)

    def sizes(self, cohort: Sequence[int]) -> torch.Tensor:
        return torch.tensor([float(len(self.parts.indices[k])) for k in cohort], dtype=torch.float64)

    def shares(self, cohort: Sequence[int]) -> torch.Tensor:
        """p_k: each client's part of the cohort's samples."""
        sizes = self.sizes(cohort)
        return sizes / sizes.sum()

    def logits(self, w: torch.Tensor, samples: np.ndarray) -> torch.Tensor:
        """What the model answers on these samples."""
        vector_to_parameters(w, self.model.parameters())
        with torch.no_grad():
            return self.model(self.x[torch.from_numpy(samples)])

    def train(
        self,
        w: torch.Tensor,
        round_: int,
        client: int,
        *,
        logits: Callable[[torch.Tensor], torch.Tensor] = lambda z: z,
        extra: Callable[[torch.Tensor], torch.Tensor | float] = lambda w: 0.0,
        push: torch.Tensor | None = None,
        push_after: torch.Tensor | None = None,
        samples: np.ndarray | None = None,
    ) -> Trained:
        """One client's local training from `w`, on its own samples or on these.

        `logits` changes the local logits, `extra` of the weights is added to the loss, `push` to the gradient of every
        step; `push_after` times the learning rate is taken off the weights after it.
        """
        lr, cfg = self.lr(round_), self.cfg
        vector_to_parameters(w.clone(), self.model.parameters())
        parameters = list(self.model.parameters())
        sgd = torch.optim.SGD(parameters, lr=lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay)
        losses = []
        for own in batches(self.parts.indices[client] if samples is None else samples, cfg, round_, client):
            sgd.zero_grad()
            z = self.model(self.x[own])
            losses.append(F.cross_entropy(z.detach(), self.y[own], reduction="none"))
            loss = F.cross_entropy(logits(z), self.y[own])
            (loss + extra(parameters_to_vector(parameters))).backward()
            for parameter, part in zip(parameters, self._split(push), strict=True):
                parameter.grad += part
            sgd.step()
            with torch.no_grad():
                for parameter, part in zip(parameters, self._split(push_after), strict=True):
                    parameter -= lr * part
        return Trained(parameters_to_vector(parameters).detach().clone(), len(losses), torch.cat(losses))

    def named(self, w: torch.Tensor) -> dict[str, torch.Tensor]:
        """The flat model by name."""
        vector_to_parameters(w.clone(), self.model.parameters())
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def _split(self, flat: torch.Tensor | None) -> list[torch.Tensor]:
        sizes = [p.numel() for p in self.model.parameters()]
        if flat is None:
            flat = torch.zeros(sum(sizes), dtype=torch.float64)
        return [part.view_as(p) for part, p in zip(flat.split(sizes), self.model.parameters(), strict=True)]


def cohorts(outcome: Outcome) -> list[tuple[int, ...]]:
    """Who trained in each round."""
    return [record.trained for record in outcome.records]


def check(outcome: Outcome, expected: dict[str, torch.Tensor]) -> None:
    """The run's model is the reference's, to what float32 can say."""
    assert set(expected) <= set(outcome.model)
    for name, value in expected.items():
        torch.testing.assert_close(outcome.model[name].double(), value, atol=2e-5, rtol=1e-4)
