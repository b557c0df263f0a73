"""Fed-CBS: QCID by hand, picks against the definition, and the same distribution among many clients."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedentopt.errors import InputError
from fedentopt.selection import FedCBSSelector, fed_cbs
from fedentopt.selection.fed_cbs import LEAST, Imbalance
from fedentopt.selection.rows import Rows


def rows_of(counts: Any) -> Rows:
    table = np.asarray(counts, dtype=np.float64)
    owners, classes = np.nonzero(table)
    lengths = np.bincount(owners, minlength=len(table))
    return Rows.from_lengths(lengths, classes.astype(np.int32), table[owners, classes])


def qcid(labels: np.ndarray) -> float:
    """The definition."""
    total = labels.sum()
    return 1 - 1 / labels.size if total == 0 else float(((labels / total - 1 / labels.size) ** 2).sum())


def test_qcid_by_hand() -> None:
    counts = [[10, 0], [0, 10], [5, 5], [0, 0], [3, 1]]
    imbalance = Imbalance(rows_of(counts), 2)
    # (1, 0): 2 * 0.25; (3/4, 1/4): 2 / 16; an even client 0, floored; an empty one like one class alone
    np.testing.assert_allclose(np.exp(imbalance.log_single), [0.5, 0.5, LEAST, 0.5, 0.125])
    # with (10, 0) gathered: (20, 0), (10, 10), (15, 5), (10, 0), (13, 1)
    expected = [0.5, LEAST, 0.125, 0.5, 2 * (13 / 14 - 0.5) ** 2]
    np.testing.assert_allclose(np.exp(imbalance.logs(np.array([10.0, 0]))), expected)
    np.testing.assert_allclose(np.exp(imbalance.logs(np.array([10.0, 0]), np.array([4, 1]))), expected[4::-3])


def test_a_pair_that_is_even_is_found() -> None:
    """From (10, 0), (0, 10) has QCID 0, floored at 1e-12: against 0.5 and more it is drawn but for 1 in 1e23."""
    counts = {"a": [10, 0], "b": [10, 1], "c": [0, 10], "d": [30, 2]}
    for seed in range(30):
        selector = FedCBSSelector(2, seed=seed)
        selector.register(counts)
        cohort = selector.select().clients
        if cohort[0] == "a":
            assert cohort == ("a", "c")
            return
    raise AssertionError("no seed starts with a")


def reference(counts: np.ndarray, available: list[int], size: int, selector: FedCBSSelector, times: Any) -> list[int]:
    """The definition in loops, with the selector's random numbers."""
    rng = selector.rng()
    t = selector.round + 1
    picked: list[int] = []
    while len(picked) < min(size, len(available)):
        left = [k for k in available if k not in picked]
        beta = selector.beta * (len(picked) + 1)
        logs = []
        for k in left:
            own = -beta * math.log(max(qcid(counts[[*picked, k]].sum(axis=0)), LEAST))
            if not picked and t > 1 and selector.lam:
                own = math.log(math.exp(own) + selector.lam * math.sqrt(3 * math.log(t) / (2 * (1 + times[k]))))
            logs.append(own)
        weights = [math.exp(log - max(logs)) for log in logs]
        mark, reached = rng.random() * sum(weights), 0.0
        for k, weight in zip(left, weights, strict=True):
            reached += weight
            if mark < reached:
                picked.append(k)
                break
    return picked


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_picks_are_those_of_the_definition(data: st.DataObject) -> None:
    clients, classes = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    cells = st.lists(st.integers(0, 30), min_size=classes, max_size=classes).filter(any)
    counts = np.array(data.draw(st.lists(cells, min_size=clients, max_size=clients)))
    size = data.draw(st.integers(1, 5))
    selector = FedCBSSelector(
        size, seed=data.draw(st.integers(0, 99)), lam=data.draw(st.sampled_from([0.0, 10.0, 1e4]))
    )
    selector.register(counts)
    times = [0] * clients
    for _ in range(4):
        here = data.draw(st.lists(st.integers(0, clients - 1), min_size=1, unique=True))
        expected = reference(counts, sorted(here), size, selector, times)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert list(selector.select(here).clients) == expected
        for k in expected:
            times[k] += 1
    assert dict(selector.memory()["times"]) == {k: n for k, n in enumerate(times) if n}


def test_exploration_finds_those_never_chosen() -> None:
    """One even client among one-class ones: lam draws the others into the first place."""
    counts = [[5, 5], *([[10, 0]] * 6)]

    def firsts(lam: float) -> set[Any]:
        selector = FedCBSSelector(1, seed=0, lam=lam)
        selector.register(counts)
        return {selector.select().clients[0] for _ in range(60)}

    assert firsts(0.0) == {0}
    assert len(firsts(1e13)) == 7


@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e15])
def test_nothing_overflows(scale: float) -> None:
    """QCID**-m of an even cohort at m = 120 is 1e1440; of counts of any size."""
    counts = np.tile([[2.0, 2.0], [3.0, 1.0], [1.0, 3.0]], (60, 1)) * scale
    selector = FedCBSSelector(120, seed=1)
    selector.register(counts, noisy=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cohorts = [selector.select().clients for _ in range(2)]
    assert all(len(set(cohort)) == 120 for cohort in cohorts)


# --- many clients
def many(seed: int = 0, clients: int = 600) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.multinomial(50, rng.dirichlet(np.full(4, 0.6), clients)) * rng.integers(1, 9, clients)[:, None]


def much_alike(clients: int = 600) -> np.ndarray:
    """Clients that all hold nearly even labels, as where data are spread at random."""
    return np.random.default_rng(1).multinomial(1000, np.full(4, 0.25), clients)


@pytest.mark.parametrize(("beta", "alike"), [(2.0, False), (9.0, False), (60.0, False), (100.0, True), (1e-3, True)])
def test_among_many_the_distribution_is_the_same(beta: float, alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws by bounds against the weights of the definition, in eight groups of clients with like weights."""
    counts = much_alike() if alike else many()
    exact = Imbalance(rows_of(counts), 4)
    monkeypatch.setattr(fed_cbs, "MANY", 1)
    monkeypatch.setattr(fed_cbs, "_CHUNK", 128)
    fast = Imbalance(rows_of(counts), 4)
    gathered = counts[:6].sum(axis=0).astype(np.float64)
    if alike:  # a hundred of them, as even together as they come after many draws
        gathered = np.array([25001.0, 24999.0, 25000.0, 25000.0])
    open_rows = np.arange(600) >= 6
    logs = np.where(open_rows, -beta * exact.logs(gathered), -np.inf)
    p = np.exp(logs - logs.max())
    p /= p.sum()
    order = np.argsort(-p)
    groups = np.minimum((np.cumsum(p[order]) * 8).astype(int), 7)
    expected = np.bincount(groups, weights=p[order], minlength=8)
    where = np.empty(600, dtype=int)
    where[order] = groups
    rng = np.random.default_rng(7)
    by_bound = 0
    draws = 1500
    found = np.zeros(8)
    for _ in range(draws):
        bounds = fast._screen.spread(gathered, open_rows)  # type: ignore[union-attr]
        assert bounds is not None
        drawn = fast._draw_by_bound(rng, gathered, beta, *bounds)
        by_bound += drawn is not None
        found[where[fast.draw(rng, gathered, open_rows, beta) if drawn is None else drawn]] += 1
    assert by_bound == draws, "the case did not test the bounds"
    used = expected > 1e-9
    assert ((found - draws * expected)[used] ** 2 / (draws * expected[used])).sum() < 24.3  # 0.1 % of chi2 with 7
    assert not found[~used].any()


def test_bounds_hold_and_closed_clients_are_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fed_cbs, "MANY", 1)
    rng = np.random.default_rng(2)
    for seed in range(20):
        counts = many(seed)
        made = Imbalance(rows_of(counts), 4)
        gathered = counts[: 1 + seed].sum(axis=0).astype(np.float64)
        open_rows = rng.random(600) < 0.5
        bounds = made._screen.spread(gathered, open_rows)  # type: ignore[union-attr]
        assert bounds is not None
        chi2, off, share = bounds
        lower = (chi2[open_rows].astype(np.float64) - off) / (1 + share) / 4
        true = np.array([qcid(counts[k] + gathered) for k in np.flatnonzero(open_rows)])
        assert (lower <= true).all()
        assert np.isinf(chi2[~open_rows]).all()
        assert all(open_rows[made.draw(rng, gathered, open_rows, 30.0)] for _ in range(5))


def test_products_of_all_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worked out for all clients at once, where bounds say nothing, against each client by itself."""
    counts = many()
    gathered = counts[:9].sum(axis=0).astype(np.float64)
    monkeypatch.setattr(fed_cbs, "MANY", 1)
    monkeypatch.setattr(fed_cbs, "_CHUNK", 128)
    monkeypatch.setattr(fed_cbs, "FEW_CELLS", 0)
    made = Imbalance(rows_of(counts), 4)
    everybody = np.log([qcid(row + gathered) for row in counts])
    np.testing.assert_allclose(made.logs(gathered), everybody, rtol=1e-9)
    np.testing.assert_allclose(made.logs(gathered, np.arange(5, 600, 7)), everybody[5::7], rtol=1e-9)


def test_where_bounds_say_nothing_the_definition_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody even: QCID is 0 for all, which no bound in single precision can tell from others."""
    monkeypatch.setattr(fed_cbs, "MANY", 1)
    selector = FedCBSSelector(5, seed=0)
    selector.register(np.full((300, 4), 7))
    cohorts = [selector.select().clients for _ in range(40)]
    assert len({client for cohort in cohorts for client in cohort}) > 100
    alone = FedCBSSelector(3, seed=0)
    alone.register(np.zeros((300, 4)), noisy=True)  # nothing is ever gathered
    assert len(set(alone.select().clients)) == 3


def test_exponents_that_single_precision_cannot_take_are_left_to_the_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With QCID**-250000 a bound is too wide to draw by: it would be tried thousands of times."""
    monkeypatch.setattr(fed_cbs, "MANY", 1)
    counts = many()
    made = Imbalance(rows_of(counts), 4)
    gathered, open_rows = counts[:6].sum(axis=0).astype(np.float64), np.arange(600) >= 6
    bounds = made._screen.spread(gathered, open_rows)  # type: ignore[union-attr]
    assert bounds is not None
    assert made._draw_by_bound(np.random.default_rng(0), gathered, 250_000.0, *bounds) is None
    best = int(np.argmin(np.where(open_rows, made.logs(gathered), np.inf)))
    assert made.draw(np.random.default_rng(0), gathered, open_rows, 250_000.0) == best


def test_a_state_that_is_none_is_refused() -> None:
    selector = FedCBSSelector(2)
    selector.register([[1, 2], [3, 4], [5, 6]])
    selector.select()
    state = selector.state_dict()
    for times in (3, [["a"]], [[0, 0]], [[0, 1.5]], [[0, True]], [[0, 1], [0, 2]], [[None, 1]], [[0, "1"]]):
        with pytest.raises(InputError, match=r"state: times is .*; accepted: "):
            selector.load_state_dict({**state, "times": times})
        assert selector.state_dict() == state
