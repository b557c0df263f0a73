"""Clients that fail sit out: one round after the first failure, then 2, 4, ... up to `LONGEST`, until they answer.

A client that is dead, too slow or sends what cannot be averaged would otherwise be picked as often as ever, and with
few clients take a place in every cohort. Where too few others are there, those whose pause ends first come back early.

One that answers and fails in turn would cost as much, if an answer ended all. So a row of failures, of whatever length,
leaves a debt of `DEBT` answers when it ends, which further answers pay off one by one; pauses double with every
`DOUBLED_BY` that are owed. Who failed once pays for nothing but the next failures; who fails every second or third time
sits out longer and longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace

from fedentopt.selection import ClientId

LONGEST = 64
DEBT, DOUBLED_BY, LARGEST_DEBT = 2, 4, 24  # at the largest debt every pause is the longest


@dataclass(frozen=True)
class _Record:
    """A client's failures: those in a row up to now (0 after an answer), the last round that it sits out for them, and
    how many answers it owes for rows before."""

    failures: int = 0
    until: int = 0
    owed: int = 0

    @property
    def pause(self) -> int:
        """Rounds to sit out after the last failure."""
        return min(1 << min(self.failures - 1 + self.owed // DOUBLED_BY, 30), LONGEST)


class Backoff:
    """The records of the clients that have failed and are not what they were yet."""

    def __init__(self) -> None:
        self._known: dict[ClientId, _Record] = {}

    def failed(self, client: ClientId, round: int) -> int:
        """Book a failure; returns how many rounds the client sits out. A second one in the same round counts for
        nothing: a client that is waited for may be asked again and again."""
        record = self._known.get(client, _Record())
        if not record.failures or record.until != round + record.pause:
            record = replace(record, failures=record.failures + 1)
            self._known[client] = replace(record, until=round + record.pause)
        return record.pause

    def answered(self, client: ClientId) -> None:
        """A good reply: the pause is over, and what is owed changes."""
        if client not in self._known:
            return
        record = self._known.pop(client)
        owed = min(record.owed + DEBT, LARGEST_DEBT) if record.failures else record.owed - 1
        if owed:
            self._known[client] = replace(record, failures=0, owed=owed)

    def has_failed(self, client: ClientId) -> bool:
        """Whether its last try failed."""
        return client in self._known and self._known[client].failures > 0

    def over(self, client: ClientId, round: int) -> bool:
        """Whether the client may be tried in this round."""
        return not self.has_failed(client) or self._known[client].until < round

    def rested(self, clients: Sequence[ClientId], round: int, least: int) -> list[ClientId]:
        """Those that may be picked in this round, in their order; at least `least` of them where there are so many."""
        if not self._known:
            return list(clients)
        paused = [client for client in clients if not self.over(client, round)]
        missing = least - (len(clients) - len(paused))
        early = sorted(paused, key=lambda client: self._known[client].until)[: max(0, missing)]
        out = set(paused) - set(early)
        return [client for client in clients if client not in out]

    def forget(self, clients: Iterable[ClientId]) -> None:
        """These clients are gone."""
        for client in clients:
            self._known.pop(client, None)

    def state_dict(self) -> list[list[ClientId | int]]:
        """Client, failures in a row, last round of its pause, and what it owes if anything; JSON-serialisable."""
        return [[client, *astuple(record)[: 3 if record.owed else 2]] for client, record in self._known.items()]

    def load_state_dict(self, state: Iterable[Sequence[ClientId | int]]) -> None:
        """Take over what `state_dict` gave; earlier versions kept no debts."""
        self._known = {client: _Record(*map(int, numbers)) for client, *numbers in state}
