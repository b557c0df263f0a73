"""Rounds tried without training: what is told to the selector, and what the figures are of."""

from __future__ import annotations

import numpy as np
import pytest

from fedentopt.errors import InputError
from fedentopt.selection.measures import entropy
from fedentopt.selection.trial import sweep

COUNTS = np.array([[8, 0, 0], [0, 4, 0], [2, 2, 2], [0, 0, 6]])


def test_figures_are_of_the_true_counts_where_others_were_reported() -> None:
    reported = np.array([[-1.0, 5.0, 0.5], [3.0, -0.5, 2.0], [1.0, 1.0, 1.0], [0.0, -2.0, -1.0]])
    (row,) = sweep(COUNTS, [(4, 0)], rounds=3, seed=0, reported=reported)  # everybody: the picks play no part
    assert row.mean_entropy == pytest.approx(entropy(COUNTS.sum(axis=0)))
    assert row.worst_entropy == pytest.approx(row.mean_entropy)
    assert (row.cohort, row.buffer, row.coverage, row.never_selected) == (4, 0, 1.0, 0)


def test_counts_are_exact_unless_said_otherwise() -> None:
    empty = np.vstack([COUNTS, np.zeros((1, 3), dtype=int)])
    with pytest.raises(InputError, match="client 4: all label counts are 0"):
        sweep(empty, [(2, 0)], rounds=1, seed=0)
    (row,) = sweep(empty, [(5, 0)], rounds=1, seed=0, noisy=True)
    assert row.mean_entropy == pytest.approx(entropy(COUNTS.sum(axis=0)))


@pytest.mark.filterwarnings("error")
def test_weights_of_a_target_may_be_as_large_as_numbers_go() -> None:
    """Their sum is beyond the largest one; only their shares count."""
    counts = np.array([[3.0, 1.0], [1.0, 5.0], [2.0, 2.0]])
    small, large = (
        sweep(counts, [(2, 0), (2, None)], 4, 0, target=np.array([1.0, 1.0]) * scale) for scale in (1, 1e308)
    )
    assert large == small
