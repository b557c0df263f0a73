"""The screen never loses a client that could be picked, however unequal the numbers, and leaves few."""

from __future__ import annotations

import numpy as np
import pytest

from fedentopt.selection import screen
from fedentopt.selection.measures import row_scores
from fedentopt.selection.rows import Rows
from fedentopt.selection.screen import Screen

TIE = 1e-9


def as_rows(counts: np.ndarray) -> Rows:
    held = counts > 0
    return Rows.from_lengths(held.sum(axis=1), np.nonzero(held)[1].astype(np.int32), counts[held].astype(np.float64))


def divergences(counts: np.ndarray, gathered: np.ndarray, target: np.ndarray) -> np.ndarray:
    return -row_scores(counts + gathered, np.log2(target))


def ask(counts, gathered, target, open_rows):
    rows = as_rows(counts)
    screened = Screen(rows, rows.totals(), target)
    return screened.candidates(gathered, open_rows, lambda places: divergences(counts[places], gathered, target), TIE)


def tables(rng: np.random.Generator, kind: str, clients: int, target: np.ndarray) -> np.ndarray:
    classes = target.size
    shares = rng.dirichlet(np.full(classes, rng.choice([0.1, 0.5, 5.0])), size=clients)
    if kind == "equal sizes":
        return rng.multinomial(50, shares).astype(float)
    if kind == "noisy":
        return np.maximum(rng.multinomial(50, shares) + rng.laplace(0, 2, shares.shape), 0)
    if kind == "sizes of all magnitudes":
        return shares * 10.0 ** rng.uniform(-6, 6, (clients, 1))
    if kind == "nearly the target":
        return 1000 * target + rng.normal(0, 1, shares.shape)
    return rng.integers(0, 2, shares.shape).astype(float)  # ties, and clients without anything


KINDS = ["equal sizes", "noisy", "sizes of all magnitudes", "nearly the target", "ties"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("aimed", [False, True])
def test_nobody_who_could_be_picked_is_lost(monkeypatch, kind, aimed):
    monkeypatch.setattr(screen, "_FEW", 1)
    monkeypatch.setattr(screen, "_CHUNK", 37)
    narrowed = 0
    for seed in range(60):
        rng = np.random.default_rng([seed, len(kind)])
        classes = int(rng.integers(2, 13))
        target = rng.dirichlet(np.full(classes, 2.0)) + 0.01 if aimed else np.ones(classes)
        target /= target.sum()
        counts = np.maximum(tables(rng, kind, 300, target), 0)
        # Cohorts from a single client to far larger and better balanced ones than any.
        gathered = counts[rng.choice(300, int(rng.integers(1, 60)), replace=False)].sum(axis=0)
        gathered += target * counts.sum(axis=1).max() * rng.choice([0.0, 1.0, 1e3, 1e6])
        if not gathered.any():
            continue
        open_rows = rng.random(300) < 0.8
        found = ask(counts, gathered, target, open_rows)
        assert found is not None
        assert open_rows[found].all()
        assert (np.diff(found) > 0).all()
        scores = np.where(open_rows, divergences(counts, gathered, target), np.inf)
        near = np.flatnonzero(scores <= scores.min() + TIE)
        assert set(near) <= set(found.tolist()), seed
        narrowed += found.size < open_rows.sum()
    assert narrowed > 10  # a screen that keeps everybody would lose nobody either


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_is_off_by_no_more_than_is_allowed_for(kind):
    worst = 0.0
    for seed in range(40):
        rng = np.random.default_rng([seed, len(kind), 1])
        target = rng.dirichlet(np.full(int(rng.integers(2, 13)), 2.0)) + 0.01
        target /= target.sum()
        counts = np.maximum(tables(rng, kind, 300, target), 0)
        gathered = counts[:20].sum(axis=0) + target * counts.sum(axis=1).max() * rng.choice([0.0, 1.0, 1e3, 1e6])
        rows = as_rows(counts)
        screened = Screen(rows, rows.totals(), target)
        size = gathered.sum()
        excess = gathered / size / target - 1
        own = float((target * excess**2).sum())
        screened._work_out(size / rows.totals().max(), excess, own, np.ones(300, dtype=bool))
        p = (counts + gathered) / (counts + gathered).sum(axis=1, keepdims=True)
        exact = ((p - target) ** 2 / target).sum(axis=1)
        allowed = [screened._rounding(float(np.sqrt(chi2)), excess, own) for chi2 in exact]
        shares = np.abs(screened._chi2 - exact) / allowed
        worst = max(worst, float(shares.max()))
    assert 0.001 < worst < 0.5  # not for nothing, and with room to spare


@pytest.mark.parametrize("kind", ["equal sizes", "noisy", "sizes of all magnitudes"])
def test_few_are_left_once_a_few_clients_are_gathered(kind):
    rng = np.random.default_rng(1)
    target = np.full(10, 0.1)
    counts = tables(rng, kind, 20_000, target)
    found = ask(counts, counts[:40].sum(axis=0), target, np.arange(20_000) >= 40)
    assert found is not None
    assert 1 <= found.size < 200


def test_no_answer_where_there_is_none():
    counts = np.eye(3)[np.arange(60) % 3]
    target = np.full(3, 1 / 3)
    everybody, nobody = np.ones(60, dtype=bool), np.zeros(60, dtype=bool)
    assert ask(counts, counts[0], target, everybody) is None  # twenty equal ones are more than every sixteenth
    assert ask(counts, counts[0], target, nobody) is None
    assert ask(np.vstack([counts, [1e12, 0, 0]]), counts[0], target, np.ones(61, dtype=bool)) is None


def test_which_tables_it_serves():
    dense, sparse = as_rows(np.ones((50, 100))), as_rows(np.eye(100))
    even = np.full(100, 0.01)
    assert Screen.serves(dense, even)
    assert not Screen.serves(sparse, even)
    assert Screen.serves(as_rows(np.eye(10)), np.full(10, 0.1))
    assert not Screen.serves(as_rows(np.eye(3)), np.array([0.5, 0.5, 2.0**-1000]))


@pytest.mark.parametrize("step", [1, 7, 60, 1000])
def test_parts_of_rows_are_the_rows(step):
    counts = np.random.default_rng(2).integers(0, 3, (60, 4)).astype(float)
    counts[[0, 13, 14, 59]] = 0
    parts = [as_rows(counts).part(start, start + step).dense(4) for start in range(0, 60, step)]
    assert [len(part) for part in parts[:-1]] == [step] * (len(parts) - 1)
    assert np.array_equal(np.concatenate(parts), counts)
