"""FedEntropy: clients are drawn, trained, and then judged by the entropy of their combined soft labels.

Ling et al., "FedEntropy: efficient device grouping for federated learning using maximum entropy judgment", 2022.
Every client has a value, 1 at the start. A draw goes by value with probability 0.8, else uniformly. After training
each client sends its mean softmax over its own data; `selection.fedentropy.judge` removes, one at a time, the client
whose removal raises the entropy of the n-weighted mean most. Kept clients gain 1, dropped ones are halved, and only
the kept ones are averaged.
"""

from __future__ import annotations

import numpy as np

from fedentopt.algorithms.algorithm import Algorithm

BY_VALUE = 0.8
LEAST = float(np.finfo(np.float64).tiny)  # a value; halved on, it would be 0 in the end, and a draw among zeros is none


class FedEntropy(Algorithm):
    """FedAvg over the clients that pass the judgment."""

    judges_soft_labels = True


class ValuedDraw:
    """Values of the clients and the draw they steer. Indices are client numbers."""

    def __init__(self, clients: int, cohort_size: int) -> None:
        self.values = np.ones(clients)
        self.cohort_size = cohort_size

    def draw(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Draw a cohort without repeats."""
        left = np.arange(len(self.values))
        chosen: list[int] = []
        while len(chosen) < self.cohort_size:
            if rng.random() < BY_VALUE:
                values = np.maximum(self.values[left], LEAST)
                pick = int(rng.choice(len(left), p=values / values.sum()))
            else:
                pick = int(rng.integers(len(left)))
            chosen.append(int(left[pick]))
            left = np.delete(left, pick)
        return tuple(chosen)

    def learn(self, kept: tuple[int, ...], dropped: tuple[int, ...]) -> None:
        """Reward the kept, halve the dropped, down to the smallest number that has all its digits."""
        self.values[list(kept)] += 1.0
        self.values[list(dropped)] = np.maximum(self.values[list(dropped)] * 0.5, LEAST)
