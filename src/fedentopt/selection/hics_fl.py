"""HiCS-FL: clients whose labels seem even first, told from how their training moved the last layer's bias.

Chen, Vikalo: Heterogeneity-Guided Client Sampling: Towards Fast and Efficient Non-IID Federated Learning (NeurIPS
2024, arXiv 2310.00198). First everybody trains once. With b_k the change of the last layer's bias when k last trained,
per unit of step size that its training added up to (`Observation.travel`) where that is known:

    H_k = entropy (nats) of softmax(b_k / T)
    distance(u, k) = arccos(b_u b_k / (|b_u| |b_k|)) + lam |H_u - H_k|

Ward's linkage on these distances makes G groups (default M); H_g is a group's mean. A group is drawn with probability
proportional to exp(gamma_t H_g), gamma_t = gamma (1 - t / rounds) after t rounds, then a client of it by numbers of
samples, until M clients are drawn; a group that is used up is out. The models are averaged with equal weights.

In the paper all train with one step size. Where it falls from round to round, or clients take different numbers of
steps, the bare change would call those even that trained late or briefly; hence the division. The paper sets T by hand
(0.0025, 0.0015) for bare changes; since T has to grow with b, it is `scale` times the largest b here, unless
`temperature` gives it: where travel is known, a T for bare changes over the travel that it was set for. A model without
a bias has the row means of the weight's change in its place. Clients that join late train in the next round, those that
drop out are tried again (`everybody_once`).

The authors' code (CityChan/HiCS-FL) differs from the paper, which is followed here: its entropy comes from row means
of the weight, its Ward takes the rows of the distance matrix as features, clients of a group are drawn uniformly, and
where the entropies' variance is 0.1 or more it samples by Fraboni's Algorithm 2 instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from fedentopt.selection.cohort import ClientId, Cohort
from fedentopt.selection.draws import draw_place, weight_sums
from fedentopt.selection.everybody_once import EverybodyOnce
from fedentopt.selection.feedback import Head, Observation
from fedentopt.selection.selector import selector
from fedentopt.selection.ward import LARGEST, cut_into, pairs, scipy_part, ward_tree
from fedentopt.settings import setting


@selector("hics-fl", label="HiCS-FL")
class HiCSFLSelector(EverybodyOnce):
    """Groups by the change of the last layer's bias, those with even labels first; equal weights."""

    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    needs_plain_logits = True
    sizes_only = True
    own_weights = True
    largest = LARGEST
    all_pairs = True
    scale: float = setting(0.1, help="temperature as a share of the largest change of a bias per step size", above=0)
    temperature: float | None = setting(
        None, help="temperature itself, in the unit of those changes; none: by scale", above=0
    )
    lam: float = setting(10.0, help="weight of the difference of entropies in the distance", low=0)
    groups: int | None = setting(None, help="number of groups; none: M", low=1)
    gamma: float = setting(4.0, help="preference for groups with even labels, in round 1", low=0)
    horizon: int | None = setting(
        None, help="rounds in which the preference falls to 0; none: the run's, or it never falls", low=1
    )

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        scipy_part("cluster.hierarchy", self.name)

    @classmethod
    def for_run(
        cls, *, cohort_size: int, clients: int, seed: int, rounds: int | None = None, **settings: Any
    ) -> HiCSFLSelector:
        """See `Selector.for_run`; the preference falls over the rounds of the run."""
        settings["horizon"] = rounds if settings.get("horizon") is None else settings["horizon"]
        return cls(cohort_size, seed=seed, **settings)

    def pick_known(self, known: np.ndarray, seats: int) -> list[int]:
        rows = self._vectors.rows[self.rows_of(known)]
        entropies = self.entropies(rows)
        distances = bias_distances(rows, entropies, self.lam)
        groups = cut_into(ward_tree(distances, self.name), self.groups or self.cohort_size)
        past = 0.0 if self.horizon is None else min(self.round / self.horizon, 1.0)
        pull = self.gamma * (1 - past) * np.array([entropies[group].sum() / group.size for group in groups])
        sizes: list[float] = self.sizes[known].tolist()
        rng = self.rng(1)
        sums = weight_sums(pull)
        left: list[list[int]] = [group.tolist() for group in groups]
        picked: list[int] = []
        while len(picked) < seats:
            drawn = draw_place(rng, sums)
            group = left[drawn]
            masses = list(accumulate(sizes[place] for place in group))
            which = draw_place(rng, masses) if masses[-1] > 0 else int(rng.integers(len(group)))
            picked.append(int(known[group.pop(which)]))
            if not group:
                if len(left) == 1:
                    break
                del left[drawn]
                pull = np.delete(pull, drawn)
                sums = weight_sums(pull)
        return picked

    def entropies(self, rows: np.ndarray) -> np.ndarray:
        """H_k in nats of these changes of biases."""
        largest = float(np.abs(self._vectors.rows).max(initial=0.0))
        temperature = self.temperature or self.scale * largest or 1.0  # nothing has moved: all even
        return softmax_entropies(rows.astype(np.float64) / temperature)

    def finish(self, picked: list[int]) -> Cohort:
        return self.cohort(picked, weights=(1 / len(picked),) * len(picked))

    def observe(self, observations: Mapping[ClientId, Observation]) -> None:
        """Keep how each client's training moved the bias."""
        self.learn_changes(observations, bias_change)


def bias_change(head: Head) -> np.ndarray:
    """The change of the bias, or of the weight's row means where there is none."""
    if head.bias is not None:
        return head.bias
    with np.errstate(over="ignore", invalid="ignore"):
        means = head.weight.mean(axis=1)
    # A sum may leave single precision where the mean does not.
    return means if np.isfinite(means).all() else np.asarray(head.weight.astype(np.float64).mean(axis=1))


def softmax_entropies(logits: np.ndarray) -> np.ndarray:
    """Entropy in nats of the softmax of every row."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    raised = np.exp(shifted)
    total = raised.sum(axis=1, keepdims=True)
    p = raised / total
    return np.asarray((p * (np.log(total) - shifted)).sum(axis=1))


def bias_distances(rows: np.ndarray, entropies: np.ndarray, lam: float) -> np.ndarray:
    """Angle plus `lam` times the difference of entropies, one number per pair of clients (`pairs`)."""
    wide = rows.astype(np.float64)
    squares = (wide**2).sum(axis=1)
    directions = wide / np.sqrt(np.where(squares > 0, squares, 1.0))[:, None]
    products = directions @ directions.T
    still = squares == 0
    products[still] = products[:, still] = 1.0
    cosines = pairs(products, HiCSFLSelector.name)
    np.clip(cosines, -1.0, 1.0, out=cosines)
    apart = pairs(entropies[:, None] - entropies, HiCSFLSelector.name)
    np.abs(apart, out=apart)
    apart *= lam
    apart += np.arccos(cosines, out=cosines)
    return apart
