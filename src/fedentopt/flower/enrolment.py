"""The register of clients where nobody is asked for labels: every node that is online is let in.

A node's name is what it says in the record `client` of its replies (`client-id`), as in a label report. In a census
before round 1 names are known before anybody is registered, so that picks do not depend on Flower's random node ids. A
node that comes later is let in as "node-<id>"; where its first training reply names a client that is known and whose
node is gone, that client is back; where it names one that is excluded, the reply is not used and the node asked no
more. Two nodes that give one name both keep their "node-<id>", and so does one that gives another's.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedentopt.errors import InputError
from fedentopt.flower.census import ABOUT, Census, Member
from fedentopt.flower.report import CLIENT_ID, ClientId, Report, id_order, normal_id

log = logging.getLogger("flwr")


class Enrolment(Census):
    """A register that asks nothing. Its members' counts say nothing: one sample of each class."""

    def ask(self, grid: Grid, online: Collection[int], enough: int = 1) -> list[Report]:
        """Let in the online nodes that are unknown; nothing is sent."""
        admitted = self.enrol(dict.fromkeys(self.unknown(online)))
        if admitted:
            log.info("%d node(s) let in, to be estimated when they first train", len(admitted))
        return admitted

    def enrol(self, names: Mapping[int, ClientId | None]) -> list[Report]:
        """Let nodes in under the names they gave, or where they gave none, or one that is taken, by their ids."""
        claims = Counter(name for name in names.values() if name is not None)
        by_id = {f"node-{node}": node for node in (*names, *self._client_on)}
        clients: dict[ClientId, int] = {}
        for node, name in names.items():
            if name in self.exclude:
                self.leave_out(node, name)
                continue
            others = name is not None and (claims[name] > 1 or by_id.get(str(name), node) != node)
            if name is not None and (others or name in self.members or not self._may_have(name, node)):
                log.warning("node %d calls itself %r, a name that others have too: known as node-%d", node, name, node)
                name = None
            clients[f"node-{node}" if name is None else name] = node
        admitted = [Report(client, np.ones(self.num_classes), None) for client in sorted(clients, key=id_order)]
        for report in admitted:  # in the order in which selectors register them, also after a stop
            self._put(report.client, Member(clients[report.client], report))
        return admitted

    def restore(self, members: Mapping[ClientId, Member]) -> None:
        """As always; nodes of clients that are excluded by now are known, and need not train to tell their names."""
        super().restore(members)
        for client, member in members.items():
            if client in self.exclude:
                self.leave_out(member.node_id, client)

    def returning(self, client: ClientId, reply: Message, online: Collection[int]) -> ClientId | None:
        """The known client, gone from its old node, that the one on a node says it is; None: it is nobody else.

        One that is known by a name keeps it, or it would leave the buffer whenever somebody is away.
        """
        name, node = told_name(reply), self.members[client].node_id
        before = None if name is None else self.members.get(name)
        if name is None or client != f"node-{node}" or name == client or before is None or before.node_id in online:
            return None
        return name if self._may_have(name, node) else None

    def move(self, client: ClientId, node: int) -> None:
        """A client is back on another node, whose own entry has been removed."""
        log.info("client %s is back on node %d (before: node %d)", client, node, self.members[client].node_id)
        self._put(client, Member(node, self.members[client].report))

    def _may_have(self, name: ClientId, node: int) -> bool:
        try:
            self._check_name(name, node)
        except InputError:
            return False
        return True


def told_name(reply: Message) -> ClientId | None:
    """The name a node gives in a reply, None without one that can be used."""
    about = reply.content.config_records.get(ABOUT)
    value = None if about is None else about.get(CLIENT_ID)
    try:
        return None if value is None else normal_id(value)
    except InputError:
        return None
