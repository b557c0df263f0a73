"""A selector and two algorithms of your own, in one small file.

    fedentopt compare --method fedavg --method own_method:Damped:part=0.5+own_method:RoundRobin

(from the folder of this file). Any algorithm goes with any selector, and both with everything else: settings on the
command line, checkpoints, sweeps, the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedentopt.algorithms import Algorithm, Client, LocalTerms, Mixing, Round, setting
from fedentopt.selection import ClientId, Observation, Selector

if TYPE_CHECKING:
    from torch import Tensor


class RoundRobin(Selector):
    """Everybody in turn, in order of registration. The round number is all it has to remember."""

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        """Choose among the available clients (numbers, ascending)."""
        start = self.round * self.cohort_size
        return [int(available[(start + i) % available.size]) for i in range(min(self.cohort_size, available.size))]


class HardestFirst(Selector):
    """Those whose training loss was highest the last time, and before them those who have not trained yet."""

    needs = frozenset({"loss"})
    forget: float = setting(0.9, help="factor on what is known of a client, each round", above=0, high=1)

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self.known: dict[str, float] = {}

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        """Highest value first; ties are drawn, from a generator that depends on seed and round alone."""
        values = [self.known.get(str(self.clients[number]), np.inf) for number in available]
        order = np.lexsort((self.rng().random(available.size), -np.array(values)))
        chosen: list[int] = available[order[: self.cohort_size]].tolist()
        return chosen

    def observe(self, observations: Mapping[ClientId, Observation]) -> None:
        """What those that trained have told."""
        self.known = {client: value * self.forget for client, value in self.known.items()}
        self.known |= {str(client): float(seen.loss or 0.0) for client, seen in observations.items()}

    def memory(self) -> dict[str, Any]:
        """What a run that is continued must know; JSON."""
        return {"known": self.known}

    def remember(self, memory: Mapping[str, Any]) -> None:
        self.known = dict(memory["known"])


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


class SignStep(Algorithm):
    """The server moves every weight by a fixed length along the sign of a running mean of the clients' changes."""

    length: float = setting(1e-3, help="length of a step", above=0)
    beta: float = setting(0.9, help="decay of the running mean", low=0, below=1)
    server_vectors = ("mean",)

    def step(self, server: dict[str, Tensor], start: Tensor, trained: Tensor, shares: Tensor) -> Tensor:
        """The next global model, as one flat row; `server` vectors are kept, checkpointed and counted."""
        server["mean"] = self.beta * server["mean"] + (1 - self.beta) * (shares @ (trained - start))
        return start + self.length * server["mean"].sign()
