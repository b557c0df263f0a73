"""FedExP: a server step size that extrapolates where the clients' changes disagree.

Jhunjhunwala, Wang & Joshi, "FedExP: speeding up federated averaging via extrapolation", ICLR 2023. With the plain mean
D = (1/M) sum_k (w_k - w):

    eta = max(1, sum_k |w_k - w|^2 / (2 M (|D|^2 + eps))),    w <- w + eta D

The iterates swing, so the model that is evaluated and saved is the mean of the last two; after round 1 the start model
is one of them.

The authors' code (Divyansh03/FedExP) weighs clients by samples in all three sums, adds M eps in the place of eps, lets
eps fall with the square of the learning rate, and evaluates the new model alone after round 1; the paper's algorithm,
and this one, do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedentopt.algorithms.algorithm import Algorithm, algorithm
from fedentopt.settings import setting

if TYPE_CHECKING:
    from torch import Tensor


@algorithm("fedexp", label="FedExP")
class FedExP(Algorithm):
    """Plain averaging with an adaptive server step."""

    eps: float = setting(1e-3, help="added to the squared length of the mean change", above=0)
    server_vectors = ("previous",)

    def step(self, server: dict[str, Tensor], start: Tensor, trained: Tensor, shares: Tensor) -> Tensor:
        changes = trained - start
        mean = changes.mean(0)
        eta = changes.square().sum() / (2 * len(changes) * (mean.square().sum() + self.eps))
        server["previous"] = start
        return start + eta.clamp(min=1.0) * mean

    def evaluated(self, server: dict[str, Tensor], model: Tensor) -> Tensor:
        return (server["previous"] + model) / 2
