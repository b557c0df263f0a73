"""Cycle: everybody exactly once in ceil(K / M) rounds, cohorts that no exchange makes more even, who is away."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedentopt.errors import InputError
from fedentopt.selection import CohortWarning, CycleSelector, cycle
from fedentopt.selection.measures import entropy, row_scores, selection_entropy


def skewed(clients: int, classes: int = 4, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.multinomial(60, rng.dirichlet(np.full(classes, 0.2), clients))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 5))
def test_exactly_once_in_a_cycle(clients: int, size: int, seed: int) -> None:
    selector = CycleSelector(size, seed=seed)
    counts = skewed(clients, seed=seed)
    selector.register(counts)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if clients >= size else "ignore", CohortWarning)  # a small last one is no lack
        for _ in range(3):
            cohorts = [selector.select() for _ in range(math.ceil(clients / size))]
            assert sorted(k for cohort in cohorts for k in cohort.clients) == list(range(clients))
            assert [len(cohort.clients) for cohort in cohorts[:-1]] == [size] * (len(cohorts) - 1)
            # no exchange between two cohorts raises the sum of their entropies
            for a, b in combinations([list(cohort.clients) for cohort in cohorts], 2):
                now = entropy(counts[a].sum(axis=0)) + entropy(counts[b].sum(axis=0))
                for i in a:
                    for j in b:
                        moved = counts[j] - counts[i]
                        then = entropy(counts[a].sum(axis=0) + moved) + entropy(counts[b].sum(axis=0) - moved)
                        assert then <= now + 1e-8


def test_by_hand() -> None:
    """Two of each class in cohorts of two: every cohort has both; sizes 1 to 4 pair up as evenly as they can."""
    selector = CycleSelector(2, seed=0)
    selector.register({"a": [5, 0], "b": [5, 0], "c": [0, 5], "d": [0, 5]})
    pairs = set()
    for _ in range(20):
        cohort = selector.select()
        assert cohort.entropy == 1
        pairs.add(frozenset(cohort.clients))
    assert len(pairs) == 4, "dealt anew each cycle"
    assert selection_entropy(list(Counter(k for pair in pairs for k in pair).values())) == 1


def test_far_more_even_than_random() -> None:
    selector = CycleSelector(10, seed=0)
    counts = skewed(100, 10)
    selector.register(counts)
    found = [selector.select().entropy for _ in range(10)]
    rng = np.random.default_rng(0)
    dealt = [entropy(counts[part].sum(axis=0)) for part in np.split(rng.permutation(100), 10)]
    assert min(found) > np.mean(dealt) + 0.1
    assert np.mean(found) > 3.28  # log2 10 = 3.32


def test_many_cohorts_are_evened_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = skewed(120)
    monkeypatch.setattr(cycle, "ALL_PAIRS", 4)
    monkeypatch.setattr(cycle, "SOME", 4)
    selector = CycleSelector(6, seed=0)
    selector.register(counts)
    cohorts = [selector.select() for _ in range(20)]
    assert sorted(k for cohort in cohorts for k in cohort.clients) == list(range(120))
    mixed = np.random.default_rng(0).permutation(120).reshape(20, 6)
    assert np.mean([c.entropy for c in cohorts]) > np.mean([entropy(counts[part].sum(axis=0)) for part in mixed]) + 0.1
    monkeypatch.setattr(CycleSelector, "largest", 100)
    with pytest.raises(InputError, match="clients: 120 are too many for cycle; accepted: at most 100"):
        CycleSelector(6).register(counts)


def test_large_cohorts_are_not_compared_client_by_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cohorts of 10,000 have 100 million pairs of clients, which fit neither memory nor patience."""
    looked_at: list[int] = []

    def watched(rows: np.ndarray) -> np.ndarray:
        looked_at.append(len(rows))
        return row_scores(rows)

    monkeypatch.setattr(cycle, "row_scores", watched)
    selector = CycleSelector(200, seed=0)
    counts = skewed(400, 10)
    selector.register(counts)
    cohorts = [selector.select() for _ in range(2)]
    assert max(looked_at) <= 2 * cycle.SOME**2 + 2
    assert sorted(k for cohort in cohorts for k in cohort.clients) == list(range(400))
    mixed = np.random.default_rng(0).permutation(400).reshape(2, 200)
    dealt = np.mean([entropy(counts[part].sum(axis=0)) for part in mixed])
    assert np.mean([cohort.entropy for cohort in cohorts]) > dealt


def test_who_is_away_stays_due() -> None:
    selector = CycleSelector(2, seed=1)
    selector.register({name: [1, i] for i, name in enumerate("abcdefg")})
    away: Any = {"a", "b"}
    here = [name for name in "abcdefg" if name not in away]
    cohorts = [selector.select(here).clients for _ in range(3)]
    assert sorted(k for cohort in cohorts for k in cohort) == here
    assert [len(cohort) for cohort in cohorts] == [2, 2, 1]
    # a and b come back before the cycle is over: they are what is left of it
    assert set(selector.select().clients) == away
    rest = [selector.select().clients for _ in range(4)]
    assert sorted(k for cohort in rest for k in cohort) == sorted("abcdefg")
    # they stay away: the others start over without them
    again = [selector.select(here).clients for _ in range(6)]
    assert Counter(k for cohort in again for k in cohort) == dict.fromkeys(here, 2)


def test_clients_join_change_and_leave_within_a_cycle() -> None:
    selector = CycleSelector(2, seed=1)
    selector.register({name: [1, i] for i, name in enumerate("abcdef")})
    done = list(selector.select().clients)
    selector.register({"late": [7, 0]})
    leaver = next(name for name in "abcdef" if name not in done)
    selector.remove([leaver])
    selector.update({next(name for name in "fedcba" if name not in (*done, leaver)): [9, 9]})
    rest = [selector.select().clients for _ in range(2)]
    assert sorted([*done, *(k for cohort in rest for k in cohort)]) == sorted({*"abcdef", "late"} - {leaver})
    served = set(selector.memory()["served"])
    assert served == set(selector.clients)
    selector.remove([done[0]])
    selector.register({done[0]: [1, 1]})
    assert selector.select().clients == (done[0],), "whoever comes back is new, and due"


def test_bad_states_are_refused() -> None:
    selector = CycleSelector(2)
    selector.register(skewed(6))
    selector.select()
    state = selector.state_dict()
    for change in ({"served": 3}, {"plan": {}}, {"plan": [1]}, {"plan": [[0, 1], [1, 2]]}, {"served": [0, 0]}):
        with pytest.raises(InputError, match=f"state: {next(iter(change))} is .*; accepted: a list of"):
            selector.load_state_dict({**state, **change})
        assert selector.state_dict() == state


@pytest.mark.parametrize("counts", [np.zeros((5, 3)), np.full((5, 3), 2.0), np.eye(5)[:, :1] * 4.5])
def test_degenerate_counts(counts: np.ndarray) -> None:
    selector = CycleSelector(2, seed=0)
    selector.register(counts, noisy=True)
    assert sorted(k for _ in range(3) for k in selector.select().clients) == [0, 1, 2, 3, 4]


def test_one_report_far_larger_than_the_others_does_not_hide_them() -> None:
    """Beside 9e15 samples a few disappear in a sum: exchanges judged by it would go round for ever."""
    rng = np.random.default_rng(6)
    for seed in range(30):
        counts = np.maximum(rng.multinomial(20, rng.dirichlet(np.full(3, 0.4), 8)) + rng.laplace(0, 2, (8, 3)), 0)
        counts[0] = [9e15, 0, 0]
        selector = CycleSelector(2, seed=seed)
        selector.register(counts, noisy=True)
        cohorts = [list(selector.select().clients) for _ in range(4)]
        assert sorted(k for cohort in cohorts for k in cohort) == list(range(8))
        for a, b in combinations(cohorts, 2):
            now = entropy(counts[a].sum(axis=0)) + entropy(counts[b].sum(axis=0))
            for i in range(2):
                for j in range(2):
                    one, other = [a[1 - i], b[j]], [b[1 - j], a[i]]
                    assert entropy(counts[one].sum(axis=0)) + entropy(counts[other].sum(axis=0)) <= now + 1e-8


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_sums_without_each(rows: int) -> None:
    counts = np.random.default_rng(0).random((rows, 3))
    expected = [np.delete(counts, k, axis=0).sum(axis=0) for k in range(rows)]
    np.testing.assert_allclose(cycle._without_each(counts), expected)
