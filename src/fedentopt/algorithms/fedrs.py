"""FedRS: restricted softmax; a client barely moves the classifier rows of classes it does not hold.

Li & Zhan, "FedRS: federated learning with restricted softmax for label distribution non-IID data", KDD 2021:
local logits of absent classes are multiplied by alpha. The authors' published code grades the factor instead,
alpha + (1 - alpha) * n_c / max n: the `soft` version. Evaluation uses plain logits.
"""

from __future__ import annotations

import numpy as np

from fedentopt.algorithms.algorithm import Algorithm, LocalTerms


class FedRS(Algorithm):
    """FedAvg with local logits scaled by class presence."""

    def __init__(self, alpha: float, *, soft: bool = False) -> None:
        self.alpha, self.soft = alpha, soft

    def local_terms(self, label_counts: np.ndarray) -> LocalTerms:
        counts = np.asarray(label_counts, dtype=np.float64)
        if self.soft:
            scale = self.alpha + (1 - self.alpha) * counts / counts.max()
        else:
            scale = np.where(counts > 0, 1.0, self.alpha)
        return LocalTerms(logit_scale=scale)
