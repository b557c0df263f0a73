"""The contract of selectors: what authors read and write, what is remembered, what every registered one keeps to."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from fedentopt.errors import InputError
from fedentopt.selection import (
    SELECTORS,
    Candidates,
    ClientId,
    Cohort,
    CohortWarning,
    EntropySelector,
    Head,
    KLSelector,
    Observation,
    RandomSelector,
    Selector,
    setting,
)
from fedentopt.selection.fedentropy import ValueSelector
from fedentopt.selection.selector import make_for_run
from fedentopt.selection.table import CountTable
from fedentopt.settings import settings_of


class RoundRobin(Selector):
    """The example of the module's docstring."""

    name = "round-robin"

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Any:
        start = self.round * self.cohort_size
        return [available[(start + i) % len(available)] for i in range(min(self.cohort_size, len(available)))]


class Learner(Selector):
    """Everything an author may write: settings, candidates, feedback, memory, arrays."""

    name = "learner"
    needs = frozenset({"candidate_loss", "loss", "update"})
    pull: float = setting(0.5, help="weight of what was learnt", low=0, high=1)
    asks: int | None = setting(None, help="samples that a candidate looks at", low=1)

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self.learnt: dict[ClientId, float] = {}
        self.updates: dict[ClientId, np.ndarray] = {}
        self.seen: list[tuple[list[int], list[float] | None]] = []

    def candidates(self, available: Iterable[ClientId] | None = None) -> Candidates:
        rows = self.available_numbers(available)
        drawn = np.sort(self.rng(1).choice(rows, min(rows.size, 2 * self.cohort_size), replace=False))
        return Candidates(tuple(self.clients[number] for number in drawn), self.asks)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        self.seen.append((available.tolist(), None if losses is None else losses.tolist()))
        told = np.zeros(len(self.clients)) if losses is None else np.nan_to_num(losses)
        learnt = np.array([self.learnt.get(client, 0.0) for client in self.clients])
        scores = told + self.pull * learnt + 0.1 * self.rng(2).random(len(self.clients))
        return available[np.argsort(-scores[available], kind="stable")][: self.cohort_size].tolist()

    def observe(self, observations: Mapping[ClientId, Observation]) -> None:
        for client, seen in observations.items():
            assert seen.loss is not None
            assert seen.update is not None
            self.learnt[client] = seen.loss
            self.updates[client] = seen.update

    def memory(self) -> dict[str, Any]:
        return {"learnt": [[client, value] for client, value in self.learnt.items()], "order": list(self.updates)}

    def remember(self, memory: Mapping[str, Any]) -> None:
        if not isinstance(memory["learnt"], list):
            raise InputError(f"state: learnt is {memory['learnt']!r}; accepted: pairs")
        self.learnt = {client: float(value) for client, value in memory["learnt"]}
        self._order = memory["order"]

    def arrays(self) -> dict[str, np.ndarray]:
        return {"updates": np.array(list(self.updates.values()), np.float32)} if self.updates else {}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.updates = dict(zip(self._order, arrays["updates"], strict=True))


COUNTS = {"a": [4, 0, 0], "b": [0, 4, 0], "c": [0, 0, 2], "d": [0, 2, 2], "e": [4, 0, 0], "f": [0, 5, 1]}


def made(cls: type[Selector], size: int = 2, **settings: Any) -> Any:
    selector = cls(size, **settings)
    selector.register(COUNTS)
    return selector


# --- what authors read
def test_the_example_of_the_docstring() -> None:
    selector = made(RoundRobin, 4)
    rounds = [selector.select() for _ in range(3)]
    assert [cohort.clients for cohort in rounds] == [tuple("abcd"), tuple("efab"), tuple("cdef")]
    assert rounds[1].label_counts.tolist() == [8, 9, 1]  # e, f, a, b
    assert rounds[1].classes_covered == 3
    assert (rounds[1].weights, rounds[1].sample_limits, rounds[1].released) == (None, None, ())
    assert selector.round == 3


def test_counts_sizes_and_numbers() -> None:
    selector = RoundRobin(2)
    assert (selector.clients, selector.num_classes, selector.round) == ((), None, 0)
    selector.register({"a": [-1.5, 2.5], "b": [4.0, 0.0]}, noisy=True)
    selector.register({"c": [1, 1]})
    assert selector.clients == ("a", "b", "c")
    assert selector.num_classes == 2
    np.testing.assert_array_equal(selector.counts, [[0, 2.5], [4, 0], [1, 1]])
    np.testing.assert_array_equal(selector.sizes, [2.5, 4, 2])
    selector.update({"b": [1, 7]})
    selector.remove(["a"])
    np.testing.assert_array_equal(selector.counts, [[1, 7], [1, 1]])
    np.testing.assert_array_equal(selector.sizes, [8, 2])
    np.testing.assert_array_equal(selector.numbers_of(["c", "b"]), [1, 0])
    np.testing.assert_array_equal(selector.available_numbers(), [0, 1])
    np.testing.assert_array_equal(selector.available_numbers(["c", "b", "c"]), [0, 1])
    with pytest.raises(InputError, match="client 'a': not registered"):
        selector.numbers_of(["a"])


def test_a_cohort_adds_up_what_its_clients_hold() -> None:
    selector = made(RoundRobin)
    cohort = selector.cohort([5, 0], weights=(0.25, 0.75))
    assert cohort.clients == ("f", "a")
    assert cohort.label_counts.tolist() == [4, 5, 1]
    shares = np.array([4, 5, 1]) / 10
    assert cohort.entropy == pytest.approx(-(shares * np.log2(shares)).sum())
    assert cohort.weights == (0.25, 0.75)


def test_draws_are_a_function_of_seed_selector_round_and_numbers() -> None:
    class Other(RoundRobin):
        name = "other"

    class Streamed(RoundRobin):
        stream = 77

    first, again = made(RoundRobin, seed=5), made(RoundRobin, seed=5)
    draws = {
        "plain": first.rng().random(),
        "numbered": first.rng(1).random(),
        "numbered otherwise": first.rng(1, 2).random(),
        "another seed": made(RoundRobin, seed=6).rng().random(),
        "another name": made(Other, seed=5).rng().random(),
        "a stream": made(Streamed, seed=5).rng().random(),
    }
    assert first.rng().random() == draws["plain"], "of nothing drawn before"
    assert again.rng().random() == draws["plain"]
    assert made(Streamed, seed=5).rng(3).random() == np.random.default_rng([5, 77, 0, 3]).random()
    first.select()
    draws["the next round"] = first.rng().random()
    assert len(set(draws.values())) == len(draws)
    again.load_state_dict({**first.state_dict()})
    assert again.rng().random() == draws["the next round"]


def test_names() -> None:
    class Nameless(Selector):
        def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
            return [0]

    class Inherits(RandomSelector):
        pass

    assert Nameless.name == "nameless"
    assert Inherits.name == "random"
    with pytest.raises(TypeError, match="abstract"):
        Selector(2)  # type: ignore[abstract]


# --- settings
def test_settings_are_checked_kept_and_part_of_the_state() -> None:
    selector = Learner(2, seed=3, pull=1, asks=np.int64(4))
    assert (selector.pull, selector.asks) == (1.0, 4)
    assert type(selector.pull) is float
    assert Learner(2).pull == 0.5
    state = selector.state_dict()
    assert state == {
        "selector": "learner", "cohort_size": 2, "round": 0, "seed": 3, "pull": 1.0, "asks": 4, "learnt": [],
        "order": [],
    }  # fmt: skip
    with pytest.raises(InputError, match=r"state: pull is 1\.0; accepted: 0\.5, as set here"):
        Learner(2, asks=4).load_state_dict(state)
    for given, words in (
        ({"pull": 2}, "pull: 2.0 is out of range; accepted: at least 0 and at most 1"),
        ({"push": 2}, "push: no setting of Learner; accepted: pull, asks, cohort_size, seed"),
        ({"asks": 0}, "asks: 0 is out of range; accepted: at least 1"),
    ):
        with pytest.raises(InputError) as caught:
            Learner(2, **given)
        assert str(caught.value) == words
    with pytest.raises(InputError, match="colour: no setting of RoundRobin; accepted: cohort_size, seed"):
        RoundRobin(2, colour=3)
    for bad, words in (
        ({"cohort_size": 0}, "cohort_size: 0"),
        ({"cohort_size": 2.0}, "cohort_size: 2.0"),
        ({"cohort_size": 2, "seed": -1}, "seed: -1"),
        ({"cohort_size": True}, "cohort_size: True"),
    ):
        with pytest.raises(InputError, match=words):
            RoundRobin(**bad)


class Patient(Learner):
    name = "patient"
    pull = 0.25  # another default

    @classmethod
    def for_run(cls, *, cohort_size: int, clients: int, seed: int, **settings: Any) -> Patient:
        return cls(min(cohort_size, clients // 2), seed=seed, **settings)


def test_a_selector_for_a_run() -> None:
    assert Patient(2).pull == 0.25
    assert Patient(2, pull=0.75).state_dict()["pull"] == 0.75
    made_for = Patient.for_run(cohort_size=8, clients=10, seed=4, asks=2)
    assert (made_for.cohort_size, made_for.seed, made_for.asks) == (5, 4, 2)
    plain = Learner.for_run(cohort_size=8, clients=10, seed=4, pull=0.1)
    assert (plain.cohort_size, plain.seed, plain.pull) == (8, 4, 0.1)

    class Small(RoundRobin):
        largest = 9

    Small.check_run(cohort_size=2, clients=9)
    with pytest.raises(InputError, match="clients: 10 are too many for round-robin; accepted: at most 9"):
        Small.check_run(cohort_size=2, clients=10)


def test_a_selector_says_for_how_many_clients_it_is() -> None:
    class Small(RoundRobin):
        name = "small"
        largest = 1000

    Small.check_run(cohort_size=2, clients=10**3)
    Small.check_run(cohort_size=2, clients=5)
    with pytest.raises(InputError, match="clients: 1001 are too many for small; accepted: at most 1000"):
        Small.check_run(cohort_size=2, clients=1001)


def test_without_clients_there_are_no_counts() -> None:
    assert RoundRobin(2).counts.shape == (0, 1)
    assert RoundRobin(2).sizes.shape == (0,)


@pytest.mark.parametrize("name", ["round", "pull"])
def test_memory_may_not_hide_what_the_state_says_itself(name: str) -> None:
    class Hiding(Learner):
        def memory(self) -> dict[str, Any]:
            return {"other": 1, name: 2}

    with pytest.raises(InputError, match=f"'{name}' in its memory is taken; accepted: another name"):
        Hiding(2).state_dict()


# --- picking
class Gives(Selector):
    """Picks what it is told to."""

    name = "gives"

    def __init__(self, picked: Any, cohort_size: int = 2) -> None:
        super().__init__(cohort_size)
        self.picked = picked
        self.register(COUNTS)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Any:
        return self.picked(self, available) if callable(self.picked) else self.picked


@pytest.mark.parametrize(
    ("picked", "clients"),
    [
        ([3, 1], ("d", "b")),
        ((3, 1), ("d", "b")),
        (np.array([3, 1]), ("d", "b")),
        (iter([3, 1]), ("d", "b")),
        (lambda own, available: available[-2:], ("e", "f")),
        (lambda own, available: own.cohort([3, 1], divergence=0.5), ("d", "b")),
    ],
)
def test_a_pick_may_be_any_sequence_or_a_cohort(picked: Any, clients: tuple[str, ...]) -> None:
    cohort = Gives(picked).select()
    assert isinstance(cohort, Cohort)
    assert cohort.clients == clients
    assert all(isinstance(client, str) for client in cohort.clients)


@pytest.mark.parametrize(
    "picked", [[], None, [1, 1], [6], [-1], [0, 2.5], ["a"], "01", [[0, 1]], 3, [None], [0, 1.0]], ids=str
)
def test_a_pick_that_is_none_is_refused_and_the_round_does_not_count(picked: Any) -> None:
    selector = Gives(picked)
    with pytest.raises(
        InputError, match=r"selector: 'gives' picked .*; accepted: distinct numbers of available clients"
    ):
        selector.select()
    assert selector.round == 0


def test_a_pick_of_somebody_who_is_away_is_refused() -> None:
    selector = Gives([0, 1])
    with pytest.raises(InputError, match="distinct numbers of available clients"):
        selector.select(available=["a", "c"])
    assert selector.select(available=["b", "a", "f"]).clients == ("a", "b")


def test_who_is_available() -> None:
    selector = made(Learner)
    selector.select(available=["f", "b", "b", "d"])
    assert selector.seen[-1] == ([1, 3, 5], None)
    with pytest.raises(InputError, match="available: client 'z': not registered"):
        selector.select(available=["a", "z"])
    with pytest.raises(InputError, match="available: nobody of 6 registered clients"):
        selector.select(available=[])
    with pytest.raises(InputError, match="select: no client is registered"):
        Learner(2).select()
    assert selector.round == 1
    with pytest.warns(CohortWarning, match="cohort of 1 instead of 2: no more clients are available"):
        assert selector.select(available=["c"]).clients == ("c",)


def test_a_cohort_with_weights_may_be_small() -> None:
    """A client drawn twice counts once, with double weight: nothing to warn of."""
    selector = Gives(lambda own, available: own.cohort([2], weights=(2.0,)), cohort_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selector.select().weights == (2.0,)


def test_losses_come_by_number_with_nan_for_those_not_asked() -> None:
    selector = made(Learner)
    asked = selector.candidates()
    assert asked.samples is None
    assert len(asked.ids) == 4
    assert asked == selector.candidates(), "keyed"
    selector.select(losses={"c": 1.5, "a": 0.5})
    available, losses = selector.seen[-1]
    assert available == list(range(6))
    np.testing.assert_array_equal(losses, [0.5, np.nan, 1.5, np.nan, np.nan, np.nan])
    with pytest.raises(InputError, match="losses: client 'z': not registered"):
        selector.select(losses={"z": 1.0})
    assert selector.round == 1
    assert made(Learner, asks=3).candidates(["a", "b"]) == Candidates(("a", "b"), 3)


def test_cohorts_that_may_be_smaller() -> None:
    """One who gives fewer than it could is warned of, unless its definition has it so; fewer available always are."""

    class Last(Gives):
        smaller_cohorts = True

    with pytest.warns(CohortWarning, match="cohort of 1 instead of 2: gives picked no more"):
        Gives([3]).select()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Last([3]).select().clients == ("d",)
    with pytest.warns(CohortWarning, match="cohort of 1 instead of 2: no more clients are available"):
        Last([3]).select(["d"])


def test_figures_by_number_and_who_left() -> None:
    class Notes(RoundRobin):
        left: list[set[ClientId]]

        def forget_clients(self, gone: Any) -> None:
            self.left = [*getattr(self, "left", []), set(gone)]

    selector = made(Notes)
    np.testing.assert_array_equal(selector.by_number({"c": 2.5, "a": 1, "stranger": 9.0}), [1, 0, 2.5, 0, 0, 0])
    np.testing.assert_array_equal(selector.by_number({}, np.nan), [np.nan] * 6)
    selector.remove(["a", "d"])
    assert selector.left == [{"a", "d"}]
    np.testing.assert_array_equal(selector.by_number({"c": 2.5, "a": 1}, -1.0), [-1, 2.5, -1, -1])
    with pytest.raises(InputError, match="client 'a': not registered"):
        selector.remove(["b", "a"])
    assert len(selector.left) == 1


def test_a_for_run_may_ask_for_the_rounds() -> None:
    class Long(RoundRobin):
        rounds = 0

        @classmethod
        def for_run(cls, *, cohort_size: int, clients: int, seed: int, rounds: int = 7, **settings: Any) -> Long:
            selector = cls(cohort_size, seed)
            selector.rounds = rounds
            return selector

    def rounds_of(cls: type[Selector]) -> int:
        return getattr(make_for_run(cls, cohort_size=2, clients=5, rounds=30, seed=1), "rounds", 0)

    assert rounds_of(Long) == 30
    assert rounds_of(RoundRobin) == 0


# --- remembering
def told(client: ClientId, round_: int, classes: int = 3) -> Observation:
    """Everything a selector may be told, in numbers that depend on client and round."""
    rng = np.random.default_rng([round_, *str(client).encode()])
    head = Head(rng.normal(size=(classes, 4)).astype(np.float32), rng.normal(size=classes).astype(np.float32))
    update = np.concatenate([rng.normal(size=6).astype(np.float32), head.weight.ravel(), head.bias])
    loss = float(rng.uniform(0.1, 2))
    return Observation(int(rng.integers(1, 50)), loss, 1.2 * loss, head, update, float(rng.uniform(1, 9)), loss < 1)


def play(selector: Selector, round_: int, available: list[ClientId] | None = None) -> tuple[ClientId, ...]:
    """One round: questions, cohort, feedback."""
    asked = selector.candidates(available)
    losses = None if asked is None else {client: told(client, -round_ % 97).loss or 0.0 for client in asked.ids}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CohortWarning)
        cohort = selector.select(available, losses=losses)
    trained = cohort.clients[: max(1, len(cohort.clients) - round_ % 2)]  # in odd rounds one drops out
    selector.observe({client: told(client, round_, selector.num_classes or 3) for client in trained})
    return cohort.clients


def saved(selector: Selector) -> tuple[Any, dict[str, np.ndarray]]:
    """What a checkpoint keeps of a selector, through JSON and float32, or float64 where that is what it gives."""
    given = selector.arrays().items()
    arrays = {name: np.array(array, array.dtype if array.dtype == np.float64 else np.float32) for name, array in given}
    return json.loads(json.dumps(selector.state_dict())), arrays


def restore(selector: Selector, kept: tuple[Any, dict[str, np.ndarray]]) -> None:
    selector.load_state_dict(kept[0])
    if kept[1]:
        selector.load_arrays(kept[1])


def same(a: tuple[Any, dict[str, np.ndarray]], b: tuple[Any, dict[str, np.ndarray]]) -> bool:
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(np.array_equal(a[1][n], b[1][n]) for n in a[1])


def test_a_selector_goes_on_where_another_stood() -> None:
    whole = made(Learner, seed=7)
    expected = [play(whole, r) for r in range(8)]
    for stop in (1, 4, 7):
        first = made(Learner, seed=7)
        begun = [play(first, r) for r in range(stop)]
        second = made(Learner, seed=99)
        restore(second, saved(first))
        assert second.updates.keys() == first.updates.keys()
        assert begun + [play(second, r) for r in range(stop, 8)] == expected
        assert same(saved(second), saved(whole))
        for client, update in second.updates.items():
            np.testing.assert_array_equal(update, whole.updates[client])


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    selector = made(Learner)
    play(selector, 0)
    before, learnt = saved(selector), dict(selector.learnt)
    for change, words in (
        ({"selector": "random"}, "state: selector is 'random'; accepted: 'learner', as set here"),
        ({"cohort_size": 3}, "state: cohort_size is 3; accepted: 2, as set here"),
        ({"pull": 0.75}, "state: pull is 0.75; accepted: 0.5, as set here"),
        ({"round": -1}, "state: round: -1 is out of range; accepted: a whole number, at least 0"),
        ({"round": 2.0}, "state: round: 2.0 is out of range"),
        ({"seed": "x"}, "state: seed: 'x' is out of range"),
        ({"extra": 1}, "state: 'extra' is unknown; accepted: selector, cohort_size, round, seed, pull, asks, learnt"),
        ({"learnt": 3, "round": 9}, "state: learnt is 3; accepted: pairs"),
    ):
        with pytest.raises(InputError) as caught:
            selector.load_state_dict({**before[0], **change})
        assert words in str(caught.value)
        assert same(saved(selector), before)
        assert selector.learnt == learnt
    for key in before[0]:
        with pytest.raises(InputError, match=f"state: '{key}' is missing; accepted: what state_dict"):
            selector.load_state_dict({k: v for k, v in before[0].items() if k != key})
    with pytest.raises(InputError, match="state: list; accepted: what state_dict"):
        selector.load_state_dict([])  # type: ignore[arg-type]


# --- every registered selector
EVERY = [*SELECTORS, ValueSelector, Learner]


def fresh(cls: type[Selector], seed: int = 3, clients: int = 12, size: int = 3) -> Selector:
    made_for = (
        cls.for_run(cohort_size=size, clients=clients, seed=seed) if cls is not ValueSelector else cls(size, seed)
    )
    rng = np.random.default_rng(5)
    counts = rng.multinomial(40, rng.dirichlet(np.full(4, 0.4), size=clients))
    made_for.register({f"client {i}": row for i, row in enumerate(counts)})
    return made_for


every = pytest.mark.parametrize("cls", EVERY, ids=lambda cls: cls.name)


@every
def test_cohorts_are_distinct_clients_and_repeat_with_the_seed(cls: type[Selector]) -> None:
    first, again = fresh(cls), fresh(cls)
    rounds = [play(first, r) for r in range(8)]
    assert rounds == [play(again, r) for r in range(8)]
    for cohort in rounds:
        assert len(cohort) == len(set(cohort)) <= 3
        assert set(cohort) <= set(first.clients)
    assert cls.needs <= {"candidate_loss", "loss", "head", "update", "seconds", "kept"}
    if cls is not KLSelector:
        others = fresh(cls, seed=4)
        assert rounds != [play(others, r) for r in range(8)]


@every
def test_goes_on_identically_after_every_round(cls: type[Selector]) -> None:
    whole = fresh(cls)
    states, expected = [], []
    for r in range(7):
        states.append(saved(whole))
        expected.append(play(whole, r))
    for r, state in enumerate(states):
        other = fresh(cls)
        restore(other, state)
        assert same(saved(other), state)
        assert [play(other, later) for later in range(r, 7)] == expected[r:]


@every
def test_the_order_of_the_available_does_not_matter(cls: type[Selector]) -> None:
    first, second = fresh(cls), fresh(cls)
    here: list[ClientId] = [f"client {i}" for i in (1, 2, 4, 5, 7, 8, 11)]
    for r in range(4):
        cohort = play(first, r, here)
        assert cohort == play(second, r, [*here[::-1], here[0]])
        assert set(cohort) <= set(here)


@every
def test_clients_come_late_change_and_leave(cls: type[Selector]) -> None:
    selector = fresh(cls)
    for r in range(3):
        play(selector, r)
    selector.register({"late": [0, 9, 9, 0], "later": [9, 0, 0, 9]})
    for r in range(3, 6):
        play(selector, r)
    assert play(selector, 6, ["late"]) == ("late",)
    selector.update({"late": [30, 1, 1, 1]})
    assert play(selector, 7, ["late", "later"])[0] in ("late", "later")
    gone = ["client 0", "client 5", "later"]
    selector.remove(gone)
    assert not set(gone) & set(selector.clients)
    for r in range(8, 20):
        assert not set(gone) & set(play(selector, r))
    # Somebody who left and comes back is new, and nothing else has moved.
    selector.register({"client 5": [1, 2, 3, 4]})
    assert selector.clients[-1] == "client 5"
    assert play(selector, 20, ["client 5"]) == ("client 5",)
    state = saved(selector)
    counts = dict(zip(selector.clients, selector.counts.tolist(), strict=True))
    other = cls.for_run(cohort_size=3, clients=12, seed=0)
    other.register(counts)
    restore(other, state)
    assert [play(other, r) for r in range(21, 25)] == [play(selector, r) for r in range(21, 25)]


@every
def test_feedback_may_stay_away(cls: type[Selector]) -> None:
    """Everybody dropped out, or answered with what is not finite: nobody is told of."""
    selector = fresh(cls)
    for r in range(6):
        if r % 2:
            play(selector, r)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CohortWarning)
                assert len(selector.select().clients) <= 3
            selector.observe({})
    assert selector.round == 6


@pytest.mark.parametrize("cls", [*SELECTORS, ValueSelector], ids=lambda cls: cls.name)
def test_feedback_may_name_clients_by_whole_numbers_of_numpy(cls: type[Selector]) -> None:
    """As `register` and `select` may: what is kept of them is kept by plain ones, which JSON can hold."""
    plain, other = fresh(cls), fresh(cls)
    for selector in (plain, other):
        selector.remove(selector.clients)
        selector.register(np.random.default_rng(1).integers(1, 20, (12, 4)), ids=np.arange(12))
    if census := plain.census():
        assert census.epochs
        plain.observe({client: told(client, 9, 4) for client in range(12)})
        other.observe({client: told(int(client), 9, 4) for client in np.arange(12)})
    for r in range(6):
        asked = plain.candidates()
        losses = None if asked is None else {client: told(client, r, 4).loss or 0.0 for client in asked.ids}
        cohorts = [selector.select(losses=losses).clients for selector in (plain, other)]
        assert cohorts[0] == cohorts[1]
        plain.observe({client: told(client, r, 4) for client in cohorts[0]})
        other.observe({client: told(client, r, 4) for client in np.array(cohorts[0])})
        assert same(saved(plain), saved(other))


@every
def test_noisy_counts_of_clients_that_may_hold_nothing(cls: type[Selector]) -> None:
    selector = cls.for_run(cohort_size=3, clients=8, seed=1)
    rng = np.random.default_rng(2)
    counts = rng.integers(0, 9, (8, 4)) + rng.laplace(0, 2, (8, 4))
    counts[3] = -1.0
    selector.register(counts, noisy=True)
    for r in range(10):
        cohort = play(selector, r)
        assert len(cohort) == len(set(cohort)) <= 3
        assert set(cohort) <= set(range(8))


@every
def test_fewer_than_asked_for(cls: type[Selector]) -> None:
    selector = fresh(cls)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cohort = selector.select(["client 2", "client 9"])
    assert set(cohort.clients) <= {"client 2", "client 9"}
    if cohort.weights is None:
        assert len(cohort.clients) == 2
        assert [str(w.message) for w in caught if w.category is CohortWarning] == [
            "cohort of 2 instead of 3: no more clients are available"
        ]


@every
def test_a_keyword_that_the_constructor_does_not_take_is_refused_with_those_it_takes(cls: type[Selector]) -> None:
    declared = [name for name in settings_of(cls) if name not in cls.run_settings]
    refusal = f"no setting of {cls.__name__}.*accepted: .*cohort_size"
    for wrong in ({"colour": 1}, {"buffer": "50%"}):  # the second is a setting of runs, not of a constructor
        with pytest.raises(InputError, match=refusal) as caught:
            cls(3, **wrong)
        assert str(caught.value).startswith(f"{next(iter(wrong))}: ")
        assert all(name in str(caught.value) for name in declared)
    with pytest.raises(InputError, match=r"cohortsize: no setting of .*; did you mean cohort_size"):
        cls(cohortsize=3)  # type: ignore[call-arg]
    with pytest.raises(InputError, match="colour: no setting of"):
        cls.for_run(cohort_size=3, clients=10, seed=0, colour=1)


def test_settings_that_a_kind_of_a_built_in_selector_declares_reach_it() -> None:
    for base in SELECTORS:
        own = type("Own", (base,), {"__annotations__": {"tilt": float}, "tilt": setting(0.5, low=0)})
        assert (own(3).tilt, own(3, tilt=2).tilt) == (0.5, 2.0)
        assert own.for_run(cohort_size=3, clients=10, seed=0, tilt=2).tilt == 2.0
        with pytest.raises(InputError, match="tlit: no setting of Own; did you mean tilt"):
            own(3, tlit=2)


def test_a_constructor_that_hands_keywords_on_is_refused_with_those_of_its_base() -> None:
    class Handing(EntropySelector):
        def __init__(self, cohort_size: int, *, tilt: float = 0.5, **others: Any) -> None:
            super().__init__(cohort_size, **others)
            self.tilt = tilt

    assert Handing(3, tilt=2, buffer_size=4, release="random").release == "random"
    with pytest.raises(InputError) as caught:
        Handing(3, bufer_size=4)
    taken = "release, cohort_size, tilt, buffer_size, seed, target"
    assert str(caught.value) == f"bufer_size: no setting of Handing; did you mean buffer_size?; accepted: {taken}"


@every
def test_counts_are_taken_by_name_and_for_exact_unless_said_otherwise(cls: type[Selector]) -> None:
    selector = cls.for_run(cohort_size=1, clients=2, seed=0) if cls is not ValueSelector else cls(1)
    for counts, words in ((np.array([[1, -2], [1, 1]]), "class 1 is -2"), (np.array([[1, 1], [0, 0]]), "are 0")):
        with pytest.raises(InputError, match=words):
            selector.register(counts)
    with pytest.raises(TypeError, match="positional"):
        selector.register([[1, 2]], True)  # type: ignore[misc]
    selector.register(counts=np.array([[1, 2], [2, 1]]))
    assert selector.clients == (0, 1)


@every
@pytest.mark.parametrize(
    "counts",
    [np.zeros((5, 3)), np.full((5, 3), 7.0), np.arange(1.0, 6.0)[:, None], np.ones((1, 3)), np.eye(5)[:, :2] * 1e-9],
    ids=["nothing", "equal", "one class", "one client", "traces"],
)
def test_degenerate_counts(cls: type[Selector], counts: np.ndarray) -> None:
    clients = len(counts)
    selector = cls.for_run(cohort_size=min(2, clients), clients=clients, seed=1)
    selector.register(counts, noisy=True)
    for r in range(6):
        cohort = play(selector, r)
        assert 1 <= len(set(cohort)) == len(cohort) <= 2
        assert set(cohort) <= set(range(clients))
    other = cls.for_run(cohort_size=min(2, clients), clients=clients, seed=1)
    other.register(counts, noisy=True)
    restore(other, saved(selector))
    assert [play(other, r) for r in range(6, 9)] == [play(selector, r) for r in range(6, 9)]


ODD = (None, -1, 0.5, True, "x", [], {}, [None], [[]], float("nan"), 10**400, [["c0", 10**400]])


@pytest.mark.parametrize("cls", [*SELECTORS, ValueSelector], ids=lambda cls: cls.name)
def test_damaged_states_are_refused_and_change_nothing(cls: type[Selector]) -> None:
    """Every entry of a state in turn, down to single figures, replaced by what JSON may hold in its place. What is
    taken all the same must be of the entry's kind and kept as it was given, or make no difference."""

    def made() -> Selector:
        selector = cls(2, 1) if cls is ValueSelector else make_for_run(cls, cohort_size=2, clients=6, rounds=9, seed=1)
        selector.register({f"c{k}": [k + 1, 1, 6 - k] for k in range(6)})
        return selector

    def entries(value: Any, path: tuple[Any, ...] = ()) -> Iterable[tuple[tuple[Any, ...], Any]]:
        yield path, value
        lists = isinstance(value, list) and bool(value) and isinstance(value[0], list)
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, one in inside:
            if not lists or key == 0:  # one client's entry is like another's
                yield from entries(one, (*path, key))

    def kind(value: Any) -> type:
        return float if isinstance(value, int) and not isinstance(value, bool) else type(value)

    used = made()
    if used.census() is not None:
        used.observe({client: told(client, 1) for client in used.clients})
    for round_ in range(3):
        play(used, round_)
    state, arrays = saved(used)
    going_on = [play(used, round_) for round_ in range(3, 6)]
    taken = 0
    for path, held in entries(state):
        for odd in ODD:
            if isinstance(held, bool) and isinstance(odd, bool):  # the other of two: as good a state
                continue
            damaged = copy.deepcopy(state)
            place = damaged
            for key in path[:-1]:
                place = place[key]
            if path:
                place[path[-1]] = odd
            other = made()
            before = other.state_dict()
            try:
                other.load_state_dict(damaged if path else odd)
            except InputError:
                assert other.state_dict() == before, (path, odd)
                continue
            try:
                if arrays:
                    other.load_arrays(arrays)
            except InputError:
                continue
            taken += 1
            kept = saved(other)[0]
            if kept == state:
                assert [play(other, round_) for round_ in range(3, 6)] == going_on, (path, odd)
                continue
            assert kept == damaged, (path, odd)
            a_client = isinstance(held, str) and isinstance(odd, int)
            nobody_seen = path == ("audit",) and odd is None
            assert kind(odd) is kind(held) or a_client or nobody_seen, (path, odd)
            assert all(play(other, round_) for round_ in range(3, 6)), (path, odd)
    assert taken, "a seed of 10**400 is a seed"


def test_states_out_of_range_are_refused() -> None:
    """Numbers where numbers belong, which no round can have led to."""
    wrong: dict[str, dict[str, Any]] = {
        "oort": {"preferred": [-1, 100.5, 1e300], "history": [[-1.0], [2.0, -0.1]]},
        "cycle": {"plan": [[[]], [["a", "b"], []]]},
        "hics-fl": {"per_travel": [None]},
        "fedentropy": {"values": [[1.0] * 5 + [0.0], [1.0] * 5 + [-1.0], [1.0] * 5 + [float("inf")], [1.0] * 5]},
    }
    for name, entries in wrong.items():
        selector = made(ValueSelector if name == "fedentropy" else SELECTORS.get(name))
        play(selector, 0)
        state = json.loads(json.dumps(selector.state_dict()))
        for key, values in entries.items():
            for value in values:
                with pytest.raises(InputError, match=f"state: .*{key}.*; accepted: "):
                    selector.load_state_dict({**state, key: value})
                assert json.loads(json.dumps(selector.state_dict())) == state


@pytest.mark.parametrize("name", ["hics-fl", "divfl", "clustered-update", "inferred"])
def test_arrays_that_are_not_finite_are_refused(name: str) -> None:
    selector = made(SELECTORS.get(name))
    play(selector, 0)
    state, arrays = saved(selector)
    for damaged in arrays:
        other = made(SELECTORS.get(name))
        other.load_state_dict(state)
        broken = {key: array.copy() for key, array in arrays.items()}
        broken[damaged].flat[0] = np.nan
        with pytest.raises(InputError, match=f"arrays: {damaged} .*; accepted: finite numbers"):
            other.load_arrays(broken)


def test_an_array_of_numbers_says_who_is_available_as_a_list_does() -> None:
    counts = np.random.default_rng(0).integers(1, 9, (40, 4))
    here = np.array([30, 2, 2, 17, 5, 39])
    pair = [RandomSelector(3, seed=1), RandomSelector(3, seed=1)]
    for one in pair:
        one.register(counts)
    assert pair[0].select(here).clients == pair[1].select(here.tolist()).clients
    for bad in (np.array([3, 40]), np.array([-1, 3]), np.array([], dtype=int), np.array([1.0, 2.0])):
        with pytest.raises(InputError, match=r"available|client id"):
            pair[0].select(bad)
    with pytest.raises(InputError, match="client id"):
        pair[0].select(np.ma.array([3, 4], mask=[True, False]))
    pair[0].remove([0])  # numbers move up, ids do not
    assert set(pair[0].select(np.array([1, 2, 3])).clients) == {1, 2, 3}
    named = RandomSelector(2)
    named.register(counts, ids=[str(k) for k in range(40)])
    with pytest.raises(InputError, match="client 2: not registered"):
        named.select(np.array([2, 3]))


def test_a_table_that_was_read_is_registered_as_its_counts_are() -> None:
    counts = np.random.default_rng(1).integers(1, 9, (40, 4))
    table = CountTable()
    table.register(counts, None, False, None)
    shared, own = EntropySelector(3, buffer_size=9, seed=2), EntropySelector(3, buffer_size=9, seed=2)
    shared.register(table)
    own.register(counts)
    assert [shared.select().clients for _ in range(5)] == [own.select().clients for _ in range(5)]
    shared.update(np.array([[100, 0, 0, 0]]), ids=[7])
    shared.register(np.ones((1, 4)), ids=["new"])
    assert (table.rows.dense(4) == counts).all()
    assert len(table) == 40
    with pytest.raises(InputError, match="a table for 41 registered clients"):
        shared.register(table)
    with pytest.raises(InputError, match="4 classes; accepted: 3"):
        EntropySelector(3, target=[1, 1, 1]).register(table)
