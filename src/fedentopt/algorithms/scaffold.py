"""SCAFFOLD: control variates take the drift out of local training.

Karimireddy et al., "SCAFFOLD: stochastic controlled averaging for federated learning", ICML 2020. The server keeps
c, every client c_k, all zero at the start; a client is pushed along c - c_k. Two variants:

    niid      as NIID-Bench (Li et al., ICDE 2022): after each optimiser step w_k <- w_k - lr (c - c_k), outside
              momentum; then c_k' = c_k - c + (w - w_k) / (steps * lr)
    gradient  the push is added to the gradient and passes through momentum, so steps is replaced by FedNova's a_k:
              plain steps would overestimate c_k' by about 1 / (1 - momentum), and training collapses

and in both w <- sum_k p_k w_k, c <- c + (1/K) sum_{k in S} (c_k' - c_k).
"""

from __future__ import annotations

import numpy as np
import torch

from fedentopt.algorithms.algorithm import Algorithm, effective_steps


class Scaffold(Algorithm):
    """Which variant; the variates themselves live in `ControlVariates`."""

    model_vectors = 2

    def __init__(self, variant: str) -> None:
        self.correction = {"niid": "after", "gradient": "gradient"}[variant]

    def pace(self, steps: np.ndarray, momentum: float, lr: float) -> np.ndarray:
        """What turns the way a client went into its mean gradient: 1 / (steps * lr), or 1 / (a_k * lr), float32.

        0 where that is beyond float32: at such a learning rate no client moves, and 0 / 0 would follow.
        """
        reach = effective_steps(steps, momentum) if self.correction == "gradient" else np.asarray(steps, np.float64)
        with np.errstate(divide="ignore", over="ignore"):
            pace = (1.0 / (reach * lr)).astype(np.float32)
        return np.where(np.isfinite(pace), pace, np.float32(0))


class ControlVariates:
    """c and the c_k of one run, as flat parameter rows: (K, width) floats stay on the device."""

    def __init__(self, clients: int, width: int, device: torch.device) -> None:
        self.server = torch.zeros(width, device=device)
        self.client = torch.zeros(clients, width, device=device)

    def corrections(self, clients: torch.Tensor) -> torch.Tensor:
        """c - c_k for these clients (int64, on the device), (M, width)."""
        return self.server - self.client[clients]

    def absorb(self, clients: torch.Tensor, start: torch.Tensor, trained: torch.Tensor, pace: torch.Tensor) -> None:
        """Move c and c_k after a round: `start` (width,) is what `trained` (M, width) began from, `pace` (M,) the
        `Scaffold.pace` of each client."""
        change = (start - trained) * pace[:, None] - self.server  # c_k' - c_k
        self.client.index_add_(0, clients, change)
        self.server = self.server + change.sum(0) / len(self.client)
