"""FedYogi: Yogi on the server, whose second moment grows and shrinks additively.

Reddi et al., "Adaptive federated optimization", ICLR 2021, Algorithm 2. As FedAdam, but

    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedentopt.algorithms.algorithm import algorithm
from fedentopt.algorithms.fedadam import FedAdam

if TYPE_CHECKING:
    from torch import Tensor


@algorithm("fedyogi", label="FedYogi")
class FedYogi(FedAdam):
    """FedAdam with Yogi's second moment."""

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * (v - square).sign()
