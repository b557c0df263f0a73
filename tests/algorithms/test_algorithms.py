"""Every algorithm against straight-line PyTorch on two uneven clients and one linear layer, over several rounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import toy
from fedentopt.algorithms import FedLC, FedNova, FedRS, Scaffold, cluster_clients, concat_budget, effective_steps
from fedentopt.algorithms.fedentropy import ValuedDraw
from fedentopt.errors import InputError
from fedentopt.models import build
from fedentopt.partition import parse, partition
from fedentopt.randomness import key
from sample_order import batches

ROUNDS, EPOCHS, LR, DECAY, WD, RHO = 4, 3, 0.05, 0.9, 1e-2, 0.9


def reference(data, cfg, method):
    """FedAvg and its kin written out, with torch's own SGD where it can express the step."""
    parts = partition(data.y_train, parse(cfg.partition), 2, cfg.seed, num_classes=3, min_samples=1)
    x = torch.from_numpy(data.x_train).float() / 255
    x = (x - 0.4) / 0.25
    y = torch.from_numpy(data.y_train)
    model = build(cfg.model, 3, seed=key(cfg.seed, "model") >> 1, image_size=8)
    w = {n: p.detach().clone().double() for n, p in model.named_parameters()}
    names = list(w)
    c = {n: torch.zeros_like(v) for n, v in w.items()}
    c_k = [{n: torch.zeros_like(v) for n, v in w.items()} for _ in range(2)]
    model = model.double()
    sizes = np.array([len(i) for i in parts.indices], dtype=float)
    p = sizes / sizes.sum()
    for r in range(ROUNDS):
        lr = LR * DECAY**r
        results, new_c, taken = [], [], []
        for k in range(2):
            counts = torch.from_numpy(parts.counts[k]).double()
            model.load_state_dict(w)
            opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=RHO, weight_decay=WD)
            steps = 0
            for own in batches(parts.indices[k], cfg, r + 1, k):
                steps += 1
                z = model(x[own].double())
                if method == "fedrs":
                    z = torch.where(counts > 0, z, 0.5 * z)
                if method == "fedlc":
                    z = z - torch.where(counts > 0, counts, torch.tensor(1e-8, dtype=torch.float64)) ** -0.25
                loss = F.cross_entropy(z, y[own])
                if method == "fedprox":
                    loss = loss + 0.5 / 2 * sum(((q - w[n]) ** 2).sum() for n, q in model.named_parameters())
                opt.zero_grad()
                loss.backward()
                if method == "scaffold-gradient":
                    for n, q in model.named_parameters():
                        q.grad += c[n] - c_k[k][n]
                opt.step()
                if method == "scaffold-niid":
                    with torch.no_grad():
                        for n, q in model.named_parameters():
                            q -= lr * (c[n] - c_k[k][n])
            trained = {n: q.detach().clone() for n, q in model.named_parameters()}
            results.append(trained)
            taken.append(steps)
            reach = steps if method == "scaffold-niid" else float(effective_steps(np.array([steps]), RHO)[0])
            new_c.append({n: c_k[k][n] - c[n] + (w[n] - trained[n]) / (reach * lr) for n in names})
        if method == "fednova":
            assert taken[0] != taken[1]
            a = effective_steps(np.array(taken), RHO)
            scale = (p * a).sum()
            w = {n: w[n] - scale * sum(p[k] * (w[n] - results[k][n]) / a[k] for k in range(2)) for n in names}
        else:
            w = {n: sum(p[k] * results[k][n] for k in range(2)) for n in names}
        if method.startswith("scaffold"):
            c = {n: c[n] + sum(new_c[k][n] - c_k[k][n] for k in range(2)) / 2 for n in names}
            c_k = new_c
    return w


SETTINGS = {
    "fedavg": {"algorithm": "fedavg"},
    "fedprox": {"algorithm": "fedprox", "mu": 0.5},
    "fednova": {"algorithm": "fednova"},
    "scaffold-niid": {"algorithm": "scaffold"},
    "scaffold-gradient": {"algorithm": "scaffold", "scaffold_variant": "gradient"},
    "fedrs": {"algorithm": "fedrs"},
    "fedlc": {"algorithm": "fedlc"},
}


@pytest.mark.parametrize("trainer", ["loop", "stacked", "streams"])
@pytest.mark.parametrize("method", SETTINGS)
def test_algorithm_equals_straight_line_torch(method, trainer):
    data = toy.images()
    cfg = toy.config(
        clients=2, cohort="2", rounds=ROUNDS, epochs=EPOCHS, lr=LR, lr_decay=DECAY, weight_decay=WD, momentum=RHO,
        batch_size=16, partition="dir:0.3", seed=5, **toy.PLAIN, **SETTINGS[method],
    )  # fmt: skip
    ours = toy.run([cfg], data, trainer=trainer)[0].model
    for name, value in reference(data, cfg, method).items():
        torch.testing.assert_close(ours[name].double(), value, atol=2e-5, rtol=1e-4)


def test_methods_really_differ():
    """The references above would not notice if every setting were ignored: the results must differ pairwise."""
    data = toy.images()
    common = {"clients": 2, "cohort": "2", "rounds": 3, "lr": LR, "partition": "dir:0.3", "seed": 5, **toy.PLAIN}
    outcomes = [toy.run([toy.config(**common, **s)], data)[0] for s in SETTINGS.values()]
    for i, a in enumerate(outcomes):
        for b in outcomes[i + 1 :]:
            assert toy.difference(a, b) > 1e-5


def test_effective_steps_by_hand():
    # t = 2, rho = 0.5: [2 - 0.5 (1 - 0.25) / 0.5] / 0.5 = (2 - 0.75) / 0.5
    assert effective_steps(np.array([2]), 0.5)[0] == pytest.approx(2.5)
    # One step carries one step, whatever the momentum; without momentum t steps carry t.
    assert effective_steps(np.array([1]), 0.9)[0] == pytest.approx(1.0)
    assert effective_steps(np.array([7]), 0.0)[0] == pytest.approx(7.0)


def test_fednova_factors_by_hand():
    # Shares 1/4 and 3/4, steps 1 and 3 without momentum: A = 1/4 + 9/4 = 5/2.
    mixing = FedNova().mix(np.array([0.25, 0.75]), np.array([1, 3]), 0.0)
    np.testing.assert_allclose(mixing.clients, [2.5 * 0.25 / 1, 2.5 * 0.75 / 3])
    assert mixing.own == pytest.approx(1 - 0.625 - 0.625)


def test_fedrs_and_fedlc_terms_by_hand():
    counts = np.array([0, 16, 81])
    np.testing.assert_allclose(FedRS(0.5).local_terms(counts).logit_scale, [0.5, 1, 1])
    np.testing.assert_allclose(FedRS(0.5, soft=True).local_terms(counts).logit_scale, [0.5, 0.5 + 0.5 * 16 / 81, 1])
    np.testing.assert_allclose(FedLC(1.0).local_terms(counts).logit_shift, [-100, -1 / 2, -1 / 3])
    np.testing.assert_allclose(FedLC(2.0).local_terms(counts).logit_shift, [-200, -1, -2 / 3])


def test_fedconcat_budget_matches_the_published_setting():
    # LeNet-5, T = 500, K = 100, M = 10, T1 = 450: 373 rounds for 10 classes, 192 for 20.
    ten = (62006, 62006 - 850, (5 * 84 + 1) * 10)
    twenty = (62006 + 850, 62006 - 850, (5 * 84 + 1) * 20)
    assert concat_budget(500, 0.9, 500, 10, 100, 5, ten).second == 373
    assert concat_budget(500, 0.9, 500, 10, 100, 5, twenty).second == 192
    assert concat_budget(500, 0.9, 500, 10, 100, 5, ten).first == 450
    assert concat_budget(5000, 0.9, 500, 10, 100, 5, ten).second == 500


def test_fedconcat_shortens_stage_one_before_it_refuses():
    sizes = (62006, 61156, 4210)
    budget = concat_budget(40, 0.9, 500, 10, 100, 5, sizes)
    spent = 2 * budget.first * 10 * 62006 + 100 * 5 * 61156 + 2 * budget.second * 10 * 4210
    assert abs(2 * 40 * 10 * 62006 - spent) < 2 * 10 * 62006  # another round of stage 1 would not fit
    assert budget.second >= 10
    with pytest.raises(InputError, match="accepted: at least 27"):
        concat_budget(20, 0.9, 500, 10, 100, 5, sizes)
    assert concat_budget(27, 0.9, 500, 10, 100, 5, sizes).second >= 10


def test_clusters_follow_label_histograms():
    counts = np.array([[90, 10, 0], [45, 5, 0], [0, 3, 300], [0, 1, 100], [0, 0, -5]])
    clusters = cluster_clients(counts, 2, seed=0)
    assert clusters[0] == clusters[1] != clusters[2] == clusters[3]
    with pytest.raises(InputError, match="6 clusters for 5 clients"):
        cluster_clients(counts, 6, seed=0)


@pytest.mark.parametrize("variant", ["niid", "gradient"])
def test_scaffold_outlives_a_learning_rate_that_moves_nobody(variant):
    scaffold, steps = Scaffold(variant), np.array([1, 30])
    ordinary = 1 / (np.array([1, 30]) * 0.01)
    np.testing.assert_allclose(Scaffold("niid").pace(steps, 0.9, 0.01), ordinary, rtol=1e-6)
    for lr in (1e-38, 1e-45, 5e-324, 0.0):
        pace = scaffold.pace(steps, 0.9, lr)
        assert pace.dtype == np.float32
        assert np.isfinite(pace).all()
    assert not pace.any()
    config = toy.config(algorithm="scaffold", scaffold_variant=variant, rounds=60, lr_decay=0.1, evaluate_every=60)
    outcome = toy.run([config], toy.images())[0]
    assert outcome.diverged_round is None
    assert all(bool(torch.isfinite(t).all()) for t in outcome.model.values())


def test_fedentropy_still_draws_after_a_thousand_halvings():
    draw, rng = ValuedDraw(4, 2), np.random.default_rng(0)
    for _ in range(1100):
        draw.learn(kept=(), dropped=(0, 1, 2))
    assert all(len(set(draw.draw(rng))) == 2 for _ in range(50))
    draw.learn(kept=(), dropped=())
    for _ in range(1100):
        draw.learn(kept=(), dropped=(3,))
    counts = np.bincount([k for _ in range(2000) for k in draw.draw(rng)], minlength=4)
    assert counts.min() > 900, "equal values, equal chances"
    draw.values[:] = 0.0  # as a checkpoint may hold them
    assert len(draw.draw(rng)) == 2
    draw.learn(kept=(2,), dropped=(0,))
    assert draw.values[2] == 1.0


def test_fedentropy_values_steer_the_draw():
    draw = ValuedDraw(10, 3)
    for _ in range(12):
        draw.learn(kept=(4,), dropped=(7, 8))
    assert draw.values[4] == 13.0
    assert draw.values[7] == pytest.approx(2.0**-12)
    rng = np.random.default_rng(0)
    counts = np.bincount([k for _ in range(2000) for k in draw.draw(rng)], minlength=10)
    assert all(len(set(draw.draw(rng))) == 3 for _ in range(100))
    assert counts[4] > 2 * counts[0] > 2 * counts[7] > 0
