"""FedEntropy's draw by value, and its judgment after training: drop the clients that make the soft labels less even.

Ling et al.: FedEntropy: Efficient Device Grouping for Federated Learning Using Maximum Entropy Judgment (2022).
Every client sends its mean softmax over its own data. The server takes away, one at a time, the client whose
absence raises the entropy of the mean (weighted by numbers of samples) most, until none raises it. Every client has a
value, 1 at the start: a draw goes by value with probability 0.8, else uniformly; kept clients gain 1, dropped ones are
halved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError
from fedentopt.randomness import generator
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.feedback import Observation
from fedentopt.selection.measures import row_scores
from fedentopt.selection.per_client import is_finite
from fedentopt.selection.scoring import TIE_BITS, lowest_within_tie
from fedentopt.selection.selector import Selector

BY_VALUE = 0.8
LEAST = float(np.finfo(np.float64).tiny)  # a value; halved on, it would be 0 in the end, and a draw among zeros is none


def judge(soft_labels: ArrayLike, weights: ArrayLike) -> np.ndarray:
    """Indices of the clients kept, ascending; at least one.

    `soft_labels` is (M, C), not negative; `weights` are the M numbers of samples. A removal must gain more
    than 1e-9 bits, and equal gains go to the lowest index, so that no removal hangs on rounding.
    """
    soft = np.asarray(soft_labels, dtype=np.float64)
    n = np.asarray(weights, dtype=np.float64)
    if soft.ndim != 2 or not soft.size or not np.isfinite(soft).all() or (soft < 0).any():
        raise InputError(
            f"soft_labels: an array of shape {soft.shape}; accepted: (clients, classes), finite, 0 or more"
        )
    if n.shape != (len(soft),) or not np.isfinite(n).all() or (n < 0).any() or not n.sum() > 0:
        raise InputError(f"weights: {n.tolist()}; accepted: one for each of {len(soft)} clients, 0 or more, not all 0")
    weighted = soft * n[:, None]
    kept = np.arange(len(soft))
    while kept.size > 1:
        # Summed anew for every removal: subtracting from the total could leave traces of what was taken away.
        without = np.stack([np.delete(weighted[kept], i, axis=0).sum(axis=0) for i in range(kept.size)])
        scores = row_scores(without)
        if scores.max() <= row_scores(weighted[kept].sum(axis=0)[None, :])[0] + TIE_BITS:
            break
        kept = np.delete(kept, lowest_within_tie(scores))
    return kept


class ValueSelector(Selector):
    """The draw that FedEntropy's judgment steers. It belongs to that algorithm, so no other goes with it."""

    name = "fedentropy"
    needs: ClassVar[frozenset[str]] = frozenset({"kept"})
    reads_label_counts = False

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self.values: dict[ClientId, float] = {}

    def register(
        self, counts: Any, *, noisy: bool = False, ids: Sequence[ClientId] | None = None, num_classes: int | None = None
    ) -> None:
        super().register(counts, noisy=noisy, ids=ids, num_classes=num_classes)
        for client in self.clients:
            self.values.setdefault(client, 1.0)

    def remove(self, ids: Iterable[ClientId]) -> None:
        gone = list(ids)
        super().remove(gone)
        for client in gone:
            self.values.pop(client, None)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        rng = generator(self.seed, "fedentropy", self.round + 1)
        known = self.clients
        left = available
        chosen: list[int] = []
        while len(chosen) < min(self.cohort_size, available.size):
            if rng.random() < BY_VALUE:
                values = np.maximum([self.values[known[number]] for number in left], LEAST)
                place = int(rng.choice(len(left), p=values / values.sum()))
            else:
                place = int(rng.integers(len(left)))
            chosen.append(int(left[place]))
            left = np.delete(left, place)
        return chosen

    def observe(self, observations: Mapping[ClientId, Observation]) -> None:
        """Reward the kept, halve the dropped, down to the smallest number that has all its digits."""
        for client, seen in observations.items():
            if seen.kept is not None and client in self.values:
                value = self.values[client]
                self.values[client] = value + 1.0 if seen.kept else max(value * 0.5, LEAST)

    def memory(self) -> dict[str, Any]:
        return {"values": [self.values[client] for client in self.clients]}

    def remember(self, memory: Mapping[str, Any]) -> None:
        values = memory["values"]
        numbers = isinstance(values, list) and all(isinstance(one, int | float) for one in values)
        if not numbers or any(isinstance(one, bool) or not is_finite(one) or one <= 0 for one in values):
            raise InputError("state: values; accepted: a list of numbers above 0, one per client")
        if len(values) != len(self.clients):
            raise InputError(f"state: values of {len(values)} clients; accepted: of all {len(self.clients)} registered")
        self.values = dict(zip(self.clients, map(float, values), strict=True))
