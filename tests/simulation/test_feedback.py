"""What a selector is told of those that trained: last layers, updates, seconds, who was kept; and weights it gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import toy
from fedentopt.algorithms import Algorithm, Client, LocalTerms
from fedentopt.errors import InputError
from fedentopt.randomness import generator
from fedentopt.results.records import Outcome
from fedentopt.selection import Observation, RandomSelector, Selector
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from reference_runs import HARD, TRAINERS, World, check, cohorts

M = __name__
CPU = RunOptions(device="cpu")
Told = list[dict[Any, Observation]]


def listener(*needs: str) -> type[RandomSelector]:
    """A class of random selection that also notes what it is told."""

    class Listener(RandomSelector):
        name = "listener"

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.told: Told = []

        def observe(self, observations: Mapping[Any, Observation]) -> None:
            self.told.append(dict(observations))

    Listener.needs = frozenset(needs)
    return Listener


def heard(needs: tuple[str, ...], data: Any = None, **settings: Any) -> tuple[Told, Outcome, RunConfig]:
    """What a run tells a selector with these needs; `trainer` and `algorithm` objects are taken out of the settings."""
    options = RunOptions(device="cpu", trainer=settings.pop("trainer", "auto"))
    own = settings.pop("own", None)
    made: list[Any] = []

    def make(config: RunConfig) -> Selector:
        made.append(listener(*needs)(config.cohort_size, config.seed))
        return made[-1]

    cfg = toy.config(**HARD | {"selector": f"{M}:listener"} | settings)
    task = Task(cfg, toy.Memory(), selector=make, algorithm=own)
    (outcome,) = run_stack([task], toy.images(samples=70) if data is None else data, options)
    return made[0].told, outcome, cfg


def last_round_is_told(told: Told, outcome: Outcome) -> list[Any]:
    """Records of the rounds that were told; the last one is not, since nobody is picked after it."""
    records = [record for record in outcome.records if record.trained]
    assert len(told) in (len(records) - 1, len(records))
    return records[: len(told)]


# --- head and update
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(("model", "head"), [("toy:linear", "1"), ("toy:branching", "last")])
def test_heads_and_updates_are_after_minus_before(model, head, trainer):
    told, outcome, cfg = heard(("head", "update"), model=model, trainer=trainer)
    data = toy.images(samples=70)
    world = World(cfg, data)
    w = world.start
    seen = last_round_is_told(told, outcome)
    assert len(seen) == 4
    for record, observations in zip(seen, told, strict=True):
        assert tuple(observations) == record.trained
        trained = [world.train(w, record.round, k).w for k in record.trained]
        before = world.named(w)
        for own, (k, observation) in zip(trained, observations.items(), strict=True):
            after = world.named(own)
            assert observation.samples == len(world.parts.indices[k])
            assert observation.head is not None
            assert observation.head.bias is not None
            assert observation.update is not None
            for found, expected in (
                (observation.head.weight, after[f"{head}.weight"] - before[f"{head}.weight"]),
                (observation.head.bias, after[f"{head}.bias"] - before[f"{head}.bias"]),
                (observation.update, own - w),  # plain order, whatever order the trainer keeps
            ):
                assert found.dtype == np.float32
                assert found.shape == tuple(expected.shape)
                np.testing.assert_allclose(found, expected.numpy(), atol=2e-5, rtol=1e-3)
            assert np.abs(observation.update).max() > 1e-3
        w = world.shares(record.trained) @ torch.stack(trained)


def biasless(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes, bias=False))


def bare(num_classes: int) -> nn.Module:
    """A model that is its own last layer, but for the shape of its input."""

    class Bare(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(1))

    return Bare(192, num_classes)


def headless(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, num_classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def frozen(num_classes: int) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, num_classes))
    model[2].requires_grad_(False)
    return model


def test_heads_of_odd_models():
    told, _, _ = heard(("head",), model=f"{M}:biasless")
    (one, *_) = told[0].values()
    assert one.head.weight.shape == (3, 192)
    assert one.head.bias is None
    told, _, _ = heard(("head", "update"), model=f"{M}:bare")
    (one, *_) = told[0].values()
    assert (one.head.weight.shape, one.head.bias.shape) == ((3, 192), (3,))
    np.testing.assert_array_equal(one.update, np.concatenate([one.head.weight.ravel(), one.head.bias]))


@pytest.mark.parametrize("model", ["headless", "frozen"])
def test_a_head_that_does_not_exist_or_train_is_refused(model):
    with pytest.raises(
        InputError, match=rf"needs the change of the last layer, and the model '{M}:{model}' has no lin"
    ):
        heard(("head",), model=f"{M}:{model}")
    told, _, _ = heard(("update",), model=f"{M}:{model}")
    assert all(observation.update is not None for seen in told for observation in seen.values())


def test_groups_start_from_their_own_models():
    """With a model per group, a client's change is from where it started."""

    class Halves(Algorithm):
        def groups(self, label_counts: np.ndarray, seed: int) -> np.ndarray:
            return np.arange(len(label_counts)) % 2

    told, outcome, cfg = heard(("update",), own=Halves(), algorithm=f"{M}:Halves", cohort="3")
    world = World(cfg, toy.images(samples=70))
    models = [world.start, world.start]
    for record, observations in zip(last_round_is_told(told, outcome), told, strict=True):
        trained = {k: world.train(models[k % 2], record.round, k).w for k in record.trained}
        for k, observation in observations.items():
            np.testing.assert_allclose(observation.update, (trained[k] - models[k % 2]).numpy(), atol=2e-5, rtol=1e-3)
        for group in (0, 1):
            members = [k for k in record.trained if k % 2 == group]
            if members:
                models[group] = world.shares(members) @ torch.stack([trained[k] for k in members])


# --- seconds and kept
@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_seconds_are_samples_times_epochs_by_speed(spread):
    told, outcome, cfg = heard(("seconds",), speed_spread=spread, stragglers=0.6, epochs=4, cohort="4", dropout=0.2)
    sizes = World(cfg, toy.images(samples=70)).parts.counts.sum(1)
    slow = {int(k) for k in generator(5, "stragglers").permutation(5)[:3]}
    fewer = 0

    def seconds(k: int, round_: int) -> float:
        nonlocal fewer
        epochs = 4
        if k in slow:
            epochs = int(generator(5, "straggler-epochs", round_, k).integers(1, 5))
            fewer += epochs < 4
        z = generator(5, "speed", k).standard_normal()
        return int(sizes[k]) * epochs / (1000 * math.exp(spread * z))

    for record in outcome.records:
        each = [seconds(k, record.round) for k in record.trained]
        assert record.simulated_seconds == pytest.approx(max(each, default=0.0), rel=1e-12)
    for record, observations in zip(last_round_is_told(told, outcome), told, strict=True):
        assert [seen.seconds for seen in observations.values()] == pytest.approx(
            [seconds(k, record.round) for k in record.trained], rel=1e-12
        )
    assert fewer, "the case was not hard"


def test_speeds_are_the_clients_for_the_whole_run():
    told, _, _ = heard(("seconds",), speed_spread=1.0, epochs=2, cohort="5", rounds=4)
    each = [{k: seen.seconds for k, seen in observations.items()} for observations in told]
    assert each[0] == each[1] == each[2]
    rates = {round(seen.samples * 2 / 1000 / seen.seconds, 9) for seen in told[0].values()}
    assert len(rates) == 5, "everybody at their own"


class KeepsHalf(Algorithm):
    def judge(self, soft_labels: np.ndarray, samples: np.ndarray) -> np.ndarray:
        return np.arange(0, len(samples), 2)


def test_who_was_kept():
    told, outcome, _ = heard(("kept",), own=KeepsHalf(), algorithm=f"{M}:KeepsHalf", cohort="4")
    for record, observations in zip(last_round_is_told(told, outcome), told, strict=True):
        assert record.clients == record.trained[::2]
        assert {k: seen.kept for k, seen in observations.items()} == {k: k in record.clients for k in record.trained}
    assert len(told) == 4
    # Where no algorithm judges, all that trained are kept.
    told, outcome, _ = heard(("kept",))
    for record, observations in zip(last_round_is_told(told, outcome), told, strict=True):
        assert {k: seen.kept for k, seen in observations.items()} == dict.fromkeys(record.trained, True)
    assert len(told) == 4
    told, _, _ = heard(("seconds",))
    assert all(seen.kept is None for observations in told for seen in observations.values())


# --- and nothing else
@pytest.mark.parametrize("need", ["head", "update", "seconds", "kept"])
def test_only_what_is_needed_is_filled_in(need):
    told, _, _ = heard((need,), own=KeepsHalf(), algorithm=f"{M}:KeepsHalf")
    assert told
    for observations in told:
        for seen in observations.values():
            filled = {field.name for field in fields(seen) if getattr(seen, field.name) is not None}
            assert filled == {"samples", need, *({"travel", "untrained"} if need == "head" else ())}


def test_a_selector_that_needs_nothing_is_told_nothing():
    told, outcome, cfg = heard(())
    assert told == []
    plain = toy.run([cfg.replace(selector="random")], toy.images(samples=70))[0]
    assert [r.clients for r in outcome.records] == [r.clients for r in plain.records]
    assert toy.difference(outcome, plain) == 0


def test_what_is_told_costs_no_bytes_but_losses():
    data = toy.images(samples=70)
    model = (3 * 8 * 8 * 3 + 3) * 4
    for needs in ((), ("head", "update", "seconds", "kept")):
        _, outcome, _ = heard(needs, data)
        assert {(r.bytes_up, r.bytes_down) for r in outcome.records} == {(2 * model, 2 * model)}


class Spoilt(Algorithm):
    """One client's local objective leads nowhere."""

    def local_terms(self, client: Client) -> LocalTerms:
        return LocalTerms(mu=1e38 if client.number == 2 else 0.0)


@pytest.mark.parametrize("need", ["head", "update"])
def test_clients_with_figures_that_are_not_finite_are_left_out(need):
    told, outcome, _ = heard((need,), own=Spoilt(), algorithm=f"{M}:Spoilt", cohort="4", rounds=6)
    first = next(record for record in outcome.records if 2 in record.trained)
    assert outcome.diverged_round == first.round
    assert len(first.trained) == 4
    assert set(told[first.round - 1]) == set(first.trained) - {2}
    assert len(told) == first.round, "after that nobody trains"
    assert all(np.isfinite(getattr(s, need).weight if need == "head" else s.update).all() for s in told[-1].values())


def test_all_that_is_not_finite_is_nothing_to_tell():
    told, outcome, _ = heard(("update",), lr=1e30)
    assert outcome.diverged_round == 1
    assert told == []


# --- a run that was stopped goes on
class Learner(Selector):
    """Picks by what it was told, to the last bit."""

    name = "learner"

    def __init__(self, cohort_size: int, seed: int = 0) -> None:
        super().__init__(cohort_size, seed)
        self.scores: dict[Any, float] = {}
        self.kept = np.zeros((0, 0), np.float32)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        scores = np.array([self.scores.get(self.clients[number], 0.0) for number in available])
        if self.kept.size:
            scores = scores + float(self.kept.sum()) * self.rng().random(len(scores))
        return available[np.argsort(scores, kind="stable")][: self.cohort_size].tolist()

    def observe(self, observations: Mapping[Any, Observation]) -> None:
        rows = []
        for client, seen in observations.items():
            parts = [seen.seconds, seen.loss, seen.loss_rms, None if seen.kept is None else float(seen.kept)]
            arrays = [seen.update, None if seen.head is None else seen.head.weight.ravel()]
            value = sum(part for part in parts if part is not None)
            value += sum(float(np.abs(a).astype(np.float64).sum()) for a in arrays if a is not None)
            self.scores[client] = self.scores.get(client, 0.0) + value
            rows.append(next((a for a in arrays if a is not None), np.array([value]))[:7])
        self.kept = np.stack(rows).astype(np.float32)

    def memory(self) -> dict[str, Any]:
        return {"scores": [[client, value] for client, value in self.scores.items()]}

    def remember(self, memory: Mapping[str, Any]) -> None:
        self.scores = dict(memory["scores"])

    def arrays(self) -> dict[str, np.ndarray]:
        return {"kept": self.kept} if self.kept.size else {}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.kept = arrays["kept"]


class NeedsHead(Learner):
    needs = frozenset({"head"})


class NeedsUpdate(Learner):
    needs = frozenset({"update"})


class NeedsSeconds(Learner):
    needs = frozenset({"seconds"})


class NeedsKept(Learner):
    needs = frozenset({"kept", "seconds"})


def same_bits(a: Outcome, b: Outcome) -> bool:
    figures = [[replace(record, seconds=0.0) for record in outcome.records] for outcome in (a, b)]
    return figures[0] == figures[1] and all(torch.equal(a.model[n], b.model[n]) for n in a.model)


LEARNERS = ["NeedsHead", "NeedsUpdate", "NeedsSeconds", "NeedsKept"]


def learning(name: str, **settings: Any) -> RunConfig:
    algorithm = f"{M}:KeepsHalf" if name == "NeedsKept" else "fedavg"
    given = {"selector": f"{M}:{name}", "algorithm": algorithm, "rounds": 6, "model": "toy:normed", "dropout": 0.2}
    return toy.config(**given | {"speed_spread": 0.5} | settings)


@pytest.mark.parametrize("name", LEARNERS)
def test_resumed_after_every_round_equals_straight_through_bit_for_bit(name):
    data, cfg = toy.images(samples=90), learning(name)
    straight = toy.Memory()
    run_stack([Task(cfg, straight)], data, replace(CPU, checkpoint_every=1))
    assert len(straight.saves) == 5
    assert "selector.kept" in straight.saves[-1][0].tensors
    for saved, records in straight.saves:
        again = toy.Memory()
        again.saved, again.records = (saved, records), list(records)
        (outcome,) = run_stack([Task(cfg, again)], data, CPU)
        assert same_bits(outcome, straight.outcome), saved.round
    plain = toy.run([cfg.replace(selector="random")], data)[0]
    assert cohorts(plain) != cohorts(straight.outcome), "what was told did not matter"


def test_alone_equals_in_a_stack_bit_for_bit():
    data = toy.images(samples=90)
    configs = [learning(name, seed=seed) for name in LEARNERS for seed in (0, 1)]
    for cfg, outcome in zip(configs, toy.run(configs, data, workers=2), strict=True):
        assert same_bits(outcome, toy.run([cfg], data, workers=1)[0]), cfg.method


# --- weights of a cohort
class Weighted(RandomSelector):
    """Random selection that weighs a client by its number."""

    name = "weighted"

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Any:
        picked = super().pick(available, losses)
        return self.cohort(picked, weights=tuple(1.0 + 3 * number for number in picked))


@pytest.mark.parametrize("averaging", ["selector", "samples"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedavgm"])
def test_weights_of_a_cohort_are_those_of_the_average(averaging, algorithm):
    data = toy.images(samples=70)
    given = {"selector": f"{M}:Weighted", "averaging": averaging, "algorithm": algorithm, "dropout": 0.2, "cohort": "3"}
    cfg = toy.config(**HARD | given)
    outcome = toy.run([cfg], data)[0]
    world = World(cfg, data)
    w, v, fewer = world.start, torch.zeros_like(world.start), 0
    for r, cohort in enumerate(cohorts(outcome), 1):
        fewer += len(cohort) < 3
        if not cohort:
            continue
        weights = torch.tensor([1.0 + 3 * k for k in cohort], dtype=torch.float64)
        p = world.shares(cohort) if averaging == "samples" else weights / weights.sum()
        change = p @ torch.stack([world.train(w, r, k).w - w for k in cohort])
        v = change if algorithm == "fedavg" else 0.9 * v + change
        w = w + v
    assert fewer, "the case was not hard: weights of those that dropped out"
    check(outcome, world.named(w))


def test_buffers_are_averaged_by_the_same_weights():
    data = toy.images(samples=70)
    given = HARD | {"model": "toy:normed", "rounds": 1, "selector": f"{M}:Weighted"}
    both = toy.run([toy.config(**given, averaging=a) for a in ("selector", "samples")], data)
    assert not torch.equal(both[0].model["1.running_mean"], both[1].model["1.running_mean"])
    (k, j) = both[0].records[0].trained
    alone = {}
    for client in (k, j):
        (outcome,) = run_stack(
            [Task(toy.config(**given | {"cohort": "1"}), toy.Memory(), selector=lambda cfg, c=client: Only(c))],
            data,
            CPU,
        )
        alone[client] = outcome.model["1.running_mean"].double()
    expected = ((1 + 3 * k) * alone[k] + (1 + 3 * j) * alone[j]) / (2 + 3 * k + 3 * j)
    torch.testing.assert_close(both[0].model["1.running_mean"].double(), expected, atol=1e-6, rtol=1e-5)


class Only(Selector):
    name = "only"

    def __init__(self, client: int) -> None:
        super().__init__(1)
        self.client = client

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        return [self.client]


def adding(**more: Any) -> Any:
    """A selector whose cohorts carry this, too."""

    class Wrong(RandomSelector):
        name = "wrong"

        def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Any:
            return self.cohort(super().pick(available, losses), **more)

    return lambda cfg: Wrong(cfg.cohort_size, cfg.seed)


@pytest.mark.parametrize(
    "weights",
    [
        (1.0,),
        (1.0, 0.0),
        (1.0, -1.0),
        (1.0, float("nan")),
        (1.0, 2.0, 3.0),
        (1.0, "much"),
        ((1,), (1, 2)),
        torch.ones(2, requires_grad=True),
    ],
)
def test_weights_that_are_none_are_refused(weights):
    cfg = toy.config(**HARD | {"selector": f"{M}:wrong"})
    with pytest.raises(
        InputError, match=f"selector: '{M}:wrong' gave the weights .*; accepted: one above 0 per client"
    ):
        run_stack([Task(cfg, toy.Memory(), selector=adding(weights=weights))], toy.images(samples=70), CPU)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (np.ones((2, 3)), "gave ndarray as sample_limits; accepted: a mapping from client to one number per class"),
        *(
            (
                dict.fromkeys(range(9), limit),
                r"limits client \d to .*; accepted: one number per class, 0 or more",
            )
            for limit in ([1, 1], [1, 1, -1], [1, 1, np.nan], [1, [1], 1], "all", torch.ones(3, requires_grad=True))
        ),
    ],
)
def test_sample_limits_that_are_none_are_refused(limits, words):
    cfg = toy.config(**HARD | {"selector": f"{M}:wrong"})
    with pytest.raises(InputError, match=f"selector: '{M}:wrong' {words}"):
        run_stack([Task(cfg, toy.Memory(), selector=adding(sample_limits=limits))], toy.images(samples=70), CPU)


def test_a_limit_beyond_all_samples_is_none():
    cfg = toy.config(**HARD | {"selector": f"{M}:wrong"})
    found = []
    for more in ({}, {"sample_limits": dict.fromkeys(range(9), (np.inf, 10**6, np.inf))}):
        memory = toy.Memory()
        run_stack([Task(cfg, memory, selector=adding(**more))], toy.images(samples=70), CPU)
        found.append([(record.trained, record.loss) for record in memory.records])
    assert found[0] == found[1]


# --- second stages
CONCAT = {"algorithm": "fedconcat", "clusters": 2, "rounds": 40, "concat_share": 0.3, "concat_max_rounds": 12}


@pytest.mark.parametrize("need", ["candidate_loss", "loss", "head", "update"])
def test_what_a_second_stage_cannot_tell_is_refused(need):
    with pytest.raises(InputError) as caught:
        heard(("seconds", need), **CONCAT)
    assert str(caught.value) == (
        f"selector: '{M}:listener' needs {need}, which the second stage of fedconcat does not give; "
        f"accepted: selectors that need label counts or seconds only"
    )


def test_a_second_stage_tells_seconds():
    told, outcome, cfg = heard(("seconds",), **CONCAT, batch_size=8, speed_spread=0.5)
    sizes = World(cfg, toy.images(samples=70)).parts.counts.sum(1)
    second = outcome.records[12:]
    assert len(second) == 12
    for record in second:
        # Three batches of 8, or as many whole epochs as it takes to have three batches.
        expected = []
        for k in record.trained:
            n = int(sizes[k])
            epochs = math.ceil(3 / math.ceil(n / 8))
            z = generator(5, "speed", k).standard_normal()
            expected.append(min(24, epochs * n) / (1000 * math.exp(0.5 * z)))
        assert record.simulated_seconds == pytest.approx(max(expected))
        if record.round <= len(told):
            observed = [seen.seconds for seen in told[record.round - 1].values()]
            assert observed == pytest.approx(expected)
    assert len(told) == 23
