"""FedDyn: a linear term per client makes local optima agree with the global one.

Acar et al., "Federated learning based on dynamic regularization", ICLR 2021. Client k minimises

    L_k(w) - <h_k, w> + (alpha / 2) |w - w_t|^2,    then  h_k <- h_k - alpha (w_k - w_t)

and the server keeps h <- h - (alpha / K) sum_{k in S} (w_k - w_t) and sets w_{t+1} = mean_{k in S} w_k - h / alpha.

The step -h / alpha, the sum of all changes so far over K, comes in every round and is undone by local training alone:
with a learning rate that decays to nothing it goes on when clients no longer move. The authors' code trains without
momentum, clips gradients and divides alpha by a client's relative size; the paper's algorithm, and this one, do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedentopt.algorithms.algorithm import Algorithm, Client, LocalTerms, Round, Vectors, algorithm
from fedentopt.settings import setting

if TYPE_CHECKING:
    from torch import Tensor


@algorithm("feddyn", label="FedDyn")
class FedDyn(Algorithm):
    """Dynamic regularisation of strength `alpha`."""

    alpha: float = setting(0.01, help="strength of the regularisation", above=0)
    server_vectors = ("h",)
    client_vectors = ("h",)

    def local_terms(self, client: Client) -> LocalTerms:
        return LocalTerms(mu=self.alpha)

    def push(self, vectors: Vectors) -> Tensor:
        return -vectors.client["h"]

    def absorb(self, vectors: Vectors, start: Tensor, trained: Tensor, round: Round) -> None:
        changes = trained - start
        vectors.client["h"] = vectors.client["h"] - self.alpha * changes
        vectors.server["h"] = vectors.server["h"] - self.alpha / round.total_clients * changes.sum(0)

    def step(self, server: dict[str, Tensor], start: Tensor, trained: Tensor, shares: Tensor) -> Tensor:
        return trained.mean(0) - server["h"] / self.alpha
