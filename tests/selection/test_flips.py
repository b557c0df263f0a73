"""FLIPS: clusters that are there are found, clusters and their clients take turns, many clients join the nearest."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedentopt.errors import InputError
from fedentopt.selection import CohortWarning, FLIPSSelector, flips


def blocks(*numbers: int, seed: int = 0) -> np.ndarray:
    """So many clients of each class, of different sizes, in random order."""
    labels = np.repeat(np.arange(len(numbers)), numbers)
    np.random.default_rng(seed).shuffle(labels)
    return np.eye(len(numbers), dtype=int)[labels] * np.random.default_rng(1).integers(5, 50, labels.size)[:, None]


def test_clusters_that_are_there_are_found() -> None:
    counts = blocks(5, 3, 9, 1)
    for seed in range(5):
        selector = FLIPSSelector(4, seed=seed)
        selector.register(counts)
        found = {frozenset(np.flatnonzero(selector.labels() == c).tolist()) for c in set(selector.labels())}
        assert found == {frozenset(np.flatnonzero(counts[:, c]).tolist()) for c in range(4)}


def test_the_best_of_several_starts_is_kept() -> None:
    """One start leaves clusters of a single client, which would train every round."""
    counts = two_classes_each()
    shares = counts / counts.sum(axis=1, keepdims=True)
    for seed in range(4):
        selector = FLIPSSelector(10, seed=seed)
        selector.register(counts)
        kept = _spread(shares, selector.labels())
        starts = []
        for start in range(20):
            alone = FLIPSSelector(10, seed=100 + start)
            alone.register(counts)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(flips, "STARTS", 1)
                starts.append(_spread(shares, alone.labels()))
        assert kept <= np.quantile(starts, 0.3), "better than most single starts"


def _spread(points: np.ndarray, labels: np.ndarray) -> float:
    groups = [points[labels == c] for c in np.unique(labels)]
    return sum(float(((group - group.mean(axis=0)) ** 2).sum()) for group in groups)


def test_clusters_take_turns_and_so_do_their_clients() -> None:
    """Clusters of 4, 2 and 2 clients, three seats: one of each every round; the four take turns."""
    counts = blocks(4, 2, 2)
    selector = FLIPSSelector(3, seed=2)
    selector.register(counts)
    times: Counter[object] = Counter()
    for r in range(1, 9):
        cohort = selector.select()
        assert sorted(counts[list(cohort.clients)].argmax(axis=1)) == [0, 1, 2]
        times.update(cohort.clients)
        for c in range(3):
            own = [times[k] for k in np.flatnonzero(counts[:, c])]
            assert max(own) - min(own) <= 1
            assert sum(own) == r
    # Only the first cluster is there, for two rounds: afterwards the others have their turn, until even.
    first = np.flatnonzero(counts[:, 0]).tolist()
    for _ in range(2):
        assert len(selector.select(first).clients) == 3
    later = Counter(int(counts[k].argmax()) for _ in range(4) for k in selector.select().clients)
    assert later == {1: 6, 2: 6}


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_picks_are_those_of_the_definition(data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, 10))
    cells = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)
    counts = np.array(data.draw(st.lists(cells, min_size=clients, max_size=clients)))
    size, clusters = data.draw(st.integers(1, 4)), data.draw(st.one_of(st.none(), st.integers(1, 6)))
    selector = FLIPSSelector(size, seed=data.draw(st.integers(0, 9)), clusters=clusters)
    selector.register(counts)
    labels, times = selector.labels().tolist(), [0] * clients
    assert len(set(labels)) <= (clusters or size)
    for _ in range(4):
        here = sorted(data.draw(st.lists(st.integers(0, clients - 1), min_size=1, unique=True)))
        rng = selector.rng()
        used = [sum(times[k] for k in range(clients) if labels[k] == c) for c in range(max(labels) + 1)]
        expected: list[int] = []
        while len(expected) < min(size, len(here)):
            left = [k for k in here if k not in expected]
            open_clusters = sorted({labels[k] for k in left})
            least = [c for c in open_clusters if used[c] == min(used[o] for o in open_clusters)]
            cluster = least[rng.integers(len(least))]
            members = [k for k in left if labels[k] == cluster]
            idle = [k for k in members if times[k] == min(times[m] for m in members)]
            expected.append(idle[rng.integers(len(idle))])
            used[cluster] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CohortWarning)
            assert list(selector.select(here).clients) == expected
        for k in expected:
            times[k] += 1


def test_many_clients_join_the_nearest_centre(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flips, "SAMPLE", 50)
    monkeypatch.setattr(flips, "_CHUNK", 64)
    counts = blocks(100, 80, 120)
    counts[:, 0] += 1
    selector = FLIPSSelector(3, seed=1)
    selector.register(counts)
    found = [set(np.flatnonzero(selector.labels() == c).tolist()) for c in range(3)]
    expected = [set(np.flatnonzero(counts.argmax(axis=1) == c).tolist()) for c in range(3)]
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


def test_degenerate_counts() -> None:
    alike = FLIPSSelector(3, seed=0)
    alike.register([[4, 4]] * 5)
    assert set(alike.labels()) == {0}, "as many clusters as there are different clients"
    assert {client for _ in range(2) for client in alike.select().clients} == set(range(5))
    empty = FLIPSSelector(2, seed=0)
    empty.register([[0, 0], [3, 1], [0, 0]], noisy=True)
    assert empty.labels()[0] == empty.labels()[2] != empty.labels()[1]
    one = FLIPSSelector(1)
    one.register({"a": [1]})
    assert one.select().clients == ("a",)


def test_clusters_follow_the_counts_and_the_seed() -> None:
    selector = FLIPSSelector(2, seed=0)
    selector.register([[9, 0], [8, 1], [0, 9]])
    before = selector.labels().tolist()
    assert before[0] == before[1] != before[2]
    selector.update({1: [0, 7]})
    after = selector.labels().tolist()
    assert after[1] == after[2] != after[0]


def two_classes_each(clients: int = 100) -> np.ndarray:
    """Two classes of ten per client: where k-means ends depends on its start."""
    rng = np.random.default_rng(0)
    counts = np.zeros((clients, 10), dtype=int)
    for row in counts:
        row[rng.choice(10, 2, replace=False)] = rng.integers(5, 50, 2)
    return counts


def after(rounds: int, counts: np.ndarray, seed: int, starts: int) -> tuple[dict[str, Any], np.ndarray]:
    """The state of a selector that takes the best of so many starts, and its clusters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flips, "STARTS", starts)
        selector = FLIPSSelector(10, seed=seed)
        selector.register(counts)
        for _ in range(rounds):
            selector.select()
        return selector.state_dict(), selector.labels()


@pytest.mark.parametrize("says", [True, False], ids=["says its starts", "of an older version"])
@pytest.mark.parametrize("rounds", [1, 4, 30])
def test_a_state_of_other_clusters_is_refused_and_nothing_changes(rounds: int, says: bool) -> None:
    counts = two_classes_each()
    for seed in (0, 1, 3):  # of 2 the first start is the best
        old, clusters = after(rounds, counts, seed, starts=1)
        new, best = after(rounds, counts, seed, starts=10)
        assert not np.array_equal(clusters, best)
        if not says:
            del old["starts"], new["starts"]
        selector = FLIPSSelector(10, seed=seed + 50)  # the state's seed counts
        selector.register(counts)
        untouched = selector.state_dict()
        with pytest.raises(InputError, match=r"^state: counts the turns of clusters that were the best of 1 start"):
            selector.load_state_dict(old)
        assert selector.state_dict() == untouched
        selector.load_state_dict(new)
        assert np.array_equal(selector.labels(), best)
        assert (selector.round, selector.seed) == (rounds, seed)


def test_a_state_whose_clusters_are_todays_goes_on_however_they_were_made() -> None:
    counts = blocks(5, 3, 9, 1)
    for says in (True, False):
        old, _ = after(6, counts, 3, starts=1)
        if not says:
            del old["starts"]
        selector = FLIPSSelector(10, seed=3)
        selector.register(counts)
        selector.load_state_dict(old)
        assert selector.round == 6
    fresh, _ = after(0, two_classes_each(), 0, starts=1)
    unused = FLIPSSelector(10, seed=0)
    unused.register(two_classes_each())
    unused.load_state_dict(fresh)  # nobody has had a turn
    with pytest.raises(InputError, match="state: starts: 'ten' is out of range"):
        unused.load_state_dict(fresh | {"starts": "ten"})
