"""Losses that selectors are told: of those that trained, and of candidates before a cohort is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import toy
from fedentopt.algorithms import Algorithm, Client, LocalTerms, setting
from fedentopt.errors import InputError
from fedentopt.randomness import generator
from fedentopt.results.records import Outcome
from fedentopt.selection import Candidates, Observation, RandomSelector, Selector
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from reference_runs import HARD, TRAINERS, World, cohorts

M = __name__
CPU = RunOptions(device="cpu")
MODEL = (3 * 8 * 8 * 3 + 3) * 4


class Listener(RandomSelector):
    """Random selection that notes the losses of those that trained."""

    name = "listener"
    needs = frozenset({"loss"})

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.told: list[dict[Any, Observation]] = []

    def observe(self, observations: Mapping[Any, Observation]) -> None:
        self.told.append(dict(observations))


class Asker(RandomSelector):
    """Random selection that asks the same three clients first, and notes what they answer."""

    name = "asker"
    needs = frozenset({"candidate_loss"})
    asked: tuple[Any, ...] = (4, 0, 1)
    samples: int | None = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.answers: list[Any] = []

    def candidates(self, available: Iterable[Any] | None = None) -> Candidates | None:
        return Candidates(self.asked, self.samples)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Any:
        self.answers.append(None if losses is None else losses.copy())
        return super().pick(available, losses)


def run(selector: type[Selector], **settings: Any) -> tuple[Any, Outcome, RunConfig]:
    """A run with this selector: the selector after it, the outcome, the config."""
    options = RunOptions(device="cpu", trainer=settings.pop("trainer", "auto"))
    own, made = settings.pop("own", None), []

    def make(config: RunConfig) -> Selector:
        made.append(selector(config.cohort_size, config.seed))
        return made[-1]

    cfg = toy.config(**HARD | {"selector": f"{M}:{selector.__name__}"} | settings)
    task = Task(cfg, toy.Memory(), selector=make, algorithm=own)
    (outcome,) = run_stack([task], toy.images(samples=70), options)
    return made[0], outcome, cfg


# --- of those that trained
def calibrated(world: World, k: int) -> Any:
    counts = torch.where(world.counts[k] > 0, world.counts[k], torch.tensor(1e-8, dtype=torch.float64))
    return lambda z: z - counts**-0.25


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("algorithm", ["fedavg", "fedlc"])
def test_losses_are_plain_cross_entropy_over_all_samples_of_all_steps(algorithm, trainer):
    """Uneven clients and partial batches: a mean of batch means would be another number."""
    selector, outcome, cfg = run(Listener, algorithm=algorithm, trainer=trainer)
    world = World(cfg, toy.images(samples=70))
    w = world.start
    assert len(selector.told) == 4
    for record, observations in zip(outcome.records, selector.told, strict=False):
        assert tuple(observations) == record.trained
        terms = [{"logits": calibrated(world, k)} if algorithm == "fedlc" else {} for k in record.trained]
        trained = [world.train(w, record.round, k, **own) for k, own in zip(record.trained, terms, strict=True)]
        for done, (k, seen) in zip(trained, observations.items(), strict=True):
            assert seen.samples == len(world.parts.indices[k])
            assert seen.loss == pytest.approx(done.losses.mean().item(), rel=2e-4)
            assert seen.loss_rms == pytest.approx(done.losses.square().mean().sqrt().item(), rel=2e-4)
            assert seen.loss_rms > seen.loss
            filled = {field.name for field in fields(seen) if getattr(seen, field.name) is not None}
            assert filled == {"samples", "loss", "loss_rms"}
        w = world.shares(record.trained) @ torch.stack([done.w for done in trained])


def test_two_losses_of_four_bytes_go_up():
    _, outcome, _ = run(Listener, dropout=0.3)
    assert [r.bytes_up for r in outcome.records] == [len(r.trained) * (MODEL + 8) for r in outcome.records]
    assert {r.bytes_down for r in outcome.records} == {2 * MODEL}


class Spoilt(Algorithm):
    def local_terms(self, client: Client) -> LocalTerms:
        return LocalTerms(mu=1e38 if client.number == 2 else 0.0)


def test_a_loss_that_is_not_finite_is_left_out():
    selector, outcome, _ = run(Listener, own=Spoilt(), algorithm=f"{M}:Spoilt", cohort="4", rounds=6, epochs=5)
    first = next(record for record in outcome.records if 2 in record.trained)
    assert set(selector.told[first.round - 1]) == set(first.trained) - {2}


# --- of candidates
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("samples", [None, 4])
def test_candidates_answer_with_the_loss_of_the_current_model(samples, trainer):
    class Asks(Asker):
        pass

    Asks.samples = samples
    selector, outcome, cfg = run(Asks, trainer=trainer)
    world = World(cfg, toy.images(samples=70))
    w, fewer = world.start, 0
    assert len(selector.answers) == 5
    for record, answers in zip(outcome.records, selector.answers, strict=True):
        expected = np.full(5, np.nan)
        for k in (4, 0, 1):
            own = world.parts.indices[k]
            if samples is not None and samples < len(own):
                fewer += 1
                draw = generator(cfg.seed, "candidate-samples", record.round, k)
                own = np.sort(draw.choice(own, samples, replace=False))
            expected[k] = F.cross_entropy(world.logits(w, own), world.y[torch.from_numpy(own)]).item()
        np.testing.assert_allclose(answers, expected, rtol=2e-4)
        w = world.shares(record.trained) @ torch.stack([world.train(w, record.round, k).w for k in record.trained])
    assert bool(fewer) == (samples is not None)


def test_whoever_is_asked_gets_the_model_and_sends_four_bytes():
    _, outcome, _ = run(Asker)
    for record in outcome.records:
        assert record.bytes_up == 2 * MODEL + 3 * 4
        assert record.bytes_down == len({*record.clients, 4, 0, 1}) * MODEL
    assert len({record.bytes_down for record in outcome.records}) > 1, "some of those asked trained too"


def test_who_is_only_asked_gets_the_model_without_the_vectors_that_training_takes():
    """SCAFFOLD sends its control variate beside the model to those that train: a forward pass has no use for it."""
    _, outcome, _ = run(Asker, algorithm="scaffold")
    for record in outcome.records:
        only_asked = {4, 0, 1} - set(record.clients)
        assert only_asked
        assert record.bytes_down == (2 * len(record.clients) + len(only_asked)) * MODEL


class Halves(Algorithm):
    def groups(self, label_counts: np.ndarray, seed: int) -> np.ndarray:
        return np.arange(len(label_counts)) % 2


def test_candidates_of_a_group_answer_for_its_model():
    selector, outcome, cfg = run(Asker, own=Halves(), algorithm=f"{M}:Halves", cohort="3")
    world = World(cfg, toy.images(samples=70))
    models = [world.start, world.start]
    for record, answers in zip(outcome.records, selector.answers, strict=True):
        for k in (4, 0, 1):
            own = world.parts.indices[k]
            loss = F.cross_entropy(world.logits(models[k % 2], own), world.y[torch.from_numpy(own)]).item()
            assert answers[k] == pytest.approx(loss, rel=2e-4)
        trained = {k: world.train(models[k % 2], record.round, k).w for k in record.trained}
        for group in (0, 1):
            members = [k for k in record.trained if k % 2 == group]
            if members:
                models[group] = world.shares(members) @ torch.stack([trained[k] for k in members])
    assert not torch.equal(*models)


class AsksNobody(Asker):
    def candidates(self, available: Iterable[Any] | None = None) -> None:
        return None


class AsksWithoutNeed(Asker):
    needs = frozenset()


@pytest.mark.parametrize("cls", [AsksNobody, AsksWithoutNeed])
def test_nobody_is_asked_where_nobody_is_named_or_nothing_needed(cls):
    selector, outcome, _ = run(cls)
    assert selector.answers == [None] * 5
    assert {(r.bytes_up, r.bytes_down) for r in outcome.records} == {(2 * MODEL, 2 * MODEL)}


@pytest.mark.parametrize("asked", [(0, 9), (0, 0), (), ("a",)])
def test_candidates_that_do_not_exist_are_refused(asked):
    class Wrong(Asker):
        pass

    Wrong.asked = asked
    with pytest.raises(InputError, match=f"selector: '{M}:Wrong' .*distinct numbers from 0 to 4"):
        run(Wrong)


def test_a_client_without_samples_is_not_asked():
    """Only noise can hide that it has none."""
    given = {"clients": 12, "cohort": "12", "partition": "dir:0.05", "min_samples": 0, "epsilon": 0.5}
    selector, _, _ = run(Asker, **given, seed=8)  # clients 4 and 0 hold nothing
    assert [np.flatnonzero(~np.isnan(answers)).tolist() for answers in selector.answers] == [[1]] * 5
    selector, outcome, _ = run(Asker, **given, seed=1)  # none of the three holds anything
    assert selector.answers == [None] * 5
    assert {r.bytes_down for r in outcome.records} == {12 * MODEL}


def test_a_run_that_diverged_asks_nobody():
    selector, outcome, _ = run(Asker, lr=1e30)
    assert outcome.diverged_round == 1
    assert len(selector.answers) == 1  # nor is the selector, which has no answers to choose by
    assert selector.answers[0] is not None
    assert {r.clients for r in outcome.records} == {outcome.records[0].clients}
    assert [r.bytes_up for r in outcome.records[1:]] == [0] * 4


# --- resumed and in a stack
class Learner(Selector):
    """Picks by losses, to the last bit."""

    name = "learner"
    asks: int | None = setting(None, help="samples a candidate looks at")

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self.scores: dict[Any, float] = {}

    def candidates(self, available: Iterable[Any] | None = None) -> Candidates:
        drawn = self.rng().choice(len(self.clients), 4, replace=False)
        return Candidates(tuple(self.clients[number] for number in drawn), self.asks)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        scores = np.array([self.scores.get(self.clients[number], 0.0) for number in available])
        scores = scores if losses is None else scores + np.nan_to_num(losses)[available]
        return available[np.argsort(-scores, kind="stable")][: self.cohort_size].tolist()

    def observe(self, observations: Mapping[Any, Observation]) -> None:
        for client, seen in observations.items():
            self.scores[client] = -(seen.loss + seen.loss_rms)

    def memory(self) -> dict[str, Any]:
        return {"scores": [[client, value] for client, value in self.scores.items()]}

    def remember(self, memory: Mapping[str, Any]) -> None:
        self.scores = dict(memory["scores"])


class ByLoss(Learner):
    needs = frozenset({"loss"})


class ByCandidates(Learner):
    needs = frozenset({"candidate_loss", "loss"})


CASES = [("ByLoss", {}), ("ByCandidates", {}), ("ByCandidates", {"selector.asks": 3})]


def same_bits(a: Outcome, b: Outcome) -> bool:
    figures = [[replace(record, seconds=0.0) for record in outcome.records] for outcome in (a, b)]
    return figures[0] == figures[1] and all(torch.equal(a.model[n], b.model[n]) for n in a.model)


def learning(name: str, settings: Mapping[str, Any], seed: int = 0) -> RunConfig:
    given = {"selector": f"{M}:{name}", "rounds": 6, "model": "toy:normed", "dropout": 0.2, "seed": seed}
    return toy.config(**given | settings)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_resumed_after_every_round_equals_straight_through_bit_for_bit(name, settings):
    data, cfg = toy.images(samples=90), learning(name, settings)
    straight = toy.Memory()
    run_stack([Task(cfg, straight)], data, replace(CPU, checkpoint_every=1))
    for saved, records in straight.saves:
        again = toy.Memory()
        again.saved, again.records = (saved, records), list(records)
        (outcome,) = run_stack([Task(cfg, again)], data, CPU)
        assert same_bits(outcome, straight.outcome), saved.round
    plain = toy.run([cfg.replace(selector="random")], data)[0]
    assert cohorts(plain) != cohorts(straight.outcome)


def test_alone_equals_in_a_stack_bit_for_bit():
    data = toy.images(samples=90)
    configs = [learning(name, settings, seed) for name, settings in CASES for seed in (0, 1)]
    for cfg, outcome in zip(configs, toy.run(configs, data, workers=2), strict=True):
        assert same_bits(outcome, toy.run([cfg], data, workers=1)[0]), cfg.method
