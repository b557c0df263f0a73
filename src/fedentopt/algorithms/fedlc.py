"""FedLC: logits calibrated by how rare each class is on the client.

Zhang et al., "Federated learning with label distribution skew via logits calibration", ICML 2022: cross-entropy on
z_c - tau * n_c^(-1/4). Absent classes take n_c = 1e-8, which lowers their logit by 100 tau and so removes them. The
true class stays in the softmax's denominator; the printed formula leaves it out, and training then collapses.
"""

from __future__ import annotations

import numpy as np

from fedentopt.algorithms.algorithm import Algorithm, Client, LocalTerms, algorithm
from fedentopt.settings import setting

ABSENT = 1e-8


@algorithm("fedlc", label="FedLC")
class FedLC(Algorithm):
    """FedAvg with calibrated local logits; evaluation uses plain ones."""

    tau: float = setting(1.0, help="FedLC: strength of the calibration", low=0, option="fedlc_tau")

    def local_terms(self, client: Client) -> LocalTerms:
        counts = np.asarray(client.label_counts, dtype=np.float64)
        return LocalTerms(logit_shift=-self.tau * np.where(counts > 0, counts, ABSENT) ** -0.25)
