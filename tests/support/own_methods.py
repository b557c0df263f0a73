"""Algorithms and a selector as a user may write them, for whole runs: one per tier, each using all its tier has."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from fedentopt.algorithms import (
    AFTER_STEP,
    IN_GRADIENT,
    Algorithm,
    Client,
    LocalTerms,
    Mixing,
    ModelSizes,
    Round,
    SecondStage,
    Vectors,
    setting,
)
from fedentopt.selection import Observation, Selector


class Data(Algorithm):
    """The data tier: terms that know their client, factors that know their round."""

    strength: float = setting(0.1, help="of the proximal term", low=0)

    def local_terms(self, client: Client) -> LocalTerms:
        present = np.asarray(client.label_counts) > 0
        return LocalTerms(
            mu=self.strength * (1 + client.number),
            logit_scale=np.where(present, 1.0, 0.5),
            logit_shift=0.1 * np.arange(len(present)),
        )

    def mix(self, round: Round) -> Mixing:
        even = 1 / (1 + np.ptp(round.label_counts, axis=1)) + round.steps / round.total_clients
        return Mixing(0.25, 0.75 * even / even.sum())


class State(Algorithm):
    """The state tier: everything it has, in numbers that nothing cancels."""

    after: bool = setting(False, help="whether the push enters after the step")
    server_vectors = ("trend", "pace")
    client_vectors = ("drift",)
    sends_down = ("trend", "pace")
    sends_up = ("drift",)

    @property
    def push_enters(self) -> str:
        return AFTER_STEP if self.after else IN_GRADIENT

    def initial(self, vector: str) -> float:
        return {"trend": 0.0, "pace": 0.8, "drift": 0.01}[vector]

    def push(self, vectors: Vectors) -> torch.Tensor:
        return 0.3 * vectors.server["trend"] + 0.5 * vectors.client["drift"]

    def absorb(self, vectors: Vectors, start: torch.Tensor, trained: torch.Tensor, round: Round) -> None:
        reach = round.tensor((1 / (round.steps * round.lr)).astype(np.float32))
        way = (start - trained) * reach[:, None]
        vectors.client["drift"] = 0.5 * vectors.client["drift"] + 0.2 * way
        vectors.server["trend"] = vectors.server["trend"] + way.sum(0) / round.total_clients

    def mix(self, round: Round) -> Mixing:
        return Mixing(0.0, np.sqrt(round.shares) / np.sqrt(round.shares).sum())

    def step(
        self, server: dict[str, torch.Tensor], start: torch.Tensor, trained: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        row = start + server["pace"] * (shares @ (trained - start)) - 0.001 * server["trend"]
        server["pace"] = 0.9 * server["pace"]
        return row

    def evaluated(self, server: dict[str, torch.Tensor], model: torch.Tensor) -> torch.Tensor:
        return model - 0.01 * server["trend"]


class Fair(Algorithm):
    """q-FedAvg (Li, Sanjabi, Beirami, Smith, ICLR 2020), whose steps grow shorter, with noise: what a server reads of a
    round beside models and shares."""

    q: float = setting(2.0, help="how much a high loss weighs", low=0)
    noise: float = setting(0.01, help="deviation of what is added to every parameter", low=0)
    reads_losses = True

    def step(
        self,
        server: dict[str, torch.Tensor],
        start: torch.Tensor,
        trained: torch.Tensor,
        shares: torch.Tensor,
        round: Round | None = None,
    ) -> torch.Tensor:
        assert round is not None
        assert round.losses is not None
        change = (start - trained) / round.lr
        reach = self.q * round.losses ** (self.q - 1) * change.double().square().sum(1).cpu().numpy()
        down = (reach + round.losses**self.q / round.lr).sum() * (1 + 0.1 * round.number)
        noise = round.tensor(self.noise * round.rng(7).standard_normal(len(start), dtype=np.float32))
        return start - round.tensor((round.losses**self.q / down).astype(np.float32)) @ change + noise


class Code(Algorithm):
    """The code tier: cross-entropy of smoothed labels, drawn to what the client had learnt before."""

    client_vectors = ("last",)
    keeps_models = True

    def local_loss(self, model: Any, start: Any, batch: Any, context: Any) -> torch.Tensor:
        logits = model(batch.x)
        loss = F.cross_entropy(logits, batch.y, label_smoothing=0.1 + 0.01 * context.client)
        with torch.no_grad():
            anchor = start(batch.x) if context.previous is None else context.previous(batch.x)
        return loss + 0.05 * (logits - anchor).square().mean() + 0.001 * context.vectors["last"].abs().mean()

    def absorb(self, vectors: Vectors, start: torch.Tensor, trained: torch.Tensor, round: Round) -> None:
        vectors.client["last"] = trained - start


class Favour(Selector):
    """Draws by how often a client was kept, and remembers; the draw that `Judging` brings."""

    name = "favour"
    needs = frozenset({"kept", "seconds"})

    def __init__(self, cohort_size: int, seed: int = 0) -> None:
        super().__init__(cohort_size, seed)
        self.kept: dict[Any, float] = {}

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        ids = self.clients
        weights = np.array([1.0 + self.kept.get(ids[number], 0.0) for number in available])
        drawn = self.rng().choice(available, min(self.cohort_size, available.size), False, weights / weights.sum())
        return drawn.tolist()

    def observe(self, observations: Any) -> None:
        for client, seen in observations.items():
            assert isinstance(seen, Observation)
            self.kept[client] = self.kept.get(client, 0.0) + (seen.seconds if seen.kept else -0.5 * seen.seconds)

    def memory(self) -> dict[str, Any]:
        return {"kept": [[client, value] for client, value in self.kept.items()]}

    def remember(self, memory: Any) -> None:
        self.kept = dict(memory["kept"])


class Judging(State):
    """Keeps the clients whose soft labels are most even, and draws its own clients."""

    own_selector = Favour

    def judge(self, soft_labels: np.ndarray, samples: np.ndarray) -> np.ndarray:
        return np.argsort(soft_labels.max(1))[: max(1, len(samples) - 1)]


class Grouped(Algorithm):
    """Two groups of clients by number, a few rounds of a second stage."""

    reads_label_counts = True

    def groups(self, label_counts: np.ndarray, seed: int) -> np.ndarray:
        return np.arange(len(label_counts)) % 2

    def second_stage(self, rounds: int, cohort: int, clients: int, sizes: ModelSizes) -> SecondStage:
        return SecondStage(rounds - 2, 3, 2)
