"""A vector that every client keeps: what it leans towards, round after round, and a push against it.

fedentopt compare --method fedavg --method own_vectors:Upright:strength=0.5
"""

import numpy as np
from torch import Tensor

from fedentopt.algorithms import Algorithm, Round, Vectors, setting


class Upright(Algorithm):
    """FedAvg whose clients lean against the way they keep straying from the others.

    Local half: cross-entropy + strength * <h_k, w>. After training: h_k <- h_k + w_k - sum_j p_j w_j.
    """

    strength: float = setting(0.1, help="weight of the push", low=0)
    client_vectors = ("h",)

    def push(self, vectors: Vectors) -> Tensor:
        """The gradient of the linear term, one row per client that is about to train: (M, P)."""
        return self.strength * vectors.client["h"]

    def absorb(self, vectors: Vectors, start: Tensor, trained: Tensor, round: Round) -> None:
        """Note where the clients went: all from `start` (P,), each to its row of `trained` (M, P)."""
        shares = round.tensor(round.shares.astype(np.float32))
        vectors.client["h"] = vectors.client["h"] + trained - shares @ trained
