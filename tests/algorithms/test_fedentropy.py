"""FedEntropy: values that steer the draw, the judgment inside a run, and what its soft labels cost."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pytest
import torch

import toy
from fedentopt.algorithms import FedEntropy
from fedentopt.errors import InputError
from fedentopt.selection import Observation
from fedentopt.selection.fedentropy import ValueSelector, judge
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from reference_runs import HARD, TRAINERS, World, check


def made(clients: int, cohort: int) -> ValueSelector:
    selector = ValueSelector(cohort)
    selector.register(np.ones((clients, 2)))
    return selector


def learn(selector: ValueSelector, kept: Sequence[int], dropped: Sequence[int]) -> None:
    selector.observe({k: Observation(1, kept=k in kept) for k in (*kept, *dropped)})


def times(selector: ValueSelector, rounds: int) -> np.ndarray:
    drawn = [client for _ in range(rounds) for client in selector.select().clients]
    return np.bincount(drawn, minlength=len(selector.clients))


def test_fedentropy_still_draws_after_a_thousand_halvings():
    selector = made(4, 2)
    for _ in range(1100):
        learn(selector, kept=(), dropped=(0, 1, 2))
    assert all(len(set(selector.select().clients)) == 2 for _ in range(50))
    learn(selector, kept=(), dropped=())
    for _ in range(1100):
        learn(selector, kept=(), dropped=(3,))
    assert times(selector, 2000).min() > 900, "equal values, equal chances"
    selector.values = dict.fromkeys(range(4), 0.0)  # as a checkpoint may hold them
    assert len(selector.select().clients) == 2
    learn(selector, kept=(2,), dropped=(0,))
    assert selector.values[2] == 1.0


def test_fedentropy_values_steer_the_draw():
    selector = made(10, 3)
    for _ in range(12):
        learn(selector, kept=(4,), dropped=(7, 8))
    assert selector.values[4] == 13.0
    assert selector.values[7] == pytest.approx(2.0**-12)
    assert all(len(set(selector.select().clients)) == 3 for _ in range(100))
    counts = times(selector, 2000)
    assert counts[4] > 2 * counts[0] > 2 * counts[7] > 0


def test_a_client_that_leaves_is_forgotten():
    selector = made(4, 2)
    learn(selector, kept=(1,), dropped=(2,))
    assert selector.memory() == {"values": [1.0, 2.0, 0.5, 1.0]}
    selector.remove([1])
    assert selector.memory() == {"values": [1.0, 0.5, 1.0]}
    selector.register({1: [1, 1]})
    assert selector.values == {0: 1.0, 2: 0.5, 3: 1.0, 1: 1.0}


def test_news_of_a_client_that_left_and_no_news_change_no_value():
    selector = made(4, 2)
    selector.remove([1])
    selector.observe({1: Observation(5, kept=True), 2: Observation(5), 3: Observation(5, kept=False)})
    assert selector.values == {0: 1.0, 2: 1.0, 3: 0.5}


def test_large_cohorts_end():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sorted(made(300, 300).select().clients) == list(range(300))


def test_a_state_with_values_of_others_is_refused():
    selector = made(2, 1)
    for values in ([1.0], [1.0, 2.0, 3.0]):
        with pytest.raises(InputError, match=r"state: values of \d clients; accepted: of all 2"):
            selector.load_state_dict(selector.state_dict() | {"values": values})
    assert selector.values == {0: 1.0, 1: 1.0}


def test_one_draw_in_five_is_uniform():
    # Value 10^9 against 1 and 1: drawn by value it is client 0, drawn uniformly any of the three.
    selector = made(3, 1)
    selector.values[0] = 1e9
    counts = times(selector, 6000)
    assert np.abs(counts / 6000 - [0.8 + 0.2 / 3, 0.2 / 3, 0.2 / 3]).max() < 0.02


def test_the_judgment_is_the_selections():
    soft = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert FedEntropy().judge(soft, np.array([4, 1, 1])).tolist() == [1, 2]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_run_equals_straight_line_torch(trainer):
    data = toy.images(samples=70)
    cfg = toy.config(**HARD | {"algorithm": "fedentropy", "cohort": "3", "rounds": 6, "dropout": 0.1})
    memory = toy.Memory()
    (outcome,) = run_stack([Task(cfg, memory)], data, RunOptions(device="cpu", trainer=trainer, checkpoint_every=1))
    world = World(cfg, data)
    w, values, dropped = world.start, np.ones(5), 0
    expected: dict[int, list[float]] = {}
    model = (3 * 8 * 8 * 3 + 3) * 4
    for record in outcome.records:
        trained = [world.train(w, record.round, k).w for k in record.trained]
        soft = [
            world.logits(own, world.parts.indices[k]).softmax(1).mean(0)
            for own, k in zip(trained, record.trained, strict=True)
        ]
        places = judge(torch.stack(soft).numpy(), world.sizes(record.trained).numpy())
        kept = [record.trained[i] for i in places]
        assert list(record.clients) == kept
        for k in record.trained:
            values[k] = values[k] + 1 if k in kept else values[k] / 2
        expected[record.round] = values.tolist()
        dropped += len(record.trained) - len(kept)
        w = world.shares(kept) @ torch.stack([trained[i] for i in places])
        # Every client that trained sends one soft label per class, of 4 bytes, and those that are kept their models.
        assert record.bytes_up == len(kept) * model + len(record.trained) * 3 * 4
        assert record.bytes_down == 3 * model
    assert dropped, "the case was not hard"
    check(outcome, world.named(w))
    saved = {checkpoint.round: checkpoint.meta["planner"]["selector"] for checkpoint, _ in memory.saves}
    assert list(saved) == [1, 2, 3, 4, 5]
    for number, state in saved.items():
        assert state["values"] == expected[number]
        assert (state["selector"], state["round"]) == ("fedentropy", number)
