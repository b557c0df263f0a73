"""FedProx: a proximal term keeps clients near the global model.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020: local loss + (mu/2) |w_k - w|^2.
"""

from __future__ import annotations

from fedentopt.algorithms.algorithm import Algorithm, Client, LocalTerms, algorithm
from fedentopt.settings import setting


@algorithm("fedprox", label="FedProx")
class FedProx(Algorithm):
    """FedAvg with a proximal term of weight `mu`."""

    mu: float = setting(1e-4, help="FedProx: weight of the proximal term", low=0, option="mu")

    def local_terms(self, client: Client) -> LocalTerms:
        return LocalTerms(mu=self.mu)
