"""FedAvg: clients minimise cross-entropy, the server averages by data size.

McMahan et al., "Communication-efficient learning of deep networks from decentralized data", AISTATS 2017:
w <- sum_k p_k w_k with p_k the client's share of the samples trained on.
"""

from __future__ import annotations

from fedentopt.algorithms.algorithm import Algorithm, algorithm


@algorithm("fedavg", label="FedAvg")
class FedAvg(Algorithm):
    """Plain averaging: what `Algorithm` does unless told otherwise."""
