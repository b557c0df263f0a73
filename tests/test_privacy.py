from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedentopt import EntropySelector
from fedentopt.errors import InputError
from fedentopt.privacy import _mechanism, clip_persons, discrete_laplace, laplace_noise, secure_laplace

SAMPLES = 40_000
# How far the distribution of that many draws may be from the true one: by Massart's bound, 2 exp(-2 n t^2), which holds
# for every n and every distribution, a fair sampler is farther but once in 2e10 times.
FAR = 3.5 / np.sqrt(SAMPLES)
DRAWS = 10_000  # of the whole numbers


def noise_of(kind: str, epsilon: float) -> np.ndarray:
    counts = np.arange(SAMPLES, dtype=np.float64) % 50
    if kind == "simulation":
        return laplace_noise(counts, epsilon, np.random.default_rng(1)) - counts
    return secure_laplace(counts, epsilon) - counts


@pytest.mark.parametrize("kind", ["simulation", "real client"])
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_noise_is_laplace_of_scale_one_over_epsilon(kind: str, epsilon: float) -> None:
    noise = np.sort(noise_of(kind, epsilon))
    assert abs(noise.mean()) < 7 * np.sqrt(2 / SAMPLES) / epsilon
    assert np.abs(noise).mean() == pytest.approx(1 / epsilon, rel=7 / np.sqrt(SAMPLES))
    # Gaussian noise of the same spread is 0.06 away.
    expected = np.where(noise < 0, 0.5 * np.exp(noise * epsilon), 1 - 0.5 * np.exp(-np.abs(noise) * epsilon))
    assert np.abs(expected - (np.arange(SAMPLES) + 0.5) / SAMPLES).max() < FAR


@pytest.mark.parametrize(("epsilon", "sensitivity"), [(0.5, 1), (2.0, 1), (0.5, 3), (0.1, 2)])
def test_a_clients_noise_is_discrete_laplace(epsilon: float, sensitivity: int) -> None:
    counts = np.arange(DRAWS) % 50
    noise = discrete_laplace(counts, epsilon, sensitivity=sensitivity) - counts
    assert noise.dtype == np.int64
    # P(x) = (1 - a) / (1 + a) a^|x|, a = exp(-epsilon / sensitivity), so P(X <= x) for x < 0 is a^-x / (1 + a).
    a, x = np.exp(-epsilon / sensitivity), np.arange(noise.min(), noise.max() + 1)
    expected = np.where(x < 0, a ** -np.minimum(x, 0) / (1 + a), 1 - a ** (np.maximum(x, 0) + 1) / (1 + a))
    seen = np.searchsorted(np.sort(noise), x, side="right") / DRAWS
    assert np.abs(expected - seen).max() < 3.5 / np.sqrt(DRAWS)


def test_every_class_has_noise_of_its_own() -> None:
    noise = discrete_laplace(np.zeros((DRAWS // 2, 2)), 0.5)
    assert noise.shape == (DRAWS // 2, 2)
    a = np.exp(-0.5)
    same = ((1 - a) / (1 + a)) ** 2 * (1 + a**2) / (1 - a**2)  # sum of the squares of all P(x)
    assert abs(np.mean(noise[:, 0] == noise[:, 1]) - same) < 3.5 / np.sqrt(DRAWS // 2)  # Hoeffding: but once in 2e10


@pytest.mark.parametrize("sensitivity", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("epsilon", [3.0, 1 / 3, 0.7, 1e-6, 50.0])
def test_a_discrete_mechanism_keeps_its_budget_by_opendps_own_map(epsilon: float, sensitivity: int) -> None:
    # The map says 3.0000000000000004 for a scale of 1/3.0; the scale is widened until it fits, and not more.
    kept = _mechanism("i64", sensitivity, epsilon).map(sensitivity)
    assert epsilon * (1 - 1e-12) < kept <= epsilon


def test_without_noise_to_speak_of_counts_come_back() -> None:
    for sensitivity in (1, 5):
        noisy = discrete_laplace([700, 0, 300], 1e4, sensitivity=sensitivity)  # P(any noise) < 1e-800
        assert noisy.tolist() == [700, 0, 300]


def test_discrete_noise_refuses_what_it_cannot_honour() -> None:
    for counts in ([0.5], [-1], [2.0**54], ["a"], [np.nan]):
        with pytest.raises(InputError, match="counts: noise"):
            discrete_laplace(counts, 1.0)
    for epsilon in (0, -1, float("nan"), True, "1"):
        with pytest.raises(InputError, match=r"epsilon: .*accepted"):
            discrete_laplace([1], epsilon)
    for sensitivity in (0, -1, 1.5, True, 2**40):
        with pytest.raises(InputError, match=r"sensitivity: .*accepted: a whole number from 1"):
            discrete_laplace([1], 1.0, sensitivity=sensitivity)
    with pytest.raises(InputError, match=r"epsilon: 1e-13 gives noise of scale 1e\+13.* such as 1e-12"):
        discrete_laplace([1], 1e-13)
    with pytest.raises(InputError, match=r"epsilon: 1e-12 .* such as 3e-12"):
        discrete_laplace([1], 1e-12, sensitivity=3)


def test_persons_are_clipped_by_hand() -> None:
    labels = np.array([0, 1, 2, 0, 1, 2, 0])
    persons = np.array(["ann", "bob", "ann", "ann", "eve", "ann", "bob"])
    assert clip_persons(labels, persons, 7).tolist() == labels.tolist()
    assert clip_persons(labels, persons, 4).tolist() == labels.tolist()
    two = clip_persons(labels, persons, 2)
    assert len(two) == 2 + 2 + 1
    assert [label for label in two.tolist() if label == 1] == [1, 1]  # bob's and eve's, who have two and one
    assert len(clip_persons(labels, persons, 1)) == 3
    assert clip_persons([], [], 3).tolist() == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=60), st.integers(1, 5))
def test_removing_a_person_moves_the_counts_by_at_most_the_clip(samples: list[tuple[int, int]], most: int) -> None:
    labels, persons = (np.array(column) for column in zip(*samples, strict=True))
    every = np.bincount(clip_persons(labels, persons, most), minlength=5)
    assert every.sum() == sum(min(most, size) for size in np.bincount(persons))
    for person in np.unique(persons):
        others = persons != person
        without = np.bincount(clip_persons(labels[others], persons[others], most), minlength=5)
        moved = every - without
        assert moved.min() >= 0  # nobody else's samples were chosen anew
        assert moved.sum() <= most


def test_which_samples_of_a_person_are_kept_does_not_follow_the_order_of_the_classes() -> None:
    persons = np.repeat(np.arange(500), 20)
    labels = np.tile(np.repeat([0, 1], 10), 500)  # sorted, as folders of classes are
    kept = np.bincount(clip_persons(labels, persons, 5), minlength=2)
    assert kept.sum() == 2500
    assert abs(kept[0] - 1250) < 100
    assert np.array_equal(clip_persons(labels, persons, 5), clip_persons(labels, persons, 5))
    assert np.array_equal(clip_persons(labels, persons.astype(str), 5), clip_persons(labels, persons, 5))


@pytest.mark.parametrize(
    "persons", [[1, 2], [[1], [2], [3]], [1.0, 2.0, 3.0], ["a", "", "b"], [None, "a", "b"], [True, False, True]]
)
def test_persons_without_a_name_are_refused(persons: list[object]) -> None:
    with pytest.raises(InputError, match=r"persons: .*accepted: one name per sample"):
        clip_persons([0, 1, 2], persons, 2)
    with pytest.raises(InputError, match="samples_per_person: 0"):
        clip_persons([0, 1, 2], [1, 2, 3], 0)


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
