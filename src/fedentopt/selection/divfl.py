"""DivFL: the clients whose updates stand for everybody's, as facilities stand near all customers.

Balakrishnan, Li, Zhou, Himayat, Smith, Bilmes: Diverse Client Selection for Federated Learning via Submodular
Maximization (ICLR 2022). With g_k what client k told when it last trained, the cohort S of size M makes

    G(S) = sum_k min_{i in S} |g_k - g_i|

small, greedily: each step adds the client that lowers G most. `stochastic` greedy, the paper's choice, looks at
max(M, share K) clients drawn anew in each step only; `full` looks at all (the result of lazy greedy). Ties go to the
client registered first. Everybody whose g_k is known is a customer; facilities are those available.

g_k stands for a gradient. It is the change of the last layer, weight and bias (C F + C numbers instead of the whole
model's, in which the labels show), per unit of step size that training added up to (`Observation.travel`) where that is
known: otherwise changes of late rounds, or of clients with few steps, would be near each other for being small. The
paper computes gradients of all clients in the first round; here everybody trains once before (`everybody_once`), and
g_k is refreshed for those that train. Averages keep numbers of samples, as in the authors' code (melodi-lab/divfl). All
distances between known clients are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from fedentopt.selection.cohort import ClientId
from fedentopt.selection.everybody_once import EverybodyOnce
from fedentopt.selection.feedback import Head, Observation
from fedentopt.selection.per_client import ClientVectors, euclidean
from fedentopt.selection.selector import selector
from fedentopt.selection.ward import LARGEST
from fedentopt.settings import setting


@selector("divfl", label="DivFL")
class DivFLSelector(EverybodyOnce):
    """Facility location over the changes of the last layer, by stochastic greedy."""

    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    reads_label_counts = False
    largest = LARGEST
    all_pairs = True
    greedy: str = setting(
        "stochastic",
        help="clients looked at in each step: stochastic (some, drawn anew) or full (all)",
        choices=("stochastic", "full"),
    )
    share: float = setting(0.1, help="share of the clients that stochastic greedy looks at in a step", low=0, high=1)

    def make_vectors(self) -> ClientVectors:
        return ClientVectors(euclidean)

    def pick_known(self, known: np.ndarray, seats: int) -> list[int]:
        places = self.rows_of(known)
        customers = np.arange(len(self._vectors.rows))
        distances = self._vectors.between(customers, places)  # (customers, facilities)
        rng = self.rng(1)
        looked_at = max(self.cohort_size, int(self.share * known.size)) if self.greedy == "stochastic" else known.size
        left = np.arange(known.size)
        nearest = np.full(customers.size, np.inf)
        picked: list[int] = []
        while len(picked) < min(seats, known.size):
            some = left[np.sort(rng.choice(left.size, looked_at, replace=False))] if looked_at < left.size else left
            totals = np.minimum(nearest[:, None], distances[:, some]).sum(axis=0)
            best = int(some[np.argmin(totals)])
            nearest = np.minimum(nearest, distances[:, best])
            left = left[left != best]
            picked.append(int(known[best]))
        return picked

    def observe(self, observations: Mapping[ClientId, Observation]) -> None:
        """Keep how each client's training moved the last layer."""
        self.learn_changes(observations, _flat)


def _flat(head: Head) -> np.ndarray:
    return head.weight.ravel() if head.bias is None else np.concatenate([head.weight.ravel(), head.bias])
