"""The federation as the server sees it in a round: who is online, who is known, who may be picked.

Unknown nodes are asked for their label counts, clients that fail sit out, clients that have been away too long are
forgotten, and the server waits, within limits, for nodes that are not there yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from flwr.serverapp import Grid

from fedentopt.flower.census import Census
from fedentopt.flower.exchange import Clock
from fedentopt.flower.report import ClientId
from fedentopt.flower.roster import Roster
from fedentopt.server.backoff import Backoff

log = logging.getLogger("flwr")

_TELL_EVERY = 60.0  # seconds between two lines about what is being waited for


class NoClientsError(RuntimeError):
    """Nobody to train with: the nodes are gone, or none of them has told its label counts."""


class Federation:
    """Census, roster and the clients' record of failures, brought up to date before each round.

    node_timeout   longest wait for nodes, in seconds
    refresh_every  rounds after which known clients are asked again for their counts; 0: never
    forget_after   rounds after which a client that is offline is forgotten; None: never
    """

    poll_interval = 1.0  # seconds between two looks at who is online

    def __init__(
        self,
        census: Census,
        roster: Roster,
        *,
        node_timeout: float,
        refresh_every: int = 0,
        forget_after: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.census, self.roster = census, roster
        self.node_timeout, self.refresh_every, self.forget_after = node_timeout, refresh_every, forget_after
        self.clock = clock or Clock()
        self.backoff = Backoff()
        self.mute = Backoff()
        """Clients that let an evaluation time out: each of them would hold up every round for that long."""
        self._away_since: dict[ClientId, int] = {}

    def gather(self, server_round: int, grid: Grid, least: int, enough: int) -> tuple[list[int], list[ClientId]]:
        """Who is online and which clients may be picked, at least one; learns the counts of unknown nodes.

        `least` nodes are waited for; `enough` is how many known clients make a cohort.
        """
        if self.refresh_every and server_round > 1 and (server_round - 1) % self.refresh_every == 0:
            self.census.refresh(self.census.members)
        deadline = self.clock.now() + self.node_timeout
        told = -_TELL_EVERY
        while True:
            online = self.wait_for_nodes(grid, least)
            if len(online) < least:
                raise NoClientsError(
                    f"round {server_round}: {len(online)} node(s) online after {self.node_timeout:g} s, "
                    f"min_available_nodes asks for {least}"
                )
            self.roster.take(self.census.ask(grid, online, enough))
            available = self.census.available(online)
            if available:
                self._forget(server_round, available)
                return online, self.backoff.rested(available, server_round, enough)
            now = self.clock.now()
            if now >= deadline:
                reasons = [f"node {node}: {self.census.refusals.get(node, 'unknown')}" for node in online]
                raise NoClientsError(
                    f"round {server_round}: no client with known label counts is online "
                    f"({'; '.join(reasons[:20]) or 'no node is'}{' ...' if len(reasons) > 20 else ''})"
                )
            if now - told >= _TELL_EVERY:
                told = now
                log.warning(
                    "round %d: no client with known label counts is online; waiting %g s for one at most",
                    *(server_round, deadline - now),
                )
            self.clock.sleep(self.poll_interval)

    def wait_for_nodes(self, grid: Grid, least: int) -> list[int]:
        """Who is online, as soon as `least` nodes are, or after `node_timeout` seconds."""
        deadline = self.clock.now() + self.node_timeout
        told, told_at = -1, 0.0
        while True:
            online = sorted(grid.get_node_ids())
            now = self.clock.now()
            if len(online) >= least or now >= deadline:
                return online
            if len(online) != told or now - told_at >= _TELL_EVERY:
                told, told_at = len(online), now
                log.info("waiting for nodes: %d online, %d needed, %g s left", told, least, deadline - now)
            self.clock.sleep(self.poll_interval)

    def note_failure(self, client: ClientId, server_round: int, reason: str) -> None:
        """Book and log that a client did not train."""
        pause = self.backoff.failed(client, server_round)
        log.warning("round %d: client %s did not train: %s (sits out %d)", server_round, client, reason, pause)

    def drop(self, clients: Sequence[ClientId], why: str) -> None:
        """Forget clients altogether."""
        if clients:
            log.warning("%d client(s) %s: %s", len(clients), why, ", ".join(map(str, clients[:20])))
            self.census.forget(clients)
            self.roster.forget(clients)
            self.backoff.forget(clients)
            self.mute.forget(clients)
            for client in clients:
                self._away_since.pop(client, None)

    def _forget(self, server_round: int, available: Sequence[ClientId]) -> None:
        if self.forget_after is None:
            return
        here = set(available)
        self._away_since = {
            client: self._away_since.get(client, server_round) for client in self.census.members if client not in here
        }
        gone = [client for client, since in self._away_since.items() if server_round - since >= self.forget_after]
        self.drop(gone, f"forgotten, away for {self.forget_after} rounds")

    def state_dict(self) -> dict[str, Any]:
        """Selector, failures and absences; the register itself is kept apart. JSON-serialisable."""
        return {
            "roster": self.roster.state_dict(),
            "backoff": self.backoff.state_dict(),
            "mute": self.mute.state_dict(),
            "away": [[client, since] for client, since in self._away_since.items()],
        }

    def load_state_dict(self, state: dict[str, Any], arrays: dict[str, Any], watched: dict[str, Any]) -> None:
        """Go on from `state_dict()`, with the census already restored; clients excluded since are dropped."""
        reports = [member.report for member in self.census.members.values()]
        self.roster.load_state_dict(state["roster"], reports, arrays, watched)
        self.backoff.load_state_dict(state["backoff"])
        self.mute.load_state_dict(state.get("mute", ()))  # none in checkpoints of versions that asked them every round
        self._away_since = dict(state["away"])
        excluded = self.census.exclude
        gone = [c for c, m in self.census.members.items() if c in excluded or f"node-{m.node_id}" in excluded]
        self.drop(gone, "excluded")
