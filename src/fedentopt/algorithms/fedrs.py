"""FedRS: restricted softmax; a client barely moves the classifier rows of classes it does not hold.

Li & Zhan, "FedRS: federated learning with restricted softmax for label distribution non-IID data", KDD 2021:
local logits of absent classes are multiplied by alpha. The authors' published code grades the factor instead,
alpha + (1 - alpha) * n_c / max n: the `soft` version. Evaluation uses plain logits.
"""

from __future__ import annotations

import numpy as np

from fedentopt.algorithms.algorithm import Algorithm, Client, LocalTerms, algorithm
from fedentopt.settings import setting


@algorithm("fedrs", label="FedRS")
class FedRS(Algorithm):
    """FedAvg with local logits scaled by class presence."""

    alpha: float = setting(
        0.5, help="FedRS: factor on the logits of absent classes", low=0, high=1, option="fedrs_alpha"
    )
    soft: bool = setting(
        False,
        help="FedRS: the authors' code's soft version, alpha + (1 - alpha) * share of the largest class",
        option="fedrs_soft",
    )

    def local_terms(self, client: Client) -> LocalTerms:
        counts = np.asarray(client.label_counts, dtype=np.float64)
        if self.soft:
            scale = self.alpha + (1 - self.alpha) * counts / counts.max()
        else:
            scale = np.where(counts > 0, 1.0, self.alpha)
        return LocalTerms(logit_scale=scale)
