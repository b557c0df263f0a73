"""Balanced softmax: local logits shifted by how often each class occurs on the client.

Ren et al., "Balanced meta-softmax for long-tailed visual recognition", NeurIPS 2020; the generic head of FedROD (Chen &
Chao, ICLR 2022): cross-entropy on z_c + log n_c, absent classes taking the log of a small number. Evaluation uses plain
logits.
"""

from __future__ import annotations

import numpy as np

from fedentopt.algorithms.algorithm import Algorithm, Client, LocalTerms, algorithm
from fedentopt.settings import setting


@algorithm("balanced-softmax", label="Balanced softmax")
class BalancedSoftmax(Algorithm):
    """FedAvg with local logits shifted by log label counts."""

    floor: float = setting(1e-3, help="count that a class with fewer samples, or none, is given", above=0)

    def local_terms(self, client: Client) -> LocalTerms:
        return LocalTerms(logit_shift=np.log(np.maximum(np.asarray(client.label_counts, np.float64), self.floor)))
