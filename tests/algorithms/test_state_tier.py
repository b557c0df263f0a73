"""Algorithms that remember: server momenta, extrapolation, control variates, dynamic regularisation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

import toy
from fedentopt.algorithms import (
    AFTER_STEP,
    IN_GRADIENT,
    Client,
    FedAdam,
    FedAvgM,
    FedDyn,
    FedExP,
    FedYogi,
    Round,
    Scaffold,
    Vectors,
)
from reference_runs import HARD, TRAINERS, World, check, cohorts

Rounds = Sequence[Sequence[int]]


# --- whole runs
def fedavgm(world: World, rounds: Rounds) -> torch.Tensor:
    w, v = world.start, torch.zeros_like(world.start)
    for r, cohort in enumerate(rounds, 1):
        delta = world.shares(cohort) @ torch.stack([world.train(w, r, k).w - w for k in cohort])
        v = 0.6 * v + delta
        w = w + 0.7 * v
    return w


def adaptive(world: World, rounds: Rounds, yogi: bool) -> torch.Tensor:
    w, m, v = world.start, torch.zeros_like(world.start), torch.full_like(world.start, 0.01**2)
    for r, cohort in enumerate(rounds, 1):
        delta = world.shares(cohort) @ torch.stack([world.train(w, r, k).w - w for k in cohort])
        m = 0.8 * m + 0.2 * delta
        square = delta**2
        v = v - 0.1 * square * torch.sign(v - square) if yogi else 0.9 * v + 0.1 * square
        w = w + 0.02 * m / (v.sqrt() + 0.01)
    return w


def fedexp(world: World, rounds: Rounds) -> torch.Tensor:
    w, extrapolated = world.start, 0
    for r, cohort in enumerate(rounds, 1):
        changes = torch.stack([world.train(w, r, k).w - w for k in cohort])
        mean = changes.mean(0)
        eta = float((changes**2).sum() / (2 * len(cohort) * ((mean**2).sum() + 1e-4)))
        extrapolated += eta > 1
        before, w = w, w + max(1.0, eta) * mean
    assert 0 < extrapolated < len(rounds), "the case was not hard"
    return (before + w) / 2


def feddyn(world: World, rounds: Rounds) -> torch.Tensor:
    alpha, w = 0.1, world.start
    h, h_k = torch.zeros_like(w), torch.zeros(world.cfg.clients, len(w), dtype=torch.float64)
    for r, cohort in enumerate(rounds, 1):
        start, trained = w, []
        for k in cohort:

            def term(q: torch.Tensor, k: int = k, start: torch.Tensor = start) -> torch.Tensor:
                return -(h_k[k] @ q) + alpha / 2 * (q - start).square().sum()

            trained.append(world.train(start, r, k, extra=term).w)
        for k, own in zip(cohort, trained, strict=True):
            h_k[k] -= alpha * (own - start)
            h = h - alpha / world.cfg.clients * (own - start)
        w = torch.stack(trained).mean(0) - h / alpha
    return w


def scaffold(
    world: World, rounds: Rounds, after: bool, random: bool = False, cohort_mean: bool = False
) -> torch.Tensor:
    w, c = world.start, world.another("vectors") if random else torch.zeros_like(world.start)
    c_k = c.repeat(world.cfg.clients, 1)
    rho = world.cfg.momentum
    for r, cohort in enumerate(rounds, 1):
        start, trained, change = w, [], torch.zeros_like(w)
        for k in cohort:
            push = c - c_k[k]
            done = world.train(start, r, k, **{"push_after" if after else "push": push})
            reach = sum(1.0 if after else (1 - rho**i) / (1 - rho) for i in range(1, done.steps + 1))
            new = c_k[k] - c + (start - done.w) / (reach * world.lr(r))
            change += new - c_k[k]
            c_k[k] = new
            trained.append(done.w)
        w = world.shares(cohort) @ torch.stack(trained)
        c = c + change / (len(cohort) if cohort_mean else world.cfg.clients)
    return w


RUNS = {
    "fedavgm": ({"algorithm": "fedavgm", "algorithm.beta": 0.6, "algorithm.server_lr": 0.7}, fedavgm),
    "fedadam": ({"algorithm": "fedadam"}, partial(adaptive, yogi=False)),
    "fedyogi": ({"algorithm": "fedyogi"}, partial(adaptive, yogi=True)),
    "fedexp": ({"algorithm": "fedexp", "algorithm.eps": 1e-4, "cohort": "3", "rounds": 6}, fedexp),
    "feddyn": ({"algorithm": "feddyn", "algorithm.alpha": 0.1}, feddyn),
    "scaffold-niid": ({"algorithm": "scaffold"}, partial(scaffold, after=True)),
    "scaffold-gradient": (
        {"algorithm": "scaffold", "scaffold_variant": "gradient"}, partial(scaffold, after=False)
    ),
    "scaffold-random": (
        {"algorithm": "scaffold", "scaffold_start": "random"}, partial(scaffold, after=True, random=True)
    ),
    "scaffold-cohort": (
        {"algorithm": "scaffold", "scaffold_divisor": "cohort"}, partial(scaffold, after=True, cohort_mean=True)
    ),
}  # fmt: skip
ADAPTIVE = {"server_lr": 0.02, "beta1": 0.8, "beta2": 0.9, "tau": 0.01}
for adaptive_name in ("fedadam", "fedyogi"):
    RUNS[adaptive_name][0].update({f"algorithm.{name}": value for name, value in ADAPTIVE.items()})


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("method", RUNS)
def test_algorithm_equals_straight_line_torch(method, trainer):
    settings, reference = RUNS[method]
    data, cfg = toy.images(samples=70), toy.config(**HARD | settings)
    outcome = toy.run([cfg], data, trainer=trainer)[0]
    rounds = cohorts(outcome)
    met = [k for cohort in rounds for k in cohort]
    assert len(set(met)) > cfg.cohort_size, "not all of those that ever train do so every round"
    assert len(set(met)) < len(met), "some client must come back to what it remembers"
    world = World(cfg, data)
    check(outcome, world.named(reference(world, rounds)))


@pytest.mark.parametrize("method", ["feddyn", "scaffold-niid", "scaffold-random"])
def test_vectors_follow_the_models_memory_order(method):
    """Convolution weights lie channels-last in a row: pushes and vectors must lie in the same order."""
    settings, reference = RUNS[method]
    data, cfg = toy.images(samples=70), toy.config(**HARD | {"model": "toy:branching"} | settings)
    outcome = toy.run([cfg], data, trainer="loop")[0]
    world = World(cfg, data)
    check(outcome, world.named(reference(world, cohorts(outcome))))


def test_methods_really_differ():
    data = toy.images(samples=70)
    plain = {"fedavg": ({"algorithm": "fedavg"}, None)}
    outcomes = toy.run([toy.config(**HARD | settings) for settings, _ in (plain | RUNS).values()], data)
    for i, a in enumerate(outcomes):
        for b in outcomes[i + 1 :]:
            assert toy.difference(a, b) > 1e-5


# --- by hand
def t(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def test_fedavgm_by_hand():
    algorithm, server = FedAvgM(beta=0.5, server_lr=2.0), {"v": t(1.0, 0.0)}
    trained = torch.stack([t(3.0, 1.0), t(-1.0, 5.0)])
    # Delta = 1/4 (2, 0) + 3/4 (-2, 4) = (-1, 3); v = (1/2, 0) + Delta; w = (1, 1) + 2 v.
    row = algorithm.step(server, t(1.0, 1.0), trained, t(0.25, 0.75))
    torch.testing.assert_close(server["v"], t(-0.5, 3.0))
    torch.testing.assert_close(row, t(0.0, 7.0))
    # Once more from there, everybody standing still: v halves.
    row = algorithm.step(server, row, row.expand(2, 2), t(0.25, 0.75))
    torch.testing.assert_close(server["v"], t(-0.25, 1.5))
    torch.testing.assert_close(row, t(-0.5, 10.0))
    assert algorithm.initial("v") == 0


def test_fedadam_by_hand():
    algorithm = FedAdam(server_lr=0.5, beta1=0.5, beta2=0.75, tau=0.5)
    assert (algorithm.initial("m"), algorithm.initial("v")) == (0.0, 0.25)
    server = {"m": t(0.0), "v": t(0.25)}
    # Delta = 3; m = 1.5; v = 3/16 + 9/4 = 39/16; w = 1 + 0.5 * 1.5 / (sqrt(39)/4 + 0.5).
    row = algorithm.step(server, t(1.0), torch.tensor([[4.0]]), t(1.0))
    torch.testing.assert_close(server["m"], t(1.5))
    torch.testing.assert_close(server["v"], t(39 / 16))
    torch.testing.assert_close(row, t(1 + 0.75 / (math.sqrt(39) / 4 + 0.5)))
    assert FedAdam().initial("v") == pytest.approx(1e-6)


def test_fedadam_with_a_short_memory_by_hand():
    # v = 1/16 + 3/4 * 4 = 49/16: what is new counts 1 - beta2, also where beta2 is below one half.
    server = {"m": t(0.0), "v": t(0.25)}
    FedAdam(server_lr=0.5, beta1=0.5, beta2=0.25, tau=0.5).step(server, t(0.0), torch.tensor([[2.0]]), t(1.0))
    torch.testing.assert_close(server["v"], t(49 / 16))


def test_fedyogi_by_hand():
    algorithm = FedYogi(server_lr=0.5, beta1=0.5, beta2=0.75, tau=0.5)
    assert (algorithm.initial("m"), algorithm.initial("v")) == (0.0, 0.25)
    # Delta = (3, 0.25, 0.5): Delta^2 above v, v grows by a quarter of it; below, it shrinks; equal, it stays.
    server = {"m": t(0.0, 0.0, 0.0), "v": t(0.25, 0.25, 0.25)}
    row = algorithm.step(server, t(0.0, 0.0, 0.0), torch.tensor([[3.0, 0.25, 0.5]]), t(1.0))
    v = [0.25 + 9 / 4, 0.25 - 1 / 64, 0.25]
    torch.testing.assert_close(server["v"], t(*v))
    moved = [0.5 * 0.5 * d / (math.sqrt(x) + 0.5) for d, x in zip((3.0, 0.25, 0.5), v, strict=True)]
    torch.testing.assert_close(row, t(*moved))


def test_fedexp_by_hand():
    algorithm = FedExP(eps=0.5)
    start, server = t(1.0, 0.0), {"previous": t(9.0, 9.0)}
    # Changes (2, 0) and (0, 2): sum of squares 8, mean (1, 1) with square 2: eta = 8 / (4 * 2.5) < 1, so 1.
    row = algorithm.step(server, start, torch.tensor([[3.0, 0.0], [1.0, 2.0]]), t(0.9, 0.1))
    torch.testing.assert_close(row, t(2.0, 1.0))
    torch.testing.assert_close(server["previous"], start)
    torch.testing.assert_close(algorithm.evaluated(server, row), t(1.5, 0.5))
    # Changes (4, 0) and (-2, 0): sum 20, mean (1, 0) with square 1: eta = 20 / (4 * 1.5) = 10/3.
    row = algorithm.step(server, start, torch.tensor([[5.0, 0.0], [-1.0, 0.0]]), t(0.9, 0.1))
    torch.testing.assert_close(row, t(1 + 10 / 3, 0.0))


def about(clients: Sequence[int] = (0, 1), steps: Sequence[int] = (1, 4), **changes: float) -> Round:
    """A round of two among eight clients, with learning rate 1/2 and momentum 1/2."""
    given = {"lr": 0.5, "momentum": 0.5, "total_clients": 8} | changes
    return Round(
        number=3, clients=tuple(clients), shares=np.array([0.5, 0.5]), steps=np.array(steps),
        label_counts=np.ones((2, 2)), tensor=torch.from_numpy, **given,
    )  # fmt: skip


def test_feddyn_by_hand():
    algorithm = FedDyn(alpha=0.5)
    assert algorithm.local_terms(Client(0, np.array([1]))).mu == 0.5
    assert algorithm.push_enters == IN_GRADIENT
    vectors = Vectors({"h": t(1.0)}, {"h": torch.tensor([[2.0], [-4.0]])})
    torch.testing.assert_close(algorithm.push(vectors), torch.tensor([[-2.0], [4.0]]))
    # Changes 2 and 6: h_k - 0.5 times them; h - 0.5 / 8 * 8.
    algorithm.absorb(vectors, t(1.0), torch.tensor([[3.0], [7.0]]), about())
    torch.testing.assert_close(vectors.client["h"], torch.tensor([[1.0], [-7.0]]))
    torch.testing.assert_close(vectors.server["h"], t(0.5))
    # The plain mean of the clients, 5, less h / alpha = 1, whatever the shares.
    row = algorithm.step(vectors.server, t(1.0), torch.tensor([[3.0], [7.0]]), t(0.9, 0.1))
    torch.testing.assert_close(row, t(4.0))


@pytest.mark.parametrize(("variant", "reach"), [("niid", (1, 4)), ("gradient", (1, 1 + 1.5 + 1.75 + 1.875))])
def test_scaffold_by_hand(variant, reach):
    algorithm = Scaffold(variant=variant)
    assert algorithm.push_enters == (AFTER_STEP if variant == "niid" else IN_GRADIENT)
    vectors = Vectors({"c": t(1.0)}, {"c": torch.tensor([[0.25], [3.0]])})
    torch.testing.assert_close(algorithm.push(vectors), torch.tensor([[0.75], [-2.0]]))
    # c_k' = c_k - c + (w - w_k) / (reach * lr) with w - w_k = -2 and 6; c + (1/K) sum of the changes, K = 8.
    algorithm.absorb(vectors, t(1.0), torch.tensor([[3.0], [-5.0]]), about())
    changes = [-1.0 - 2 / (reach[0] * 0.5), -1.0 + 6 / (reach[1] * 0.5)]
    torch.testing.assert_close(vectors.client["c"], torch.tensor([[0.25 + changes[0]], [3.0 + changes[1]]]))
    torch.testing.assert_close(vectors.server["c"], t(1.0 + sum(changes) / 8))


def test_scaffolds_mean_over_the_cohort_by_hand():
    """c_k' - c_k = (w - w_k) / (steps * lr) - c: the mean of (-4, 3) takes the place of c, whatever it and c_k were."""
    vectors = Vectors({"c": t(1.0)}, {"c": torch.tensor([[0.25], [3.0]])})
    Scaffold(divisor="cohort").absorb(vectors, t(1.0), torch.tensor([[3.0], [-5.0]]), about())
    torch.testing.assert_close(vectors.server["c"], t(-0.5))
    torch.testing.assert_close(vectors.client["c"], torch.tensor([[0.25 - 4 - 1], [3.0 + 3 - 1]]))


@pytest.mark.parametrize("variant", ["niid", "gradient"])
def test_scaffold_outlives_a_learning_rate_that_moves_nobody(variant):
    scaffold, steps = Scaffold(variant=variant), np.array([1, 30])
    ordinary = 1 / (np.array([1, 30]) * 0.01)
    np.testing.assert_allclose(Scaffold(variant="niid").pace(steps, 0.9, 0.01), ordinary, rtol=1e-6)
    for lr in (1e-38, 1e-45, 5e-324, 0.0):
        pace = scaffold.pace(steps, 0.9, lr)
        assert pace.dtype == np.float32
        assert np.isfinite(pace).all()
    assert not pace.any()
    config = toy.config(algorithm="scaffold", scaffold_variant=variant, rounds=60, lr_decay=0.1, evaluate_every=60)
    outcome = toy.run([config], toy.images())[0]
    assert outcome.diverged_round is None
    assert all(bool(torch.isfinite(t).all()) for t in outcome.model.values())
