"""Numbers that must not change: cohorts and plans of a grid of settings, as they were when results were published."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import toy
from fedentopt import KLSelector
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.methods import build_algorithm, build_selector
from fedentopt.simulation.planning import RunPlanner
from plan_digest import CLASSES, LABELS, plan_digest
from reference_runs import HARD, TRAINERS, World, check

COMMON: dict[str, Any] = {"clients": 24, "cohort": "5", "min_samples": 1, "epochs": 3, "batch_size": 16}
AWAY = {"dropout": 0.3, "stragglers": 0.4}
PLANS: list[tuple[dict[str, Any], str]] = [
    ({"selector": "random", "partition": "dir:0.1"}, "b098fbb0de04"),
    ({"selector": "fedentopt", "partition": "dir:0.1"}, "bbc26d7b60ca"),
    ({"selector": "random", "partition": "dir:0.5"}, "bd00a5eba607"),
    ({"selector": "fedentopt", "partition": "dir:0.5"}, "d89ed806cf3f"),
    ({"selector": "random", "partition": "classes:2"}, "6819e56987f1"),
    ({"selector": "fedentopt", "partition": "classes:2"}, "29faef5ef9c3"),
    ({"selector": "random", "partition": "iid"}, "ac24eca52c2c"),
    ({"selector": "fedentopt", "partition": "iid"}, "9e8ba3d90553"),
    ({"selector": "kl", "partition": "dir:0.1"}, "06ecd493bd13"),
    ({"selector": "kl", "partition": "classes:2"}, "536bb2a08c3e"),
    ({"selector": "random", "partition": "dir:0.1", "seed": 7} | AWAY, "f4ff4c65d105"),
    ({"selector": "fedentopt", "partition": "dir:0.1", "seed": 7} | AWAY, "aebbd3f65fad"),
    ({"selector": "kl", "partition": "dir:0.5", "seed": 7} | AWAY, "d3e45faa09b4"),
    ({"selector": "fedentopt", "partition": "dir:0.1", "buffer": "0"}, "0da3d24729bd"),
    ({"selector": "fedentopt", "partition": "classes:2", "buffer": "19"}, "f5ffdc50b438"),
    ({"selector": "fedentopt", "partition": "dir:0.1", "epsilon": 0.5}, "7469fcd79675"),
    ({"selector": "fedentopt", "partition": "classes:2", "epsilon": 2.0, "buffer": "25%"} | AWAY, "09ad9de3cd06"),
    ({"selector": "kl", "partition": "dir:0.1", "epsilon": 0.5}, "40b2d058eea4"),
    ({"selector": "random", "partition": "dir:0.1", "epsilon": 0.5, "min_samples": 0, "seed": 3}, "b4065bfc9da7"),
    ({"algorithm": "fedentropy", "partition": "dir:0.1"}, "120c46d0601d"),
    ({"algorithm": "fedentropy", "partition": "classes:2", "seed": 7} | AWAY, "1882d2994b1a"),
    ({"algorithm": "scaffold", "selector": "fedentopt", "partition": "classes:3", "seed": 2}, "4d9d5a85d890"),
]


def planned(settings: dict[str, Any]) -> str:
    config = RunConfig.from_dict(COMMON | settings)
    selector = build_selector(config, build_algorithm(config))
    return plan_digest(RunPlanner(config, LABELS, CLASSES, selector), config.batch_size)


@pytest.mark.parametrize(("settings", "digest"), PLANS, ids=[digest for _, digest in PLANS])
def test_plans_are_what_they_were(settings: dict[str, Any], digest: str) -> None:
    assert planned(settings) == digest


def test_no_two_plans_are_alike() -> None:
    digests = [digest for _, digest in PLANS]
    assert len(set(digests)) == len(digests) >= 20


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_run_on_part_of_the_clients_data_equals_straight_line_torch(trainer: str) -> None:
    """KL's cohorts use the first samples of each class up to their limits, and are averaged by what they used."""
    data, cfg = toy.images(samples=70), toy.config(**HARD | {"selector": "kl", "cohort": "3", "rounds": 3})
    (outcome,) = toy.run([cfg], data, trainer=trainer)
    world = World(cfg, data)
    selector = KLSelector(3)
    selector.register(world.parts.counts)
    cohort = selector.select()
    used = {}
    for k, limit in (cohort.sample_limits or {}).items():
        own = np.sort(world.parts.indices[k])
        used[k] = np.sort(np.concatenate([own[data.y_train[own] == c][: limit[c]] for c in range(3)]))
    assert any(len(used[k]) < len(world.parts.indices[k]) for k in used), "the case was not hard"
    trained = [k for k in cohort.clients if len(used[k])]
    sizes = torch.tensor([float(len(used[k])) for k in trained], dtype=torch.float64)
    w = world.start
    for record in outcome.records:
        assert (record.clients, record.trained) == (cohort.clients, tuple(trained))
        w = sizes / sizes.sum() @ torch.stack([world.train(w, record.round, k, samples=used[k]).w for k in trained])
    check(outcome, world.named(w))
