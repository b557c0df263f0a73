"""FedEntOpt without label reports: label counts are estimated from what training does to clients' last layers.

In a census before round 1 every client trains a little from the start model; nothing is averaged, and only the change
of its last bias need travel (one number per class). The estimate (see `fedentopt.audit.estimate`) times the number of
samples it trained on takes the place of a report, and every later training adds to it. A client that joins late is
estimated when it first trains; until then its labels count as even, with one sample per class.

Where there can be no census (`census_epochs` 0), clients that have never trained come first, in random order, as long
as a whole cohort of them is left; the rounds at the highest learning rate then go to uneven cohorts. One that was
picked three times and has told nothing is no reason to wait any more, and is picked like all others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from fedentopt.audit import Audit, Estimates, change_table, estimates_together, is_without_sums
from fedentopt.errors import InputError
from fedentopt.selection.cohort import ClientId, Cohort
from fedentopt.selection.entropy import EntropySelector
from fedentopt.selection.everybody_once import TRIES
from fedentopt.selection.feedback import Census, Observation
from fedentopt.selection.heads import change_of
from fedentopt.selection.per_client import as_pairs, read_pairs
from fedentopt.selection.selector import check_int, selector
from fedentopt.settings import setting

BYTES_PER_CELL = {True: 115, False: 75}
"""What a client and a class take at most, with a census, which reads all clients at once, and without. Measured."""


class _Expected:
    """A round that is about to be observed, read once."""

    def __init__(self, observations: Mapping[ClientId, Observation]) -> None:
        self.observations = observations
        self.changes = {client: change_of(seen) for client, seen in observations.items()}
        self.untrained = any(seen.untrained for seen in observations.values())
        self.estimates: Estimates | None = None


@selector("inferred", label="FedEntOpt, inferred")
class InferredSelector(EntropySelector):
    """FedEntOpt on estimated label counts; `buffer_size` and `cohort_size` as there."""

    name = "inferred"
    needs: ClassVar[frozenset[str]] = frozenset({"head"})
    reads_label_counts = False
    labels_from_heads = True
    stream = 0x494E
    run_settings: ClassVar[Mapping[str, Any]] = {
        **EntropySelector.run_settings,
        "buffer": setting("50%", help="buffer, Q: a number or a per cent of K, at most K-M", amount=True),
    }
    census_epochs: int = setting(1, help="epochs of the census before round 1; 0: no census", low=0)
    census_samples: int | None = setting(None, help="samples per client in the census (default: all)", low=1)

    def __init__(
        self, cohort_size: int, buffer_size: int = 0, seed: int = 0, census_epochs: int = 1,
        census_samples: int | None = None, *, release: str = "fifo", **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(cohort_size, buffer_size, seed, release=release, **settings)
        self.census_epochs = check_int("census_epochs", census_epochs, 0)
        self.census_samples = None if census_samples is None else check_int("census_samples", census_samples, 1)
        if self.census_samples is not None and not self.census_epochs:
            raise InputError(
                f"census_samples: {census_samples} for a census that is not taken; accepted: none with census_epochs 0"
            )
        self._audit: Audit | None = None
        self._expected: _Expected | None = None
        self._tries: dict[ClientId, int] = {}  # without a census: of those that have told nothing yet
        self._awaited: Mapping[str, Any] | None = None
        """A state whose arrays have yet to be given."""

    def census(self) -> Census | None:
        """Before round 1, while nothing is known of anybody."""
        if self.round or not self.census_epochs or self._audit is not None or self._awaited is not None:
            return None
        return Census(self.census_epochs, self.census_samples)

    def register(
        self, counts: Any, *, noisy: bool = False, ids: Sequence[ClientId] | None = None, num_classes: int | None = None
    ) -> None:
        """Add clients. Of what they are given with, only how many there are and the number of classes is looked at."""
        known = set(self.clients)
        super().register(counts, noisy=noisy, ids=ids, num_classes=num_classes)
        new = [client for client in self.clients if client not in known]
        self._forget_reports(new)

    def _check_number(self, clients: int, classes: int) -> None:
        """Estimates say something of every class, so that no table is as sparse as reports are."""
        super()._check_number(clients, classes)
        there, per_client = _memory(), BYTES_PER_CELL[bool(self.census_epochs)] * classes
        if there is not None and clients * per_client > there:
            raise InputError(
                f"clients: {clients} of {classes} classes take about {clients * per_client / 1e9:.0f} GB in "
                f"{self.name}, and this machine has {there / 1e9:.0f}; accepted: at most {there // per_client} clients"
            )

    def update(self, counts: Any, *, noisy: bool = False, ids: Sequence[ClientId] | None = None) -> None:
        """Reports are not looked at; what was estimated stays."""

    def remove(self, ids: Iterable[ClientId]) -> None:
        """Forget clients, and what was estimated of them."""
        gone = list(ids)
        self._check_complete()  # what is awaited would bring them back
        super().remove(gone)
        for client in gone:
            self._tries.pop(client, None)
        if self._audit is not None:
            self._audit.forget(gone)

    @classmethod
    def expect(cls, told: Sequence[tuple[Self, Mapping[ClientId, Observation]]]) -> None:
        """Estimate the labels of all at once, which takes a fraction of the time. What each learns is the same to the
        bit; what `observe` is going to refuse is left to it."""
        rounds: list[tuple[_Expected, np.ndarray]] = []
        for one, observations in told:
            one._expected = None
            if not observations:
                continue
            with contextlib.suppress(InputError):
                expected = _Expected(observations)
                rounds.append((expected, change_table(expected.changes, one.num_classes or 1)))
                one._expected = expected
        found = estimates_together([(table, expected.untrained) for expected, table in rounds])
        for (expected, _), estimates in zip(rounds, found, strict=True):
            expected.estimates = estimates

    def observe(self, observations: Mapping[ClientId, Observation]) -> None:
        """Estimate the labels of those that trained."""
        self._check_complete()
        if self._audit is None:
            self._audit = Audit(self.num_classes or 1, "replace")
        expected, self._expected = self._expected, None
        if expected is None or expected.observations is not observations:
            expected = _Expected(observations)
        self._audit.observe(expected.changes, untrained=expected.untrained, estimates=expected.estimates)
        for client in expected.changes:
            self._tries.pop(client, None)
        self._believe(expected.changes)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Cohort:
        """Whoever is unknown first where there was no census, then as FedEntOpt."""
        self._check_complete()
        if self.census_epochs:
            return super().pick(available, losses)
        ids = self._table.ids
        unseen = [n for n in available.tolist() if not self._is_known(ids[n]) and self._tries.get(ids[n], 0) < TRIES]
        if len(unseen) >= self.cohort_size:
            available = np.sort(self.rng().choice(unseen, self.cohort_size, replace=False))
        cohort = super().pick(available, losses)
        for client in cohort.clients:
            if not self._is_known(client):
                self._tries[client] = self._tries.get(client, 0) + 1
        return cohort

    def estimate(self, client: ClientId) -> np.ndarray | None:
        """The estimated label distribution of a client, None before it was seen."""
        return None if self._audit is None else self._audit.shares(client)

    def times_seen(self, client: ClientId) -> int:
        """How often a client has been observed, the census included."""
        return 0 if self._audit is None else self._audit.times_seen(client)

    def memory(self) -> dict[str, Any]:
        known = self._awaited if self._audit is None else self._audit.state_dict(shares=False)
        tries = {} if self.census_epochs else {"tries": as_pairs(self._tries)}
        return super().memory() | {"audit": known} | tries

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Selector.load_state_dict`; earlier versions counted no tries."""
        counts = isinstance(state, Mapping) and not self.census_epochs
        super().load_state_dict({"tries": [], **state} if counts else state)

    def remember(self, memory: Mapping[str, Any]) -> None:
        """States of earlier versions hold all that was estimated; of others, `load_arrays` has the estimates."""
        state, tries = memory["audit"], read_pairs("tries", memory.get("tries", []), low=1, whole=True)
        audit = awaited = None
        if isinstance(state, Mapping) and is_without_sums(state.get("seen")):
            _check_sums(state)
            awaited = state
        elif state is not None:
            audit = Audit(self.num_classes or 1, "replace")
            audit.load_state_dict(state)
        super().remember(memory)
        self._awaited, self._tries = awaited, tries
        self._take(audit)

    def arrays(self) -> dict[str, np.ndarray]:
        """The estimates, as sums over what was observed; in double precision, which going on to the bit takes."""
        sums = None if self._audit is None else self._audit.share_sums()
        return {} if sums is None or not sums.size else {"shares": sums}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        if self._awaited is None and not arrays:
            return
        shapes = {name: tuple(array.shape) for name, array in arrays.items()}
        if self._awaited is None or arrays.keys() != {"shares"}:
            many = 0 if self._awaited is None else len(self._awaited["seen"])
            raise InputError(f"arrays: {shapes}; accepted: those of the {many} clients that the state names")
        if not np.isfinite(arrays["shares"]).all():
            raise InputError("arrays: shares are not all finite; accepted: finite numbers")
        audit = Audit(self.num_classes or 1, "replace")
        try:
            audit.load_state_dict(self._awaited, arrays)
        except InputError as error:
            raise InputError(f"arrays: {shapes}: {error}") from error
        self._awaited = None
        self._take(audit)

    def _take(self, audit: Audit | None) -> None:
        self._audit = audit
        if audit is not None:
            self._believe(client for client in self.clients if self._is_known(client))

    def _check_complete(self) -> None:
        if self._awaited is not None:
            raise InputError(
                f"state: the estimates of {len(self._awaited['seen'])} clients are missing; accepted: load_arrays with "
                f"what arrays() returned beside it"
            )

    def _is_known(self, client: ClientId) -> bool:
        return self.times_seen(client) > 0

    def _forget_reports(self, clients: Sequence[ClientId]) -> None:
        if clients:
            super().update(np.ones((len(clients), self.num_classes or 1)), ids=list(clients), noisy=True)

    def _believe(self, clients: Any) -> None:
        assert self._audit is not None
        listed = [client for client in clients if client in self._table]
        if listed:
            super().update(np.stack([self._audit.believed(client) for client in listed]), ids=listed, noisy=True)


def _check_sums(state: Mapping[str, Any]) -> None:
    """Refuse a state without shares in which anything else is wrong: with all shares in one class."""
    seen = [[*entry[:2], entry[1:2], *entry[3:]] for entry in state["seen"]]
    Audit(1, "replace").load_state_dict({**state, "seen": seen})


def _memory() -> int | None:
    """Bytes of memory in this machine, None where that cannot be asked."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
