"""Who trains in a round, on which samples, for how long: everything that is settled before a model is touched."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from fedentopt.audit import Audit, Recall
from fedentopt.errors import InputError
from fedentopt.partition import Partition, partition
from fedentopt.partition import parse as parse_partition
from fedentopt.privacy import laplace_noise
from fedentopt.randomness import generator, key, mix64
from fedentopt.selection import ClientId, Observation, Selector
from fedentopt.selection.measures import classes_covered, entropy
from fedentopt.simulation.checked_selector import CheckedSelector
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.lies import FORGE, claims, draw_liars
from fedentopt.simulation.server_images import take_server_images
from fedentopt.simulation.validation import HeldOut, hold_out
from fedentopt.simulation.watch import Watch

SAMPLES_A_SECOND = 1000.0  # of a client of ordinary speed, in simulated time


@dataclass(frozen=True)
class ClientWork:
    """One client's task in a round; `seconds` is how long it takes in simulated time."""

    client: int
    samples: np.ndarray
    label_counts: np.ndarray
    epochs: int
    batch_size: int
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Local SGD steps: complete epochs, the last partial batch kept."""
        return self.epochs * -(-len(self.samples) // self.batch_size)


@dataclass(frozen=True)
class RoundPlan:
    """A round of one run. `selected` are the clients chosen, `work` the tasks of those that did not drop out.

    `asked` are the clients whose loss was asked for before. `weights`, where the selector defines them, are the
    clients' parts in the average. `selection_seconds` is the time that the selector took on this machine,
    `knowledge` what the server knew, where it has reason to doubt reports (see `RoundRecord`).
    """

    round: int
    selected: tuple[int, ...]
    work: tuple[ClientWork, ...]
    asked: tuple[int, ...] = ()
    weights: Mapping[int, float] | None = None
    selection_seconds: float = 0.0
    knowledge: Mapping[str, float | None] = field(default_factory=dict)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        return tuple(task.client for task in self.work)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Each trained client's number of samples."""
        return np.array([len(task.samples) for task in self.work], dtype=np.float64)

    @cached_property
    def parts(self) -> np.ndarray:
        """What the average weighs each trained client by: its samples, or what the selector says."""
        if self.weights is None:
            return self.sizes
        return np.array([self.weights[task.client] for task in self.work], dtype=np.float64)

    @cached_property
    def steps(self) -> np.ndarray:
        return np.array([task.steps for task in self.work], dtype=np.int64)

    @property
    def seconds(self) -> float:
        """Simulated time of the round: that of the slowest client."""
        return max((task.seconds for task in self.work), default=0.0)


@dataclass(frozen=True)
class Question:
    """A candidate to be asked for its loss, and the samples it looks at."""

    client: int
    samples: np.ndarray


class RunPlanner:
    """Plans the rounds of one run. Its only state is the selector's, and the audit's where there is one."""

    def __init__(
        self, config: RunConfig, labels: np.ndarray, num_classes: int, selector: Selector,
        owners: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """`owners` holds the client number of every sample, where the data knows it."""
        self.config = config
        # "All of a client's data" is asked for by a number that is large enough, and room is made for whole batches.
        self.batch_size = min(config.batch_size, len(labels))
        self.parts: Partition = partition(
            labels,
            parse_partition(config.partition),
            config.clients,
            config.seed,
            num_classes=num_classes,
            min_samples=config.least_samples,
            owners=owners,
        )
        self.held_out: HeldOut | None = None
        if config.validation:
            self.parts, self.held_out = hold_out(self.parts, labels, config.validation, config.seed)
        self.server_images: np.ndarray | None = None
        if config.server_images:
            self.parts, self.server_images = take_server_images(self.parts, labels, config.server_images, config.seed)
        self.counts = self.parts.counts
        self.liars = draw_liars(config.number_of_liars, config.clients, config.seed)
        self.forgers = frozenset(self.liars if config.lie == FORGE else ())
        self.reported = self._reported()
        empty = np.flatnonzero(self.counts.sum(axis=1) == 0)
        if empty.size and config.epsilon is None:  # under noise a server cannot tell, and they just do not train
            raise InputError(
                f"min_samples: {config.least_samples} left {empty.size} of {config.clients} clients without a sample "
                f"under {config.partition} (the first is client {empty[0]}); accepted: at least 1"
            )
        self._labels = labels
        self.selector = selector
        self._asked = CheckedSelector(selector, config)
        reports = self.counts if self.reported is None else self.reported
        self.watch = Watch(config, self.counts, reports, self.liars, selector)
        if config.size_cap is not None:
            reports = cast(np.ndarray, self.watch.believed(range(config.clients)))
        self._asked.register(reports)
        self.needs = self._asked.needs | ({"head"} if self.watch.reads_heads else frozenset())
        marked = int(config.stragglers * config.clients + 1e-9)
        order = generator(config.seed, "stragglers").permutation(config.clients)
        self.stragglers = frozenset(int(k) for k in order[:marked])
        self._speeds: dict[int, float] = {}
        self._limited: dict[tuple[int, bytes], np.ndarray] = {}

    def _reported(self) -> np.ndarray | None:
        claimed = claims(self.counts, self.liars, self.config.lie, self.config.seed) if self.liars else self.counts
        if self.config.epsilon is None:
            return claimed if self.liars else None
        return laplace_noise(claimed, self.config.epsilon, generator(self.config.seed, "label-noise"))

    @property
    def audit(self) -> Audit | None:
        """What clients reported beside what their training shows, where it is looked at."""
        return self.watch.audit

    @property
    def most_steps(self) -> int:
        """Steps of the largest client, the most that any round can have."""
        batches = -(-max(len(indices) for indices in self.parts.indices) // self.batch_size)
        return self.config.epochs * batches

    @property
    def read_counts(self) -> np.ndarray:
        """Label counts as the server reads them: true, or noisy and clamped at zero."""
        return self.counts if self.reported is None else np.maximum(self.reported, 0.0)

    @property
    def asks_ahead(self) -> bool:
        """Whether candidates can be asked before all else of their round.

        Whom a built-in selector asks is a function of the round and of what it was told: where it is told nothing else,
        it can be asked early, and again after a checkpoint. One of the user's own may draw on what it keeps: it is
        asked when its round is planned, once.
        """
        return self.needs == {"candidate_loss"} and self._asked.ours

    # --- a round, in the order in which it goes
    def census(self) -> RoundPlan | None:
        """The plan of a census before round 1, in which everybody trains, where the selector wants one."""
        wanted = self._asked.census()
        if wanted is None:
            return None
        work = []
        for client, samples in enumerate(self.parts.indices):
            if wanted.samples is not None and wanted.samples < len(samples):
                draw = generator(self.config.seed, "census-samples", client)
                samples = np.sort(draw.choice(samples, wanted.samples, replace=False))
            if len(samples):
                counts = np.bincount(self._labels[samples], minlength=self.counts.shape[1])
                work.append(self._work(client, samples, counts, wanted.epochs))
        return RoundPlan(0, tuple(task.client for task in work), tuple(work))

    def questions(self, round_: int) -> list[Question]:
        """Whom the selector wants to ask for the loss of the current model before it chooses, if anybody.

        A client without any sample, which only noise can hide, has nothing to answer with and is left out.
        """
        wanted = self._asked.candidates(*self._available()) if "candidate_loss" in self.needs else None
        if wanted is None:
            return []
        clients, most = wanted
        owned = [self.parts.indices[client] for client in clients]
        if most is not None:
            keys = self._keys(("candidate-samples",), round_, clients)
            owned = [_some_of(own, most, own_key) for own, (own_key,) in zip(owned, keys, strict=True)]
        return [Question(client, own) for client, own in zip(clients, owned, strict=True) if len(own)]

    def plan(self, round_: int, losses: Mapping[int, float] | None = None) -> RoundPlan:
        """The plan of round `round_`; rounds must be asked for in order, since selection has a memory."""
        if round_ == 2 and not self._asked.ours:  # what no checkpoint would keep is told now, not at the first
            self._asked.state_dict()
            self._asked.arrays()
        selected, cohort = self._asked.select(*self._available(), losses=losses)
        away = self._away(round_)
        work = []
        for client in selected:
            if client not in away:
                limit = self._asked.limit(cohort, client, self.counts[client])
                samples, counts = self._samples(client, limit)
                work.append(self._work(client, samples, counts, self._epochs(client, round_)))
        return RoundPlan(
            round_,
            selected,
            work=tuple(task for task in work if len(task.samples)),
            asked=tuple(losses or ()),
            weights=self._asked.weights(cohort, selected),
            selection_seconds=self._asked.take_seconds(),
            knowledge=self.watch.knowledge(cohort, selected),
        )

    def observe_recalls(self, recalls: Mapping[int, Recall]) -> None:
        """Tell the audit how well the models of a round know the server's images; `observe` comes after it."""
        if self.audit is not None:
            self.audit.observe_recalls(cast("Mapping[ClientId, Recall]", recalls))

    def observe(self, observations: Mapping[int, Observation]) -> None:
        """Tell the selector what it needs to know of the clients that trained, and the audit their last layers."""
        if not observations:
            return
        self._believe(self.watch.observe(observations))
        if self._asked.needs - {"candidate_loss"}:
            if "head" in self.needs - self._asked.needs:
                observations = {
                    client: replace(seen, head=None, travel=None, drift=None, untrained=None)
                    for client, seen in observations.items()
                }
            self._asked.observe(observations)
        self.watch.learnt(observations)

    def add_selecting(self, seconds: float) -> None:
        """Count time as the selector's that was spent on it elsewhere, for several runs at once."""
        self._asked.add_seconds(seconds)

    # --- what a round is made of
    def _believe(self, clients: list[int]) -> None:
        """Let the selector choose by what is believed of these clients now."""
        if clients:
            self._asked.believe(self.watch.believed(clients), clients)

    def _available(self) -> tuple[list[int], ...]:
        """As arguments of the selector: none at all where everybody is available."""
        available = self.watch.available()
        return () if available is None else (available,)

    def _away(self, round_: int) -> frozenset[int]:
        """Clients that would drop out before they train, chosen or not."""
        if not self.config.dropout:
            return frozenset()
        luck = generator(self.config.seed, "dropout", round_).random(self.config.clients)
        return frozenset(np.flatnonzero(luck < self.config.dropout).tolist())

    def _work(self, client: int, samples: np.ndarray, counts: np.ndarray, epochs: int) -> ClientWork:
        return ClientWork(client, samples, counts, epochs, self.batch_size, self.seconds(client, len(samples) * epochs))

    def seconds(self, client: int, samples: int) -> float:
        """Simulated time in which a client trains on so many samples, each as often as it is seen."""
        speed = self._speeds.get(client)
        if speed is None:
            spread = self.config.speed_spread
            z = float(generator(self.config.seed, "speed", client).standard_normal()) if spread else 0.0
            speed = self._speeds[client] = SAMPLES_A_SECOND * math.exp(spread * z)
        return samples / speed

    def _epochs(self, client: int, round_: int) -> int:
        if client not in self.stragglers:
            return self.config.epochs
        return int(generator(self.config.seed, "straggler-epochs", round_, client).integers(1, self.config.epochs + 1))

    def _samples(self, client: int, limit: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """The client's samples, or under a limit the first ones of each class, always the same."""
        indices = self.parts.indices[client]
        if limit is None:
            return indices, self.counts[client]
        known = self._limited.get((client, limit.tobytes()))
        if known is None:
            labels = self._labels[indices]
            keep = [indices[labels == c][:allowed] for c, allowed in enumerate(limit)]
            known = np.sort(np.concatenate(keep))
            self._limited[(client, limit.tobytes())] = known
        return known, limit

    def cohort_measures(self, clients: tuple[int, ...]) -> tuple[float, int]:
        """Entropy in bits and number of classes of all true labels that these clients hold, whatever they use."""
        total = self.counts[list(clients)].sum(axis=0) if clients else np.zeros(self.counts.shape[1])
        return entropy(total), classes_covered(total)

    def row_keys(self, round_: int, clients: Sequence[int]) -> list[list[int]]:
        """Per client the keys of its sample order, its augmentation and its model's dropout in a round."""
        return self._keys(("order", "augment", "layer-dropout"), round_, clients)

    def _keys(self, purposes: Sequence[str], round_: int, clients: Sequence[int]) -> list[list[int]]:
        """Per client its `key` in a round for each purpose, which costs much less than one by one."""
        starts = np.array([key(self.config.seed, purpose, round_) for purpose in purposes], dtype=np.uint64)
        # The last of the steps that `key` would take for each client.
        keys: list[list[int]] = mix64(np.array(clients, dtype=np.uint64)[:, None] ^ starts).tolist()
        return keys

    def code_key(self, round_: int, client: int) -> int:
        return key(self.config.seed, "local-loss", round_, client)

    # --- what is kept in a checkpoint
    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable, but for the `arrays` of selector and watch."""
        return {"selector": self._asked.state_dict(), **self.watch.state_dict()}

    def arrays(self) -> dict[str, np.ndarray]:
        """What the selector must not forget beside that."""
        return self._asked.arrays()

    def load_state_dict(
        self, state: dict[str, Any], arrays: Mapping[str, np.ndarray], watched: Mapping[str, np.ndarray]
    ) -> None:
        """Go on from `state_dict()` and the arrays of selector and watch."""
        self._believe(self.watch.load_state_dict(state, watched))
        self._asked.load(state["selector"], arrays)
        self.watch.learnt(range(self.config.clients))


def _some_of(samples: np.ndarray, most: int, own_key: int) -> np.ndarray:
    """All of a client's samples, or so many of them, drawn by a key; ascending."""
    if most >= len(samples):
        return samples
    drawn: np.ndarray = np.random.Generator(np.random.PCG64(own_key)).choice(samples, most, replace=False)
    drawn.sort()
    return drawn
