"""What every selector has in common: a table of label counts, a round number, and who is available."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection.cohort import ClientId, Cohort, CohortWarning
from fedentopt.selection.measures import row_scores
from fedentopt.selection.reports import client_ids
from fedentopt.selection.table import CountTable


@runtime_checkable
class Selector(Protocol):
    """Chooses, round after round, which clients train. It sees label counts and never a model."""

    cohort_size: int

    def register(
        self, counts: Any, *, noisy: bool = False, ids: Sequence[ClientId] | None = None, num_classes: int | None = None
    ) -> None: ...

    def update(self, counts: Any, *, noisy: bool = False, ids: Sequence[ClientId] | None = None) -> None: ...

    def remove(self, ids: Iterable[ClientId]) -> None: ...

    def select(self, available: Iterable[ClientId] | None = None) -> Cohort: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TableSelector(ABC):
    """Registration, availability and state, shared by all selectors here."""

    name: ClassVar[str]
    settings: ClassVar[tuple[str, ...]] = ("cohort_size",)  # what a state must agree with

    def __init__(self, cohort_size: int) -> None:
        self.cohort_size = check_int("cohort_size", cohort_size, 1)
        self._round = 0
        self._table = CountTable()

    @property
    def clients(self) -> tuple[ClientId, ...]:
        """Registered clients in order of registration."""
        return tuple(self._table.ids)

    @property
    def round(self) -> int:
        """Number of cohorts selected so far."""
        return self._round

    @property
    def num_classes(self) -> int | None:
        """Number of classes, known from the first registration on."""
        return self._table.num_classes

    def register(
        self, counts: Any, *, noisy: bool = False, ids: Sequence[ClientId] | None = None, num_classes: int | None = None
    ) -> None:
        """Add clients with their label counts; their order breaks ties. See `reports` for the accepted forms.

        `noisy` says that noise was added: counts may then be negative (they are read as 0) or all zero.
        `num_classes` is for {class number: count} rows, which do not tell it; without it the largest class
        number given first does. Known ids, bad counts and another number of classes are refused, and then no
        client of the call is added.
        """
        self._table.register(counts, ids, noisy, num_classes)

    def update(self, counts: Any, *, noisy: bool = False, ids: Sequence[ClientId] | None = None) -> None:
        """Replace the counts of registered clients, which keep their place; forms and refusals as in `register`."""
        self._table.update(counts, ids, noisy)

    def remove(self, ids: Iterable[ClientId]) -> None:
        """Forget clients; unknown ones are refused, and then nobody is removed."""
        self._table.remove(ids)

    def select(self, available: Iterable[ClientId] | None = None) -> Cohort:
        """The next round's cohort, from all registered clients or only from those `available`.

        Unknown ids and having nobody to choose from are refused; the round then does not count. With fewer
        clients than the cohort size the cohort is smaller, with a `CohortWarning`.
        """
        if not len(self._table):
            raise InputError("select: no client is registered; accepted: at least one")
        rows = np.arange(len(self._table))
        if available is not None:
            rows = np.unique(self._table.numbers_of(client_ids(available), "available: client"))
            if not rows.size:
                raise InputError(f"available: nobody of {len(self._table)} registered clients; accepted: at least one")
        cohort = self._pick(rows)
        self._round += 1
        if len(cohort.clients) < self.cohort_size:
            warnings.warn(
                f"cohort of {len(cohort.clients)} instead of {self.cohort_size}: no more clients are available",
                CohortWarning,
                stacklevel=2,
            )
        return cohort

    @abstractmethod
    def _pick(self, rows: np.ndarray) -> Cohort:
        """Choose among the clients with these numbers, ascending and at least one."""

    def _cohort(self, picked: Sequence[int], **more: Any) -> Cohort:
        rows = self._table.rows.take(np.asarray(picked, dtype=np.int64))
        labels = np.bincount(rows.classes, weights=rows.values, minlength=self._table.num_classes or 1)
        whole = rows.values.size and (rows.values == np.floor(rows.values)).all() and np.abs(labels).max() < 2.0**63
        return Cohort(
            clients=tuple(self._table.ids[number] for number in picked),
            label_counts=labels.astype(np.int64) if whole else labels,
            entropy=float(row_scores(labels[None, :])[0]) + 0.0,  # never -0.0
            classes_covered=int(np.count_nonzero(labels)),
            **more,
        )

    def state_dict(self) -> dict[str, Any]:
        """What is needed, beside the counts, to go on identically; JSON-serialisable."""
        return {"selector": self.name, "cohort_size": self.cohort_size, "round": self._round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the selector that made `state` stood; one that does not fit is refused, with no change."""
        self._check_state(state)
        self._round = int(state["round"])

    def _check_state(self, state: Mapping[str, Any]) -> None:
        expected = self.state_dict()
        if not isinstance(state, Mapping):
            raise InputError(f"state: {type(state).__name__}; accepted: what state_dict() returned")
        for key in expected:
            if key not in state:
                raise InputError(f"state: {key!r} is missing; accepted: what state_dict() returned")
        for key in state:
            if key not in expected:
                raise InputError(f"state: {key!r} is unknown; accepted: {', '.join(expected)}")
        for key in ("selector", *self.settings):
            if state[key] != expected[key]:
                raise InputError(f"state: {key} is {state[key]!r}; accepted: {expected[key]!r}, as set here")
        check_int("state: round", state["round"], 0)


def check_int(name: str, value: Any, low: int) -> int:
    """A whole number of at least `low`; anything else is refused."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise InputError(f"{name}: {value!r} is out of range; accepted: a whole number, at least {low}")
    return int(value)
