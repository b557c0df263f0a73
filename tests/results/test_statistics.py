"""Means, deviations and paired intervals against numbers from tables and by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedentopt.results.statistics import (
    holm,
    mean,
    mean_interval,
    paired_interval,
    paired_p_value,
    sample_std,
    student_quantile,
)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    # The two-sided 95 % column of any table of Student's t.
    [
        (1, 12.7062),
        (2, 4.3027),
        (3, 3.1824),
        (4, 2.7764),
        (5, 2.5706),
        (9, 2.2622),
        (10, 2.2281),
        (30, 2.0423),
        (120, 1.9799),
    ],
)
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, abs=5e-5)


def test_quantiles_with_a_closed_form() -> None:
    assert student_quantile(1, 0.5) == pytest.approx(1.0, rel=1e-11)  # Cauchy: half of it lies within 1
    assert student_quantile(2, 0.99) == pytest.approx(0.99 * math.sqrt(2 / (1 - 0.99**2)), rel=1e-9)
    with pytest.raises(ValueError, match="0 degrees"):
        student_quantile(0)


def test_an_interval_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, deviation 1, so 2 ± 4.3027 / √3.
    found = paired_interval({0: 11.0, 1: 22.0, 2: 33.0, 9: 99.0}, {0: 10.0, 1: 20.0, 2: 30.0, 7: 5.0})
    assert found is not None
    assert found.seeds == 3
    assert found.mean == pytest.approx(2.0)
    assert found.low == pytest.approx(2 - 4.302652730 / math.sqrt(3), abs=1e-8)
    assert found.high == pytest.approx(2 + 4.302652730 / math.sqrt(3), abs=1e-8)
    assert not found.clear
    below = mean_interval([-5.0, -5.1, -4.9])
    assert below is not None
    assert below.clear


def test_one_seed_says_nothing_about_spread() -> None:
    assert paired_interval({0: 3.0}, {0: 1.0}) is None
    assert paired_interval({0: 3.0, 1: 4.0}, {2: 1.0, 1: 1.0}) is None
    assert sample_std([5.0]) is None
    assert mean([]) is None
    assert mean([5.0]) == 5.0


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.floats(-50, 50))
def test_a_shift_common_to_all_seeds_moves_the_interval_and_no_more(values: list[float], shift: float) -> None:
    ours = dict(enumerate(values))
    plain = paired_interval(ours, dict.fromkeys(ours, 0.0))
    moved = paired_interval({seed: value + shift for seed, value in ours.items()}, dict.fromkeys(ours, 0.0))
    assert plain is not None
    assert moved is not None
    assert moved.mean == pytest.approx(plain.mean + shift, abs=1e-9)
    assert moved.high - moved.low == pytest.approx(plain.high - plain.low, rel=1e-6, abs=1e-9)
    assert plain.low <= plain.mean <= plain.high
    deviation = sample_std(values)
    assert deviation is not None
    assert deviation >= 0


def test_holm_by_hand() -> None:
    # In order: 0.005 * 4, 0.01 * 3, 0.03 * 2 = 0.06, 0.04 * 1 = 0.04, which may not fall below the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1.0, 1.0]
    assert holm([0.02, None, 0.03]) == [pytest.approx(0.04), None, pytest.approx(0.04)]
    assert holm([0.2, 0.2]) == [0.4, 0.4]
    assert holm([]) == []


def test_paired_p_value_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, s = 1, t = 2 * sqrt(3); with two degrees of freedom P(|T| > t) = 1 - t/sqrt(2 + t^2).
    t = 2 * math.sqrt(3)
    found = paired_p_value({0: 1.0, 1: 3.0, 2: 5.0}, {0: 0.0, 1: 1.0, 2: 2.0})
    assert found == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert paired_p_value({0: 1.0, 1: 2.0}, {0: 2.0, 1: 3.0}) == 0.0
    assert paired_p_value({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}) == 1.0
    assert paired_p_value({0: 1.0}, {0: 2.0}) is None


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_is_between_the_p_value_and_bonferroni(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for p, new in zip(p_values, adjusted, strict=True):
        assert new is not None
        assert p <= new <= min(1.0, len(p_values) * p)
    assert [p for _, p in sorted(zip(p_values, adjusted, strict=True))] == sorted(adjusted)  # type: ignore[type-var]
