"""What the three kinds of power-of-choice share: d candidates drawn by size, of whom the M with the largest loss train.

Cho, Wang, Joshi: Towards Understanding Biased Client Selection in Federated Learning (AISTATS 2022), section 3: d
clients are drawn without replacement with probability p_k = n_k / sum n, M <= d <= K; the M of them with the largest
loss of the global model are the cohort, and their models are averaged with equal weights. With d = M it is a draw by
size. Losses that are equal go to the client registered first.

The three differ in where the loss comes from: all data of the candidates (`pow_d`), a mini-batch (`cpow_d`), what they
told when they last trained (`rpow_d`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection.cohort import Cohort
from fedentopt.selection.draws import draw_by_weight
from fedentopt.selection.selector import Selector
from fedentopt.settings import setting


class PowerOfChoice(Selector):
    """The draw of candidates, and the choice among them."""

    sizes_only = True
    own_weights = True
    d: int | None = setting(None, help="candidates per round, from M to K; none: 2 M, or all there are", low=1)

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        if self.d is not None and self.d < cohort_size:
            raise InputError(f"d: {self.d} is out of range; accepted: at least {cohort_size}, the cohort's size")

    @classmethod
    def check_run(cls, *, cohort_size: int, clients: int, **settings: Any) -> None:
        """Refuse fewer candidates than seats, and more than clients."""
        super().check_run(cohort_size=cohort_size, clients=clients, **settings)
        d = settings.get("d")
        if d is not None and not cohort_size <= d <= clients:
            raise InputError(f"d: {d} is out of range; accepted: {cohort_size} to {clients}, cohort to clients")

    def drawn(self, available: np.ndarray) -> np.ndarray:
        """Numbers of this round's candidates among these, in the order drawn; a function of the round."""
        d = 2 * self.cohort_size if self.d is None else self.d
        return np.asarray(available[draw_by_weight(self.rng(), self.sizes[available], d)])

    def largest_loss(self, candidates: np.ndarray, losses: np.ndarray) -> Cohort:
        """The candidates with the largest losses; those without one (NaN) come last, in the order given."""
        told = ~np.isnan(losses)
        best = candidates[told][np.lexsort((candidates[told], -losses[told]))]
        picked = [*best.tolist(), *candidates[~told].tolist()][: self.cohort_size]
        return self.cohort(picked, weights=(1 / len(picked),) * len(picked))
