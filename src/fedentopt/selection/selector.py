"""What a selector is, and what every selector has in common: label counts, a round number, who is available, feedback.

A round goes: `candidates` says whom to ask for the loss of the current model (most selectors: nobody), `select`
chooses, and after training `observe` is told what the selector `needs` to know of those that trained, and nothing else.

An author writes a class with a `name` and `pick`:

    class RoundRobin(Selector):
        name = "round-robin"

        def pick(self, available, losses):
            start = self.round * self.cohort_size
            return [available[(start + i) % len(available)] for i in range(min(self.cohort_size, len(available)))]

with, where wanted, settings of its own (`setting`), `candidates`, `observe`, and `memory` / `remember` for what it must
not forget. Draws come from `self.rng()`, a function of seed, selector and round: a run that is stopped and continued
picks the same clients.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import index
from typing import Any, ClassVar, Self

import numpy as np

from fedentopt.errors import InputError
from fedentopt.registry import Registry
from fedentopt.selection.cohort import ClientId, Cohort, CohortWarning
from fedentopt.selection.feedback import LEAVES, Candidates, Census, Observation
from fedentopt.selection.measures import row_scores
from fedentopt.selection.reports import client_ids
from fedentopt.selection.table import CountTable
from fedentopt.settings import KnownKeywords, settings_of, unknown_keyword

MOST_ROUNDS = 2**53  # beyond it, what selectors make of the round number would no longer tell two rounds apart


class Selector(KnownKeywords, ABC):
    """Chooses, round after round, which clients train. It sees label counts and what it needs, and never a model."""

    name: ClassVar[str]
    label: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    """What it must be told beside label counts, of `NEEDS` (see `feedback`)."""
    cosines_suffice: ClassVar[bool] = False
    """Whether, of updates, it takes the cosines between them as well (`Observation.cosines`)."""
    reads_label_counts: ClassVar[bool] = True
    """Whether clients have to report label counts; sizes alone count as a report too."""
    labels_from_heads: ClassVar[bool] = False
    """Whether it takes the change of last layers for labels, which an algorithm that shifts logits would break."""
    needs_plain_logits: ClassVar[bool] = False
    """Whether what it reads from last layers breaks in that way too, though it estimates no labels: their evenness."""
    sizes_only: ClassVar[bool] = False
    """Whether of those reports it reads the numbers of samples alone."""
    own_weights: ClassVar[bool] = False
    """Whether its cohorts carry weights of their own for the average."""
    smaller_cohorts: ClassVar[bool] = False
    """Whether a cohort may be smaller than asked for though more clients are available: nothing to warn of then."""
    largest: ClassVar[int | None] = None
    """The most clients it can serve, where its definition takes more than a pass over them. More are refused."""
    all_pairs: ClassVar[bool] = False
    """Whether its definition takes all distances between two clients, K x K numbers."""
    run_settings: ClassVar[Mapping[str, Any]] = {}
    """Settings of a run that `for_run` turns into others (a per cent of the clients into a number)."""
    stream: ClassVar[int | None] = None
    """Number that keeps its draws apart from others made with the same seed; by default from its name."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls) and not hasattr(cls, "name"):
            cls.name = cls.__name__.lower()
        for name, value in vars(cls).items():
            if isinstance(value, dataclasses.Field) and name not in inspect.get_annotations(cls):
                raise TypeError(f"{cls.__name__}.{name}: a setting without a type; write {name}: float = setting(...)")

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        self.cohort_size = check_int("cohort_size", cohort_size, 1)
        self.seed = check_int("seed", seed, 0)
        self._round = 0
        self._table = CountTable()
        declared = {name: s for name, s in settings_of(type(self)).items() if name not in self.run_settings}
        for name in settings:
            if name not in declared:
                raise unknown_keyword(type(self), name)
        for name, one in declared.items():
            setattr(self, name, one.check(settings.get(name, one.default)))

    @classmethod
    def for_run(cls, *, cohort_size: int, clients: int, seed: int, **settings: Any) -> Selector:
        """The selector for a run among `clients` clients, from the settings by which it is asked for.

        One with a parameter `rounds` is told how many rounds the run has. A constructor that does not take what it is
        given is refused.
        """
        taken = inspect.signature(cls.__init__).parameters
        missing = [name for name in ("seed", *settings) if name not in taken]
        if missing and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
            raise InputError(
                f"selector: {cls.__name__}.__init__ does not take {', '.join(missing)}; accepted: "
                f"__init__(self, cohort_size, seed=0, **settings), which hands them on to super().__init__"
            )
        return cls(cohort_size, seed=seed, **settings)

    @classmethod
    def leaves_client(cls) -> tuple[str, ...]:
        """What a server has to know of a single client, in words; empty: nothing."""
        report = ("number of samples",) if cls.sizes_only else ("label counts",)
        told = (words for need, words in LEAVES.items() if need in cls.needs)
        return (*(report if cls.reads_label_counts else ()), *(words for words in told if words))

    @classmethod
    def check_run(cls, *, cohort_size: int, clients: int, **settings: Any) -> None:
        """Refuse settings that such a run cannot have, before anything is made."""
        cls._check_fewer_than_largest(clients)

    def _check_number(self, clients: int, classes: int) -> None:
        """Refuse more clients than can be worked with, before they are registered."""
        self._check_fewer_than_largest(clients)

    @classmethod
    def _check_fewer_than_largest(cls, clients: int) -> None:
        if cls.largest is not None and clients > cls.largest:
            why = ", which works with all distances between two clients" if cls.all_pairs else ""
            raise InputError(f"clients: {clients} are too many for {cls.name}{why}; accepted: at most {cls.largest}")

    # --- what authors read
    @property
    def clients(self) -> tuple[ClientId, ...]:
        """Registered clients in order of registration; a client's number is its place here."""
        return tuple(self._table.ids)

    @property
    def round(self) -> int:
        """Number of cohorts selected so far."""
        return self._round

    @property
    def num_classes(self) -> int | None:
        """Number of classes, known from the first registration on."""
        return self._table.num_classes

    @property
    def counts(self) -> np.ndarray:
        """Label counts (K, C) by client number, noisy ones clamped at 0."""
        return self._table.rows.dense(self._table.num_classes or 1)

    @property
    def sizes(self) -> np.ndarray:
        """Number of samples (K,) by client number, as reported."""
        return self._table.sizes.copy()

    def rng(self, *numbers: int) -> np.random.Generator:
        """A generator for this round: a function of seed, selector, round and `numbers`, of nothing drawn before."""
        stream = zlib.crc32(self.name.encode()) if self.stream is None else self.stream
        return np.random.default_rng([self.seed, stream, self._round, *numbers])

    def numbers_of(self, clients: Iterable[ClientId]) -> np.ndarray:
        """Numbers of these clients; an unknown one is refused."""
        return self._table.numbers_of(clients)

    def by_number(self, figures: Mapping[ClientId, float], default: float = 0.0) -> np.ndarray:
        """Figures kept by client as an array (K,) by client number; `default` for those without one."""
        table = np.full(len(self._table), default)
        numbers = self._table.find(figures)
        known = numbers >= 0
        table[numbers[known]] = np.fromiter(figures.values(), dtype=np.float64, count=len(figures))[known]
        return table

    def available_numbers(self, available: Iterable[ClientId] | None = None) -> np.ndarray:
        """Numbers of the available clients, ascending: all, or those named. Nobody, and unknown ids, are refused."""
        if not len(self._table):
            raise InputError("select: no client is registered; accepted: at least one")
        if available is None:
            return np.arange(len(self._table))
        marked = self._table.numbers_marked(available)
        if marked is not None:
            return marked
        rows = np.unique(self._table.numbers_of(client_ids(available), "available: client"))
        if not rows.size:
            raise InputError(f"available: nobody of {len(self._table)} registered clients; accepted: at least one")
        return rows

    def cohort(self, picked: Sequence[int], **more: Any) -> Cohort:
        """The cohort of the clients with these numbers; `more` are further fields of `Cohort`."""
        rows = self._table.rows.take(np.asarray(picked, dtype=np.int64))
        labels = np.bincount(rows.classes, weights=rows.values, minlength=self._table.num_classes or 1)
        exact = rows.values.size and labels.max() < 2.0**63 and (rows.values == np.floor(rows.values)).all()
        return Cohort(
            clients=tuple(self._table.ids[number] for number in picked),
            label_counts=labels.astype(np.int64) if exact else labels,
            entropy=float(row_scores(labels[None, :])[0]) + 0.0,  # never -0.0
            classes_covered=int(np.count_nonzero(labels)),
            **more,
        )

    # --- what authors write
    @abstractmethod
    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Cohort | Sequence[int]:
        """Choose among the clients with these numbers, ascending and at least one: their numbers in the order picked,
        or `self.cohort(numbers, ...)` with more on it.

        `losses` (K,) by client number holds what the candidates answered, NaN elsewhere; None where nobody was asked.
        """

    def census(self) -> Census | None:
        """Whether every client should train once before round 1, for `observe` alone; None: no."""
        return None

    def estimate(self, client: ClientId) -> np.ndarray | None:
        """The label distribution (C,) it has inferred for a client; None where it infers none."""
        return None

    def times_seen(self, client: ClientId) -> int:
        """How many observations of a client that rests on."""
        return 0

    def candidates(self, available: Iterable[ClientId] | None = None) -> Candidates | None:
        """Whom to ask for their loss before this round's `select`; None: nobody."""
        return None

    def observe(self, observations: Mapping[ClientId, Observation]) -> None:
        """Learn from the clients that trained. Clients whose figures were not finite are left out."""

    @classmethod
    def expect(cls, told: Sequence[tuple[Self, Mapping[ClientId, Observation]]]) -> None:
        """Look at what selectors of this class, of many runs, are about to observe, each with its own mapping: for work
        that is cheaper when it is done for all together. What `observe` learns must not depend on it."""

    def forget_clients(self, gone: Collection[ClientId]) -> None:
        """Drop what is known of clients that were removed; whoever comes back is new."""

    def memory(self) -> dict[str, Any]:
        """What the selector must not forget beside the round number: JSON, always under the same names."""
        return {}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Take over what `memory` gave."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Large numbers it must not forget, float32 or float64 by name, kept beside the JSON."""
        return {}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over what `arrays` gave."""

    # --- what others call
    def register(
        self, counts: Any, *, noisy: bool = False, ids: Sequence[ClientId] | None = None, num_classes: int | None = None
    ) -> None:
        """Add clients with their label counts; their order breaks ties. See `reports` for the accepted forms.

        `noisy` says that noise was added: counts may then be negative (they are read as 0) or all zero.
        `num_classes` is for {class number: count} rows, which do not tell it; without it the largest class
        number given first does, up to 2**20 classes. Known ids, bad counts and another number of classes are
        refused, and then no client of the call is added.
        """
        if isinstance(counts, CountTable):  # of trials on the same counts, which are read once for all of them
            self._table.share(counts, num_classes, self._check_number)
        else:
            self._table.register(counts, ids, noisy, num_classes, check_number=self._check_number)

    def update(self, counts: Any, *, noisy: bool = False, ids: Sequence[ClientId] | None = None) -> None:
        """Replace the counts of registered clients, which keep their place; forms and refusals as in `register`."""
        self._table.update(counts, ids, noisy)

    def remove(self, ids: Iterable[ClientId]) -> None:
        """Forget clients; unknown ones are refused, and then nobody is removed."""
        self.forget_clients(self._table.remove(ids))

    def select(
        self, available: Iterable[ClientId] | None = None, *, losses: Mapping[ClientId, float] | None = None
    ) -> Cohort:
        """The next round's cohort, from all registered clients or only from those `available`.

        `losses` are what the `candidates` answered, by client. Unknown ids and having nobody to choose from are
        refused; the round then does not count. With fewer clients than the cohort size the cohort is smaller, with a
        `CohortWarning`.
        """
        rows = self.available_numbers(available)
        picked = self.pick(rows, self._losses(losses))
        cohort = picked if isinstance(picked, Cohort) else self.cohort(self._checked(picked, rows))
        self._round += 1
        if self.falls_short(cohort, rows.size):
            few = rows.size < self.cohort_size
            reason = "no more clients are available" if few else f"{self.name} picked no more"
            warnings.warn(
                f"cohort of {len(cohort.clients)} instead of {self.cohort_size}: {reason}",
                CohortWarning,
                stacklevel=2,
            )
        return cohort

    def falls_short(self, cohort: Cohort, available: int) -> bool:
        """Whether a cohort of so many available clients is smaller than it is meant to be: not so the last one of a
        cycle, nor one in which a client was drawn twice."""
        meant = self.smaller_cohorts or cohort.weights is not None
        return len(cohort.clients) < self.cohort_size and (available < self.cohort_size or not meant)

    def _losses(self, losses: Mapping[ClientId, float] | None) -> np.ndarray | None:
        if losses is None:
            return None
        if not isinstance(losses, Mapping):
            raise InputError(f"losses: {losses!r}; accepted: what the candidates answered, by client")
        table = np.full(len(self._table), np.nan)
        for number, (client, loss) in zip(
            self._table.numbers_of(losses, "losses: client"), losses.items(), strict=True
        ):
            try:
                table[number] = np.nan if loss is None else float(loss)
            except (TypeError, ValueError) as error:
                raise InputError(f"losses: client {client!r}: {loss!r}; accepted: a number") from error
        return table

    def _checked(self, picked: Any, rows: np.ndarray) -> list[int]:
        """Numbers that `pick` gave, which an author may have got wrong."""
        try:
            numbers = [index(number) for number in picked]
        except (TypeError, ValueError):
            numbers = []
        wanted = np.array(numbers, dtype=np.int64)
        places = np.minimum(np.searchsorted(rows, wanted), rows.size - 1)
        if not numbers or len(set(numbers)) < len(numbers) or (rows[places] != wanted).any():
            raise InputError(
                f"selector: {self.name!r} picked {picked!r}; accepted: distinct numbers of available clients"
            )
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """What is needed, beside counts and `arrays`, to go on identically; JSON-serialisable."""
        declared = [name for name in settings_of(type(self)) if name not in self.run_settings]
        settings = {name: getattr(self, name) for name in declared}
        fixed = {"selector": self.name, "cohort_size": self.cohort_size, "round": self._round, "seed": self.seed}
        memory = self.memory()
        for name in memory:
            if name in fixed or name in settings:
                raise InputError(f"selector: {self.name!r}: {name!r} in its memory is taken; accepted: another name")
        return {**fixed, **settings, **memory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the selector that made `state` stood; its seed becomes this one's. One that does not fit is
        refused, with no change."""
        expected = self.state_dict()
        if not isinstance(state, Mapping):
            raise InputError(f"state: {type(state).__name__}; accepted: what state_dict() returned")
        for key in expected:
            if key not in state:
                raise InputError(f"state: {key!r} is missing; accepted: what state_dict() returned")
        for key in state:
            if key not in expected:
                raise InputError(f"state: {key!r} is unknown; accepted: {', '.join(expected)}")
        kept = self.memory()
        for key, value in expected.items():
            if key not in ("round", "seed", *kept) and state[key] != value:
                raise InputError(f"state: {key} is {state[key]!r}; accepted: {value!r}, as set here")
        number = check_int("state: round", state["round"], 0)
        if number > MOST_ROUNDS:
            raise InputError("state: round is too large; accepted: at most 2**53")
        seed = check_int("state: seed", state["seed"], 0)
        self.remember({key: state[key] for key in kept})
        self._round, self.seed = number, seed


def make_for_run(
    cls: type[Selector], *, cohort_size: int, clients: int, rounds: int, seed: int, **settings: Any
) -> Selector:
    """The selector of a run; the number of rounds goes to a `for_run` that asks for it."""
    if "rounds" in inspect.signature(cls.for_run).parameters:
        settings["rounds"] = rounds
    return cls.for_run(cohort_size=cohort_size, clients=clients, seed=seed, **settings)


def check_int(name: str, value: Any, low: int) -> int:
    """A whole number of at least `low`; anything else is refused."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise InputError(f"{name}: {value!r} is out of range; accepted: a whole number, at least {low}")
    return int(value)


SELECTORS: Registry[Selector] = Registry("selector")
selector = SELECTORS.register
