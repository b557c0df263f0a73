"""FedConcat: clusters, the budget of its two stages, and stage 1 against straight-line torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import toy
from fedentopt.algorithms import FedConcat, ModelSizes, SecondStage, cluster_clients, concat_budget
from fedentopt.algorithms.fedconcat import ConcatBudget
from fedentopt.errors import InputError
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from fedentopt.simulation.layout import FlatLayout
from reference_runs import HARD, World


def test_fedconcat_budget_matches_the_published_setting():
    # LeNet-5, T = 500, K = 100, M = 10, T1 = 450: 373 rounds for 10 classes, 192 for 20.
    ten = (62006, 62006 - 850, (5 * 84 + 1) * 10)
    twenty = (62006 + 850, 62006 - 850, (5 * 84 + 1) * 20)
    assert concat_budget(500, 0.9, 500, 10, 100, 5, ten).second == 373
    assert concat_budget(500, 0.9, 500, 10, 100, 5, twenty).second == 192
    assert concat_budget(500, 0.9, 500, 10, 100, 5, ten).first == 450
    assert concat_budget(5000, 0.9, 500, 10, 100, 5, ten).second == 500


def test_the_hook_gives_the_published_stages():
    assert FedConcat().second_stage(500, 10, 100, ModelSizes(62006, 61156, 84, 10)) == SecondStage(450, 373, 3)
    assert FedConcat().second_stage(500, 10, 100, ModelSizes(62856, 61156, 84, 20)) == SecondStage(450, 192, 3)
    short = FedConcat(max_rounds=20, share=0.5).second_stage(500, 10, 100, ModelSizes(62006, 61156, 84, 10))
    assert short == SecondStage(250, 20, 3)


def test_fedconcat_shortens_stage_one_before_it_refuses():
    sizes = (62006, 61156, 4210)
    budget = concat_budget(40, 0.9, 500, 10, 100, 5, sizes)
    spent = 2 * budget.first * 10 * 62006 + 100 * 5 * 61156 + 2 * budget.second * 10 * 4210
    assert abs(2 * 40 * 10 * 62006 - spent) < 2 * 10 * 62006  # another round of stage 1 would not fit
    assert budget.second >= 10
    with pytest.raises(InputError, match="accepted: at least 27"):
        concat_budget(20, 0.9, 500, 10, 100, 5, sizes)
    assert concat_budget(27, 0.9, 500, 10, 100, 5, sizes).second >= 10


def test_the_least_budget_by_hand():
    # One client, one encoder of 10, models of 10, a new layer of 10. Eleven rounds, one of them for stage 1, leave
    # 2 * 10 * 10 - 10 = 190 for rounds of 2 * 10: 9.5, which rounds to ten. Ten rounds leave 8.5.
    assert concat_budget(11, 0.9, 500, 1, 1, 1, (10, 10, 10)) == ConcatBudget(1, 10)
    with pytest.raises(InputError, match="accepted: at least 11"):
        concat_budget(10, 0.9, 500, 1, 1, 1, (10, 10, 10))


def test_stage_one_has_one_round_at_least():
    assert concat_budget(100, 0.001, 500, 10, 100, 5, (62006, 61156, 4210)) == ConcatBudget(1, 500)


def test_the_new_layer_reads_all_encoders_and_a_bias():
    # (5 * 83 + 1) * 10 = 4160 numbers; what is left, 2 * 50 * 10 * 62006 - 100 * 5 * 61156, pays for 377.7 rounds.
    assert FedConcat().second_stage(500, 10, 100, ModelSizes(62006, 61156, 83, 10)).rounds == 378


def test_clusters_follow_label_histograms():
    counts = np.array([[90, 10, 0], [45, 5, 0], [0, 3, 300], [0, 1, 100], [0, 0, -5]])
    clusters = cluster_clients(counts, 2, seed=0)
    assert clusters[0] == clusters[1] != clusters[2] == clusters[3]
    assert FedConcat(clusters=2).groups(counts, 0).tolist() == clusters.tolist()
    with pytest.raises(InputError, match="6 clusters for 5 clients"):
        cluster_clients(counts, 6, seed=0)


def test_clusters_do_not_depend_on_how_much_a_client_holds():
    clusters = cluster_clients(np.array([[1, 0], [100, 0], [0, 1], [0, 100]]), 2, seed=0)
    assert clusters[0] == clusters[1] != clusters[2] == clusters[3]


@pytest.mark.parametrize(("seed", "state"), [(7, 7), (2**31 + 7, 2**31 + 7), (2**32 + 7, 7)])
def test_k_means_starts_ten_times_from_the_runs_seed(monkeypatch, seed, state):
    import sklearn.cluster

    made = []

    class Noting(sklearn.cluster.KMeans):
        def __init__(self, **options):
            super().__init__(**options)
            made.append(options)

    monkeypatch.setattr(sklearn.cluster, "KMeans", Noting)
    cluster_clients(np.eye(3), 2, seed)
    assert made == [{"n_clusters": 2, "n_init": 10, "random_state": state}]


@pytest.mark.parametrize("trainer", ["loop", "stacked"])
def test_stage_one_is_fedavg_within_every_cluster(trainer):
    data = toy.images(samples=70)
    cfg = toy.config(
        **HARD | {"algorithm": "fedconcat", "clusters": 3, "rounds": 40, "concat_share": 0.15, "concat_max_rounds": 10}
    )
    memory = toy.Memory()
    run_stack([Task(cfg, memory)], data, RunOptions(device="cpu", trainer=trainer, checkpoint_every=1))
    world, first = World(cfg, data), 6
    groups = cluster_clients(world.parts.counts, 3, cfg.seed)
    models = [world.start] * 3
    alone = without = 0
    for record in memory.records[:first]:
        for group in range(3):
            members = [k for k in record.trained if groups[k] == group]
            alone += len(members) == 1
            without += not members
            if members:
                trained = torch.stack([world.train(models[group], record.round, k).w for k in members])
                models[group] = world.shares(members) @ trained
    assert alone, "the case was not hard: no cluster had one drawn member"
    assert without > first, "the case was not hard: two clusters without a drawn member in some round"
    saved = next(c for c, _ in memory.saves if c.round == first)
    assert "head" not in saved.tensors
    layout = FlatLayout(world.model)
    for row, expected in zip(saved.tensors["models"], models, strict=True):
        for name, value in world.named(expected).items():
            torch.testing.assert_close(layout.unpack(row)[name].double(), value, atol=2e-5, rtol=1e-4)
    # Judged by the mean of the clusters' logits.
    x = (torch.from_numpy(data.x_test).double() / 255 - 0.4) / 0.25
    linear = [world.named(w) for w in models]
    logits = sum(x.flatten(1) @ m["1.weight"].T + m["1.bias"] for m in linear) / 3
    y = torch.from_numpy(data.y_test)
    last = memory.records[first - 1]
    assert last.loss == pytest.approx(float(F.cross_entropy(logits, y)), rel=1e-4)
    assert last.accuracy == pytest.approx(100 * float((logits.argmax(1) == y).double().mean()))
    assert next(c.round for c, _ in memory.saves if "head" in c.tensors) == first + 1
