"""Draws by weight: the distribution of successive draws, weights of 0, logarithms beyond what exp can take."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from fedentopt.selection.draws import draw_by_weight, draw_one, draw_place


def test_successive_draws_have_the_probabilities_of_successive_draws() -> None:
    weights = np.array([5.0, 3.0, 2.0])
    rng = np.random.default_rng(1)
    found = Counter(tuple(draw_by_weight(rng, weights, 2).tolist()) for _ in range(20_000))
    for first, second, _ in permutations(range(3)):
        p = weights[first] / 10 * weights[second] / (10 - weights[first])
        assert found[first, second] / 20_000 == pytest.approx(p, abs=4 * np.sqrt(p / 20_000))


def test_a_few_of_many_are_those_of_all() -> None:
    weights = np.random.default_rng(0).random(200)
    for seed in range(20):
        all_of_them = draw_by_weight(np.random.default_rng(seed), weights, 200)
        assert sorted(all_of_them) == list(range(200))
        few = draw_by_weight(np.random.default_rng(seed), weights, 7)
        assert few.tolist() == all_of_them[:7].tolist()


def test_weights_of_zero_come_last_and_all_alike() -> None:
    weights = np.array([0.0, 1.0, 0.0, 2.0] + [0.0] * 60)
    firsts: Counter[int] = Counter()
    for seed in range(300):
        drawn = draw_by_weight(np.random.default_rng(seed), weights, 4).tolist()
        assert set(drawn[:2]) == {1, 3}
        assert len(set(drawn)) == 4
        firsts.update(drawn[2:3])
    assert max(firsts.values()) < 20, "600 draws among 62"
    nothing = draw_by_weight(np.random.default_rng(0), np.zeros(5), 9)
    assert sorted(nothing) == [0, 1, 2, 3, 4]
    assert draw_by_weight(np.random.default_rng(0), np.array([1e308, 1e-308]), 2).tolist() == [0, 1]


def test_one_by_logarithms() -> None:
    logs = np.array([-np.inf, 5000.0, 5000.0 + np.log(3.0), -9000.0])
    rng = np.random.default_rng(3)
    found = Counter(draw_one(rng, logs) for _ in range(4000))
    assert set(found) == {1, 2}
    assert found[2] / 4000 == pytest.approx(0.75, abs=0.03)
    assert {draw_one(rng, np.full(3, -np.inf)) for _ in range(50)} == {0, 1, 2}


def test_a_mark_at_the_very_end_is_still_inside() -> None:
    class Last:
        def random(self) -> float:
            return 1.0  # as a product with the sum may round

    assert draw_place(Last(), np.array([0.5, 2.0, 2.0])) == 1  # type: ignore[arg-type]
    assert draw_place(Last(), [0.5, 2.0, 2.0]) == 1  # type: ignore[arg-type]
