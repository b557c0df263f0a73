"""FedAdam: Adam on the server.

Reddi et al., "Adaptive federated optimization", ICLR 2021, Algorithm 2. With Delta = sum_k p_k (w_k - w):

    m <- beta1 m + (1 - beta1) Delta
    v <- beta2 v + (1 - beta2) Delta^2
    w <- w + server_lr m / (sqrt(v) + tau)

v starts at tau^2; there is no bias correction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedentopt.algorithms.algorithm import Algorithm, algorithm
from fedentopt.settings import setting

if TYPE_CHECKING:
    from torch import Tensor


@algorithm("fedadam", label="FedAdam")
class FedAdam(Algorithm):
    """FedAvg's change as the gradient of an adaptive server."""

    server_lr: float = setting(0.01, help="learning rate of the server", above=0)
    beta1: float = setting(0.9, help="decay of the first moment", low=0, below=1)
    beta2: float = setting(0.99, help="decay of the second moment", low=0, below=1)
    tau: float = setting(
        1e-3, help="adaptivity: added to the root of the second moment, whose start is its square", above=0
    )
    server_vectors = ("m", "v")

    def initial(self, vector: str) -> float:
        return self.tau**2 if vector == "v" else 0.0

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """v after a round whose squared change was `square`."""
        return self.beta2 * v + (1 - self.beta2) * square

    def step(self, server: dict[str, Tensor], start: Tensor, trained: Tensor, shares: Tensor) -> Tensor:
        delta = shares @ (trained - start)
        server["m"] = self.beta1 * server["m"] + (1 - self.beta1) * delta
        server["v"] = self.second_moment(server["v"], delta.square())
        return start + self.server_lr * server["m"] / (server["v"].sqrt() + self.tau)
