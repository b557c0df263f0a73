"""What an algorithm is: data for the clients, a function for the server.

The local half is data, not code. Every client minimises

    cross-entropy(scale * logits + shift) + (mu / 2) * |w - w_start|^2

by the same SGD step, with an optional drift correction; an algorithm only says which numbers go in. So one training
step serves all of them, side by side in one stack. The server half is a linear rule

    w_next = own * w + sum_k clients[k] * w_k

whose factors an algorithm gives. Buffers such as BatchNorm statistics are always averaged by data size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LocalTerms:
    """Numbers of one client's local objective. None stands for a scale of one, a shift of zero."""

    mu: float = 0.0
    logit_scale: np.ndarray | None = None
    logit_shift: np.ndarray | None = None


@dataclass(frozen=True)
class Mixing:
    """Factors of the next global model: on the old one and on each trained client model."""

    own: float
    clients: np.ndarray


class Algorithm:
    """FedAvg, and the base of the others: overrides say only what differs.

    McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017:
    w <- sum_k p_k w_k with p_k the client's share of the samples trained on.
    """

    model_vectors = 1
    """Model-sized vectors that travel each way for one client and round."""
    reads_label_counts = False
    """Whether the server half needs the clients' label counts."""
    correction: str | None = None
    """Drift correction: None, "after" (each step) or "gradient" (inside momentum)."""
    judges_soft_labels = False
    """Whether the server picks among the trained clients by their soft labels."""

    def local_terms(self, label_counts: np.ndarray) -> LocalTerms:
        """The local objective of a client with these label counts, (C,)."""
        return LocalTerms()

    def mix(self, shares: np.ndarray, steps: np.ndarray, momentum: float) -> Mixing:
        """Server factors from data shares (sum 1), local step counts and the momentum used."""
        return Mixing(0.0, shares)


def effective_steps(steps: np.ndarray, momentum: float) -> np.ndarray:
    """FedNova's a_k: how far `steps` SGD steps with momentum carry, in units of one plain step.

    a = [t - rho (1 - rho^t) / (1 - rho)] / (1 - rho); without momentum it is t itself.
    """
    t = np.asarray(steps, dtype=np.float64)
    return (t - momentum * (1 - momentum**t) / (1 - momentum)) / (1 - momentum)
