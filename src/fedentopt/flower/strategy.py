"""Label-aware selection for Flower's strategies.

    strategy = FedEntOpt(cohort_size=10, buffer_size=50, num_classes=10, seed=0)      # FedAvg
    class EntAdam(LabelAware, FedAdam): ...                                            # any FedAvg-derived strategy

`LabelAware` overrides `configure_train`: before it selects, it asks unknown nodes for their label counts (`census`),
lets a selector of `fedentopt.selection` pick the cohort among the known clients that are online, and hands exactly
that cohort to the strategy it is mixed into, which then does whatever it does there (FedProx adds its mu, FedAdam
remembers the model). Aggregation is untouched, which Flower's privacy accounting insists on.

Selection is seeded and depends on client ids, counts and who is online, never on Flower's random node ids or on the
order in which replies arrive.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fedentopt.errors import InputError
from fedentopt.flower import loop
from fedentopt.flower.census import Census
from fedentopt.flower.cohort_grid import CohortGrid
from fedentopt.flower.exchange import Answer
from fedentopt.flower.report import ClientId
from fedentopt.flower.roster import Roster
from fedentopt.selection import Cohort, EntropySelector, Selector

log = logging.getLogger("flwr")


class NoClientsError(RuntimeError):
    """Nobody to train with: the nodes are gone, or none of them has told its label counts."""


@dataclass
class RoundSelection:
    """A round's cohort, and what became of it: clients that answered, and why the others did not."""

    round: int
    cohort: Cohort
    answered: tuple[ClientId, ...] = ()
    failed: dict[ClientId, str] = field(default_factory=dict)


class LabelAware(FedAvg):
    """Mixin: the cohort is picked by label counts. Put it before the strategy it joins.

    cohort_size       clients a round (M)
    num_classes       length of a label count vector (C)
    buffer_size       FedEntOpt's buffer (Q): clients that trained lately and are kept out for a while
    seed, target      of `EntropySelector`
    selector          another selector of `fedentopt.selection`, instead of buffer_size, seed and target
    query_timeout     longest wait for label counts, in seconds, each time unknown nodes are asked
    query_attempts    how often running a node may fail to give usable counts before it is asked no more
    node_timeout      longest wait for `min_available_nodes` nodes to be online, in seconds
    checkpoint_dir    folder for the checkpoint after each round; `start` continues from it
    strategy_options  everything else goes to the strategy, except fraction_train and min_train_nodes, which
                      cohort_size replaces
    """

    poll_interval = 1.0  # seconds between two looks at who is online

    def __init__(
        self,
        *,
        cohort_size: int,
        num_classes: int,
        buffer_size: int = 0,
        seed: int = 0,
        target: Sequence[float] | None = None,
        selector: Selector | None = None,
        query_timeout: float = 300.0,
        query_attempts: int = 3,
        node_timeout: float = 600.0,
        checkpoint_dir: str | Path | None = None,
        **strategy_options: Any,
    ) -> None:
        for name in ("fraction_train", "min_train_nodes"):
            if name in strategy_options:
                raise InputError(
                    f"{name}: {strategy_options[name]!r} has no place here; cohort_size says how many clients train"
                )
        _check_whole("num_classes", num_classes, 1)
        _check_whole("query_attempts", query_attempts, 1)
        _check_positive("query_timeout", query_timeout)
        _check_positive("node_timeout", node_timeout)
        if selector is not None and ((buffer_size, seed) != (0, 0) or target is not None):
            raise InputError("selector: give either a selector or buffer_size, seed and target, which would build one")
        if selector is not None and selector.cohort_size != cohort_size:
            raise InputError(f"cohort_size: {cohort_size} differs from the selector's {selector.cohort_size}")
        needs = ", ".join(sorted(getattr(selector, "needs", ())))
        if needs:
            raise InputError(
                f"selector: {type(selector).__name__} needs {needs}, which this strategy does not ask of its clients; "
                f"accepted: selectors that need label counts only"
            )
        super().__init__(**strategy_options)
        self.selector = selector if selector is not None else EntropySelector(cohort_size, buffer_size, seed, target)
        aim = self.selector.target if isinstance(self.selector, EntropySelector) else None
        if aim is not None and aim.size != num_classes:  # else the first client would be blamed, after the query
            raise InputError(f"target: {aim.size} weights; accepted: {num_classes}, one for each class (num_classes)")
        self.roster = Roster(self.selector)
        self.cohort_size = self.selector.cohort_size
        self.census = Census(int(num_classes), timeout=query_timeout, attempts=query_attempts)
        self.node_timeout = node_timeout
        self.checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self.history: list[RoundSelection] = []
        self.saves_itself = False  # True while `loop.start` runs this strategy and writes its checkpoints

    def summary(self) -> None:
        """Log the settings."""
        log.info("\t├──> Label-aware selection:")
        log.info("\t│\t├── Selector: %s, cohort of %d", type(self.selector).__name__, self.cohort_size)
        log.info("\t│\t└── Checkpoints: %s", self.checkpoint_dir or "none")
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Pick the cohort and make its messages, in the order picked.

        Waits for nodes at most `node_timeout` seconds; raises `NoClientsError` when there is nobody to pick.
        """
        if self.checkpoint_dir is not None and not self.saves_itself:
            raise InputError(
                "checkpoint_dir: a strategy inside a wrapper is checkpointed when fedentopt.flower.start(wrapper, "
                "grid, ...) runs it, not by wrapper.start(grid, ...)"
            )
        online = self._gather_clients(server_round, grid)
        cohort = self.roster.select(self.census.available(online))
        if cohort.sample_limits is not None:
            raise InputError(
                f"selector: {type(self.selector).__name__} lets clients train on part of their data, which a training "
                "message does not say; accepted: selectors of whole clients, such as EntropySelector and RandomSelector"
            )
        self.history.append(RoundSelection(server_round, cohort))
        log.info(
            "configure_train: picked %d clients of %d online nodes: %s",
            len(cohort.clients),
            len(online),
            cohort.clients,
        )
        log.info("configure_train: entropy %.3f bits, %d classes covered", cohort.entropy, cohort.classes_covered)
        nodes = [self.census.node_of(client) for client in cohort.clients]
        return self._messages(nodes, server_round, arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As Flower does it, but a federation that is gone is not waited for without end."""
        if self.fraction_evaluate > 0:
            least = max(self.min_available_nodes, self.min_evaluate_nodes)
            online = self._wait_for_nodes(grid, least)
            if len(online) < least:
                log.warning("round %d: no evaluation on the nodes, %d of %d online", server_round, len(online), least)
                return []
            grid = CohortGrid(grid, online)  # Flower looks again, and would wait for a node that has just gone
        return super().configure_evaluate(server_round, arrays, config, grid)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds up to `num_rounds`, from the checkpoint where there is one. See `fedentopt.flower.start`."""
        return loop.start(self, grid, initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn)

    def note_answers(self, answers: Sequence[Answer]) -> None:
        """Take down who of the last cohort answered, and log who did not, by client and reason."""
        last = self.history[-1]
        clients = {self.census.node_of(client): client for client in last.cohort.clients}
        last.answered = tuple(clients[answer.node_id] for answer in answers if answer.failure is None)
        last.failed = {clients[answer.node_id]: answer.failure for answer in answers if answer.failure is not None}
        for client, reason in last.failed.items():
            log.warning("round %d: client %s did not train: %s", last.round, client, reason)

    def state_dict(self) -> dict[str, Any]:
        """Selector state and label counts, JSON-serialisable."""
        return {
            "selector": type(self.selector).__name__,
            "roster": self.roster.state_dict(),
            "clients": self.census.state_dict(),
            "num_classes": self.census.num_classes,
            "cohort_size": self.cohort_size,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; one of another selector or another number of classes is refused."""
        for name, own in (
            ("selector", type(self.selector).__name__),
            ("num_classes", self.census.num_classes),
            ("cohort_size", self.cohort_size),
        ):
            if state[name] != own:
                raise InputError(f"{name}: {own!r}, but the checkpoint was written with {state[name]!r}")
        self.roster.load_state_dict(state["roster"], self.census.load_state_dict(state["clients"]))

    def _gather_clients(self, server_round: int, grid: Grid) -> list[int]:
        """Wait for nodes and learn the counts of unknown ones; return who is online, at least one of them known."""
        deadline = time.monotonic() + self.node_timeout
        told = False
        while True:
            online = self._wait_for_nodes(grid, self.min_available_nodes)
            if len(online) < self.min_available_nodes:
                raise NoClientsError(
                    f"round {server_round}: {len(online)} node(s) online after {self.node_timeout:g} s, "
                    f"min_available_nodes asks for {self.min_available_nodes}"
                )
            self.roster.take(self.census.ask_unknown(grid, online))
            if self.census.available(online):
                return online
            nobody_to_ask = not self.census.unknown(online)
            if nobody_to_ask and not told:
                told = True
                log.warning(
                    "round %d: no client with known label counts is online; waiting %g s for one at most",
                    *(server_round, self.node_timeout),
                )
            if nobody_to_ask and time.monotonic() > deadline:
                reasons = [f"node {node}: {self.census.refusals.get(node, 'unknown')}" for node in online]
                raise NoClientsError(
                    f"round {server_round}: no client with known label counts is online "
                    f"({'; '.join(reasons) or 'no node is'})"
                )
            time.sleep(self.poll_interval)

    def _wait_for_nodes(self, grid: Grid, least: int) -> list[int]:
        """Who is online, as soon as `least` nodes are, or after `node_timeout` seconds."""
        deadline = time.monotonic() + self.node_timeout
        told = -1
        while True:
            online = sorted(grid.get_node_ids())
            if len(online) >= least or time.monotonic() >= deadline:
                return online
            if len(online) != told:
                told = len(online)
                log.info("waiting for nodes: %d online, %d needed", told, least)
            time.sleep(self.poll_interval)

    def _messages(
        self, nodes: Sequence[int], server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Let the joined strategy configure training for exactly these nodes.

        Flower samples a fraction of the nodes it sees, so it is shown the cohort alone and told to take all of it.
        """
        kept = self.fraction_train, self.min_train_nodes, self.min_available_nodes
        self.fraction_train, self.min_train_nodes, self.min_available_nodes = 1.0, len(nodes), len(nodes)
        try:
            messages = list(super().configure_train(server_round, arrays, config, CohortGrid(grid, nodes)))
        finally:
            self.fraction_train, self.min_train_nodes, self.min_available_nodes = kept
        place = {node: index for index, node in enumerate(nodes)}
        if sorted(message.metadata.dst_node_id for message in messages) != sorted(nodes):
            raise InputError(
                f"{type(self).__name__}: its configure_train does not train every node it is given, so no selection "
                "can be added to it"
            )
        return sorted(messages, key=lambda message: place[message.metadata.dst_node_id])


class FedEntOpt(LabelAware):
    """FedAvg with cohorts of maximum label entropy (FedEntOpt). Options: see `LabelAware` and Flower's `FedAvg`."""


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}: {value!r} is not accepted; accepted: a whole number of at least {least}")


def _check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InputError(f"{name}: {value!r} is not accepted; accepted: a number of seconds above 0")
