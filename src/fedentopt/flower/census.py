"""Who holds which labels: the server's register of clients, filled by asking nodes it does not know.

A node is asked when it is unknown (first round, late joiner, restarted node), with one query, and not again once it
has answered. A node that answers nonsense, too late or not at all is left out with a reason in the log and asked
again before the next selections, until it has failed `attempts` times running. A good answer clears the count: a
node that stands in for another of its name, in turns, is asked at every turn.

Clients are named by their own stable id, nodes by Flower's random one. A known client that appears under a new node
id has restarted and takes its old place, once the old node is offline. Two nodes that are online under one id are a
mistake or an attack: the known one stays, the other is held back until the known one is gone; of two unknown ones
neither is let in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedentopt.errors import InputError
from fedentopt.flower.exchange import exchange
from fedentopt.flower.report import MESSAGE_TYPE, ClientId, Report, id_order, normal_id, read_report
from fedentopt.labels import validate_report

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Member:
    """A client whose counts are known, and the node it was last seen on."""

    node_id: int
    report: Report


class Census:
    """The register. `timeout` bounds one query in seconds, `attempts` how often running a node may fail it."""

    def __init__(self, num_classes: int, *, timeout: float, attempts: int) -> None:
        self.num_classes = num_classes
        self.timeout = timeout
        self.attempts = attempts
        self.members: dict[ClientId, Member] = {}
        self.refusals: dict[int, str] = {}
        self._held: dict[int, Report] = {}
        self._tries: dict[int, int] = {}

    def ask_unknown(self, grid: Grid, online: Sequence[int]) -> list[Report]:
        """Ask the online nodes that are unknown; return the reports that are new or changed, ordered by client id."""
        self._held = {node: report for node, report in self._held.items() if node in set(online)}
        unknown = self.unknown(online)
        if unknown:
            log.info("asking %d node(s) for their label counts", len(unknown))
        messages = [Message(RecordDict(), node, MESSAGE_TYPE) for node in unknown]
        for answer in exchange(grid, messages, self.timeout):
            node = answer.node_id
            self._tries[node] = self._tries.get(node, 0) + 1
            try:
                if answer.failure is not None or answer.reply is None:
                    raise InputError(answer.failure)
                self._held[node] = read_report(answer.reply, self.num_classes)
                del self._tries[node]
            except InputError as error:
                self._refuse(node, str(error))
        return self._admit(set(online))

    def unknown(self, online: Iterable[int]) -> list[int]:
        """The online nodes that would be asked: not known, not held back, and not asked too often."""
        known = {member.node_id for member in self.members.values()} | set(self._held)
        return sorted(node for node in online if node not in known and self._tries.get(node, 0) < self.attempts)

    def available(self, online: Iterable[int]) -> list[ClientId]:
        """Known clients whose node is online, ordered by client id."""
        nodes = set(online)
        return sorted((client for client, member in self.members.items() if member.node_id in nodes), key=id_order)

    def node_of(self, client: ClientId) -> int:
        """The node a client is on."""
        return self.members[client].node_id

    def _admit(self, online: set[int]) -> list[Report]:
        """Let those held in for whom no rival is online."""
        claims: dict[ClientId, list[int]] = {}
        for node, report in self._held.items():
            claims.setdefault(report.client, []).append(node)
        admitted = []
        for client in sorted(claims, key=id_order):
            before = self.members.get(client)
            rivals = claims[client] + ([before.node_id] if before and before.node_id in online else [])
            if len(rivals) > 1:
                for node in claims[client]:
                    others = ", ".join(str(rival) for rival in rivals if rival != node)
                    self._refuse(node, f"client id {client!r} is also claimed by node {others}, online too", held=True)
                continue
            node = claims[client][0]
            report = self._held.pop(node)
            self.refusals.pop(node, None)
            self.members[client] = Member(node_id=node, report=report)
            if before is None:
                admitted.append(report)
                continue
            log.info("client %s is back on node %d (before: node %d)", client, node, before.node_id)
            if not np.array_equal(before.report.counts, report.counts) or before.report.epsilon != report.epsilon:
                admitted.append(report)
        return admitted

    def _refuse(self, node: int, reason: str, *, held: bool = False) -> None:
        if held and self.refusals.get(node) == reason:
            return  # said once is enough for a state that lasts
        self.refusals[node] = reason
        left = self.attempts - self._tries.get(node, 0)
        if held:
            then = "held back until the other is offline"
        else:
            then = f"to be asked {left} more time(s)" if left else "not asked again"
        log.warning("node %d is left out: %s (%s)", node, reason, then)

    def state_dict(self) -> list[dict[str, Any]]:
        """The members in the order they were let in, JSON-serialisable; floats survive bit for bit."""
        return [
            {
                "client": client,
                "node": member.node_id,
                "counts": member.report.counts.tolist(),
                "epsilon": member.report.epsilon,
            }
            for client, member in self.members.items()
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> list[Report]:
        """Take over the members of a checkpoint; return their reports in the order they were let in."""
        self.members = {}
        for entry in state:
            client, epsilon = normal_id(entry["client"]), entry["epsilon"]
            counts = validate_report(client, entry["counts"], self.num_classes, noisy=epsilon is not None)
            self.members[client] = Member(int(entry["node"]), Report(client, counts, epsilon))
        return [member.report for member in self.members.values()]
