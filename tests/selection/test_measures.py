from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedentopt.errors import InputError
from fedentopt.selection.measures import classes_covered, covers_all, entropy, selection_entropy


def test_entropy_by_hand() -> None:
    assert entropy([1, 1, 1, 1]) == 2
    assert entropy([2, 1, 1, 0]) == 1.5
    assert entropy([7]) == 0
    assert entropy([0, 0]) == 0
    assert entropy([-5, 3, 3]) == 1  # noisy counts below 0 are read as 0
    assert math.copysign(1, entropy([0, 4])) == 1


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=8))
def test_entropy_is_bounded_and_scale_free(counts: list[int]) -> None:
    value = entropy(counts)
    assert 0 <= value <= math.log2(max(classes_covered(counts), 1)) + 1e-12
    assert entropy([7 * x for x in counts]) == pytest.approx(value, abs=1e-12)
    assert entropy(counts[::-1]) == pytest.approx(value, abs=1e-12)


def test_selection_entropy_by_hand() -> None:
    assert selection_entropy([5, 5, 5, 5]) == 1
    assert selection_entropy([10, 0, 0, 0]) == 0
    assert selection_entropy([1, 1, 0, 0]) == 0.5
    assert selection_entropy([0, 0]) == 0
    assert selection_entropy([3]) == 1
    assert selection_entropy([0]) == 0


def test_coverage() -> None:
    assert classes_covered([0, 3, 0.5, -1]) == 2
    assert covers_all(3.18, 10)
    assert not covers_all(3.16, 10)
    assert not covers_all(math.log2(9), 10)
    assert covers_all(0.0, 1)
    assert not covers_all(0.0, 2)
    assert covers_all(1e-9, 2)


@pytest.mark.parametrize("classes", [2, 10, 12, 14, 100, 1000])
def test_even_counts_with_one_class_missing_prove_nothing(classes: int) -> None:
    # Their entropy is log2(C - 1) exactly, and for some C it is rounded up.
    assert not covers_all(entropy([7] * (classes - 1) + [0]), classes)
    assert covers_all(entropy([7] * classes), classes)


@given(st.lists(st.integers(0, 50), min_size=2, max_size=6))
def test_the_entropy_rule_never_claims_too_much(counts: list[int]) -> None:
    if covers_all(entropy(counts), len(counts)):
        assert classes_covered(counts) == len(counts)


@pytest.mark.parametrize("bad", [[], [[1, 2]], ["a"], [1, float("nan")], None])
def test_bad_vectors_are_refused(bad) -> None:
    for measure in (entropy, selection_entropy, classes_covered):
        with pytest.raises(InputError, match=r"counts|times_selected"):
            measure(bad)
    with pytest.raises(InputError, match="num_classes: 0"):
        covers_all(1.0, 0)


def test_refusal_names_the_position() -> None:
    with pytest.raises(InputError, match="counts: inf at position 1"):
        entropy(np.array([1, np.inf]))
