"""Labels from last layers: against straight-line torch on known mixtures, and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedentopt.audit import estimate as constants
from fedentopt.audit import estimates_together, head_change, label_estimate, label_estimates, travel_of
from fedentopt.errors import InputError

CLASSES = 10


def train(
    shares: np.ndarray, *, momentum: float = 0.0, weight_decay: float = 0.0, lr: float = 0.05, epochs: int = 2,
    samples: int = 200, push: float = 0.0, bias: bool = True, seed: int = 0, warm: int = 0,
) -> tuple[np.ndarray, float, np.ndarray]:  # fmt: skip
    """A two-layer net trained by torch's own SGD on one client's mixture: the change of its last layer, its travel, and
    the true shares. Classes are Gaussian blobs, the start model is the same for all. `push` is a constant that is added
    to the gradient of the last layer's first class, `warm` the epochs of the start model on all classes."""
    centres = np.random.default_rng(99).normal(size=(CLASSES, 12))
    rng = np.random.default_rng(seed)
    counts = np.floor(shares * samples).astype(int)
    labels = rng.permutation(np.repeat(np.arange(CLASSES), counts))
    x = torch.tensor(centres[labels] + rng.normal(size=(len(labels), 12)), dtype=torch.float32)
    y = torch.tensor(labels)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, CLASSES, bias=bias))
    if warm:
        every = np.random.default_rng(5).permutation(np.arange(CLASSES * 40) % CLASSES)
        data = torch.tensor(
            centres[every] + np.random.default_rng(6).normal(size=(len(every), 12)), dtype=torch.float32
        )
        warming = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(warm * 20):
            warming.zero_grad()
            nn.functional.cross_entropy(net(data), torch.tensor(every)).backward()
            warming.step()
    last = net[2]
    before = (last.weight.detach().numpy().copy(), last.bias.detach().numpy().copy() if bias else None)
    optimiser = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum, weight_decay=weight_decay)
    steps = 0
    for _ in range(epochs):
        for at in range(0, len(y), 20):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[at : at + 20]), y[at : at + 20]).backward()
            if push:
                last.bias.grad[0] += push
            optimiser.step()
            steps += 1
    after = (last.weight.detach().numpy(), last.bias.detach().numpy() if bias else None)
    return head_change(before, after), travel_of(lr, momentum, steps), counts / counts.sum()


def mixture(*classes: int) -> np.ndarray:
    shares = np.zeros(CLASSES)
    shares[list(classes)] = 1 / len(classes)
    return shares


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum() / 2)


MIXTURES = [mixture(3), mixture(1, 7), mixture(0, 2, 4, 6), mixture(*range(CLASSES)), mixture(2, 9), mixture(5, 8)]
MIXTURES += [mixture(5), mixture(8), mixture(0, 4), mixture(6, 9), mixture(1, 3, 7)]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 5e-4])
def test_known_mixtures_come_out(momentum: float, weight_decay: float) -> None:
    lr = 0.05 * (1 - momentum)
    trained = [
        train(shares, momentum=momentum, weight_decay=weight_decay, lr=lr, seed=k) for k, shares in enumerate(MIXTURES)
    ]
    found = label_estimates(np.stack([change / travel for change, travel, _ in trained]), untrained=True)
    errors = [distance(estimate.shares, truth) for estimate, (_, _, truth) in zip(found, trained, strict=True)]
    assert max(errors) < 0.2
    assert np.mean(errors) < 0.1
    within = [error <= estimate.spread for error, estimate in zip(errors, found, strict=True)]
    assert np.mean(within) >= 0.8


def test_without_a_bias_the_rows_of_the_weight_tell() -> None:
    trained = [train(shares, bias=False, seed=k) for k, shares in enumerate(MIXTURES)]
    found = label_estimates(np.stack([change / travel for change, travel, _ in trained]), untrained=True)
    for estimate, (_, _, truth), shares in zip(found, trained, MIXTURES, strict=True):
        if np.count_nonzero(shares) <= 2:
            assert set(np.argsort(estimate.shares)[-np.count_nonzero(shares) :]) == set(np.flatnonzero(shares))
            assert distance(estimate.shares, truth) < 0.4


def test_a_push_that_is_known_is_undone() -> None:
    """What SCAFFOLD's correction does to a bias: travel times the push, which is taken back."""
    plain, travel, truth = train(mixture(1, 7), seed=4)
    pushed, _, _ = train(mixture(1, 7), push=0.3, seed=4)
    drift = np.zeros(CLASSES)
    drift[0] = -travel * 0.3
    others = [change / way for change, way, _ in (train(shares, seed=k) for k, shares in enumerate(MIXTURES))]

    def found(change: np.ndarray) -> float:
        return distance(label_estimates(np.stack([change / travel, *others]), untrained=True)[0].shares, truth)

    assert found(pushed) > 0.15
    assert found(pushed - drift) < 0.1
    assert found(plain) < 0.1


def test_even_clients_come_out_even() -> None:
    """The plain clip of changes below 0 turns their noise into a distribution."""
    even = np.full(CLASSES, 0.1)
    for warm in (0, 3):
        trained = [train(mixture(*range(CLASSES)), samples=300, seed=k, warm=warm) for k in range(12)]
        changes = np.stack([change / travel for change, travel, _ in trained])
        clipped = np.maximum(changes, 0) / np.maximum(changes, 0).sum(axis=1, keepdims=True)
        assert np.mean([distance(row, even) for row in clipped]) > 0.3
        found = label_estimates(changes, untrained=not warm)
        assert np.mean([distance(estimate.shares, even) for estimate in found]) < 0.12


def test_by_hand() -> None:
    """db = S (D - 1/4), S = 0.8: from a model with even outputs the level of absent classes tells S exactly."""
    truth = np.array([[0.75, 0.25, 0, 0], [0, 0, 0.5, 0.5], [0, 1, 0, 0]])
    found = label_estimates(0.8 * (truth - 0.25), untrained=True)
    for estimate, shares in zip(found, truth, strict=True):
        np.testing.assert_allclose(estimate.shares, shares, atol=1e-9)
        assert estimate.level == pytest.approx(0.8)


def test_a_level_that_all_share_is_taken_out() -> None:
    """A trained model that mostly says class 0: clients that lack it push it down, and nobody else's share rises."""
    pattern = np.array([0.7, 0.1, 0.1, 0.1])
    truth = np.array([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0.5, 0.5, 0], [0, 0, 0.5, 0.5], [0, 0.5, 0, 0.5]])
    for estimate, shares in zip(label_estimates(0.5 * (truth - pattern)), truth, strict=True):
        assert distance(estimate.shares, shares) < 0.1


@given(
    st.integers(2, 12).flatmap(
        lambda classes: st.lists(
            st.lists(st.floats(-1e3, 1e3), min_size=classes, max_size=classes), min_size=1, max_size=6
        )
    ),
    st.booleans(),
)
def test_whatever_comes_a_distribution_goes(rows: list[list[float]], untrained: bool) -> None:
    for estimate in label_estimates(np.array(rows), untrained=untrained):
        assert np.isfinite(estimate.shares).all()
        assert (estimate.shares >= 0).all()
        assert estimate.shares.sum() == pytest.approx(1)
        assert 0 <= estimate.spread <= 1
        assert 0 <= estimate.level <= 1


def test_nothing_moved_tells_nothing() -> None:
    np.testing.assert_allclose(label_estimate(np.zeros(4), np.zeros(4)).shares, np.full(4, 0.25))


def test_travel() -> None:
    """Three steps from rest with momentum 0.5: velocities 1, 1.5, 1.75."""
    assert travel_of(0.1, 0.5, 3) == pytest.approx(0.425)
    assert travel_of(0.1, 0.0, 3) == pytest.approx(0.3)


def test_layers_may_come_in_every_form() -> None:
    weight, bias = np.arange(6.0).reshape(2, 3), np.array([1.0, 2.0])
    assert head_change((weight, bias), (weight + 5, bias + np.array([1, -1]))).tolist() == [1, -1]
    assert head_change((weight, None), (weight + np.array([[1], [3]]), None)).tolist() == [1, 3]
    assert head_change(weight, weight + np.array([[0, 3, 0], [0, 0, 0]])).tolist() == [1, 0]
    assert head_change(bias, bias + 1).tolist() == [1, 1]
    layer = nn.Linear(3, 2)
    numbers = (layer.weight.detach().numpy(), layer.bias.detach().numpy())
    assert head_change(numbers, numbers).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (np.zeros(3), np.zeros(4), r"after: shape \(4,\); accepted: \(3,\)"),
        ((np.zeros((3, 2)), np.zeros(3)), (np.zeros((3, 2)), None), "of another kind than before"),
        (np.zeros(3), np.array([0, np.nan, 0]), "after: shape .* finite numbers"),
        (np.zeros((2, 2, 2)), np.zeros(2), "before: shape"),
        ([np.zeros((3, 2)), np.zeros(3)], np.zeros(3), "before: no array; accepted: .* as a tuple"),
    ],
)
def test_what_is_no_last_layer_is_refused(before: np.ndarray, after: np.ndarray, words: str) -> None:
    with pytest.raises(InputError, match=words):
        label_estimate(before, after)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="travel: 0"):
        label_estimate(np.zeros(3), np.zeros(3), travel=0)
    with pytest.raises(InputError, match="travel: inf"):
        label_estimate(np.zeros(3), np.zeros(3), travel=np.inf)
    with pytest.raises(InputError, match=r"others: a change of shape \(4,\); accepted: \(3,\)"):
        label_estimate(np.zeros(3), np.zeros(3), others=[np.zeros(4)])
    with pytest.raises(InputError, match=r"momentum: 1\.0 is out of range"):
        travel_of(0.1, 1.0, 5)
    for wrong in (np.zeros((3, 0)), np.zeros(3), np.full((2, 2), np.inf), np.full((2, 2), 1e300)):
        with pytest.raises(InputError, match=r"changes: shape .* clients by classes"):
            label_estimates(wrong)
    assert [estimate.shares.tolist() for estimate in label_estimates(np.zeros((2, 1)))] == [[1.0], [1.0]]


def drawn_rounds() -> list[tuple[np.ndarray, bool]]:
    """Rounds of several shapes, skewed and even, some with clients of which no class went down or nothing moved."""
    rng = np.random.default_rng(4)
    rounds = []
    for i in range(48):
        clients, classes = ((10, 10), (10, 10), (3, 10), (7, 20))[i % 4]
        labels = rng.dirichlet(np.full(classes, (0.1, 1.0, 100.0)[i % 3]), size=clients)
        model = rng.dirichlet(np.full(classes, 20.0))
        changes = rng.uniform(0.02, 1, (clients, 1)) * (labels - model) + rng.normal(0, 0.01, (clients, classes))
        changes[0] = (changes[0], np.abs(changes[0]), 0.0)[(i // 4) % 3]
        rounds.append((changes, i % 5 == 0))
    return rounds


def plain_estimate(changes: np.ndarray, untrained: bool) -> tuple[np.ndarray, np.ndarray]:
    """Shares and levels in straight lines, one client and one class at a time."""
    clients, classes = changes.shape
    prior, tiny = constants.PRIOR[untrained], 1e-9
    pattern, own = [1 / classes] * classes, [tiny] * clients

    def middle(values: list[float]) -> float:
        return float(np.median(values)) if values else 0.0

    for _ in range(8):
        own = [max(middle([-x / e for x, e in zip(row, pattern, strict=True) if x < 0]), tiny) for row in changes]
        for c in range(classes):
            down = [-x / level for x, level in zip(changes[:, c], own, strict=True) if x < 0]
            usual = min(max(middle(down), 0.1 / classes), 10 / classes)
            pattern[c] = (len(down) * usual + prior / classes) / (len(down) + prior)
        pattern = [e / sum(pattern) for e in pattern]
    if untrained:
        own = [max(*(-row / pattern), tiny) for row in changes]
        for _ in range(4):
            for k, row in enumerate(changes):
                absent = row / own[k] + pattern < constants.FEW / classes
                own[k] = max(middle((-row / pattern)[absent].tolist()) if absent.any() else own[k], tiny)
    highest, power = constants.EVEN_LEVEL[untrained], constants.EVENNESS_POWER[untrained]
    levels = list(own) if untrained else [max(level, highest) for level in own]

    def shares(k: int) -> np.ndarray:
        excess = levels[k] - own[k]
        common = changes.mean(axis=0) * excess / levels[k]
        cut = np.maximum((changes[k] - common + own[k] * np.array(pattern) + excess / classes) / levels[k], 0)
        return cut / cut.sum() if cut.sum() > 0 else np.full(classes, 1 / classes)

    for _ in range(constants.MOST_TURNS):
        even = [-sum(p * np.log(p) for p in shares(k) if p > 0) / np.log(classes) for k in range(clients)]
        before, levels = levels, [max(own[k], highest * even[k] ** power) for k in range(clients)]
        if max(abs(a - b) for a, b in zip(levels, before, strict=True)) < constants.SETTLED:
            break
    return np.array([shares(k) for k in range(clients)]), np.minimum(own, 1.0)


def test_estimates_are_those_of_straight_lines() -> None:
    for changes, untrained in drawn_rounds():
        found = label_estimates(changes, untrained=untrained)
        shares, levels = plain_estimate(changes, untrained)
        np.testing.assert_allclose([estimate.shares for estimate in found], shares, rtol=0, atol=1e-9)
        np.testing.assert_allclose([estimate.level for estimate in found], levels, rtol=1e-9)


def test_rounds_together_are_estimated_as_alone_to_the_bit() -> None:
    rounds = drawn_rounds()
    for (changes, untrained), (shares, spread, level) in zip(rounds, estimates_together(rounds), strict=True):
        alone = label_estimates(changes, untrained=untrained)
        assert np.array([estimate.shares for estimate in alone]).tobytes() == shares.tobytes()
        assert [estimate.spread for estimate in alone] == spread.tolist()
        assert [estimate.level for estimate in alone] == level.tolist()
    assert estimates_together([]) == []
