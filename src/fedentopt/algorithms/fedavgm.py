"""FedAvgM: momentum on the server.

Hsu, Qi & Brown, "Measuring the effects of non-identical data distribution for federated visual classification", 2019.
With Delta = sum_k p_k (w_k - w):

    v <- beta v + Delta,    w <- w + server_lr v

A direction that stays the same is followed 1 / (1 - beta) times as far as by FedAvg, so where cohorts pull the model to
and fro, client or server learning rates that suit FedAvg can be too large.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedentopt.algorithms.algorithm import Algorithm, algorithm
from fedentopt.settings import setting

if TYPE_CHECKING:
    from torch import Tensor


@algorithm("fedavgm", label="FedAvgM")
class FedAvgM(Algorithm):
    """FedAvg whose server step has momentum."""

    beta: float = setting(0.9, help="momentum of the server", low=0, below=1)
    server_lr: float = setting(1.0, help="learning rate of the server", above=0)
    server_vectors = ("v",)

    def step(self, server: dict[str, Tensor], start: Tensor, trained: Tensor, shares: Tensor) -> Tensor:
        delta = shares @ (trained - start)
        server["v"] = self.beta * server["v"] + delta
        return start + self.server_lr * server["v"]
