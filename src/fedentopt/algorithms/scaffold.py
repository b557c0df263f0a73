"""SCAFFOLD: control variates take the drift out of local training.

Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020. The server keeps
c, every client c_k, all zero at the start; a client is pushed along c - c_k. Two variants:

    niid      as NIID-Bench (Li et al., ICDE 2022): after each optimiser step w_k <- w_k - lr (c - c_k), outside
              momentum; then c_k' = c_k - c + (w - w_k) / (steps * lr)
    gradient  the push is added to the gradient and passes through momentum, so steps is replaced by FedNova's a_k:
              plain steps would overestimate c_k' by about 1 / (1 - momentum), and training collapses

and in both w <- sum_k p_k w_k, c <- c + (1/K) sum_{k in S} (c_k' - c_k).

Two departures in public code can be had as settings, to see what they do. `start="random"`: NIID-Bench takes the
control variates from a freshly drawn network, c = c_k for all k, so that c - c_k is zero until clients have trained;
from then on those who have and those who have not are pushed apart along the random network, until all have trained.
`divisor="cohort"`: NIID-Bench divides by K as above, code that descends from it often by |S|. Since c_k' - c_k =
(w - w_k) / (steps * lr) - c, the server's c is then the mean of the last round's cohort alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedentopt.algorithms.algorithm import (
    AFTER_STEP,
    IN_GRADIENT,
    Algorithm,
    Round,
    Vectors,
    algorithm,
    effective_steps,
)
from fedentopt.settings import setting

if TYPE_CHECKING:
    from torch import Tensor


@algorithm("scaffold", label="SCAFFOLD")
class Scaffold(Algorithm):
    """FedAvg with control variates c (the server's) and c_k (the clients')."""

    variant: str = setting(
        "niid",
        help="SCAFFOLD: niid (correction after the step) or gradient (inside momentum)",
        choices=("niid", "gradient"),
        option="scaffold_variant",
    )
    start: str = setting(
        "zero",
        help="SCAFFOLD: control variates start at zero, or as one random network (as in NIID-Bench)",
        choices=("zero", "random"),
        option="scaffold_start",
    )
    divisor: str = setting(
        "clients",
        help="SCAFFOLD: the server adds the sum of changes over the number of all clients, or of the cohort's",
        choices=("clients", "cohort"),
        option="scaffold_divisor",
    )
    server_vectors = ("c",)
    client_vectors = ("c",)
    sends_down = ("c",)
    sends_up = ("c",)

    @property
    def vectors_start_as_network(self) -> bool:
        return self.start == "random"

    @property
    def push_enters(self) -> str:
        return IN_GRADIENT if self.variant == "gradient" else AFTER_STEP

    def push(self, vectors: Vectors) -> Tensor:
        return vectors.server["c"] - vectors.client["c"]

    def absorb(self, vectors: Vectors, start: Tensor, trained: Tensor, round: Round) -> None:
        pace = round.tensor(self.pace(round.steps, round.momentum, round.lr))
        change = (start - trained) * pace[:, None] - vectors.server["c"]  # c_k' - c_k
        vectors.client["c"] = vectors.client["c"] + change
        divisor = round.total_clients if self.divisor == "clients" else len(round.clients)
        vectors.server["c"] = vectors.server["c"] + change.sum(0) / divisor

    def pace(self, steps: np.ndarray, momentum: float, lr: float) -> np.ndarray:
        """What turns the way a client went into its mean gradient: 1 / (steps * lr), or 1 / (a_k * lr), float32.

        0 where that is beyond float32: at such a learning rate no client moves, and 0 / 0 would follow.
        """
        reach = effective_steps(steps, momentum) if self.variant == "gradient" else np.asarray(steps, np.float64)
        with np.errstate(divide="ignore", over="ignore"):
            pace = (1.0 / (reach * lr)).astype(np.float32)
        return np.where(np.isfinite(pace), pace, np.float32(0))
