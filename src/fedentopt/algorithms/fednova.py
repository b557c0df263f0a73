"""FedNova: client updates are normalised by how far their steps carry before they are averaged.

Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization", NeurIPS 2020:

    w <- w - (sum_k p_k a_k) * sum_k p_k (w - w_k) / a_k

with a_k of `effective_steps`. As factors: clients[k] = A p_k / a_k and own = 1 - sum_k clients[k], A = sum_k p_k a_k.
"""

from __future__ import annotations

from fedentopt.algorithms.algorithm import Algorithm, Mixing, Round, algorithm, effective_steps


@algorithm("fednova", label="FedNova")
class FedNova(Algorithm):
    """Normalised averaging; the factors need not add up to one over the clients, so buffers keep FedAvg's."""

    def mix(self, round: Round) -> Mixing:
        a = effective_steps(round.steps, round.momentum)
        clients = (round.shares * a).sum() * round.shares / a
        return Mixing(1.0 - float(clients.sum()), clients)
