"""A selector that is told what training taught, and an algorithm whose server remembers.

fedentopt compare --method own_feedback:SignStep:length=0.002 --method own_feedback:HardestFirst
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedentopt.algorithms import Algorithm, setting
from fedentopt.selection import ClientId, Observation, Selector


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
        return available[order[: self.cohort_size]].tolist()

    def observe(self, observations: Mapping[ClientId, Observation]) -> None:
        """What those that trained have told."""
        self.known = {client: value * self.forget for client, value in self.known.items()}
        self.known |= {str(client): float(seen.loss or 0.0) for client, seen in observations.items()}

    def memory(self) -> dict[str, Any]:
        """What a run that is continued must know; JSON."""
        return {"known": self.known}

    def remember(self, memory: Mapping[str, Any]) -> None:
        self.known = dict(memory["known"])


class SignStep(Algorithm):
    """The server moves every weight by a fixed length along the sign of a running mean of the clients' changes."""

    length: float = setting(1e-3, help="length of a step", above=0)
    server_vectors = ("mean",)

    def step(self, server: dict[str, Tensor], start: Tensor, trained: Tensor, shares: Tensor) -> Tensor:
        """The next global model, as one flat row; `server` vectors are kept, checkpointed and counted."""
        server["mean"] = 0.9 * server["mean"] + 0.1 * (shares @ (trained - start))
        return start + self.length * server["mean"].sign()
