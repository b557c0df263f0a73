"""Clustered sampling: bins filled exactly, unbiased by enumeration, the authors' procedure, clients drawn twice."""

from __future__ import annotations

import warnings
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from fedentopt.errors import InputError
from fedentopt.selection import (
    ClusteredLabelSelector,
    ClusteredSizeSelector,
    ClusteredUpdateSelector,
    CohortWarning,
    Observation,
    ward,
)
from fedentopt.selection.bins import Bins, bins_by_group, bins_by_size, full_and_rest, whole_sizes
from fedentopt.selection.ward import cut_by_mass, cut_into

EVERY = (ClusteredSizeSelector, ClusteredUpdateSelector, ClusteredLabelSelector)
sizes_lists = st.lists(st.integers(0, 30), min_size=1, max_size=9).filter(any)


def test_bins_by_size_by_hand() -> None:
    # 5, 3, 2 of 10, two bins: masses 10, 6, 4 of capacity 10
    assert bins_by_size(np.array([5, 3, 2]), 2).masses(3).tolist() == [[10, 0, 0], [0, 6, 4]]
    # 4, 3, 3: 8, 6, 6: client 1 spills over
    assert bins_by_size(np.array([3, 4, 3]), 2).masses(3).tolist() == [[2, 8, 0], [4, 0, 6]]
    # a client with more than 1/M fills bins: 6 of 10, three bins: 18, 9, 3
    assert bins_by_size(np.array([1, 6, 3]), 3).masses(3).tolist() == [[0, 10, 0], [0, 8, 2], [3, 0, 7]]


def test_bins_by_group_by_hand() -> None:
    # Four of size 2, one of 4, three bins of capacity 12, masses 6, 6, 6, 6, 12. Client 4 fills a bin alone. Of the
    # groups {0, 1} with 12, {2} with 6 and {3} with 6, two get a bin; the lightest, {2} before {3}, fills that of {3}.
    groups = [np.array([0, 1]), np.array([2]), np.array([3]), np.array([4])]
    made = bins_by_group(np.array([2, 2, 2, 2, 4]), groups, 3, np.random.default_rng(0))
    assert made.masses(5).tolist() == [[0, 0, 0, 0, 12], [0, 0, 6, 6, 0], [6, 6, 0, 0, 0]]


@settings(max_examples=80, deadline=None)
@given(sizes_lists, st.integers(1, 6), st.data())
def test_unbiased_by_enumeration(sizes: list[int], count: int, data: st.DataObject) -> None:
    """sum_j r_jk = M p_k exactly, and the expected weight over all draws is p_k exactly."""
    n = np.array(sizes)
    order = data.draw(st.permutations(range(n.size)))
    tree, roots = [], list(order)
    for i in range(n.size - 1):  # any tree will do
        tree.append([roots.pop(0), roots.pop(0)])
        roots.append(n.size + i)
    _, rest = full_and_rest(n, count)
    groups = cut_by_mass(np.array(tree, dtype=np.int64).reshape(-1, 2), rest, int(n.sum()))
    assert sorted(k for group in groups for k in group) == list(range(n.size))
    for bins in (bins_by_size(n, count), bins_by_group(n, groups, count, np.random.default_rng(0))):
        masses = bins.masses(n.size)
        assert (masses.sum(axis=1) == n.sum()).all(), "every bin is full"
        assert (masses.sum(axis=0) == count * n).all(), "unbiased"
        if masses.astype(bool).sum(axis=1).prod() <= 400:
            expected = [Fraction(0)] * n.size
            for draw in product(*(np.flatnonzero(row).tolist() for row in masses)):
                p = Fraction(1)
                for j, k in enumerate(draw):
                    p *= Fraction(int(masses[j, k]), int(n.sum()))
                for k in draw:
                    expected[k] += p / count
            assert expected == [Fraction(int(one), int(n.sum())) for one in n]


@settings(max_examples=80, deadline=None)
@given(sizes_lists, st.integers(1, 6))
def test_algorithm_1_is_pouring(sizes: list[int], count: int) -> None:
    """The paper's loop over clients and bins, in fractions."""
    total = sum(sizes)
    r = [[Fraction(0)] * len(sizes) for _ in range(count)]
    j = 0
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        mass = Fraction(count * sizes[k], total)
        while mass > 0:
            part = min(1 - sum(r[j]), mass)
            r[j][k] += part
            mass -= part
            j += sum(r[j]) == 1
    found = bins_by_size(np.array(sizes), count).masses(len(sizes))
    assert [[Fraction(int(mass), total) for mass in row] for row in found] == r


def test_draws_follow_the_masses() -> None:
    bins = bins_by_size(np.array([3, 4, 3]), 2)
    rng = np.random.default_rng(0)
    drawn = np.array([bins.draw(rng) for _ in range(4000)])
    for j, row in enumerate(bins.masses(3)):
        np.testing.assert_allclose(np.bincount(drawn[:, j], minlength=3) / 4000, row / 10, atol=0.03)


def test_sizes_of_all_kinds_become_whole() -> None:
    assert whole_sizes(np.array([3.0, 0.0, 5.0]), 4).tolist() == [3, 0, 5]
    assert whole_sizes(np.zeros(3), 4).tolist() == [1, 1, 1]
    noisy = whole_sizes(np.array([0.5, 1.25, 0.0]), 4)
    assert noisy.dtype == np.int64
    np.testing.assert_allclose(noisy / noisy.sum(), np.array([0.5, 1.25, 0]) / 1.75, atol=1e-12)
    huge = whole_sizes(np.array([1e300, 3e300]), 1000)
    np.testing.assert_allclose(huge / huge.sum(), [0.25, 0.75])
    assert int(huge.sum()) * 1000 < 2**63
    assert isinstance(bins_by_size(huge, 1000), Bins)


# --- the selectors
LABELS = {"a": [9, 1], "b": [9, 1], "c": [1, 9], "d": [1, 9]}


def test_groups_of_labels_by_hand() -> None:
    """Two groups of two with half of the mass each: every cohort has one of either, each with half the weight."""
    selector = ClusteredLabelSelector(2, seed=0)
    selector.register(LABELS)
    seen = set()
    for _ in range(30):
        cohort = selector.select()
        assert [len(set(cohort.clients) & set(pair)) for pair in ("ab", "cd")] == [1, 1]
        assert cohort.weights == (0.5, 0.5)
        seen.add(frozenset(cohort.clients))
    assert len(seen) == 4


def test_groups_of_updates_by_hand() -> None:
    selector = ClusteredUpdateSelector(2, seed=0)
    selector.register({client: [5, 5] for client in "abcd"})
    directions = {"a": [1.0, 0.0], "c": [0.9, 0.1], "b": [-1.0, 0.0], "d": [-2.0, 0.3]}
    for client, update in directions.items():
        selector.observe({client: Observation(10, update=np.array(update, np.float32))})
    for _ in range(20):
        assert [len(set(selector.select().clients) & set(pair)) for pair in ("ac", "bd")] == [1, 1]
    # a turns round: now it belongs to b and d, who with it are too heavy for one bin
    selector.observe({"a": Observation(10, update=np.array([-1.0, 0.1], np.float32))})
    together = [selector.select().clients for _ in range(60)]
    assert any(set(cohort) == {"a", "c"} for cohort in together)
    assert any(set(cohort) == {"b", "d"} for cohort in together) or any(
        set(cohort) == {"a", "b"} for cohort in together
    )


def test_cosines_serve_as_well_as_updates() -> None:
    """Told the cosines of the updates, or the updates: the same angles but for rounding, and the same cohorts."""
    rng = np.random.default_rng(3)
    by_update, by_cosine = ClusteredUpdateSelector(3, seed=1), ClusteredUpdateSelector(3, seed=1)
    names = [f"client {k}" for k in range(9)]
    for selector in (by_update, by_cosine):
        selector.register({name: [5 + k, 5] for k, name in enumerate(names)})
    latest: dict[str, np.ndarray] = {}
    for step in range(12):
        cohort = by_update.select()
        assert by_cosine.select().clients == cohort.clients
        told = {name: rng.normal(size=30).astype(np.float32) for name in cohort.clients}
        if step == 5:
            told[cohort.clients[0]][:] = 0
        by_update.observe({name: Observation(9, update=update) for name, update in told.items()})
        latest |= told
        cosines = {}
        for name, update in told.items():
            others = [latest.get(other, np.zeros(30)).astype(np.float64) for other in names]
            own = update.astype(np.float64)
            lengths = [np.linalg.norm(own) * np.linalg.norm(other) for other in others]
            row = [own @ other / length if length else 1.0 for other, length in zip(others, lengths, strict=True)]
            cosines[name] = np.array(row, np.float32)
        by_cosine.observe({name: Observation(9, cosines=row) for name, row in cosines.items()})
        if step == 8:
            for selector in (by_update, by_cosine):
                selector.remove([names[2]])
            names.remove("client 2")
            latest.pop("client 2", None)
    arrays, bare = by_update.arrays(), by_cosine.arrays()
    assert arrays.keys() == {"vectors", "distances"}
    assert bare.keys() == {"distances"}, "whoever keeps the updates, not the selector"
    np.testing.assert_allclose(bare["distances"], arrays["distances"], atol=1e-3)
    assert np.count_nonzero(bare["distances"]) > 20
    again = ClusteredUpdateSelector(3, seed=1)
    again.register({name: [1, 1] for name in names})
    again.load_state_dict(by_cosine.state_dict())
    again.load_arrays(bare)
    np.testing.assert_array_equal(again.arrays()["distances"], bare["distances"])


def test_cosines_that_do_not_fit_are_refused() -> None:
    selector = ClusteredUpdateSelector(2)
    selector.register({client: [1, 1] for client in "abc"})
    row, update = np.array([1.0, 0.5, 0.2], np.float32), np.ones(4, np.float32)
    with pytest.raises(
        InputError, match=r"cosines of client 'a' of shape \(2,\); accepted: \(3,\), one per registered"
    ):
        selector.observe({"a": Observation(2, cosines=row[:2])})
    assert selector.arrays() == {}
    selector.observe({"a": Observation(2, cosines=row), "b": Observation(2, cosines=row * np.nan)})
    assert selector.memory() == {"vectors": ["a"]}, "what is not finite counts as not told"
    with pytest.raises(InputError, match=r"4 numbers of client .*; accepted: distances alone, as before"):
        selector.observe({"b": Observation(2, update=update)})
    other = ClusteredUpdateSelector(2)
    other.register({client: [1, 1] for client in "abc"})
    other.observe({"a": Observation(2, update=update)})
    with pytest.raises(InputError, match="distances after vectors; accepted: vectors, as before"):
        other.observe({"b": Observation(2, cosines=row)})


@pytest.mark.parametrize("cls", EVERY)
def test_a_client_drawn_twice_counts_once_with_double_weight_and_no_warning(cls: Any) -> None:
    selector = cls(4, seed=0)
    selector.register({"big": [30, 30], "a": [5, 5], "b": [5, 5], "c": [10, 10]})  # big: 60 of 100, 2.4 bins
    doubles = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            cohort = selector.select()
            assert len(set(cohort.clients)) == len(cohort.clients)
            assert sum(cohort.weights) == 1
            weights = dict(zip(cohort.clients, cohort.weights, strict=True))
            assert weights["big"] >= 0.5, "it has two bins to itself"
            doubles += weights["big"] == 0.75
    assert doubles
    with pytest.warns(CohortWarning, match="no more clients are available"):
        assert selector.select(["a"]).weights == (1.0,)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_algorithm_2_is_the_authors_procedure(data: st.DataObject) -> None:
    """Tree, cut, and filling as in the authors' code, with fcluster on masses, but for whole masses."""
    clients, count = data.draw(st.integers(2, 9)), data.draw(st.integers(1, 4))
    classes = 3
    cells = st.lists(st.integers(0, 9), min_size=classes, max_size=classes).filter(any)
    counts = np.array(data.draw(st.lists(cells, min_size=clients, max_size=clients)))
    n, total = counts.sum(axis=1), int(counts.sum())
    if (count * n >= total).any():
        return  # the paper asks for p_k <= 1/M
    selector = ClusteredLabelSelector(count, seed=data.draw(st.integers(0, 9)))
    selector.register(counts)
    unit = counts / np.sqrt((counts**2).sum(axis=1))[:, None]
    apart = np.arccos(np.clip(unit @ unit.T, -1, 1))
    apart[(unit[:, None] == unit[None]).all(axis=2)] = 0
    tree = linkage(squareform(apart, checks=False), "ward")
    masses = (count * n).tolist()
    for i, merge in enumerate(tree):
        masses.append(masses[int(merge[0])] + masses[int(merge[1])])
        tree[i, 2] = masses[-1]
    labels = fcluster(tree, total, criterion="distance")
    groups = sorted((np.flatnonzero(labels == g) for g in set(labels)), key=lambda group: (n[group].sum(), group[0]))
    rng = selector.rng(1)
    found = selector.bins(np.arange(clients)).masses(clients)
    expected = np.zeros_like(found)
    for j, group in enumerate(groups[len(groups) - count :]):
        expected[j, group] = count * n[group]
    j = 0
    for group in groups[: len(groups) - count]:
        for k in rng.permutation(group):
            mass = count * n[k]
            while mass:
                while expected[j].sum() == total:
                    j += 1
                part = min(total - expected[j].sum(), mass)
                expected[j, k] += part
                mass -= part
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("cls", EVERY)
def test_degenerate_reports(cls: Any) -> None:
    alone = cls(3, seed=0)
    alone.register({"a": [1, 2]})
    with pytest.warns(CohortWarning):
        assert alone.select().weights == (1.0,)
    alike = cls(2, seed=0)
    alike.register([[3, 0]] * 7)
    assert len({client for _ in range(60) for client in alike.select().clients}) == 7
    nothing = cls(2, seed=0)
    nothing.register(np.zeros((5, 2)), noisy=True)
    assert {client for _ in range(60) for client in nothing.select().clients} == set(range(5))
    some = cls(2, seed=0)
    some.register([[4.5, 0.5], [0, 0], [0.25, 2]], noisy=True)
    assert {client for _ in range(60) for client in some.select().clients} == {0, 2}, "who has nothing has no mass"


def test_every_selector_is_unbiased() -> None:
    """The bins it draws from, among all and among some, and what it draws from them."""
    counts = np.array([[9, 1], [2, 3], [1, 9], [4, 4], [0, 7]])
    n = counts.sum(axis=1)
    for cls in EVERY:
        selector = cls(2, seed=1)
        selector.register(counts)
        for here in (np.arange(5), np.array([0, 3, 4])):
            masses = selector.bins(here).masses(here.size)
            assert masses.sum(axis=0).tolist() == (2 * n[here]).tolist()
            assert masses.sum(axis=1).tolist() == [n[here].sum()] * 2
        weight = np.zeros(5)
        for _ in range(400):
            cohort = selector.select()
            weight[list(cohort.clients)] += cohort.weights
        np.testing.assert_allclose(weight / 400, n / 40, atol=0.06)


# --- trees
def test_cuts_by_hand() -> None:
    tree = np.array([[0, 2], [1, 3], [4, 5]])  # {0, 2}, {1, 3}, all
    assert [group.tolist() for group in cut_into(tree, 2)] == [[0, 2], [1, 3]]
    assert [group.tolist() for group in cut_into(tree, 3)] == [[0, 2], [1], [3]]
    assert [group.tolist() for group in cut_into(tree, 9)] == [[0], [1], [2], [3]]
    assert [group.tolist() for group in cut_into(tree, 1)] == [[0, 1, 2, 3]]
    assert [g.tolist() for g in cut_by_mass(tree, np.array([4, 3, 5, 8]), 10)] == [[0, 2], [1], [3]]
    assert [g.tolist() for g in cut_by_mass(tree, np.array([4, 3, 5, 8]), 11)] == [[0, 2], [1, 3]]
    assert [g.tolist() for g in cut_by_mass(np.zeros((0, 2), int), np.array([4]), 1)] == [[0]]


@pytest.mark.parametrize("cls", [ClusteredUpdateSelector, ClusteredLabelSelector])
def test_more_clients_than_a_tree_can_take_are_refused(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=f"5001 are too many for {cls.name}, which works with all distances"):
        cls.check_run(cohort_size=2, clients=5001)
    monkeypatch.setattr(cls, "largest", 3)
    selector = cls(2)
    selector.register([[1, 2], [3, 4]])
    with pytest.raises(
        InputError, match=f"clients: 4 are too many for {cls.name}, .* two clients; accepted: at most 3"
    ):
        selector.register({"a": [1, 1], "b": [1, 1]})
    assert selector.clients == (0, 1)
    assert ward.LARGEST == 5000
