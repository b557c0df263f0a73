"""Who trains in a round, on which samples, for how long: everything that is settled before a model is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedentopt.algorithms import Algorithm, ValuedDraw
from fedentopt.errors import InputError
from fedentopt.own_code import make_own
from fedentopt.partition import Partition, partition
from fedentopt.partition import parse as parse_partition
from fedentopt.privacy import laplace_noise
from fedentopt.randomness import generator, key
from fedentopt.selection import Cohort, EntropySelector, KLSelector, RandomSelector, Selector
from fedentopt.selection.measures import classes_covered, entropy
from fedentopt.simulation.config import RunConfig


@dataclass(frozen=True)
class ClientWork:
    """One client's task in a round."""

    client: int
    samples: np.ndarray
    label_counts: np.ndarray
    epochs: int
    batch_size: int

    @property
    def steps(self) -> int:
        """Local SGD steps: whole epochs, the last partial batch kept."""
        return self.epochs * -(-len(self.samples) // self.batch_size)


@dataclass(frozen=True)
class RoundPlan:
    """A round of one run. `selected` are the clients chosen, `work` the tasks of those that did not drop out."""

    round: int
    selected: tuple[int, ...]
    work: tuple[ClientWork, ...]

    @property
    def trained(self) -> tuple[int, ...]:
        return tuple(task.client for task in self.work)

    @property
    def shares(self) -> np.ndarray:
        """Each trained client's share of the samples trained on, p_k."""
        sizes = np.array([len(task.samples) for task in self.work], dtype=np.float64)
        shares: np.ndarray = sizes / sizes.sum()
        return shares

    @property
    def steps(self) -> np.ndarray:
        return np.array([task.steps for task in self.work], dtype=np.int64)


class RunPlanner:
    """Plans the rounds of one run. Its only state is the selector's (and FedEntropy's values)."""

    def __init__(self, config: RunConfig, labels: np.ndarray, num_classes: int, algorithm: Algorithm) -> None:
        self.config = config
        self.parts: Partition = partition(
            labels,
            parse_partition(config.partition),
            config.clients,
            config.seed,
            num_classes=num_classes,
            min_samples=config.least_samples,
        )
        self.counts = self.parts.counts
        self.reported = self._reported()
        empty = np.flatnonzero(self.counts.sum(axis=1) == 0)
        if empty.size and self.reported is None:  # under noise a server cannot tell, and they just do not train
            raise InputError(
                f"min_samples: {config.least_samples} left {empty.size} of {config.clients} clients without a sample "
                f"under {config.partition} (the first is client {empty[0]}); accepted: at least 1"
            )
        self._labels = labels
        self._selector = _selector(config)
        self._selector.register(
            self.counts if self.reported is None else self.reported, noisy=self.reported is not None
        )
        self.draw = ValuedDraw(config.clients, config.cohort_size) if algorithm.judges_soft_labels else None
        marked = int(config.stragglers * config.clients + 1e-9)
        order = generator(config.seed, "stragglers").permutation(config.clients)
        self.stragglers = frozenset(int(k) for k in order[:marked])
        self._limited: dict[tuple[int, bytes], np.ndarray] = {}

    @property
    def most_steps(self) -> int:
        """Steps of the largest client, the most that any round can have."""
        batches = -(-max(len(indices) for indices in self.parts.indices) // self.config.batch_size)
        return self.config.epochs * batches

    @property
    def read_counts(self) -> np.ndarray:
        """Label counts as the server reads them: true, or noisy and clamped at zero."""
        return self.counts if self.reported is None else np.maximum(self.reported, 0.0)

    def _reported(self) -> np.ndarray | None:
        if self.config.epsilon is None:
            return None
        return laplace_noise(self.counts, self.config.epsilon, generator(self.config.seed, "label-noise"))

    def plan(self, round_: int) -> RoundPlan:
        """The plan of round `round_`; rounds must be asked for in order, since selection has a memory."""
        config = self.config
        limits: dict[Any, np.ndarray] | None = None
        if self.draw is not None:
            selected = self.draw.draw(generator(config.seed, "fedentropy", round_))
        else:
            cohort = self._selector.select()
            selected = self._known_clients(cohort)
            limits = cohort.sample_limits
        luck = generator(config.seed, "dropout", round_).random(config.clients)
        work = []
        for client in selected:
            if luck[client] < config.dropout:
                continue
            samples, counts = self._samples(client, None if limits is None else limits.get(client))
            work.append(ClientWork(client, samples, counts, self._epochs(client, round_), config.batch_size))
        return RoundPlan(round_, selected, tuple(task for task in work if len(task.samples)))

    def _known_clients(self, cohort: Cohort) -> tuple[int, ...]:
        """A cohort's client numbers; a selector of the user's own may have got them wrong."""
        config = self.config
        chosen = tuple(getattr(cohort, "clients", ()))
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(config.clients)):
            raise InputError(
                f"selector: {config.selector!r} selected {chosen or cohort!r}; "
                f"accepted: a Cohort whose clients are distinct numbers from 0 to {config.clients - 1}"
            )
        return tuple(int(k) for k in chosen)

    def _epochs(self, client: int, round_: int) -> int:
        if client not in self.stragglers:
            return self.config.epochs
        return int(generator(self.config.seed, "straggler-epochs", round_, client).integers(1, self.config.epochs + 1))

    def _samples(self, client: int, limit: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The client's samples, or under a limit the first ones of each class, always the same."""
        indices = self.parts.indices[client]
        if limit is None:
            return indices, self.counts[client]
        limit = np.minimum(np.asarray(limit, dtype=np.int64), self.counts[client])
        known = self._limited.get((client, limit.tobytes()))
        if known is None:
            labels = self._labels[indices]
            keep = [indices[labels == c][:allowed] for c, allowed in enumerate(limit)]
            known = np.sort(np.concatenate(keep))
            self._limited[(client, limit.tobytes())] = known
        return known, limit

    def cohort_measures(self, clients: tuple[int, ...]) -> tuple[float, int]:
        """Entropy in bits and number of classes of these clients' true labels."""
        total = self.counts[list(clients)].sum(axis=0) if clients else np.zeros(self.counts.shape[1])
        return entropy(total), classes_covered(total)

    def order_key(self, round_: int, client: int) -> int:
        return key(self.config.seed, "order", round_, client)

    def augment_key(self, round_: int, client: int) -> int:
        return key(self.config.seed, "augment", round_, client)

    def dropout_key(self, round_: int, client: int) -> int:
        return key(self.config.seed, "layer-dropout", round_, client)

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable."""
        state: dict[str, Any] = {"selector": self._selector.state_dict()}
        if self.draw is not None:
            state["values"] = self.draw.values.tolist()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._selector.load_state_dict(state["selector"])
        if self.draw is not None:
            self.draw.values = np.array(state["values"], dtype=np.float64)


def _selector(config: RunConfig) -> Selector:
    if config.selector == "fedentopt":
        return EntropySelector(cohort_size=config.cohort_size, buffer_size=config.buffer_size, seed=config.seed)
    if config.selector == "kl":
        return KLSelector(cohort_size=config.cohort_size)
    if config.selector == "random":
        return RandomSelector(cohort_size=config.cohort_size, seed=config.seed)
    made: Selector = make_own("selector", config.selector, config)
    if isinstance(made, type):
        raise InputError(f"selector: {config.selector!r} made the class {made.__name__}; accepted: a Selector object")
    lacks = [name for name in ("register", "select", "state_dict", "load_state_dict") if not hasattr(made, name)]
    if lacks:
        raise InputError(
            f"selector: {config.selector!r} made a {type(made).__name__} without {', '.join(lacks)}; "
            "accepted: a Selector"
        )
    return made
