"""A selector and an algorithm of your own, in one small file.

    fedentopt compare --method fedavg --method own_method:Damped:part=0.5+own_method:RoundRobin

(from the folder of this file). Any algorithm goes with any selector, and both with everything else: settings on the
command line, checkpoints, sweeps, the page.
"""

import numpy as np

from fedentopt.algorithms import Algorithm, Client, LocalTerms, Mixing, Round, setting
from fedentopt.selection import Selector


class RoundRobin(Selector):
    """Everybody in turn, in order of registration. The round number is all it has to remember."""

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        """Choose among the available clients (numbers, ascending)."""
        start = self.round * self.cohort_size
        return [int(available[(start + i) % available.size]) for i in range(min(self.cohort_size, available.size))]


class Damped(Algorithm):
    """FedAvg that moves only part of the way to the clients' average, and keeps them near where they started.

    Local half: cross-entropy + (mu / 2) |w - w_start|^2. Server half: w <- (1 - part) w + part * sum_k p_k w_k.
    """

    part: float = setting(0.5, help="how far the server goes", above=0, high=1)
    mu: float = setting(1e-3, help="weight of the proximal term", low=0)

    def local_terms(self, client: Client) -> LocalTerms:
        """What a client minimises."""
        return LocalTerms(mu=self.mu)

    def mix(self, round: Round) -> Mixing:
        """The server's factors on the old model and on the clients' models."""
        return Mixing(own=1 - self.part, clients=self.part * round.shares)
