"""FedEntropy: clients are drawn, trained, and then judged by the entropy of their combined soft labels.

Ling et al., "FedEntropy: efficient device grouping for federated learning using maximum entropy judgment", 2022.
Every client has a value, 1 at the start. A draw goes by value with probability 0.8, else uniformly. After training
each client sends its mean softmax over its own data; the server removes, one at a time, the client whose removal raises
the entropy of the n-weighted mean most. Kept clients gain 1, dropped ones are halved, and only the kept ones send their
models, which are averaged. Draw and judgment are in `selection.fedentropy`.
"""

from __future__ import annotations

import numpy as np

from fedentopt.algorithms.algorithm import Algorithm, algorithm
from fedentopt.selection.fedentropy import ValueSelector, judge


@algorithm("fedentropy", label="FedEntropy")
class FedEntropy(Algorithm):
    """FedAvg over the clients that pass the judgment."""

    own_selector = ValueSelector

    def judge(self, soft_labels: np.ndarray, samples: np.ndarray) -> np.ndarray:
        return judge(soft_labels, samples)
