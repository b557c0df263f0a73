"""Uniform selection, KL selection, and FedEntropy's judgment."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedentopt import CohortWarning, EntropySelector, KLSelector, RandomSelector, Selector
from fedentopt.errors import InputError
from fedentopt.selection.fedentropy import judge
from fedentopt.selection.measures import entropy


@pytest.mark.parametrize("make", [lambda: EntropySelector(2), lambda: RandomSelector(2), lambda: KLSelector(2)])
def test_one_protocol(make) -> None:
    selector = make()
    assert isinstance(selector, Selector)
    selector.register({"a": [3, 0], "b": [1, 1], 7: [0, 5]})
    selector.update({7: [0, 6]})
    selector.remove(["b"])
    cohort = selector.select()
    assert sorted(cohort.clients, key=str) == [7, "a"]
    assert cohort.label_counts.tolist() == [3, 6]
    with pytest.warns(CohortWarning, match="cohort of 1 instead of 2"):
        assert selector.select(available=[7]).clients == (7,)
    with pytest.raises(InputError, match="available: nobody"):
        selector.select(available=[])
    with pytest.raises(InputError, match="available: client 'b': not registered"):
        selector.select(available=["b"])
    state = json.loads(json.dumps(selector.state_dict()))
    other = make()
    other.register({"a": [3, 0], 7: [0, 6]})
    other.load_state_dict(state)
    assert other.select().clients == selector.select().clients
    with pytest.raises(InputError, match="state: selector is 'x'"):
        other.load_state_dict({**state, "selector": "x"})
    with pytest.raises(InputError, match="state: round: -1"):
        other.load_state_dict({**state, "round": -1})


def test_random_is_uniform_without_replacement_and_seeded() -> None:
    selector = RandomSelector(3, seed=5)
    selector.register(np.ones((8, 2)))
    rounds = [selector.select().clients for _ in range(2000)]
    assert all(len(set(cohort)) == 3 for cohort in rounds)
    times = np.bincount(np.concatenate(rounds), minlength=8)
    assert np.abs(times - 750).max() < 110  # five standard deviations
    firsts = np.bincount([cohort[0] for cohort in rounds], minlength=8)
    assert np.abs(firsts - 250).max() < 75
    again = RandomSelector(3, seed=5)
    again.register(np.ones((8, 2)))
    assert [again.select().clients for _ in range(20)] == rounds[:20]
    other = RandomSelector(3, seed=6)
    other.register(np.ones((8, 2)))
    assert [other.select().clients for _ in range(20)] != rounds[:20]


def test_random_does_not_depend_on_the_order_of_the_available() -> None:
    cohorts = []
    for available in ([1, 3, 5, 7], [7, 5, 3, 1]):
        selector = RandomSelector(2, seed=1)
        selector.register(np.ones((8, 2)))
        cohorts.append(selector.select(available).clients)
    assert cohorts[0] == cohorts[1]
    assert set(cohorts[0]) <= {1, 3, 5, 7}


def test_kl_by_hand() -> None:
    counts = {"a": [6, 2, 0], "b": [5, 0, 0], "c": [1, 0, 9], "d": [0, 4, 0], "e": [2, 1, 1]}
    selector = KLSelector(4)
    selector.register(counts)
    cohort = selector.select()
    # Volumes: c 10, a 8, b 5, d 4, e 4. c sets v = (1, 0, 9), m = 9. Rarest is class 1: a holds it and joins
    # with all it has: v = (7, 2, 9). Rarest is class 1 again: b has none, d joins with 4: v = (7, 6, 9). Then
    # e joins with min(9 - 7, 2), min(9 - 6, 1), min(9 - 9, 1).
    assert cohort.clients == ("c", "a", "d", "e")
    assert cohort.sample_limits is not None
    limits = {client: limit.tolist() for client, limit in cohort.sample_limits.items()}
    assert limits == {"c": [1, 0, 9], "a": [6, 2, 0], "d": [0, 4, 0], "e": [2, 1, 0]}
    assert cohort.label_counts.tolist() == [9, 7, 10]
    assert selector.select().clients == cohort.clients  # the same every round


def test_kl_scans_again_and_passes_over_classes_nobody_holds() -> None:
    # a sets v = (5, 0, 0), m = 5. Nobody holds class 2, so class 1 is the rarest that counts: the first scan passes
    # over b and takes c. Of those left only class 0 is held: b joins in the second scan.
    selector = KLSelector(3)
    selector.register({"a": [5, 0, 0], "b": [4, 0, 0], "c": [0, 3, 0]})
    cohort = selector.select()
    assert cohort.clients == ("a", "c", "b")
    assert cohort.sample_limits is not None
    assert cohort.sample_limits["b"].tolist() == [0, 0, 0]  # class 0 is full: m - v = 0


def picks_of_kl(size: int, counts: dict[str, list[float]], noisy: bool = False) -> dict[str, list[int]]:
    """What each client may use, in the order picked."""
    selector = KLSelector(size)
    selector.register(counts, noisy=noisy)
    cohort = selector.select()
    assert cohort.sample_limits is not None
    assert tuple(cohort.sample_limits) == cohort.clients
    return {str(client): limit.tolist() for client, limit in cohort.sample_limits.items()}


def test_kl_with_fewer_holders_of_rare_classes_than_seats() -> None:
    # a sets v = (9, 0, 0), m = 9. The first scan passes over b and c, which hold class 0 alone, and takes d for class 1
    # and e for class 2. Of those left only class 0 is held: b and c, the larger first, join in the second scan with
    # nothing, since class 0 is full.
    counts = {"a": [9, 0, 0], "c": [4, 0, 0], "b": [5, 0, 0], "d": [0, 3, 0], "e": [0, 0, 2]}
    full = {"a": [9, 0, 0], "d": [0, 3, 0], "e": [0, 0, 2], "b": [0, 0, 0], "c": [0, 0, 0]}
    for size in range(1, 6):
        assert picks_of_kl(size, counts) == dict(list(full.items())[:size])


def test_kl_scans_start_over_from_the_largest_left() -> None:
    # a: v = (6, 5, 0), m = 6. Class 2: b and c do not hold it, d does: v = (6, 5, 2). Nobody left holds it, and class 1
    # is the rarest that somebody does: e, v = (6, 6, 2). Classes 0 and 1 tie and the lower one counts, so the scan
    # passes over f. The second scan starts with b again: b and c for class 0, then f for class 1.
    counts = {"a": [6, 5, 0], "b": [8, 0, 0], "c": [7, 0, 0], "d": [0, 0, 2], "e": [0, 1, 0], "f": [0, 1, 0]}
    assert picks_of_kl(6, counts) == {
        "a": [6, 5, 0], "d": [0, 0, 2], "e": [0, 1, 0], "b": [0, 0, 0], "c": [0, 0, 0], "f": [0, 0, 0]
    }  # fmt: skip


def test_kl_looks_for_the_rarest_class_anew_after_everybody_who_joins() -> None:
    # a: v = (9, 0, 0). Class 1: d. Now class 2 is the rarest: e, who holds class 1 alone, is passed over for f.
    counts = {"a": [9, 0, 0], "d": [0, 3, 0], "e": [0, 2, 0], "f": [0, 0, 1]}
    assert list(picks_of_kl(3, counts)) == ["a", "d", "f"]
    assert list(picks_of_kl(4, counts)) == ["a", "d", "f", "e"]


def test_kl_looks_among_classes_that_somebody_left_holds() -> None:
    # a: v = (9, 4, 0). Class 2: d, the only one, v = (9, 4, 1). Of what b and c hold, class 1 is rarer than class 0: c
    # goes before b, which is larger.
    counts = {"a": [9, 4, 0], "b": [5, 0, 0], "c": [0, 3, 0], "d": [0, 0, 1]}
    assert list(picks_of_kl(4, counts)) == ["a", "d", "c", "b"]
    assert list(picks_of_kl(3, counts)) == ["a", "d", "c"]


def test_kl_gives_seats_that_are_left_to_empty_clients_in_their_order_and_no_more() -> None:
    counts = {"e1": [-1, -1], "a": [5, 1], "e2": [0.2, 0.3], "b": [0, 2], "e3": [-9, 0], "e4": [-2, -2]}
    full = {"a": [5, 1], "b": [0, 2], "e1": [0, 0], "e2": [0, 0], "e3": [0, 0], "e4": [0, 0]}
    for size in range(1, 7):
        assert picks_of_kl(size, counts, noisy=True) == dict(list(full.items())[:size])


def test_kl_takes_states_from_before_it_had_a_seed_and_the_others_need_theirs() -> None:
    old = {"selector": "kl", "cohort_size": 1, "round": 3}
    selector = KLSelector(1, seed=5)
    selector.register({"a": [1, 2]})
    selector.load_state_dict(old)
    assert (selector.round, selector.seed) == (3, 5)
    drawing = RandomSelector(1, seed=5)
    with pytest.raises(InputError, match="state: 'seed' is missing"):
        drawing.load_state_dict({**old, "selector": "random"})
    with pytest.raises(InputError, match="state: list"):
        selector.load_state_dict([])  # type: ignore[arg-type]


def test_kl_takes_noisy_counts_and_empty_clients() -> None:
    selector = KLSelector(4)
    selector.register({"a": [-4.0, -2.0], "b": [2.6, 0.2], "c": [0.4, 1.7], "d": [0.3, 0.1]}, noisy=True)
    cohort = selector.select()
    assert cohort.clients == ("b", "c", "a", "d")
    assert cohort.sample_limits is not None
    assert [limit.tolist() for limit in cohort.sample_limits.values()] == [[3, 0], [0, 2], [0, 0], [0, 0]]
    assert all(limit.dtype == np.int64 for limit in cohort.sample_limits.values())


def test_kl_takes_everybody_once_where_seats_are_left() -> None:
    selector = KLSelector(5)
    selector.register({"a": [-1.0, -2.0], "b": [2.0, 1.0], "c": [-3.0, 0.0]}, noisy=True)
    with pytest.warns(CohortWarning, match="cohort of 3 instead of 5"):
        assert selector.select().clients == ("b", "a", "c")


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), min_size=1, max_size=8), st.data())
def test_kl_limits_hold(rows: list[list[int]], data) -> None:
    size = data.draw(st.integers(1, len(rows)))
    selector = KLSelector(size)
    selector.register(np.array(rows))
    cohort = selector.select()
    assert len(set(cohort.clients)) == size
    assert cohort.sample_limits is not None
    used = np.zeros(3)
    for client in cohort.clients:
        assert (cohort.sample_limits[client] <= rows[client]).all()
        used += cohort.sample_limits[client]
    assert used.max() == max(rows[cohort.clients[0]])  # m is never exceeded
    assert sum(rows[cohort.clients[0]]) == max(sum(row) for row in rows)


def test_judge_by_hand() -> None:
    # The mean of (1, 0), (0, 1), (1, 0) is (2/3, 1/3). Without the first or the third it is even: the first of
    # the two goes, and then nothing can be gained.
    soft = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]
    assert judge(soft, [1, 1, 1]).tolist() == [1, 2]
    # Weighted by samples (1, 4, 1): without the second there is only class 0; without the first (1, 4) is worse.
    assert judge(soft, [1, 4, 1]).tolist() == [0, 1, 2]
    # (4, 1, 1): without the first, (1, 1) is even.
    assert judge(soft, [4, 1, 1]).tolist() == [1, 2]
    assert judge([[0.5, 0.5]], [3]).tolist() == [0]
    assert judge([[0.9, 0.1], [0.9, 0.1]], [1, 1]).tolist() == [0, 1]  # equal: nothing is gained


@given(st.integers(1, 6), st.integers(0, 1000))
def test_judge_only_removes_what_raises_entropy(clients: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    soft, weights = rng.dirichlet(np.full(4, 0.3), size=clients), rng.integers(1, 50, clients)
    kept = judge(soft, weights)
    mixed = soft * weights[:, None]
    assert kept.size >= 1
    assert (np.diff(kept) > 0).all()
    final = entropy(mixed[kept].sum(axis=0))
    assert final >= entropy(mixed.sum(axis=0)) - 1e-9
    for k in kept:
        rest = kept[kept != k]
        assert not rest.size or entropy(mixed[rest].sum(axis=0)) <= final + 1e-9


@pytest.mark.parametrize(
    ("soft", "weights", "message"),
    [
        ([], [], "soft_labels"),
        ([[1.0, 0.0]], [1, 2], "weights"),
        ([[1.0, -0.1]], [1], "soft_labels"),
        ([[float("nan"), 1.0]], [1], "soft_labels"),
        ([[1.0, 0.0]], [0], "weights"),
        ([[1.0, 0.0]], [-1], "weights"),
        ([1.0, 0.5], [1, 1], "soft_labels"),
        (np.zeros((0, 3)), [], "soft_labels"),
        (np.zeros((2, 0)), [1, 1], "soft_labels"),
        ([[1.0, 0.0], [0.0, 1.0]], [-0.5, 2], "weights"),
        ([[1.0, 0.0], [0.0, 1.0]], [float("inf"), 2], "weights"),
    ],
)
def test_judge_refuses(soft, weights, message: str) -> None:
    with pytest.raises(InputError, match=message):
        judge(soft, weights)


def test_kl_keeps_what_it_picked_only_while_nothing_changes() -> None:
    selector, other = KLSelector(2), KLSelector(2)
    counts = np.array([[9, 0, 1], [0, 5, 2], [1, 1, 7], [4, 4, 4]])
    for one in (selector, other):
        one.register(counts)
    first = selector.select()
    expected = {client: limit.tolist() for client, limit in first.sample_limits.items()}
    for limit in first.sample_limits.values():
        limit[:] = 0  # what a caller does with its cohort is nothing to the next one
    again = selector.select()
    assert again.clients == first.clients
    assert {client: limit.tolist() for client, limit in again.sample_limits.items()} == expected
    assert selector.select([2, 3]).clients == other.select([2, 3]).clients
    selector.cohort_size = 3
    assert len(selector.select().clients) == 3
    selector.update(np.array([[0, 90, 0]]), ids=[2])
    assert selector.select().clients[0] == 2
