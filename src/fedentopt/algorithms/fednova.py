"""FedNova: client updates are normalised by how far their steps carry before they are averaged.

Wang et al., "Tackling the objective inconsistency problem in heterogeneous federated optimization", NeurIPS 2020:

    w <- w - (sum_k p_k a_k) * sum_k p_k (w - w_k) / a_k

with a_k of `effective_steps`. As factors: clients[k] = A p_k / a_k and own = 1 - sum_k clients[k], A = sum_k p_k a_k.
Where clients differ in size, the factors add up to more than one (with a_k in proportion to p_k, to M sum_k p_k^2), so
that the server goes further than any client went.

`normaliser="steps"` takes the number of steps for a_k, the paper's rule for SGD without momentum, whatever the
momentum is: few steps with momentum carry less far per step than many, so a_k of `effective_steps` gives small clients
larger factors.
"""

from __future__ import annotations

from fedentopt.algorithms.algorithm import Algorithm, Mixing, Round, algorithm, effective_steps
from fedentopt.settings import setting


@algorithm("fednova", label="FedNova")
class FedNova(Algorithm):
    """Normalised averaging; the factors need not add up to one over the clients, so buffers keep FedAvg's."""

    normaliser: str = setting(
        "momentum",
        help="FedNova: a client's change is divided by how far its steps carry with momentum, or by their number",
        choices=("momentum", "steps"),
        option="fednova_normaliser",
    )

    def mix(self, round: Round) -> Mixing:
        a = effective_steps(round.steps, round.momentum if self.normaliser == "momentum" else 0.0)
        clients = (round.shares * a).sum() * round.shares / a
        return Mixing(1.0 - float(clients.sum()), clients)
