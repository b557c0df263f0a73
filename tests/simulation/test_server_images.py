"""Images of the server's in real rounds: forgers are found, honest clients are not accused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import toy
from fedentopt import datasets
from fedentopt.audit import area_under_curve
from fedentopt.errors import InputError
from fedentopt.partition import Partition
from fedentopt.results.records import Outcome
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Stack, Task, run_stack
from fedentopt.simulation.server_images import take_server_images

CPU = RunOptions(device="cpu")
DATA = toy.images(samples=240, classes=4)
DIGITS = {
    "dataset": "digits", "partition": "classes:2", "clients": 20, "cohort": "8", "rounds": 12, "lr": 0.02,
    "batch_size": 16, "selector": "fedentopt", "buffer": "0", "audit": "warn", "server_images": 20,
    "evaluate_every": 99, "jitter": 0.0, "flip": 0.0, "grayscale": 0.0,
}  # fmt: skip
TOY = {
    "clients": 12, "cohort": "6", "rounds": 8, "epochs": 3, "partition": "classes:1", "lr": 0.05,
    "selector": "fedentopt", "buffer": "0", "audit": "quarantine", "server_images": 6, "liars": "3",
    "lie": "forge-head",
}  # fmt: skip


def digits(**settings: Any) -> tuple[Outcome, Stack]:
    config = RunConfig.from_dict(DIGITS | settings)
    data = datasets.load("digits", None, fine_labels=False, image_size=None)
    stack = Stack([Task(config, toy.Memory())], data, torch.device("cpu"), CPU, None)
    (outcome,) = stack.run(lambda: False)
    return outcome, stack


def recall_suspects(stack: Stack) -> list[Any]:
    audit = stack.runs[0].planner.audit
    assert audit is not None
    return list(audit.belied_by_recalls())


# --- whom they find
def test_forgers_are_found_and_nobody_else() -> None:
    for seed in (1, 2):
        _, stack = digits(seed=seed, liars="25%", lie="forge-head")
        liars = set(stack.runs[0].planner.liars)
        assert set(recall_suspects(stack)) <= liars
        assert len(recall_suspects(stack)) >= len(liars) - 1
        scores = stack.runs[0].planner.audit.recall_scores()
        honest = [score for client, score in scores.items() if client not in liars]
        assert area_under_curve([scores[client] for client in liars], honest) > 0.95
        outcome, _ = digits(seed=seed, liars="25%", lie="forge-head", audit="quarantine")
        assert outcome.records[-1].liars_chosen <= 1
    _, blind = digits(seed=seed, liars="25%", lie="forge-head", server_images=0)
    audit = blind.runs[0].planner.audit
    assert audit is not None
    assert not set(audit.suspects()) & liars  # the last layer alone does not tell


@pytest.mark.parametrize(("partition", "seed"), [("iid", 3), ("dir:0.1", 4)])
def test_honest_clients_are_not_accused(partition: str, seed: int) -> None:
    _, stack = digits(seed=seed, partition=partition)
    assert recall_suspects(stack) == []
    assert stack.runs[0].planner.audit.suspicions()


# --- where they come from
def test_images_are_taken_from_clients_and_nobody_is_left_empty() -> None:
    labels = np.repeat(np.arange(3), 10)
    parts = Partition(
        [np.arange(0, 9), np.array([9]), np.arange(10, 30)], np.array([[9, 0, 0], [1, 0, 0], [0, 10, 10]])
    )
    left, server = take_server_images(parts, labels, 8, seed=1)
    assert np.bincount(labels[server]).tolist() == [8, 8, 8]
    assert sorted(np.concatenate([server, *left.indices]).tolist()) == list(range(30))
    assert left.indices[1].tolist() == [9]
    np.testing.assert_array_equal(left.counts, [[1, 0, 0], [1, 0, 0], [0, 2, 2]])
    np.testing.assert_array_equal(take_server_images(parts, labels, 8, seed=1)[1], server)
    assert take_server_images(parts, labels, 8, seed=2)[1].tolist() != server.tolist()
    with pytest.raises(InputError, match="server_images: 9 of every class, and of class 0 the clients have only 8 to"):
        take_server_images(parts, labels, 9, seed=1)


def test_images_for_nobody_are_refused() -> None:
    with pytest.raises(InputError, match="server_images: 6 are for the audit, and that is off; accepted: 0, or audit"):
        toy_stack(audit="off")
    with pytest.raises(InputError, match="server_images: -1 is out of range"):
        toy.config(server_images=-1)
    with pytest.raises(InputError, match="server_images: 90 of every class, and of class"):
        toy_stack(server_images=90)


def toy_stack(**settings: Any) -> Stack:
    config = toy.config(**toy.PLAIN | TOY | settings)
    return Stack([Task(config, toy.Memory())], DATA, torch.device("cpu"), CPU, None)


# --- what they change
def test_recall_at_every_depth() -> None:
    """Classes put above the right one, as a share of all others; ties count half; NaN where nothing can be said."""
    stack = toy_stack()
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, float("nan"), 0.0]])
    samples = np.array([int(np.flatnonzero(DATA.y_train == c)[0]) for c in range(4)])
    stack.trainer.predict = lambda models, images: logits[:, None, :].expand(3, len(images), 4)  # type: ignore[method-assign]
    found = stack.evaluator.recalls(torch.zeros(3, 1), samples).numpy()
    np.testing.assert_allclose(found[0], [1, 2 / 3, 1 / 3, 0])
    np.testing.assert_allclose(found[1], 0.5)
    assert np.isnan(found[2]).all()


def test_an_identity_of_runs_without_images_stays() -> None:
    assert "server_images" not in toy.config().to_dict()
    assert toy.config(audit="warn", server_images=5).to_dict()["server_images"] == 5


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("policy", ["quarantine", "replace"])
def test_a_run_that_was_stopped_goes_on(policy: str, as_text: bool) -> None:
    """Also from a checkpoint of earlier versions, in which all that was observed is text."""
    config = toy.config(**toy.PLAIN | TOY | {"audit": policy})
    options = RunOptions(device="cpu", checkpoint_every=5)
    straight = toy.Memory()
    (whole,) = run_stack([Task(config, straight)], DATA, options)
    resumed = toy.Memory()
    resumed.saved = straight.saves[0]
    resumed.records = list(straight.saves[0][1])
    kept = resumed.saved[0]
    assert kept.meta["planner"]["audit"]["recalls"]
    for entry, sums in zip(kept.meta["planner"]["audit"]["seen"], kept.tensors["watch.shares"].tolist(), strict=True):
        assert entry[2] is None
        if as_text:
            entry[2] = sums
    for entry, sums in zip(
        kept.meta["planner"]["audit"]["recalls"], kept.tensors["watch.recalls"].tolist(), strict=True
    ):
        assert entry[2:5] == [None] * 3
        if as_text:
            entry[2:5] = sums
    if as_text:
        for name in ("watch.shares", "watch.recalls"):
            del kept.tensors[name]
    (rest,) = run_stack([Task(config, resumed)], DATA, options)
    assert [r.clients for r in rest.records] == [r.clients for r in whole.records]
    assert [r.suspicion_auc for r in rest.records] == [r.suspicion_auc for r in whole.records]
    assert toy.difference(whole, rest) == 0


def test_alone_and_in_a_stack() -> None:
    configs = [toy.config(**toy.PLAIN | TOY | more) for more in ({}, {"seed": 3, "audit": "replace"})]
    together = toy.run(configs, DATA)
    for config, outcome in zip(configs, together, strict=True):
        (alone,) = toy.run([config], DATA)
        assert [r.suspicion_auc for r in alone.records] == [r.suspicion_auc for r in outcome.records]
        assert toy.difference(alone, outcome) == 0
