"""FedConcat's second stages side by side equal the same stages one by one: uneven, split up, spoilt, resumed."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import replace

import pytest
import torch

import toy
from fedentopt.partition import parse, partition
from fedentopt.randomness import key
from fedentopt.simulation import engine, head_stage, second_stage
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from second_stages import in_second_stage, spoilt_checkpoint

CONCAT = {"algorithm": "fedconcat", "clusters": 2, "rounds": 40, "concat_share": 0.3, "concat_max_rounds": 12}


def small(num_classes: int) -> torch.nn.Module:
    """A model that the stacked kernels know, with an encoder that does something."""
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 5), torch.nn.ReLU(), torch.nn.Linear(5, num_classes)
    )


class OfLengthOne(torch.nn.Module):
    """Of an image of zeros, which no client has, it makes NaN, unless there is a `least` length."""

    def __init__(self, least: float) -> None:
        super().__init__()
        self.least = least

    def forward(self, x):
        x = x.flatten(1)
        return x / x.norm(dim=1, keepdim=True).clamp(min=self.least)


def nan_of_zeros(num_classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(OfLengthOne(0.0), torch.nn.Linear(3 * 8 * 8, num_classes))


def zeros_of_zeros(num_classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(OfLengthOne(1e-9), torch.nn.Linear(3 * 8 * 8, num_classes))


def mixed(model: str, **settings: object) -> list:
    """Runs with other numbers of clusters, other cohorts, other starts of their second stage, rounds without anybody,
    rounds without evaluation, and one of another kind."""
    common = CONCAT | {"model": model, "dropout": 0.4, "stragglers": 0.5} | settings
    changes = [
        {}, {"seed": 1, "cohort": "6", "evaluate_every": 13}, {"seed": 2, "clusters": 3}, {"seed": 3, "cohort": "1"},
        {"seed": 4},
        {"seed": 5, "clusters": 3, "cohort": "2"}, {"seed": 6, "concat_share": 0.2, "evaluate_every": 3},
    ]  # fmt: skip
    runs = [toy.config(**(common | change)) for change in changes]
    return [*runs, runs[0].replace(algorithm="fedavg")]


def agree(a, b, tolerance: float = 1e-5) -> None:
    """Same rounds, same figures and same models to float tolerance."""
    assert toy.difference(a, b) < tolerance
    for one, other in zip(a.records, b.records, strict=True):
        assert replace(one, seconds=0, loss=None, accuracy=None, class_accuracy=None) == replace(
            other, seconds=0, loss=None, accuracy=None, class_accuracy=None
        )
        assert one.loss == pytest.approx(other.loss, rel=1e-4, abs=1e-5)


@pytest.fixture
def together(monkeypatch):
    """Group runs on the CPU as on CUDA."""
    grouped = functools.partial(second_stage.SecondStages, together=True)
    return lambda: monkeypatch.setattr(engine, "SecondStages", grouped)


@pytest.mark.parametrize(("model", "trainer"), [(f"{__name__}:small", "stacked"), ("toy:normed", "streams")])
def test_together_equals_one_by_one(model, trainer, together):
    data = toy.images(samples=90)
    configs = mixed(model)
    alone = toy.run(configs, data, trainer=trainer)
    together()
    for a, b in zip(alone, toy.run(configs, data, trainer=trainer), strict=True):
        agree(a, b)
    second = [r.trained for outcome in alone[:-1] for r in outcome.records[-12:]]
    assert {len(trained) for trained in second} >= {0, 1, 2, 3, 4}, "the case was not hard"


@pytest.mark.parametrize(
    ("module", "limit", "value"),
    [
        (head_stage, "COPIED", 1),
        (head_stage, "FEATURE_BATCH", 5),
        (second_stage, "ROOM", 1),
        (second_stage, "TEST_ROOM", 180),
    ],
)
def test_in_parts_that_fit_equals_at_once(module, limit, value, together, monkeypatch):
    data = toy.images(samples=60, size=32)
    configs = [c.replace(rounds=7, clients=4, cohort="2", concat_max_rounds=10) for c in mixed("lenet5")[:3]]
    together()
    whole = toy.run(configs, data, trainer="stacked")
    monkeypatch.setattr(module, limit, value)
    for a, b in zip(whole, toy.run(configs, data, trainer="stacked"), strict=True):
        agree(a, b)


def test_groups_are_alike_in_inputs_and_rows_and_leave_out_runs_without_rows(together, monkeypatch):
    together()
    stack = in_second_stage([toy.config(**(CONCAT | {"clusters": c})) for c in (2, 3, 2, 2, 2, 2, 3)], toy.images())
    stack._tick(stack.runs)
    stages = [run.stage for run in stack.runs]
    groups = functools.partial(stack.second._groups, stages, [4, 4, 3, 2, 0, 4, 1], 8)
    assert groups() == [[0, 2, 5], [3], [1], [6]]
    inputs, size = stages[0].inputs, len(stages[0].head)
    monkeypatch.setattr(second_stage, "ROOM", 2 * 4 * (8 * (3 * 64 + 2 * inputs) + 3 * size))
    assert groups() == [[0, 5], [2], [3], [1], [6]]
    stack.second.together = False
    assert groups() == [[0], [1], [2], [3], [5], [6]]


@pytest.mark.parametrize("grouped", [False, True])
def test_what_a_model_makes_of_padding_does_not_reach_the_layer(grouped, together):
    if grouped:
        together()
    data = toy.images(samples=90)
    names = [f"{__name__}:{name}" for name in ("nan_of_zeros", "zeros_of_zeros")]
    first, second = (
        toy.run([toy.config(**CONCAT | {"model": name} | change) for change in ({}, {"seed": 1, "cohort": "2"})], data)
        for name in names
    )
    for one, other in zip(first, second, strict=True):
        assert one.diverged_round is None
        assert toy.difference(one, other) == 0


def test_a_layer_that_is_not_finite_spoils_its_own_run_only(together):
    data = toy.images(samples=90)
    configs = mixed(f"{__name__}:small", dropout=0.0)[:5]

    def tick() -> list:
        stack = in_second_stage(configs, data)
        stack._tick(stack.runs)
        stack.runs[0].stage.head = torch.full_like(stack.runs[0].stage.head, torch.nan)
        pending = stack._tick(stack.runs)
        assert pending.finite.tolist() == [False, True, True, True, True]
        return [run.stage.head for run in stack.runs]

    alone = tick()
    together()
    spoilt, *others = tick()
    assert not bool(torch.isfinite(spoilt).any())
    for a, b in zip(alone[1:], others, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_layer_that_is_not_finite_is_not_kept(together):
    """Trained at a learning rate far too large beside one that is not: the last finite layer is the run's last one."""
    data = toy.images(samples=90)
    good = toy.config(**(CONCAT | {"model": f"{__name__}:small"}))
    bad = good.replace(seed=1, lr=1e30, lr_decay=1.0)
    together()
    stack = in_second_stage([good, bad], data)
    before = stack.second._begin(stack.runs[1]).head.clone()
    pending = stack._tick(stack.runs)
    assert pending.finite.tolist() == [True, False]
    torch.testing.assert_close(stack.runs[1].stage.head, before, atol=0, rtol=0)
    stack._flush(deque([pending]), 0)
    stack._tick(stack.runs)
    assert stack.runs[1].diverged_round == stack.runs[1].first_stage + 1
    model = stack.runs[1].outcome().model
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.values())
    assert torch.equal(torch.cat([model["head.weight"].flatten(), model["head.bias"]]), before)


def test_a_diverged_second_stage_counts_as_chance_and_the_others_go_on(together):
    data = toy.images(samples=90)
    good, bad = toy.config(**CONCAT), toy.config(**(CONCAT | {"seed": 1}))
    memory = toy.Memory()
    memory.saved = spoilt_checkpoint(bad, data)
    straight = toy.run([good], data)[0]
    together()
    outcomes = run_stack([Task(good, toy.Memory()), Task(bad, memory)], data, RunOptions(device="cpu"))
    agree(outcomes[0], straight)
    round_ = memory.saved[0].round + 1
    assert outcomes[1].diverged_round == round_
    assert all(r.accuracy == pytest.approx(100 / 3) for r in outcomes[1].records[round_ - 1 :])
    assert all(not r.trained for r in outcomes[1].records[round_:])


def test_resumed_in_the_second_stage_equals_straight_through(together):
    data = toy.images(samples=90)
    configs = mixed(f"{__name__}:small")[:4]
    together()
    memories = [toy.Memory() for _ in configs]
    options = RunOptions(device="cpu", trainer="stacked", checkpoint_every=1)
    straight = run_stack([Task(c, m) for c, m in zip(configs, memories, strict=True)], data, options)
    for i, memory in enumerate(memories):  # each at another round of its second stage
        second = [save for save in memory.saves if "head" in save[0].tensors]
        memory.saved = second[2 * i]
        memory.records = list(memory.saved[1])
    again = run_stack([Task(c, m) for c, m in zip(configs, memories, strict=True)], data, options)
    for a, b in zip(straight, again, strict=True):
        agree(a, b)


def test_the_encoders_travel_once_when_the_second_stage_begins():
    config = toy.config(**CONCAT | {"model": f"{__name__}:small", "dropout": 0.0})
    (outcome,) = toy.run([config], toy.images(samples=60))
    encoder, layer = (3 * 64 + 1) * 5 * 4, (2 * 5 + 1) * 3 * 4  # bytes
    first = next(i for i, record in enumerate(outcome.records) if record.bytes_up == 3 * layer)
    assert len(outcome.records) == first + 12
    assert outcome.records[first].bytes_down == 3 * layer + config.clients * 2 * encoder
    assert {record.bytes_down for record in outcome.records[first + 1 :]} == {3 * layer}
    assert {record.bytes_up for record in outcome.records[first:]} == {3 * layer}


def test_a_new_layer_starts_as_torchs_linear_layer_does_from_the_runs_key():
    head = head_stage.fresh_head(16, 3, seed=5)
    drawn = torch.rand(51, generator=torch.Generator().manual_seed(key(5, "concat-head") >> 1))
    assert head.tolist() == ((drawn * 2 - 1) / 4).tolist()


def test_a_round_is_a_few_batches_of_sgd_on_the_encoders_features_and_a_plain_mean(together):
    """Clients smaller than a batch, nothing augmented, an encoder that only flattens: torch's SGD says what follows."""
    data = toy.images(samples=30)
    settings = CONCAT | toy.PLAIN | {"batch_size": 32, "lr": 0.05}
    configs = [toy.config(**(settings | change)) for change in ({}, {"seed": 1, "cohort": "4"})]
    memories = [toy.Memory() for _ in configs]
    together()
    options = RunOptions(device="cpu", trainer="stacked", checkpoint_every=1)
    run_stack([Task(c, m) for c, m in zip(configs, memories, strict=True)], data, options)
    images = ImageTransform(data.mean, data.std).standardise(torch.from_numpy(data.x_train)).flatten(1)
    features = torch.cat([images, images], 1)
    for config, memory in zip(configs, memories, strict=True):
        parts = partition(data.y_train, parse(config.partition), 6, config.seed, num_classes=3, min_samples=1)
        before, after = [c for c, _ in memory.saves if "head" in c.tensors][:2]
        record = memory.records[after.round - 1]
        trained = []
        for client in record.trained:
            own = torch.from_numpy(parts.indices[client])
            layer = torch.nn.Linear(features.shape[1], 3)
            weight, bias = before.tensors["head"].split([features.shape[1] * 3, 3])
            layer.load_state_dict({"weight": weight.view(3, -1), "bias": bias})
            optimiser = torch.optim.SGD(
                layer.parameters(), lr=0.05 * config.lr_decay, momentum=config.momentum,
                weight_decay=config.weight_decay,
            )  # fmt: skip
            for _ in range(3):
                optimiser.zero_grad()
                loss = torch.nn.functional.cross_entropy(layer(features[own]), torch.from_numpy(data.y_train)[own])
                loss.backward()
                optimiser.step()
            trained.append(torch.cat([layer.weight.detach().flatten(), layer.bias.detach()]))
        torch.testing.assert_close(after.tensors["head"], torch.stack(trained).mean(0), atol=1e-5, rtol=1e-5)
        assert (after.tensors["head"] - before.tensors["head"]).abs().max() > 1e-3
