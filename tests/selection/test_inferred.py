"""Selection by inferred labels among many clients, and of many runs at once."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fedentopt.errors import InputError
from fedentopt.selection import Head, InferredSelector, Observation, inferred


def looked_through(monkeypatch: pytest.MonkeyPatch, clients: int, epochs: int) -> int:
    """How often the list of all clients is made while everybody tells something and two cohorts are chosen."""
    made: list[int] = []

    def listed(self: InferredSelector) -> tuple[object, ...]:
        made.append(1)
        return tuple(self._table.ids)

    selector = InferredSelector(2, seed=0, census_epochs=epochs)
    selector.register(np.ones((clients, 3)))
    monkeypatch.setattr(InferredSelector, "clients", property(listed))
    selector.select()
    head = Head(np.zeros((3, 2), np.float32), np.array([0.2, -0.1, -0.1], np.float32))
    selector.observe({k: Observation(5, head=head, travel=1.0) for k in range(clients - 2)})
    selector.select()
    return len(made)


@pytest.mark.parametrize("epochs", [0, 1])
def test_the_list_of_all_is_not_made_once_per_client(epochs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_through(monkeypatch, 40, epochs) == looked_through(monkeypatch, 20, epochs)


@pytest.mark.parametrize(("epochs", "most"), [(1, 17), (0, 26)])
def test_more_than_the_memory_holds_is_refused_before_it_is_made(
    epochs: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inferred, "_memory", lambda: 2_000_000)
    selector = InferredSelector(2, census_epochs=epochs)
    selector.register({k: {0: 1} for k in range(10)}, num_classes=1000)
    with pytest.raises(InputError, match=f"clients: 50 of 1000 classes take about .* accepted: at most {most} clients"):
        selector.register({k: {0: 1} for k in range(10, 50)})
    assert len(selector.clients) == 10
    selector.select()


def told(seed: int, clients: range, *, untrained: bool = False) -> dict[str | int, Observation]:
    rng = np.random.default_rng(seed)
    heads = rng.normal(0, 0.1, (len(clients), 4)).astype(np.float32)
    weight = np.zeros((4, 2), np.float32)
    return {
        k: Observation(20 + k, head=Head(weight, head), travel=0.7, untrained=untrained)
        for k, head in zip(clients, heads, strict=True)
    }


def started(seed: int) -> InferredSelector:
    selector = InferredSelector(3, buffer_size=4, seed=seed)
    selector.register(np.ones((12, 4)))
    return selector


def whole_state(selector: InferredSelector) -> tuple[Any, dict[str, tuple[Any, bytes]]]:
    """What there is to remember, to the bit."""
    return selector.state_dict(), {name: (one.shape, one.tobytes()) for name, one in selector.arrays().items()}


def test_runs_estimated_together_learn_what_they_learn_alone() -> None:
    alone, together = [started(seed) for seed in range(5)], [started(seed) for seed in range(5)]
    for round_ in range(4):
        # Of different sizes, so that not all of them go through one table.
        seen = [
            told(10 * round_ + i, range(12) if not round_ else range(i, i + 3 + i % 2), untrained=not round_)
            for i in range(5)
        ]
        InferredSelector.expect(list(zip(together, seen, strict=True)))
        for one, other, observations in zip(alone, together, seen, strict=True):
            one.observe(observations)
            other.observe(observations)
            assert whole_state(one) == whole_state(other)
            assert one.counts.tobytes() == other.counts.tobytes()
            assert one.select().clients == other.select().clients


def test_what_was_expected_is_not_taken_for_something_else() -> None:
    one, other = started(0), started(0)
    InferredSelector.expect([(other, told(1, range(5)))])
    for selector in (one, other):
        selector.observe(told(2, range(5)))
        selector.observe(told(1, range(5)))
    assert whole_state(one) == whole_state(other)


def test_what_cannot_be_read_is_refused_when_it_is_observed() -> None:
    good, bad = started(0), started(1)
    wrong = {0: Observation(5, head=Head(np.zeros((3, 2), np.float32), np.zeros(3, np.float32)), travel=1.0)}
    seen = told(3, range(4))
    InferredSelector.expect([(bad, wrong), (good, seen)])
    with pytest.raises(InputError, match=r"head: of client 0: shape \(3,\); accepted: \(4,\)"):
        bad.observe(wrong)
    good.observe(seen)
    alone = started(0)
    alone.observe(seen)
    assert whole_state(good) == whole_state(alone)


def test_samples_for_a_census_that_is_not_taken_are_refused() -> None:
    with pytest.raises(InputError, match="census_samples: 5 for a census that is not taken; accepted: none"):
        InferredSelector(2, census_epochs=0, census_samples=5)
    assert InferredSelector(2, census_epochs=0).census() is None
    assert InferredSelector(2, census_samples=5).census() is not None


# --- without a census
def play(selector: InferredSelector, rounds: int, silent: range) -> list[int]:
    """Select so often, and tell of everybody but the silent ones; how many of each cohort told something."""
    heard = []
    for round_ in range(rounds):
        others = [client for client in selector.select().clients if client not in silent]
        heard.append(len(others))
        seen = told(round_, range(40))
        selector.observe({client: seen[client] for client in others})
    return heard


def without_census(clients: int = 40) -> InferredSelector:
    selector = InferredSelector(4, buffer_size=8, census_epochs=0)
    selector.register(np.ones((clients, 4)))
    return selector


def test_clients_that_never_tell_anything_do_not_hold_up_the_others() -> None:
    """More of them than seats: they were all that was ever picked, once everybody else was known."""
    selector = without_census()
    heard = play(selector, 40, silent=range(6))
    assert all(selector.times_seen(client) for client in range(6, 40))
    assert sum(heard[20:]) >= 40  # of 80 seats
    assert min(sum(heard[i : i + 4]) for i in range(20, 36)) > 0


def test_how_often_a_client_was_tried_is_remembered_and_ends_with_its_first_word() -> None:
    selector = without_census()
    play(selector, 13, silent=range(6))
    tries = dict(selector.state_dict()["tries"])
    assert set(tries) == set(range(6))
    assert max(tries.values()) <= 3
    again = without_census()
    again.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    again.load_arrays(selector.arrays())
    assert [again.select().clients for _ in range(6)] == [selector.select().clients for _ in range(6)]
    assert again.state_dict() == selector.state_dict()
    again.observe(told(1, range(2)))
    again.remove([2])
    assert set(dict(again.state_dict()["tries"])) == {3, 4, 5}


def test_a_state_without_a_census_of_earlier_versions_counted_no_tries() -> None:
    selector = without_census()
    play(selector, 5, silent=range(0))
    state = selector.state_dict()
    assert state.pop("tries") == []
    again = without_census()
    again.load_state_dict(state)
    again.load_arrays(selector.arrays())
    assert again.select().clients == selector.select().clients
    assert "tries" not in started(0).state_dict()  # with one, nobody is waited for


# --- remembering
def learnt() -> InferredSelector:
    """One that has seen nine of its twelve clients, some of them twice."""
    selector = started(3)
    selector.observe(told(1, range(9), untrained=True))
    selector.select()
    selector.observe(told(2, range(3, 7)))
    return selector


def test_estimates_are_kept_as_numbers_not_as_text() -> None:
    selector = learnt()
    text = json.dumps(selector.state_dict())
    assert json.loads(text)["audit"]["seen"][0][2] is None
    sums = selector.arrays()["shares"]
    assert (sums.shape, sums.dtype) == ((9, 4), np.float64)
    again = started(99)
    again.load_state_dict(json.loads(text))
    assert json.dumps(again.state_dict()) == text  # what is awaited is not lost either
    assert again.census() is None
    again.load_arrays({"shares": sums.copy()})
    assert whole_state(again) == whole_state(selector)
    assert again.counts.tobytes() == selector.counts.tobytes()
    for round_ in range(3):
        assert again.select().clients == selector.select().clients
        for one in (again, selector):
            one.observe(told(10 + round_, range(round_, round_ + 5)))
    assert whole_state(again) == whole_state(selector)


def test_a_state_of_earlier_versions_has_all_in_its_text() -> None:
    selector = learnt()
    assert selector._audit is not None
    before = {**selector.state_dict(), "audit": selector._audit.state_dict()}
    again = started(99)
    again.load_state_dict(json.loads(json.dumps(before)))
    assert whole_state(again) == whole_state(selector)
    assert again.select().clients == selector.select().clients


def test_a_state_whose_estimates_are_missing_is_not_gone_on_with() -> None:
    selector = learnt()
    again = started(99)
    again.load_state_dict(selector.state_dict())
    for use in (again.select, lambda: again.observe(told(1, range(3))), lambda: again.remove([3])):
        with pytest.raises(InputError, match="state: the estimates of 9 clients are missing; accepted: load_arrays"):
            use()
    again.load_arrays(selector.arrays())
    again.select()


def test_estimates_that_do_not_fit_their_state_are_refused() -> None:
    selector = learnt()
    sums = selector.arrays()["shares"]
    more = sums.copy()
    more[0, 0] += 1.0
    for wrong in ({}, {"shares": sums[1:]}, {"shares": sums[:, 1:]}, {"shares": more}, {"vectors": sums}):
        again = started(99)
        again.load_state_dict(selector.state_dict())
        with pytest.raises(InputError, match=r"^arrays: .*accepted: "):
            again.load_arrays(wrong)
        again.load_arrays({"shares": sums})  # nothing was changed
        assert whole_state(again)[1] == whole_state(selector)[1]
    with pytest.raises(InputError, match=r"arrays: .*accepted: those of the 0 clients that the state names"):
        started(0).load_arrays({"shares": sums})
    started(0).load_arrays({})
