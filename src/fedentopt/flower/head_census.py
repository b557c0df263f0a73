"""The census of last layers: before round 1 every node trains from the start model, and nothing is averaged.

For selectors that take the change of last layers for labels and ask for no reports (`inferred`). Messages are ordinary
training messages of round 1, made by the strategy (a round 0 would meet apps that divide by it), whose config says
besides

    census         1
    local-epochs   how many epochs suffice
    samples        on how many samples each, where not all are wanted

A ClientApp that does not look at these trains as always, and all is well. One that follows them says so with
`census = 1` in the record `client` of its reply, and may send the arrays of the last layer alone.

A node that fails is asked again after a pause, three times in all; one that did not answer in time is not waited for a
second time. Who fails sits out round 1 as after any failure, and is estimated when it first trains. Not all nodes are
asked at once (`window`), so that no more than so many models are ever held.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedentopt.flower import replies
from fedentopt.flower.enrolment import Enrolment, told_name
from fedentopt.flower.exchange import Answer
from fedentopt.flower.federation import NoClientsError
from fedentopt.flower.replies import BadReplyError, arrays_of
from fedentopt.flower.report import ClientId
from fedentopt.flower.window import Window
from fedentopt.selection import Head, Observation
from fedentopt.server.local_training import CENSUS, EPOCHS, SAMPLES

if TYPE_CHECKING:
    from fedentopt.flower.strategy import LabelAware

TRIES = 3
AT_ONCE = 64

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class _Told:
    """What is kept of a node's answer."""

    seen: Observation
    weight: float
    name: ClientId | None


class HeadCensus:
    """Takes the census of a run that has not begun."""

    def __init__(
        self, strategy: Strategy, selection: LabelAware, grid: Grid, start: ArrayRecord, config: ConfigRecord,
        timeout: float,
    ) -> None:  # fmt: skip
        self.strategy, self.selection, self.grid, self.start, self.timeout = strategy, selection, grid, start, timeout
        self.config = config
        self.asked = 0
        self.register: Enrolment = selection.census  # type: ignore[assignment]

    def take(self) -> bool:
        """Take it where the selector wants one; whether it did."""
        selection = self.selection
        wanted = selection.selector.census()
        if wanted is None:
            return False
        config = ConfigRecord({**self.config, CENSUS: 1, EPOCHS: wanted.epochs})
        if wanted.samples is not None:
            config[SAMPLES] = wanted.samples
        least = max(1, selection.min_available_nodes)
        online = selection.federation.wait_for_nodes(self.grid, least)
        if len(online) < least:
            raise NoClientsError(f"census: {len(online)} node(s) online, min_available_nodes asks for {least}")
        told: dict[int, _Told] = {}
        failed: dict[int, str] = {}
        nodes = self.register.unknown(online)
        self.asked = len(nodes)
        log.info("census: asking %d node(s) to train from the start model; nothing is averaged", len(nodes))
        window = Window(self.grid, AT_ONCE, self.timeout, selection.census.patience, selection.clock)
        for attempt in range(TRIES):
            again: list[int] = []
            window.ask(
                nodes,
                lambda some: self._messages(some, config),
                lambda answers, again=again: again.extend(self._read(answers, told, failed)),  # type: ignore[misc]
            )
            here = set(self.grid.get_node_ids()) if again else set()
            nodes = [node for node in again if node in here]
            if not nodes or attempt == TRIES - 1:
                break
            log.info("census: asking %d node(s) that failed again", len(nodes))
            selection.clock.sleep(selection.census.pause * 2.0**attempt)
        if not told:
            reasons = "; ".join(f"node {node}: {reason}" for node, reason in list(failed.items())[:20])
            raise NoClientsError(f"census: no node trained ({reasons or 'none is online'})")
        self._enrol(told)
        for node, reason in failed.items():
            selection.federation.note_failure(f"node-{node}", 0, reason)  # sits out round 1
        log.info("census: %d client(s) estimated, %d failed", len(told), len(failed))
        return True

    def _messages(self, nodes: Sequence[int], config: ConfigRecord) -> Iterable[Message]:
        """What these nodes are sent."""
        self.selection.standing_in = list(nodes)
        try:
            return self.strategy.configure_train(1, self.start, ConfigRecord(dict(config)), self.grid)
        finally:
            self.selection.standing_in = None

    def _read(self, given: Sequence[Answer], told: dict[int, _Told], failed: dict[int, str]) -> list[int]:
        """Note what nodes told; returns those that answered, but with nothing that can be used."""
        selection = self.selection
        answers = replies.judge(given, self._check, selection.weighted_by_key, {}, selection.weight_cap)
        good = [answer for answer in answers if answer.failure is None]
        key = selection.weighted_by_key
        weights: dict[ClientId, float] = {answer.node_id: replies.weight_of(answer, key) for answer in good}
        seen = selection.learning.heads.labelled(
            [(answer.node_id, answer) for answer in good], self.start, weights, clients=self.asked,
            untrained=not selection.learning.has_trained, followed=EPOCHS in self.config,
        )  # fmt: skip
        again = []
        for answer in answers:
            node = answer.node_id
            if node in seen:
                failed.pop(node, None)
                assert answer.reply is not None
                told[node] = _Told(_slim(seen[node]), weights[node], told_name(answer.reply))
                continue
            failed[node] = answer.failure or "the sizes of its steps are not known"
            if answer.reply is not None or answer.problem is not None:
                again.append(node)
        return again

    def _check(self, reply: Message) -> str | None:
        """As any training reply, but the last layer alone will do."""
        content = reply.content
        names = [name for name in self.selection.learning.heads.find(self.start) if name is not None]
        whole = len(content.array_records) != 1 or set(arrays_of(content)) != set(names)
        sent = self.start if whole else ArrayRecord({name: self.start[name] for name in names})
        if whole:
            return self.selection.check_reply(reply, self.start)
        try:
            replies.check_training(content, sent, self.selection.weighted_by_key)
        except BadReplyError as error:
            return str(error)
        return None

    def _enrol(self, told: dict[int, _Told]) -> None:
        """Let them in by name and tell the selector what it has asked for, in an order that names alone decide."""
        selection = self.selection
        reports = self.register.enrol({node: one.name for node, one in told.items()})
        selection.roster.take(reports)
        mine = {report.client: told[self.register.node_of(report.client)] for report in reports}
        samples = selection.roster.samples({client: one.weight for client, one in mine.items()})
        selection.selector.observe(
            {
                client: Observation(
                    max(1, round(samples[client])), head=one.seen.head, travel=one.seen.travel,
                    untrained=one.seen.untrained,
                )
                for client, one in mine.items()
            }
        )  # fmt: skip


def _slim(seen: Observation) -> Observation:
    """What labels are read from, without a matrix per client: the bias, or the means of the weight's rows."""
    head = seen.head
    assert head is not None
    weight = np.zeros((len(head.weight), 0)) if head.bias is not None else head.weight.mean(axis=1, keepdims=True)
    return Observation(seen.samples, head=Head(weight, head.bias), travel=seen.travel, untrained=seen.untrained)
