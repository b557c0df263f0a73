"""Who holds which labels: the server's register of clients, filled by asking nodes it does not know.

A node is asked when it is unknown (first round, late joiner, restarted node), and again when its owner announces a new
release of its counts or the server's schedule says so (`refresh`). A node that answers nonsense, too late or not at
all is left out with a reason in the log and asked again after a pause that doubles with every failure, so that one
that was repaired comes in by itself. Questions stay open: as soon as enough clients are known and nobody has answered
for a while, the round goes on, and an answer that comes later is read before a later round.

Clients are named by their own stable id, nodes by Flower's random one. A known client that appears under a new node id
has restarted and takes its old place, once the old node is offline. Two nodes that are online under one id are a
mistake or an attack: the known one stays, the other is held back until the known one is gone; of two unknown ones
neither is let in. A node keeps its name for as long as it is known. Where names are bound, a name belongs for good to
the node that first came under it, or to the one the server's operator says; a node with a registered key keeps its id,
so binding to the id is binding to the key.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedentopt.errors import InputError
from fedentopt.flower.exchange import Answer, Clock, pause_after, pull, push
from fedentopt.flower.report import MESSAGE_TYPE, ClientId, Report, id_order, normal_id, read_report
from fedentopt.server.report import printable

log = logging.getLogger("flwr")

ABOUT, RELEASE = "client", "release"
"""ConfigRecord and key, in any reply, by which an owner tells which release of its counts is the current one."""
LONGEST_PAUSE = 600.0
_NAMED = 3  # nodes that a message names before it says how many more there are
_REMEMBERED = 1000  # nodes that failed and are gone
_LINES = 20  # nodes left out that have a line of their own before a round; all of a large federation may have one cause


@dataclass(frozen=True)
class Member:
    """A client whose counts are known, the node it was last seen on, and which release of its counts these are."""

    node_id: int
    report: Report
    release: int | None = None


class Census:
    """The register.

    timeout     longest wait for an answer, in seconds
    attempts    how often running a node may fail before it is asked no more; None: it is always asked again
    pause       seconds between the first two questions to a node that fails; doubles up to `LONGEST_PAUSE`
    patience    seconds without an answer after which those still silent are not waited for, where enough are known
    bind_names  whether a name stays with the node that first came under it; or {name: node id}
    exclude     clients that are not let in; "node-<id>" for a node, which is then not even asked
    """

    def __init__(
        self,
        num_classes: int,
        *,
        timeout: float,
        attempts: int | None = None,
        pause: float = 5.0,
        patience: float = 30.0,
        bind_names: bool | Mapping[ClientId, int] = False,
        exclude: Collection[ClientId] = (),
        clock: Clock | None = None,
    ) -> None:
        self.num_classes = num_classes
        self.timeout, self.attempts, self.pause, self.patience = timeout, attempts, pause, patience
        self.bind_names = bind_names is True
        self.names: dict[ClientId, int] = {}
        if isinstance(bind_names, Mapping):
            self.names = {normal_id(name): int(node) for name, node in bind_names.items()}
        self.exclude = frozenset(normal_id(name) for name in exclude)
        self.clock = clock or Clock()
        self.members: dict[ClientId, Member] = {}
        self.refusals: dict[int, str] = {}
        self.changed: dict[ClientId, bool] = {}
        """Clients let in, changed or gone since the register was last saved; True where one has left meanwhile."""
        self._client_on: dict[int, ClientId] = {}
        self._held: dict[int, tuple[Report, int | None]] = {}
        self._tries: dict[int, int] = {}
        self._again: dict[int, float] = {}
        self._open: dict[str, tuple[Message, float]] = {}
        self._asked: set[int] = set()
        self._left_out = 0  # nodes, since the last `ask` began
        self._refresh: set[ClientId] = set()
        self._announced: dict[ClientId, int | None] = {}

    # --- asking
    def ask(self, grid: Grid, online: Collection[int], enough: int = 1) -> list[Report]:
        """Ask the online nodes that are unknown or due; return reports that are new or changed, by client id.

        Waits for the unknown ones; once `enough` clients are known, for `patience` seconds after the last answer.
        """
        here = set(online)
        self._left_out = 0
        self._held = {node: held for node, held in self._held.items() if node in here}
        self._drop_gone(here)
        unknown = self.unknown(here)
        due = sorted(
            self.members[client].node_id
            for client in self._refresh
            if client in self.members and self.members[client].node_id in here - self._asked
        )
        if unknown:
            log.info("asking %d node(s) for their label counts", len(unknown))
        if due:
            log.info("asking %d known node(s) again for their label counts", len(due))
        begin = last = self.clock.now()
        for name, message in push(grid, [Message(RecordDict(), node, MESSAGE_TYPE) for node in unknown + due]).items():
            self._open[name] = message, begin
        self._asked = {message.metadata.dst_node_id for message, _ in self._open.values()}
        for node in {*unknown, *due} - self._asked:
            self._fail(node, "the question could not be sent")
        waited_for = set(unknown)
        while True:
            if self._read(grid):
                last = self.clock.now()
            now = self.clock.now()
            waited_for &= self._asked
            known = sum(node in self._client_on for node in here) + len(self._held)
            if not waited_for or now - begin >= self.timeout or (known >= enough and now - last >= self.patience):
                break
            self.clock.sleep(min(pause_after(now - begin), self.patience, max(self.timeout - (now - begin), 0.001)))
        if self._left_out > _LINES:
            log.warning("%d more nodes are left out (reasons at level DEBUG)", self._left_out - _LINES)
        if waited_for:
            log.warning(
                "%s: no answer yet to the question for label counts; going on with the %d clients that are known",
                *(listed([f"node {node}" for node in sorted(waited_for)]), known),
            )
        return self._admit(here)

    def unknown(self, online: Iterable[int]) -> list[int]:
        """The online nodes that would be asked now: unknown, not held back, not asked already, not in a pause."""
        now = self.clock.now()
        return sorted(
            node
            for node in online
            if node not in self._client_on
            and node not in self._held
            and node not in self._asked
            and self._again.get(node, now) <= now
            and (self.attempts is None or self._tries.get(node, 0) < self.attempts)
            and f"node-{node}" not in self.exclude
        )

    def refresh(self, clients: Iterable[ClientId]) -> None:
        """Ask these clients again, next time."""
        self._refresh.update(client for client in clients if client in self.members)

    def note_release(self, client: ClientId, reply: Message) -> None:
        """Take notice of what a reply says about the client's counts: a new release is asked for."""
        release = _release(reply)
        member = self.members.get(client)
        if member is None or release in (None, member.release or 1, self._announced.get(client)):
            return
        log.info("client %s announces release %s of its label counts", client, release)
        self._announced[client] = release  # asked for once: a report need not say which release it is
        self._refresh.add(client)

    def _drop_gone(self, here: set[int]) -> None:
        """Questions to nodes that are gone will not be answered; and of nodes that failed, those that are gone are not
        remembered without end: one that starts again and again without a key has another id each time."""
        for name, (message, _) in list(self._open.items()):
            if message.metadata.dst_node_id not in here:
                del self._open[name]
        self._asked = {message.metadata.dst_node_id for message, _ in self._open.values()}
        gone = self.refusals.keys() - here
        for node in gone if len(gone) > _REMEMBERED else ():
            del self.refusals[node]
            self._tries.pop(node, None)
            self._again.pop(node, None)

    def _read(self, grid: Grid) -> bool:
        """Read the answers that have come and give up on those that are too late; whether there was any."""
        if not self._open:
            return False
        came = pull(grid, {name: message for name, (message, _) in self._open.items()})
        now = self.clock.now()
        for name, (message, begin) in list(self._open.items()):
            reply = came.get(name)
            if reply is None and now - begin < self.timeout:
                continue
            del self._open[name]
            self._asked.discard(message.metadata.dst_node_id)
            text = reply if isinstance(reply, str) else None
            self._take(Answer(message, None if isinstance(reply, str) else reply, self.timeout, problem=text))
        return bool(came)

    def _take(self, answer: Answer) -> None:
        node = answer.node_id
        self._refresh.discard(self._client_on.get(node, ""))
        try:
            if answer.failure is not None or answer.reply is None:
                raise InputError(answer.failure)
            report = read_report(answer.reply, self.num_classes)
            stood = self._client_on.get(node, report.client)
            if stood != report.client:  # under a new name it would leave the buffer, and its old one would stay behind
                raise InputError(
                    f"it is known as {stood!r} and now calls itself {report.client!r}; exclude the old name"
                )
            if report.client in self.exclude:
                self.leave_out(node, report.client)
                return
            self._check_name(report.client, node)
        except InputError as error:
            self._fail(node, printable(error))
        except Exception as error:  # a stranger's reply: whatever it trips over is that node's failure
            self._fail(node, f"the label report cannot be read ({printable(repr(error))})")
        else:
            self._held[node] = report, _release(answer.reply)
            self._tries.pop(node, None)
            self._again.pop(node, None)

    def _check_name(self, client: ClientId, node: int) -> None:
        before = self.members.get(client)
        owner = self.names.get(client, before.node_id if self.bind_names and before is not None else None)
        if owner is not None and owner != node:
            raise InputError(f"client id {client!r} is bound to node {owner}")

    def leave_out(self, node: int, client: ClientId | None) -> None:
        """Ask a node no more whose client is excluded."""
        self._tries[node], self._again[node] = 0, float("inf")
        self.refusals[node] = f"client {client!r} is excluded on this server"
        log.warning("node %d is left out: %s", node, self.refusals[node])

    def _fail(self, node: int, reason: str) -> None:
        tries = self._tries[node] = self._tries.get(node, 0) + 1
        pause = min(self.pause * 2.0 ** min(tries - 1, 60), LONGEST_PAUSE)
        self._again[node] = self.clock.now() + pause
        last = self.attempts is not None and tries >= self.attempts
        if node in self._client_on:
            self._announced.pop(self._client_on[node], None)  # asked for again when it is announced again
            log.warning("node %d keeps its old label counts: %s", node, reason)
            return
        self.refusals[node] = reason
        then = "not asked again" if last else f"asked again in {pause:g} s"
        self._left_out += 1
        level = logging.WARNING if self._left_out <= _LINES else logging.DEBUG
        log.log(level, "node %d is left out: %s (%s)", node, reason, then)

    def _admit(self, online: set[int]) -> list[Report]:
        """Let those held in for whom no rival is online."""
        claims: dict[ClientId, list[int]] = {}
        for node, (report, _) in self._held.items():
            claims.setdefault(report.client, []).append(node)
        admitted = []
        for client in sorted(claims, key=id_order):
            before = self.members.get(client)
            nodes = claims[client]
            elsewhere = before is not None and before.node_id in online and before.node_id not in nodes
            rivals = nodes + ([before.node_id] if before is not None and elsewhere else [])
            if len(rivals) > 1:
                self._hold_back(client, nodes, rivals)
                continue
            node = nodes[0]
            report, release = self._held.pop(node)
            self.refusals.pop(node, None)
            self._put(client, Member(node, report, release))
            if before is None:
                admitted.append(report)
                continue
            if before.node_id != node:
                log.info("client %s is back on node %d (before: node %d)", client, node, before.node_id)
            if not np.array_equal(before.report.counts, report.counts) or before.report.epsilon != report.epsilon:
                log.info("client %s has new label counts", client)
                admitted.append(report)
        return admitted

    def _hold_back(self, client: ClientId, nodes: Sequence[int], rivals: Sequence[int]) -> None:
        told = []
        for node in nodes:
            others = [rival for rival in rivals[: _NAMED + 1] if rival != node][:_NAMED]
            more = len(rivals) - 1 - len(others)
            reason = f"client id {client!r} is also claimed by node {', '.join(map(str, others))}" + (
                f" and {more} more" if more else ""
            )
            if self.refusals.get(node) != reason:  # said once is enough for a state that lasts
                self.refusals[node] = reason
                told.append(node)
        for node in told[:_NAMED]:
            log.warning("node %d is left out: %s, online too (held back)", node, self.refusals[node])
        if len(told) > _NAMED:
            log.warning("%d more nodes are left out: client id %r is claimed by each", len(told) - _NAMED, client)

    # --- who is there
    def available(self, online: Iterable[int]) -> list[ClientId]:
        """Known clients whose node is online, ordered by client id."""
        return sorted((self._client_on[node] for node in online if node in self._client_on), key=id_order)

    def node_of(self, client: ClientId) -> int:
        """The node a client is on."""
        return self.members[client].node_id

    def by_client(self, answers: Iterable[Answer]) -> list[tuple[ClientId, Answer]]:
        """Answers beside the clients that gave them."""
        return [(self._client_on[answer.node_id], answer) for answer in answers]

    def forget(self, clients: Iterable[ClientId]) -> None:
        """Remove clients; they are asked anew when they come back."""
        for client in clients:
            member = self.members.pop(client)
            self._client_on.pop(member.node_id, None)
            self._refresh.discard(client)
            self.changed[client] = True

    def restore(self, members: Mapping[ClientId, Member]) -> None:
        """Take over the members of a checkpoint, in the order they were let in."""
        self.members = dict(members)
        self._client_on = {member.node_id: client for client, member in members.items()}
        self.changed = {}

    def _put(self, client: ClientId, member: Member) -> None:
        before = self.members.get(client)
        if before is not None and self._client_on.get(before.node_id) == client:
            del self._client_on[before.node_id]
        self.members[client] = member
        self._client_on[member.node_id] = client
        self.changed.setdefault(client, False)


def _release(reply: Message) -> int | None:
    about = reply.content.config_records.get(ABOUT)
    value = None if about is None else about.get(RELEASE)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
