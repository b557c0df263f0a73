"""FedDisco: clients whose labels are far from even count less in the average.

Ye et al., "FedDisco: federated learning with discrepancy-aware collaboration", ICML 2023:

    weight_k ~ max(0, p_k - a d_k + b),    d_k = KL(l_k / n_k || uniform), scaled to sum 1 over the cohort
"""

from __future__ import annotations

import numpy as np

from fedentopt.algorithms.algorithm import Algorithm, Mixing, Round, algorithm
from fedentopt.settings import setting


@algorithm("feddisco", label="FedDisco")
class FedDisco(Algorithm):
    """FedAvg with weights that see how even each client's labels are. Where none is left, the shares stay."""

    a: float = setting(0.5, help="weight of the discrepancy", low=0)
    b: float = setting(0.1, help="constant added to every weight", low=0)
    reads_label_counts = True

    def mix(self, round: Round) -> Mixing:
        weights = np.maximum(round.shares - self.a * discrepancies(round.label_counts) + self.b, 0.0)
        return Mixing(0.0, weights / weights.sum() if weights.sum() > 0 else round.shares)


def discrepancies(label_counts: np.ndarray) -> np.ndarray:
    """KL divergence of each row of counts to the uniform distribution, scaled to sum 1; a row without samples has 0."""
    counts = np.asarray(label_counts, dtype=np.float64)
    totals = counts.sum(axis=1, keepdims=True)
    p = counts / np.where(totals > 0, totals, 1.0)
    logs = np.log(np.where(p > 0, p * counts.shape[1], 1.0))
    d: np.ndarray = (p * logs).sum(axis=1)
    return d / d.sum() if d.sum() > 0 else d
