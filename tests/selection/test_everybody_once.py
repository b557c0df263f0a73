"""HiCS-FL and DivFL: everybody once, entropies and groups by hand, greedy facility location against brute force."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import cut_tree, linkage
from scipy.spatial.distance import squareform

from fedentopt.errors import InputError
from fedentopt.selection import (
    ClientId,
    ClusteredUpdateSelector,
    CohortWarning,
    DivFLSelector,
    Head,
    HiCSFLSelector,
    Observation,
    Selector,
)
from fedentopt.selection.hics_fl import bias_distances, softmax_entropies
from fedentopt.selection.selector import make_for_run

BOTH = (HiCSFLSelector, DivFLSelector)


def seen(bias: Any) -> Observation:
    """A last layer that moved by `bias`; the weight does not matter to HiCS-FL, and is 0 for DivFL."""
    bias = np.array(bias, np.float32)
    return Observation(10, head=Head(np.zeros((bias.size, 2), np.float32), bias))


def warmed(cls: type[Selector], biases: dict[ClientId, Any], size: int = 2, sizes: Any = None, **settings: Any) -> Any:
    """A selector that knows these clients."""
    selector = cls(size, **settings)
    selector.register({client: [1, n] for client, n in zip(biases, sizes or [1] * len(biases), strict=True)})
    selector.observe({client: seen(bias) for client, bias in biases.items()})
    return selector


# --- everybody once
@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize(("clients", "size"), [(12, 3), (7, 3), (5, 5), (1, 1)])
def test_everybody_trains_once_first(cls: type[Selector], clients: int, size: int) -> None:
    selector = cls(size, seed=4)
    selector.register(np.ones((clients, 2)))
    first: list[Any] = []
    for _ in range(math.ceil(clients / size)):
        cohort = selector.select()
        assert len(cohort.clients) == size
        first += [client for client in cohort.clients if client not in first]
        selector.observe({client: seen([client, -client]) for client in cohort.clients})
    assert sorted(first) == list(range(clients))
    if clients == 12:
        assert first != sorted(first), "in random order"
        other = cls(size, seed=5)
        other.register(np.ones((clients, 2)))
        assert other.select().clients != tuple(first[:3])


@pytest.mark.parametrize("cls", BOTH)
def test_late_joiners_are_next_and_dropouts_tried_three_times(cls: type[Selector]) -> None:
    selector = warmed(cls, {"a": [1, 0], "b": [0, 1], "c": [1, 1], "d": [2, 1]}, size=1)
    selector.register({"late": [1, 1], "later": [1, 1]})
    tried = [selector.select().clients[0] for _ in range(6)]  # nobody answers
    assert [tried.count(client) for client in ("late", "later")] == [3, 3]
    assert sorted(tried[:2]) == sorted(tried[2:4]) == ["late", "later"], "those tried least first"
    assert {selector.select().clients[0] for _ in range(20)} <= set("abcd")
    assert selector.select(["late"]).clients == ("late",), "nobody else is there"
    selector.observe({"late": seen([3, 3])})
    assert selector.memory()["tries"] == [["later", 3]]
    selector.remove(["later", "a"])
    assert selector.memory() == {"tries": [], "vectors": ["b", "c", "d", "late"], "per_travel": False}
    selector.register({"later": [1, 1]})
    assert selector.select().clients == ("later",)
    selector.observe({"a": seen([9, 9])})
    assert "a" not in selector.memory()["vectors"]


@pytest.mark.parametrize("cls", BOTH)
def test_states_that_do_not_fit_are_refused(cls: type[Selector]) -> None:
    selector = warmed(cls, {"a": [1, 0], "b": [0, 1], "c": [1, 1]})
    state, arrays = selector.state_dict(), selector.arrays()
    assert "distances" in arrays if cls is DivFLSelector else "distances" not in arrays
    bad = {"vectors": "abc"}, {"vectors": ["a", "a"]}, {"tries": [["a", 0]]}, {"tries": {}}, {"per_travel": "no"}
    for change in bad:
        with pytest.raises(InputError, match=f"state: {next(iter(change))} is .*; accepted: "):
            selector.load_state_dict({**state, **change})
    other = cls(2)
    other.register({client: [1, 1] for client in "abc"})
    other.load_state_dict(state)
    with pytest.raises(InputError, match=r"arrays: .*; accepted: those of the 3 clients that the state names"):
        other.load_arrays({name: array[:2] for name, array in arrays.items()})
    with pytest.raises(InputError, match="accepted: those of the 3 clients"):
        other.load_arrays({})
    assert other.state_dict() == state
    assert not other.arrays()
    other.load_arrays(arrays)
    assert other.select().clients == selector.select().clients
    with pytest.raises(InputError, match=r"observe: .* numbers of client .*; accepted: .*, as before"):
        other.observe({"a": seen([1, 2, 3])})


@pytest.mark.parametrize("cls", [*BOTH, ClusteredUpdateSelector])
def test_a_state_from_before_anybody_trained_goes_on(cls: type[Selector]) -> None:
    fresh, again = cls(2), cls(2)
    for selector in (fresh, again):
        selector.register({client: [1, 1] for client in "abc"})
    again.load_state_dict(fresh.state_dict())
    again.load_arrays(fresh.arrays())
    assert again.select().clients == fresh.select().clients
    with pytest.raises(InputError, match="accepted: those of the 0 clients"):
        again.load_arrays({"vectors": np.zeros((1, 2), np.float32)})


@pytest.mark.parametrize("cls", BOTH)
def test_a_change_counts_per_step_size(cls: type[Selector]) -> None:
    """Who trained with a quarter of the step size, or a quarter of the steps, is the client it was."""
    rng = np.random.default_rng(3)
    biases = {client: rng.normal(size=4).astype(np.float32) for client in range(12)}
    plain, other = warmed(cls, biases, 4, seed=1), warmed(cls, {}, 4, seed=1)
    other.register({client: [1, 1] for client in biases})
    for client, bias in biases.items():
        factor = 0.25 ** (client % 3)
        other.observe({client: replace(seen(bias * factor), travel=factor)})
    first = [(plain.select().clients, other.select().clients) for _ in range(8)]
    assert all(mine == its for mine, its in first)
    bare = warmed(cls, {client: bias * 0.25 ** (client % 3) for client, bias in biases.items()}, 4, seed=1)
    assert any(mine != bare.select().clients for mine, _ in first), "the change itself says less"


@pytest.mark.parametrize("cls", BOTH)
def test_bare_changes_and_those_per_step_size_are_not_mixed(cls: type[Selector]) -> None:
    known, unknown = replace(seen([1, 2]), travel=0.5), seen([3, 1])
    fresh = warmed(cls, {"a": [1, 0], "b": [0, 1]})
    fresh.remove(["a", "b"])
    fresh.register({client: [1, 1] for client in "abc"})
    fresh.observe({"a": known, "stranger": unknown})  # nobody's bare change is left, and strangers do not count
    for before, now in ((fresh, {"b": unknown}), (fresh, {"a": known, "b": unknown}), (warmed(cls, {"a": [1, 0]}), {})):
        kept = before.state_dict(), {name: array.copy() for name, array in before.arrays().items()}
        with pytest.raises(InputError, match=r"observe: travel, .*; accepted: known of all, or of none"):
            before.observe(now or {"a": known})
        assert before.state_dict() == kept[0], "nothing of it was taken"
        assert all((before.arrays()[name] == array).all() for name, array in kept[1].items())
    with pytest.raises(InputError, match=r"observe: travel -0.5 of client 'a'; accepted: at least 0"):
        fresh.observe({"a": replace(known, travel=-0.5)})


@pytest.mark.parametrize("cls", BOTH)
def test_a_state_of_a_version_that_did_not_divide_goes_on_without_step_sizes_only(cls: type[Selector]) -> None:
    old = warmed(cls, {"a": [1, 0], "b": [0, 1], "c": [1, 1]})
    state = {name: value for name, value in old.state_dict().items() if name != "per_travel"}
    again = cls(2)
    again.register({client: [1, 1] for client in "abc"})
    again.load_state_dict(state)
    again.load_arrays(old.arrays())
    with pytest.raises(InputError, match="cannot be continued: start anew"):
        again.observe({"a": replace(seen([2, 2]), travel=0.1)})
    again.observe({"a": seen([2, 2])})
    old.observe({"a": seen([2, 2])})
    assert again.state_dict() == old.state_dict()
    assert again.select().clients == old.select().clients


# --- HiCS-FL
def test_entropies_by_hand() -> None:
    # softmax(0, 0) is even: ln 2; softmax(ln 3, 0) = (3/4, 1/4)
    expected = [math.log(2), -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), 0.0]
    np.testing.assert_allclose(softmax_entropies(np.array([[0, 0], [math.log(3), 0], [1e6, 0]])), expected, atol=1e-12)


def test_distances_by_hand() -> None:
    # 90 degrees between the first two, 45 between the first and the third; a bias that did not move is at angle 0
    rows = np.array([[1, 0], [0, 3], [2, 2], [0, 0]], np.float32)
    found = bias_distances(rows, np.array([0.0, 0.5, 0.0, 0.25]), 10.0)
    half, quarter = math.pi / 2, math.pi / 4
    expected = [
        [0, half + 5, quarter, 2.5],
        [half + 5, 0, quarter + 5, 2.5],
        [quarter, quarter + 5, 0, 2.5],
        [2.5, 2.5, 2.5, 0],
    ]
    np.testing.assert_allclose(squareform(found), expected, atol=1e-6)


def test_even_clients_first_while_the_preference_lasts() -> None:
    """a and b moved one class only, c and d all alike: two groups, and with a strong preference always c or d first."""
    biases: dict[ClientId, Any] = {"a": [1, -1, -1], "b": [-1, 1, -1], "c": [0.01, 0, 0], "d": [0, 0.01, 0]}
    strong = warmed(HiCSFLSelector, biases, gamma=200.0, groups=2)
    for _ in range(20):
        assert set(strong.select().clients) == {"c", "d"}
    ended = warmed(HiCSFLSelector, biases, gamma=200.0, groups=2, horizon=1)
    ended.select()
    assert len({frozenset(ended.select().clients) for _ in range(30)}) > 3, "after the horizon all groups are alike"


def test_temperature_is_a_tenth_of_the_largest_change() -> None:
    biases: dict[ClientId, Any] = {"a": [4.0, 0], "b": [1.0, 0]}
    rows = np.array(list(biases.values()))
    np.testing.assert_allclose(warmed(HiCSFLSelector, biases).entropies(rows), softmax_entropies(rows / 0.4))
    np.testing.assert_allclose(
        warmed(HiCSFLSelector, biases, temperature=2.0).entropies(rows), softmax_entropies(rows / 2)
    )
    np.testing.assert_allclose(warmed(HiCSFLSelector, biases, scale=1.0).entropies(rows), softmax_entropies(rows / 4))
    still: dict[ClientId, Any] = {"a": [0, 0], "b": [0, 0]}
    np.testing.assert_allclose(warmed(HiCSFLSelector, still).entropies(rows * 0), [math.log(2)] * 2)


def test_a_model_without_a_bias_has_row_means() -> None:
    selector = HiCSFLSelector(1)
    selector.register({"a": [1, 1]})
    selector.observe({"a": Observation(1, head=Head(np.array([[1.0, 3.0], [-2.0, 0.0]], np.float32), None))})
    assert selector.arrays()["vectors"].tolist() == [[2.0, -1.0]]


def test_a_run_tells_its_rounds() -> None:
    def made(**settings: Any) -> Any:
        return make_for_run(HiCSFLSelector, cohort_size=2, clients=9, rounds=70, seed=1, **settings)

    assert (made().horizon, made(horizon=None).horizon, made(horizon=5).horizon) == (70, 70, 5)
    assert HiCSFLSelector.for_run(cohort_size=2, clients=9, seed=1).horizon is None
    plain = make_for_run(DivFLSelector, cohort_size=2, clients=9, rounds=70, seed=1, greedy="full")
    assert isinstance(plain, DivFLSelector)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_hics_is_the_definition(data: st.DataObject) -> None:
    """Groups by SciPy's own cut, draws one after another, with the selector's random numbers."""
    clients = data.draw(st.integers(2, 8))
    moves = st.lists(st.integers(-9, 9), min_size=3, max_size=3)
    biases = data.draw(st.lists(moves, min_size=clients, max_size=clients, unique_by=tuple))
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=clients, max_size=clients))
    size = data.draw(st.integers(1, 4))
    groups, seed = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 9))
    selector = warmed(
        HiCSFLSelector,
        dict(enumerate(biases)),
        size,
        sizes,
        groups=groups,
        horizon=10,
        seed=seed,
    )
    selector._round = data.draw(st.integers(0, 12))
    rows = np.array(biases, np.float32)
    top = float(np.abs(rows).max()) or 10.0
    entropies = softmax_entropies(rows.astype(float) / (0.1 * top))
    apart = bias_distances(rows, entropies, 10.0)
    tree = linkage(apart, "ward")
    labels = cut_tree(tree, n_clusters=[min(groups, clients)]).ravel()
    members = sorted((np.flatnonzero(labels == g).tolist() for g in set(labels)), key=lambda group: group[0])
    gamma = 4 * (1 - min(selector.round / 10, 1))
    rng, left, expected = selector.rng(1), set(range(clients)), []

    def draw(options: list[Any], weights: list[float]) -> Any:
        mark, reached = rng.random() * sum(weights), 0.0
        for option, weight in zip(options, weights, strict=True):
            reached += weight
            if mark < reached:
                return option
        raise AssertionError

    while left and len(expected) < size:
        open_groups = [group for group in members if left & set(group)]
        pulls = [gamma * float(entropies[group].mean()) for group in open_groups]
        group = draw(open_groups, [math.exp(pull - max(pulls)) for pull in pulls])
        inside = [k for k in group if k in left]
        client = draw(inside, [(sizes[k] + 1) / max(sizes[k] + 1 for k in inside) for k in inside])
        left.remove(client)
        expected.append(client)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CohortWarning)
        cohort = selector.select()
    assert list(cohort.clients) == expected
    assert cohort.weights == (1 / len(expected),) * len(expected)


# --- DivFL
def spread(clients: np.ndarray, chosen: list[int]) -> float:
    """G(S)."""
    return float(sum(min(np.linalg.norm(one - clients[i]) for i in chosen) for one in clients))


def test_facilities_by_hand() -> None:
    """On a line at 0, 1, 2, 10, 11: first 2 (sum of distances 2 + 1 + 0 + 8 + 9 = 20), then 10 or 11 both leave
    G = 2 + 1 + 1, and the one registered first wins; then 1 and 11 tie: 0 or 2 from 1, 1 from 11."""
    biases: dict[ClientId, Any] = {name: [x, 0] for name, x in zip("abcde", (0, 1, 2, 10, 11), strict=True)}
    assert warmed(DivFLSelector, biases, 3, greedy="full").select().clients == ("c", "d", "a")
    assert warmed(DivFLSelector, biases, 1, greedy="full").select().clients == ("c",)
    # among some, for everybody: c and d are away
    assert warmed(DivFLSelector, biases, 2, greedy="full").select(["a", "b", "e"]).clients == ("b", "e")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_divfl_is_greedy_facility_location(data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, 9))
    point = st.lists(st.integers(-20, 20), min_size=2, max_size=2)
    points = np.array(data.draw(st.lists(point, min_size=clients, max_size=clients)), dtype=float)
    size, share = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    selector = warmed(DivFLSelector, dict(enumerate(points)), size, share=share, seed=data.draw(st.integers(0, 9)))
    rng, left, expected = selector.rng(1), list(range(clients)), []
    looked_at = max(size, int(share * clients))
    while left and len(expected) < size:
        some = sorted(rng.choice(left, looked_at, replace=False)) if looked_at < len(left) else left
        best = min(some, key=lambda k: (round(spread(points, [*expected, k]), 4), k))
        expected.append(int(best))
        left.remove(best)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CohortWarning)
        found = list(selector.select().clients)
    for m in range(1, len(found) + 1):  # equal up to ties that float32 distances may break otherwise
        assert spread(points, found[:m]) == pytest.approx(spread(points, expected[:m]), abs=1e-3)
        if found[:m] != expected[:m]:
            break


@pytest.mark.parametrize("cls", BOTH)
def test_equal_clients_and_more_than_fit(cls: type[Selector], monkeypatch: pytest.MonkeyPatch) -> None:
    selector = warmed(cls, {name: [1, 1] for name in "abcdef"}, 3)
    assert len({client for _ in range(30) for client in selector.select().clients}) > 3
    with pytest.raises(InputError, match=f"5001 are too many for {cls.name}, .* two clients; accepted: at most 5000"):
        cls.check_run(cohort_size=2, clients=5001)
