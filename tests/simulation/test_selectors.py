"""Every selector in real rounds: resumed equals straight, alone equals in a stack, weights of the average by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import toy
from fedentopt.errors import InputError
from fedentopt.results.records import Outcome
from fedentopt.selection import SELECTORS
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from reference_runs import HARD, World, check, cohorts

CPU = RunOptions(device="cpu")
WITH_FEEDBACK = [cls.name for cls in SELECTORS if cls.needs]
NEW = [cls.name for cls in SELECTORS if cls.name not in ("random", "fedentopt", "kl")]


def learning(name: str, **settings: object) -> RunConfig:
    """Few clients, so that the start in which everybody trains once is over soon; some drop out."""
    given: dict[str, object] = {"selector": name, "rounds": 6, "clients": 5, "cohort": "2", "dropout": 0.2}
    return toy.config(**given | {"speed_spread": 0.5, "epochs": 1} | settings)


def same_bits(a: Outcome, b: Outcome) -> bool:
    figures = [[replace(record, seconds=0.0) for record in outcome.records] for outcome in (a, b)]
    return figures[0] == figures[1] and all(torch.equal(a.model[n], b.model[n]) for n in a.model)


@pytest.mark.parametrize("name", NEW)
def test_resumed_equals_straight_through_bit_for_bit(name: str) -> None:
    data, cfg = toy.images(samples=70), learning(name)
    straight = toy.Memory()
    run_stack([Task(cfg, straight)], data, replace(CPU, checkpoint_every=1))
    assert len(straight.saves) == 5
    for saved, records in straight.saves[1::3]:
        again = toy.Memory()
        again.saved, again.records = (saved, records), list(records)
        (outcome,) = run_stack([Task(cfg, again)], data, CPU)
        assert straight.outcome is not None
        assert same_bits(outcome, straight.outcome), saved.round
    assert straight.outcome is not None
    trained = cohorts(straight.outcome)
    assert all(len(cohort) <= 2 for cohort in trained)
    assert len(set(trained)) > 1


@pytest.mark.parametrize("name", ["hics-fl", "divfl"])
def test_a_checkpoint_of_bare_changes_is_not_continued(name: str) -> None:
    """Versions that did not divide changes by step sizes kept numbers of another scale, and did not say so."""
    data, cfg = toy.images(samples=70), learning(name)
    straight, again = toy.Memory(), toy.Memory()
    run_stack([Task(cfg, straight)], data, replace(CPU, checkpoint_every=4))
    saved, records = straight.saves[0]
    assert saved.meta["planner"]["selector"].pop("per_travel") is True
    again.saved, again.records = (saved, records), list(records)
    with pytest.raises(InputError, match=f"^{cfg.run_id}: observe: travel, .*cannot be continued: start anew"):
        run_stack([Task(cfg, again)], data, CPU)


def test_alone_equals_in_a_stack_bit_for_bit() -> None:
    data = toy.images(samples=70)
    configs = [learning(name, rounds=4, seed=seed) for name in NEW for seed in (0, 1)]
    for cfg, outcome in zip(configs, toy.run(configs, data, workers=2), strict=True):
        if cfg.seed:
            assert same_bits(outcome, toy.run([cfg], data, workers=1)[0]), cfg.method


def test_what_was_told_matters() -> None:
    """With other learning rates the same seeds give other feedback, and so other cohorts."""
    data = toy.images(samples=70)
    for name in WITH_FEEDBACK:
        slow, fast = (cohorts(toy.run([learning(name, lr=lr, rounds=12)], data)[0]) for lr in (1e-4, 0.1))
        assert slow != fast, name


@pytest.mark.parametrize(
    ("name", "averaging"),
    [
        ("clustered-size", "selector"),
        ("clustered-size", "samples"),
        ("clustered-label", "selector"),
        ("pow-d", "selector"),
    ],
)
def test_weights_of_the_average(name: str, averaging: str) -> None:
    """The models are averaged with the selector's weights, a double draw counting twice, or by numbers of samples."""
    data = toy.images(samples=70)
    cfg = toy.config(
        **HARD | {"selector": name, "averaging": averaging, "cohort": "4", "rounds": 3, "dropout": 0.0, "seed": 1}
    )
    outcome = toy.run([cfg], data)[0]
    world = World(cfg, data)
    selector = SELECTORS.get(name)(4, seed=1)
    selector.register(world.parts.counts)
    w, doubles, apart = world.start, 0, 0.0
    for r, trained in enumerate(cohorts(outcome), 1):
        shares = world.shares(trained)
        if name == "pow-d":
            weights = {k: 1 / len(trained) for k in trained}
        else:
            cohort = selector.select()
            assert cohort.clients == trained
            assert cohort.weights is not None
            weights = dict(zip(cohort.clients, cohort.weights, strict=True))
            doubles += len(trained) < 4
        own = torch.tensor([weights[k] for k in trained], dtype=torch.float64)
        assert float(own.sum()) == pytest.approx(1)
        apart = max(apart, float((own - shares).abs().max()))
        p = shares if averaging == "samples" else own
        w = p @ torch.stack([world.train(w, r, k).w for k in trained])
    assert apart > 0.05, "both ways would be the same"
    if name != "pow-d":
        assert doubles, "nobody was drawn twice"
    check(outcome, world.named(w))


def test_cycle_serves_everybody_in_a_run() -> None:
    cfg = learning("cycle", clients=6, cohort="2", rounds=6, dropout=0.0)
    times = Counter(k for cohort in cohorts(toy.run([cfg], toy.images(samples=70))[0]) for k in cohort)
    assert times == dict.fromkeys(range(6), 2)


def test_bytes_of_the_reports() -> None:
    """In round 1 label counts are a number per class and client, sizes one number, and some report nothing."""
    data = toy.images(samples=70)
    sent = {}
    for name in ("random", "fed-cbs", "clustered-size", "divfl", "clustered-update"):
        (first,) = toy.run([learning(name, dropout=0.0, rounds=1)], data)[0].records
        sent[name] = first.bytes_up - len(first.trained) * (192 * 3 + 3) * 4
    assert sent["random"] == sent["divfl"] == 0
    assert sent["fed-cbs"] == 3 * sent["clustered-size"] > 0
    assert sent["clustered-update"] == sent["clustered-size"]
