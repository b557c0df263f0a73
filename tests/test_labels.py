from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedentopt.errors import InputError
from fedentopt.labels import label_counts, validate_report


def test_counts_by_hand() -> None:
    counts = label_counts([2, 0, 2, 2], 4)
    assert counts.tolist() == [1, 0, 3, 0]
    assert counts.dtype == np.int64
    assert label_counts([], 3).tolist() == [0, 0, 0]
    assert label_counts(np.array([1, 1], dtype=np.uint8), 2).tolist() == [0, 2]


@given(st.lists(st.integers(0, 6)))
def test_counts_add_up(labels: list[int]) -> None:
    assert label_counts(labels, 7).tolist() == [labels.count(c) for c in range(7)]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 3], "label 3 at position 2; accepted: 0 to 2"),
        ([0, -1], "label -1 at position 1"),
        ([0.5], "values of type float64"),
        ([[0], [1, 2]], "rows of different lengths"),
        ([[0, 1]], r"shape \(1, 2\)"),
        (["a"], "values of type <U1"),
        ([True], "values of type bool"),
        (np.array([2**63], dtype=np.uint64), "too large"),
    ],
)
def test_bad_labels_are_refused(labels, message: str) -> None:
    with pytest.raises(InputError, match=f"labels: .*{message}"):
        label_counts(labels, 3)


@pytest.mark.parametrize("num_classes", [0, -1, 2.0, True, None])
def test_bad_number_of_classes_is_refused(num_classes) -> None:
    with pytest.raises(InputError, match="num_classes"):
        label_counts([0], num_classes)


def test_good_reports_come_back_as_they_are() -> None:
    assert validate_report("a", [1, 0, 2], 3, noisy=False).tolist() == [1.0, 0.0, 2.0]
    assert validate_report("a", np.array([-1.5, 0.25]), 2, noisy=True).tolist() == [-1.5, 0.25]
    assert validate_report("a", [0, 0], 2, noisy=True).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("counts", "noisy", "message"),
    [
        ([1, 2], False, "2 label counts of type int64; accepted: 3 numbers"),
        ([1, 2, 3, 4], True, "4 label counts"),
        ([[1, 2, 3]], False, r"shape \(1, 3\)"),
        (5, False, r"shape \(\)"),
        (["1", "2", "3"], False, "type <U1"),
        ([True, False, True], False, "type bool"),
        ([1, None, 2], False, "type object"),
        ([[1], [1, 2], 3], False, "type object"),
        ([1, float("nan"), 2], True, "the count of class 1 is nan; accepted: finite"),
        ([1, 2, float("inf")], True, "the count of class 2 is inf; accepted: finite"),
        ([1, 2, -1], False, "the count of class 2 is -1; accepted: 0 or more"),
        ([1, 1e17, 1], False, r"the count of class 1 is 1e\+17; accepted: at most 2\*\*53"),
        ([0, 0, 0], False, "all label counts are 0; accepted: at least one sample"),
    ],
)
def test_bad_reports_are_refused_by_name(counts, noisy: bool, message: str) -> None:
    with pytest.raises(InputError, match=f"client 'site-7': .*{message}"):
        validate_report("site-7", counts, 3, noisy)
