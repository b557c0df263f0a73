"""Noise that belongs to a client: its distribution, and what does not change it."""

from __future__ import annotations

import numpy as np
import pytest

from fedentopt.errors import InputError
from fedentopt.selection.noise import keyed_laplace


def test_it_is_laplace_of_scale_one_over_epsilon() -> None:
    names = [f"client {k}" for k in range(40_000)]
    noise = keyed_laplace(np.zeros((40_000, 3)), 0.5, names, seed=1)
    for column in noise.T:
        ordered = np.sort(column)
        distribution = np.where(ordered < 0, 0.5 * np.exp(ordered / 2), 1 - 0.5 * np.exp(-ordered / 2))
        steps = np.arange(1, ordered.size + 1) / ordered.size
        assert np.abs(distribution - steps).max() < 1.95 / np.sqrt(ordered.size)  # Kolmogorov-Smirnov, 0.1 %
    assert np.abs(np.corrcoef(noise.T) - np.eye(3)).max() < 0.02
    assert np.abs(np.corrcoef(noise[:-1, 0], noise[1:, 0])[0, 1]) < 0.02


def test_it_depends_on_seed_and_name_alone() -> None:
    counts = np.arange(12.0).reshape(4, 3)
    whole = keyed_laplace(counts, 1.0, ["a", "b", "c", "d"], seed=3)
    part = keyed_laplace(counts[[2, 0]], 1.0, ["c", "a"], seed=3)
    assert (part == whole[[2, 0]]).all()
    assert (keyed_laplace(counts, 1.0, ["a", "b", "c", "d"], seed=4) != whole).all()
    assert (keyed_laplace(counts, 1.0, ["e", "f", "g", "h"], seed=3) != whole).all()
    halved = keyed_laplace(counts, 2.0, ["a", "b", "c", "d"], seed=3) - counts
    assert halved == pytest.approx((whole - counts) / 2)


@pytest.mark.parametrize(
    ("counts", "epsilon", "message"),
    [
        ([[1.0]], 1e-300, "epsilon: 1e-300 gives noise of scale"),
        ([[1.0]], 0, "epsilon: 0 is out of range"),
        ([[np.nan]], 1, "one row of finite numbers per client"),
        ([1.0], 1, "one row of finite numbers per client"),
    ],
)
def test_what_cannot_have_noise_is_refused(counts: list, epsilon: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        keyed_laplace(counts, epsilon, ["a"], seed=0)
