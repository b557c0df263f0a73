"""Algorithms that are numbers in the local objective and in the average: by hand, and against straight-line torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch

import toy
from fedentopt.algorithms import (
    BalancedSoftmax,
    Client,
    FedAvg,
    FedDisco,
    FedLC,
    FedNova,
    FedProx,
    FedRS,
    Round,
    effective_steps,
)
from fedentopt.algorithms.feddisco import discrepancies
from reference_runs import HARD, TRAINERS, World, check, cohorts


def round_of(shares, steps=(1, 1), counts=((1, 1), (1, 1)), momentum: float = 0.0) -> Round:
    """A round as a server sees it."""
    return Round(
        number=1, clients=tuple(range(len(shares))), shares=np.array(shares), steps=np.array(steps),
        label_counts=np.array(counts), lr=0.1, momentum=momentum, total_clients=7, tensor=torch.from_numpy,
    )  # fmt: skip


# --- whole runs
Logits = Callable[[torch.Tensor], torch.Tensor]


def averaged(world: World, rounds: Sequence[Sequence[int]], logits: Callable[[World, int], Logits]) -> torch.Tensor:
    """FedAvg with local logits of one's own."""
    w = world.start
    for r, cohort in enumerate(rounds, 1):
        trained = torch.stack([world.train(w, r, k, logits=logits(world, k)).w for k in cohort])
        w = world.shares(cohort) @ trained
    return w


def restricted(world: World, k: int) -> Logits:
    return lambda z: torch.where(world.counts[k] > 0, z, 0.3 * z)


def graded(world: World, k: int) -> Logits:
    return lambda z: z * (0.3 + 0.7 * world.counts[k] / world.counts[k].max())


def calibrated(world: World, k: int) -> Logits:
    counts = torch.where(world.counts[k] > 0, world.counts[k], torch.tensor(1e-8, dtype=torch.float64))
    return lambda z: z - 0.5 * counts**-0.25


def balanced(world: World, k: int) -> Logits:
    return lambda z: z + torch.log(world.counts[k].clamp(min=0.05))


def fedprox(world: World, rounds: Sequence[Sequence[int]]) -> torch.Tensor:
    w = world.start
    for r, cohort in enumerate(rounds, 1):

        def proximal(q: torch.Tensor, start: torch.Tensor = w) -> torch.Tensor:
            return 0.5 / 2 * (q - start).square().sum()

        w = world.shares(cohort) @ torch.stack([world.train(w, r, k, extra=proximal).w for k in cohort])
    return w


def fednova(world: World, rounds: Sequence[Sequence[int]], momentum: bool = True) -> torch.Tensor:
    w, uneven = world.start, 0
    for r, cohort in enumerate(rounds, 1):
        trained = [world.train(w, r, k) for k in cohort]
        uneven += len({t.steps for t in trained}) > 1
        p = world.shares(cohort)
        rho = world.cfg.momentum if momentum else 0.0
        a = torch.tensor([sum((1 - rho**i) / (1 - rho) for i in range(1, t.steps + 1)) for t in trained])
        w = w - (p * a).sum() * sum(p[i] * (w - t.w) / a[i] for i, t in enumerate(trained))
    assert uneven, "the case was not hard"
    return w


def feddisco(world: World, rounds: Sequence[Sequence[int]]) -> torch.Tensor:
    w = world.start
    for r, cohort in enumerate(rounds, 1):
        own = world.counts[list(cohort)]
        q = own / own.sum(1, keepdim=True)
        d = torch.where(q > 0, q * (q * q.shape[1]).clamp(min=1e-300).log(), 0.0).sum(1)
        weights = (world.shares(cohort) - 0.4 * d / d.sum() + 0.2).clamp(min=0)
        w = weights / weights.sum() @ torch.stack([world.train(w, r, k).w for k in cohort])
    return w


RUNS = {
    "fedavg": ({"algorithm": "fedavg"}, partial(averaged, logits=lambda world, k: lambda z: z)),
    "fedprox": ({"algorithm": "fedprox", "mu": 0.5}, fedprox),
    "fednova": ({"algorithm": "fednova"}, fednova),
    "fednova-steps": (
        {"algorithm": "fednova", "fednova_normaliser": "steps"}, partial(fednova, momentum=False)
    ),
    "fedrs": ({"algorithm": "fedrs", "fedrs_alpha": 0.3}, partial(averaged, logits=restricted)),
    "fedrs-soft": (
        {"algorithm": "fedrs", "fedrs_alpha": 0.3, "fedrs_soft": True}, partial(averaged, logits=graded)
    ),
    "fedlc": ({"algorithm": "fedlc", "fedlc_tau": 0.5}, partial(averaged, logits=calibrated)),
    "balanced-softmax": (
        {"algorithm": "balanced-softmax", "algorithm.floor": 0.05}, partial(averaged, logits=balanced)
    ),
    "feddisco": ({"algorithm": "feddisco", "algorithm.a": 0.4, "algorithm.b": 0.2}, feddisco),
}  # fmt: skip


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("method", RUNS)
def test_algorithm_equals_straight_line_torch(method, trainer):
    settings, reference = RUNS[method]
    data, cfg = toy.images(samples=70), toy.config(**HARD | settings)
    outcome = toy.run([cfg], data, trainer=trainer)[0]
    rounds = cohorts(outcome)
    assert len({k for cohort in rounds for k in cohort}) > cfg.cohort_size == 2
    world = World(cfg, data)
    check(outcome, world.named(reference(world, rounds)))


# --- by hand
def test_plain_averaging_is_by_share_and_knows_no_terms():
    mixing = FedAvg().mix(round_of([0.25, 0.75]))
    assert (mixing.own, mixing.clients.tolist()) == (0.0, [0.25, 0.75])
    terms = FedAvg().local_terms(Client(0, np.array([1, 2])))
    assert (terms.mu, terms.logit_scale, terms.logit_shift) == (0.0, None, None)


def test_fedprox_terms_by_hand():
    assert FedProx().local_terms(Client(0, np.array([1, 2]))).mu == 1e-4
    assert FedProx(mu=0.3).local_terms(Client(0, np.array([1, 2]))).mu == 0.3


def test_effective_steps_by_hand():
    # t = 2, rho = 0.5: [2 - 0.5 (1 - 0.25) / 0.5] / 0.5 = (2 - 0.75) / 0.5
    assert effective_steps(np.array([2]), 0.5)[0] == pytest.approx(2.5)
    # One step carries one step, whatever the momentum; without momentum t steps carry t.
    assert effective_steps(np.array([1]), 0.9)[0] == pytest.approx(1.0)
    assert effective_steps(np.array([7]), 0.0)[0] == pytest.approx(7.0)


def test_fednova_factors_by_hand():
    # Shares 1/4 and 3/4, steps 1 and 3 without momentum: A = 1/4 + 9/4 = 5/2.
    mixing = FedNova().mix(round_of([0.25, 0.75], steps=[1, 3]))
    np.testing.assert_allclose(mixing.clients, [2.5 * 0.25 / 1, 2.5 * 0.75 / 3])
    assert mixing.own == pytest.approx(1 - 0.625 - 0.625)
    # With momentum 1/2, steps 1 and 2 carry 1 and 2.5: A = 1/4 + 15/8 = 17/8.
    mixing = FedNova().mix(round_of([0.25, 0.75], steps=[1, 2], momentum=0.5))
    np.testing.assert_allclose(mixing.clients, [17 / 8 * 0.25, 17 / 8 * 0.75 / 2.5])
    # By steps alone, whatever the momentum: A = 1/4 + 6/4 = 7/4.
    mixing = FedNova(normaliser="steps").mix(round_of([0.25, 0.75], steps=[1, 2], momentum=0.5))
    np.testing.assert_allclose(mixing.clients, [7 / 4 * 0.25, 7 / 4 * 0.75 / 2])


def test_fednova_goes_further_than_its_clients_where_they_differ_in_size():
    """With steps in proportion to shares, every factor is A / sum of steps, and all together M sum p^2: 3 * 0.66."""
    shares = [0.1, 0.1, 0.8]
    mixing = FedNova().mix(round_of(shares, steps=[10, 10, 80]))
    np.testing.assert_allclose(mixing.clients, [0.66] * 3)
    assert mixing.own == pytest.approx(1 - 1.98)


def test_fedrs_and_fedlc_terms_by_hand():
    client = Client(3, np.array([0, 16, 81]))
    np.testing.assert_allclose(FedRS(alpha=0.5).local_terms(client).logit_scale, [0.5, 1, 1])
    soft = FedRS(alpha=0.5, soft=True).local_terms(client)
    np.testing.assert_allclose(soft.logit_scale, [0.5, 0.5 + 0.5 * 16 / 81, 1])
    np.testing.assert_allclose(FedLC(tau=1.0).local_terms(client).logit_shift, [-100, -1 / 2, -1 / 3])
    np.testing.assert_allclose(FedLC(tau=2.0).local_terms(client).logit_shift, [-200, -1, -2 / 3])


def test_balanced_softmax_terms_by_hand():
    client = Client(0, np.array([0, 1, 20]))
    np.testing.assert_allclose(BalancedSoftmax().local_terms(client).logit_shift, [np.log(1e-3), 0, np.log(20)])
    own = BalancedSoftmax(floor=2.0).local_terms(client)
    np.testing.assert_allclose(own.logit_shift, [np.log(2), np.log(2), np.log(20)])
    assert own.logit_scale is None


def test_feddisco_weights_by_hand():
    # Two classes: KL((1, 0) || (1/2, 1/2)) = log 2, and 0 for an even client. Scaled: d = (1, 0).
    counts = [[8, 0], [4, 4]]
    np.testing.assert_allclose(discrepancies(np.array(counts)), [1, 0])
    # (1/2 - 0.2 + 0.1, 1/2 + 0.1) = (0.4, 0.6).
    mixing = FedDisco(a=0.2, b=0.1).mix(round_of([0.5, 0.5], counts=counts))
    np.testing.assert_allclose(mixing.clients, [0.4, 0.6])
    assert mixing.own == 0
    # (1/2 - 0.9 + 0.1) is below 0: the skewed client has no part.
    np.testing.assert_allclose(FedDisco(a=0.9).mix(round_of([0.5, 0.5], counts=counts)).clients, [0, 1])
    # KL(3/4, 1/4) = 3/4 log 3/2 + 1/4 log 1/2 beside log 2.
    small = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    scaled = np.array([small, np.log(2)]) / (small + np.log(2))
    weights = np.array([0.25, 0.75]) - 0.5 * scaled + 0.1
    mixing = FedDisco().mix(round_of([0.25, 0.75], counts=[[3, 1], [0, 2]]))
    np.testing.assert_allclose(mixing.clients, weights / weights.sum())


def test_feddisco_keeps_the_shares_where_no_weight_is_left_or_nobody_is_skewed():
    skewed = round_of([0.25, 0.75], counts=[[5, 0], [0, 5]])  # d = (1/2, 1/2)
    np.testing.assert_allclose(FedDisco(a=9.0, b=0.0).mix(skewed).clients, [0.25, 0.75])
    even = round_of([0.25, 0.75], counts=[[2, 2], [6, 6]])
    np.testing.assert_allclose(FedDisco(a=0.5, b=0.0).mix(even).clients, [0.25, 0.75])
    # A noisy report without anything in it counts as even.
    np.testing.assert_allclose(discrepancies(np.array([[0, 0], [5, 0]])), [0, 1])


def test_methods_really_differ():
    """The references above would not notice if every setting were ignored: the results must differ pairwise."""
    data = toy.images(samples=70)
    outcomes = toy.run([toy.config(**HARD | settings) for settings, _ in RUNS.values()], data)
    for i, a in enumerate(outcomes):
        for b in outcomes[i + 1 :]:
            assert toy.difference(a, b) > 1e-5
