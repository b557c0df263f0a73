"""Clients that fail sit out: one round after the first failure, then 2, 4, ... up to `LONGEST`, until they answer.

A client that is dead, too slow or sends what cannot be averaged would otherwise be picked as often as ever, and with
few clients take a place in every cohort. Where too few others are there, those whose pause ends first come back early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedentopt.selection import ClientId

LONGEST = 64


class Backoff:
    """Failures in a row by client, and the last round each sits out."""

    def __init__(self) -> None:
        self._paused: dict[ClientId, tuple[int, int]] = {}

    def failed(self, client: ClientId, round: int) -> int:
        """Book a failure; returns how many rounds the client sits out. A second one in the same round counts for
        nothing: a client that is waited for may be asked again and again."""
        failures, until = self._paused.get(client, (0, 0))
        if not failures or until != round + _pause(failures):
            failures += 1
            self._paused[client] = failures, round + _pause(failures)
        return _pause(failures)

    def answered(self, client: ClientId) -> None:
        """A good reply: all is forgotten."""
        self._paused.pop(client, None)

    def has_failed(self, client: ClientId) -> bool:
        """Whether its last try failed."""
        return client in self._paused

    def over(self, client: ClientId, round: int) -> bool:
        """Whether the client may be tried in this round."""
        return client not in self._paused or self._paused[client][1] < round

    def rested(self, clients: Sequence[ClientId], round: int, least: int) -> list[ClientId]:
        """Those that may be picked in this round, in their order; at least `least` of them where there are so many."""
        if not self._paused:
            return list(clients)
        paused = [client for client in clients if not self.over(client, round)]
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


def _pause(failures: int) -> int:
    """Rounds to sit out after so many failures in a row."""
    return min(1 << min(failures - 1, 30), LONGEST)
