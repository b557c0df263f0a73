"""FedProx: a proximal term keeps clients near the global model.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020: local loss + (mu/2) |w_k - w|^2.
"""

from __future__ import annotations

import numpy as np

from fedentopt.algorithms.algorithm import Algorithm, LocalTerms


class FedProx(Algorithm):
    """FedAvg with a proximal term of weight `mu`."""

    def __init__(self, mu: float) -> None:
        self.mu = mu

    def local_terms(self, label_counts: np.ndarray) -> LocalTerms:
        return LocalTerms(mu=self.mu)
