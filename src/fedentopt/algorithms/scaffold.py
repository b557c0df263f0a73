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


class ControlVariates:
    """c and the c_k of one run, as flat parameter rows: (K, width) floats stay on the device."""

    def __init__(self, clients: int, width: int, device: torch.device) -> None:
        self.server = torch.zeros(width, device=device)
        self.client = torch.zeros(clients, width, device=device)

    def corrections(self, clients: tuple[int, ...]) -> torch.Tensor:
        """c - c_k for these clients, (M, width)."""
        return self.server - self.client[self._rows(clients)]

    def absorb(
        self,
        clients: tuple[int, ...],
        start: torch.Tensor,
        trained: torch.Tensor,
        steps: np.ndarray,
        lr: float,
        momentum: float,
        mode: str,
    ) -> None:
        """Move c and c_k after a round: `start` (width,) is what `trained` (M, width) began from."""
        reach = effective_steps(steps, momentum) if mode == "gradient" else np.asarray(steps, dtype=np.float64)
        scale = torch.tensor(1.0 / (reach * lr), dtype=torch.float32).to(start.device, non_blocking=True)
        change = (start - trained) * scale[:, None] - self.server  # c_k' - c_k
        self.client.index_add_(0, self._rows(clients), change)
        self.server = self.server + change.sum(0) / len(self.client)

    def _rows(self, clients: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(clients, dtype=torch.int64).to(self.server.device, non_blocking=True)
