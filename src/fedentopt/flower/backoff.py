"""Clients that fail sit out: one round after the first failure, then 2, 4, ... up to `LONGEST`, until they answer.

A client that is dead, too slow or sends what cannot be averaged would otherwise be picked as often as ever, and with
few clients take a place in every cohort. Where too few others are there, those whose pause ends first come back early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedentopt.flower.report import ClientId

LONGEST = 64


class Backoff:
    """Failures in a row by client, and the last round each sits out."""

    def __init__(self) -> None:
        self._paused: dict[ClientId, tuple[int, int]] = {}

    def failed(self, client: ClientId, round: int) -> int:
        """Book a failure; returns how many rounds the client sits out."""
        failures = self._paused.get(client, (0, 0))[0] + 1
        pause = min(1 << min(failures - 1, 30), LONGEST)
        self._paused[client] = failures, round + pause
        return pause

    def answered(self, client: ClientId) -> None:
        """A good reply: all is forgotten."""
        self._paused.pop(client, None)

    def rested(self, clients: Sequence[ClientId], round: int, least: int) -> list[ClientId]:
        """Those that may be picked in this round, in their order; at least `least` of them where there are so many."""
        if not self._paused:
            return list(clients)
        paused = [client for client in clients if self._paused.get(client, (0, 0))[1] >= round]
        missing = least - (len(clients) - len(paused))
        early = sorted(paused, key=lambda client: self._paused[client][1])[: max(0, missing)]
        out = set(paused) - set(early)
        return [client for client in clients if client not in out]

    def forget(self, clients: Iterable[ClientId]) -> None:
        """These clients are gone."""
        for client in clients:
            self._paused.pop(client, None)

    def state_dict(self) -> list[list[ClientId | int]]:
        """Client, failures in a row, last round of its pause; JSON-serialisable."""
        return [[client, failures, until] for client, (failures, until) in self._paused.items()]

    def load_state_dict(self, state: Iterable[Sequence[ClientId | int]]) -> None:
        """Take over what `state_dict` gave."""
        self._paused = {client: (int(failures), int(until)) for client, failures, until in state}
