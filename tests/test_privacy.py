from __future__ import annotations

import sys

import numpy as np
import pytest

from fedentopt import EntropySelector
from fedentopt.errors import InputError
from fedentopt.privacy import laplace_noise, secure_laplace

SAMPLES = 40_000


def noise_of(kind: str, epsilon: float) -> np.ndarray:
    counts = np.arange(SAMPLES, dtype=np.float64) % 50
    if kind == "simulation":
        return laplace_noise(counts, epsilon, np.random.default_rng(1)) - counts
    return secure_laplace(counts, epsilon) - counts


@pytest.mark.parametrize("kind", ["simulation", "real client"])
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_noise_is_laplace_of_scale_one_over_epsilon(kind: str, epsilon: float) -> None:
    noise = np.sort(noise_of(kind, epsilon))
    assert abs(noise.mean()) < 6 * np.sqrt(2 / SAMPLES) / epsilon
    assert np.abs(noise).mean() == pytest.approx(1 / epsilon, rel=6 / np.sqrt(SAMPLES))
    # Kolmogorov-Smirnov distance to the Laplace distribution; a fair sample stays below 2.5 / sqrt(n) but once
    # in 100,000 times, while Gaussian noise of the same spread is 0.06 away.
    expected = np.where(noise < 0, 0.5 * np.exp(noise * epsilon), 1 - 0.5 * np.exp(-np.abs(noise) * epsilon))
    assert np.abs(expected - (np.arange(SAMPLES) + 0.5) / SAMPLES).max() < 2.5 / np.sqrt(SAMPLES)


def test_simulated_noise_follows_its_generator() -> None:
    first, second, other = (laplace_noise([1, 2], 0.5, np.random.default_rng(s)) for s in (3, 3, 4))
    assert first.tolist() == second.tolist() != other.tolist()
    assert first.dtype == np.float64
    assert laplace_noise(np.ones((4, 3)), 1.0, np.random.default_rng(0)).shape == (4, 3)


def test_real_noise_differs_every_time() -> None:
    assert secure_laplace([1, 2, 3], 0.5).tolist() != secure_laplace([1, 2, 3], 0.5).tolist()
    assert secure_laplace(np.ones((2, 3)), 0.5).shape == (2, 3)


def test_clamped_at_read_there_are_no_negatives() -> None:
    noisy = laplace_noise(np.zeros((50, 4)), 0.1, np.random.default_rng(0))
    assert noisy.min() < 0
    selector = EntropySelector(10, seed=0)
    selector.register(noisy, noisy=True)
    cohort = selector.select()
    assert cohort.label_counts.min() >= 0
    np.testing.assert_allclose(cohort.label_counts, np.maximum(noisy[list(cohort.clients)], 0).sum(axis=0))


@pytest.mark.parametrize("epsilon", [0, -1, float("nan"), float("inf"), 5e-324, "1", None, True])
def test_bad_epsilon_is_refused(epsilon) -> None:
    with pytest.raises(InputError, match=r"epsilon: .*accepted"):
        laplace_noise([1], epsilon, np.random.default_rng(0))
    with pytest.raises(InputError, match=r"epsilon: .*accepted"):
        secure_laplace([1], epsilon)


@pytest.mark.parametrize("epsilon", [3.0, 1 / 3, 0.7, 1e-6, 50.0])
def test_budgets_whose_inverse_rounds_down_are_kept(epsilon: float) -> None:
    # OpenDP's own privacy map says 3.0000000000000004 for a scale of 1/3.0; the scale is widened until it fits.
    assert np.isfinite(secure_laplace([1.0, 2.0], epsilon)).all()


def test_the_scale_is_widened_until_opendp_says_the_budget_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    dp = pytest.importorskip("opendp.prelude")
    make, scales = dp.m.make_laplace, []

    def noting(domain, metric, scale):
        scales.append(scale)
        return make(domain, metric, scale=scale)

    monkeypatch.setattr(dp.m, "make_laplace", noting)
    secure_laplace([1.0, 2.0], 3.0)
    assert scales[0] == 1 / 3.0
    assert len(scales) > 1
    assert scales == sorted(set(scales))


def test_without_opendp_a_real_client_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    with pytest.raises(InputError, match=r"needs OpenDP; install fedentopt\[flower\]"):
        secure_laplace([1.0], 1.0)


@pytest.mark.parametrize("epsilon", [1e-300, 1e-18])
def test_noise_beyond_all_counts_is_refused_by_the_budget(epsilon: float) -> None:
    words = rf"epsilon: {epsilon!r} gives noise of scale .*accepted: a larger one, such as 1e-12"
    with pytest.raises(InputError, match=words):
        laplace_noise(np.zeros((50, 4)), epsilon, np.random.default_rng(0))
    with pytest.raises(InputError, match=words):
        secure_laplace(np.zeros(50), epsilon)
    EntropySelector(10).register(laplace_noise(np.zeros((50, 4)), 1e-12, np.random.default_rng(0)), noisy=True)


class Drawn(np.random.Generator):
    """Draws one number again and again."""

    def __init__(self, value: float) -> None:
        super().__init__(np.random.PCG64(0))
        self.value = value

    def laplace(self, loc=0.0, scale=1.0, size=None):
        return np.full(size, self.value)


def test_noise_may_make_the_largest_count_and_no_larger_one() -> None:
    for edge in (2.0**53, -(2.0**53)):
        assert laplace_noise([0.0], 1.0, Drawn(edge)).tolist() == [edge]
        with pytest.raises(InputError, match="beyond what a count can be"):
            laplace_noise([0.0], 1.0, Drawn(2 * edge))
    assert laplace_noise([2.0**54], 1.0, Drawn(0.0)).tolist() == [2.0**54]  # it was too large before


def test_counts_must_be_finite() -> None:
    for counts in (["a"], [[1], [2, 3]], None, {}, [10**400]):
        with pytest.raises(InputError, match="counts: noise can only be added to finite numbers"):
            laplace_noise(counts, 1.0, np.random.default_rng(0))
    with pytest.raises(InputError, match="counts: "):
        laplace_noise([float("nan")], 1.0, np.random.default_rng(0))
    with pytest.raises(InputError, match="counts: "):
        secure_laplace([float("inf")], 1.0)


def test_a_budget_that_no_float_can_hold_is_refused() -> None:
    with pytest.raises(InputError, match=r"epsilon: 10+ is out of range"):
        laplace_noise([1], 10**400, np.random.default_rng(0))
