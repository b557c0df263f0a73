"""A selector and an algorithm of your own, in one small file.

    fedentopt run --selector own_method:round_robin --algorithm own_method:damped --rounds 5

(from the folder of this file). Each factory gets the run's settings and returns the object; any algorithm goes with
any selector, and both with everything else: checkpoints, sweeps, the page.
"""

import numpy as np

from fedentopt import Cohort
from fedentopt.algorithms import Algorithm, LocalTerms, Mixing
from fedentopt.selection.selector import TableSelector
from fedentopt.simulation.config import RunConfig


class RoundRobin(TableSelector):
    """Everybody in turn, in order of registration. The round number is the whole state, and the base class keeps it."""

    name = "round-robin"

    def _pick(self, rows: np.ndarray) -> Cohort:
        """Choose among the available clients `rows` (numbers, ascending)."""
        start = self._round * self.cohort_size
        places = [(start + i) % rows.size for i in range(min(self.cohort_size, rows.size))]
        return self._cohort(rows[places].tolist())


class Damped(Algorithm):
    """FedAvg that moves only part of the way to the clients' average, and keeps them near where they started.

    Local half: cross-entropy + (mu / 2) |w - w_start|^2. Server half: w <- (1 - step) w + step * sum_k p_k w_k.
    """

    def __init__(self, step: float, mu: float) -> None:
        self.step, self.mu = step, mu

    def local_terms(self, label_counts: np.ndarray) -> LocalTerms:
        """What a client with these label counts minimises."""
        return LocalTerms(mu=self.mu)

    def mix(self, shares: np.ndarray, steps: np.ndarray, momentum: float) -> Mixing:
        """The server's factors on the old model and on the clients' models; `shares` are p_k."""
        return Mixing(own=1 - self.step, clients=self.step * shares)


def round_robin(config: RunConfig) -> RoundRobin:
    """What `--selector own_method:round_robin` calls."""
    return RoundRobin(config.cohort_size)


def damped(config: RunConfig) -> Damped:
    """What `--algorithm own_method:damped` calls."""
    return Damped(step=0.5, mu=config.mu)
