"""Candidates asked ahead of their round: whom it is done for, in which order, and that no number changes by it.

On a CPU nothing is queued; here it is taken for a device on which it is, whose figures are read a round late.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import toy
from fedentopt.algorithms import Algorithm
from fedentopt.results.records import Outcome
from fedentopt.selection import SELECTORS, Candidates, PowDSelector, RandomSelector, Selector
from fedentopt.simulation import checked_selector, engine
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Stack, Task, run_stack
from fedentopt.simulation.methods import build_algorithm, build_selector
from fedentopt.simulation.planning import RunPlanner
from fedentopt.simulation.trainers import LoopTrainer
from fedentopt.simulation.trainers.client_samples import QueuedMeans, places_of_clients

M = __name__
CPU = RunOptions(device="cpu")
DATA = toy.images(samples=90)
ROUNDS = 7


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device works beside the host, and two selectors that wait are many."""
    monkeypatch.setattr(engine, "works_beside", lambda device: True)
    monkeypatch.setattr(engine, "MANY_WAIT", 2)


class Wanderer(RandomSelector):
    """Asks for those whom it did not ask before, and so draws on what it keeps; trains who answered the most."""

    name = "wanderer"
    needs = frozenset({"candidate_loss"})

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.times_asked = 0

    def candidates(self, available: Iterable[Any] | None = None) -> Candidates:
        self.times_asked += 1
        return Candidates(tuple((self.times_asked * 2 + i) % len(self.clients) for i in range(4)), 3)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        assert losses is not None
        assert self.times_asked == self.round + 1, "it is asked once per round"
        return [int(k) for k in np.argsort(-np.nan_to_num(losses, nan=-1.0), kind="stable")[: self.cohort_size]]

    def memory(self) -> dict[str, Any]:
        return {"times_asked": self.times_asked}

    def remember(self, memory: Mapping[str, Any]) -> None:
        self.times_asked = int(memory["times_asked"])


class Grouped(Algorithm):
    def groups(self, label_counts: np.ndarray, seed: int) -> np.ndarray:
        return np.arange(len(label_counts)) % 2


def configs() -> list[RunConfig]:
    """Selectors that ask, that are told, that do neither; runs that end early, one that diverges, one in groups."""
    common = {"clients": 8, "cohort": "2", "epochs": 1, "rounds": ROUNDS, "dropout": 0.2, "evaluate_every": 2}
    changes: list[dict[str, Any]] = [
        {"selector": "pow-d"}, {"selector": "cpow-d", "selector.batch": 3}, {"selector": "random"},
        {"selector": "oort"}, {"selector": f"{M}:Wanderer"}, {"selector": "pow-d", "lr": 1e30},
        {"selector": "cpow-d", "rounds": 4, "algorithm": "scaffold"}, {"selector": "pow-d", "validation": 0.2},
        {"selector": "pow-d", "algorithm": f"{M}:Grouped"},
        {"selector": "pow-d", "audit": "quarantine", "lie": "permute", "liars": "2"},
    ]  # fmt: skip
    return [toy.config(**common | {"seed": i} | change) for i, change in enumerate(changes)]


def run(made: list[RunConfig], memories: list[toy.Memory], **options: Any) -> list[Outcome]:
    return run_stack([Task(c, m) for c, m in zip(made, memories, strict=True)], DATA, replace(CPU, **options))


def resumed(memory: toy.Memory, save: int) -> toy.Memory:
    again = toy.Memory()
    again.saved, again.records = memory.saves[save], list(memory.saves[save][1])
    return again


def assert_same_bits(a: Outcome, b: Outcome, what: str) -> None:
    kept = [[replace(r, seconds=0.0, selection_seconds=0.0) for r in outcome.records] for outcome in (a, b)]
    assert kept[0] == kept[1], what
    assert a.diverged_round == b.diverged_round, what
    assert all(a.model[name].equal(b.model[name]) for name in a.model), what


def test_in_which_order_a_stack_asks_and_trains(beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The questions of a part stand behind its training and before the other's, whose is queued when they are read."""
    log: list[str] = []

    def part(models: torch.Tensor) -> str:
        return {2: "A", 3: "B"}[len(models)]

    class Watched:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def train(self, starts: torch.Tensor, work: Any, *, lend: bool = False) -> Any:
            log.append(f"train {part(starts)}")
            return self.inner.train(starts, work, lend=lend)

        def mean_losses(self, models: torch.Tensor, rows: Any, samples: Any) -> Any:
            log.append(f"ask {part(models)}")
            found = self.inner.mean_losses(models, rows, samples)

            def read() -> np.ndarray:
                if log[-1] != f"read {part(models)}":
                    log.append(f"read {part(models)}")
                return found.read()

            return SimpleNamespace(read=read)

    make = engine.make_trainer
    monkeypatch.setattr(engine, "make_trainer", lambda *args, **more: Watched(make(*args, **more)))
    run([toy.config(selector="pow-d", rounds=3, seed=i) for i in range(5)], [toy.Memory() for _ in range(5)])
    assert ", ".join(log) == (
        "ask A, read A, train A, ask A, ask B, read B, train B, ask B, "
        "read A, train A, ask A, read B, train B, ask B, read A, train A, read B, train B"
    )


@pytest.mark.parametrize("trainer", ["loop", "stacked"])
def test_same_bits_however_a_stack_asks(beside: None, monkeypatch: pytest.MonkeyPatch, trainer: str) -> None:
    made = configs()
    asked: list[int] = []
    ask = engine.Questions.ask_ahead
    with monkeypatch.context() as patch:  # as each round is planned, told late as on a GPU
        patch.setattr(RunPlanner, "asks_ahead", property(lambda self: False))
        patch.setattr(engine, "MANY_WAIT", 10**9)
        late = run(made, [toy.Memory() for _ in made], trainer=trainer, checkpoint_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "works_beside", lambda device: False)
        plain = run(made, [toy.Memory() for _ in made], trainer=trainer)
    assert [i for i, outcome in enumerate(plain) if outcome.diverged_round] == [5]
    for many in (10**9, 2):
        monkeypatch.setattr(engine, "MANY_WAIT", many)
        asked.clear()
        monkeypatch.setattr(
            engine.Questions, "ask_ahead", lambda self, runs: asked.append(len(runs)) or ask(self, runs)
        )
        memories = [toy.Memory() for _ in made]
        found = run(made, memories, trainer=trainer, checkpoint_every=3)
        assert len(asked) == (ROUNDS if many > 2 else 2 * ROUNDS)
        for i, (cfg, a, b, c) in enumerate(zip(made, late, plain, found, strict=True)):
            assert_same_bits(a, c, cfg.method)
            if i != 5:  # that a run diverged is known a round earlier where nothing is queued
                assert_same_bits(b, c, cfg.method)
        left = [i for i in range(len(made)) if memories[i].saves]
        assert len(left) == len(made)
        again = run([made[i] for i in left], [resumed(memories[i], 0) for i in left], trainer=trainer)
        for i, outcome in zip(left, again, strict=True):
            if i != 5:
                assert_same_bits(late[i], outcome, f"{made[i].method} resumed")


@pytest.mark.parametrize(("late", "times"), [(True, 2), (False, 1)], ids=["read a round late", "read at once"])
def test_a_run_that_diverged_asks_nobody(monkeypatch: pytest.MonkeyPatch, late: bool, times: int) -> None:
    """From when it is known on: in vain once, where the round that diverged is read while the next one trains."""
    monkeypatch.setattr(engine, "works_beside", lambda device: late)
    passes: list[int] = []
    ask = LoopTrainer.mean_losses
    monkeypatch.setattr(
        LoopTrainer, "mean_losses", lambda self, models, *more: passes.append(len(models)) or ask(self, models, *more)
    )
    (outcome,) = run([toy.config(selector="pow-d", lr=1e30, rounds=6)], [toy.Memory()])
    assert outcome.diverged_round == 1
    assert passes == [1] * times
    assert [record.asked > 0 for record in outcome.records] == [True] * times + [False] * (6 - times)


def test_an_interrupt_after_questions_were_asked(beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked ahead and never read is asked again by the run that goes on."""
    made = [cfg for i, cfg in enumerate(configs()) if i not in (5, 6)]
    whole = run(made, [toy.Memory() for _ in made])
    ticks: list[int] = []
    tick = Stack._tick
    memories = [toy.Memory() for _ in made]
    with monkeypatch.context() as patch:
        patch.setattr(Stack, "_tick", lambda self, runs: ticks.append(len(runs)) or tick(self, runs))
        patch.setattr(engine, "interrupts", lambda say: nullcontext(lambda: len(ticks) > 6))
        with pytest.raises(KeyboardInterrupt):
            run(made, memories)
    assert [memory.saves[-1][0].round for memory in memories] == [4] * len(made)
    for cfg, a, b in zip(made, whole, run(made, [resumed(memory, -1) for memory in memories]), strict=True):
        assert_same_bits(a, b, cfg.method)


def test_the_time_of_drawing_candidates_counts_for_their_round(beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    draw = PowDSelector.candidates

    def slowly(self: PowDSelector, available: Iterable[Any] | None = None) -> Candidates:
        clock[0] += self.round + 1
        return draw(self, available)

    monkeypatch.setattr(PowDSelector, "candidates", slowly)
    monkeypatch.setattr(checked_selector, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    for outcome in run([toy.config(selector="pow-d", seed=i) for i in range(4)], [toy.Memory() for _ in range(4)]):
        assert [record.selection_seconds for record in outcome.records] == [1, 2, 3]


class OwnPowD(PowDSelector):
    """As the built-in one, but anything could stand here."""


def planner(own: Selector | None = None, **settings: Any) -> RunPlanner:
    cfg = toy.config(**settings)
    chosen = build_selector(cfg, build_algorithm(cfg)) if own is None else own
    return RunPlanner(cfg, DATA.y_train, 3, chosen)


@pytest.mark.parametrize(
    ("settings", "ahead"),
    [
        ({"selector": "pow-d"}, True),
        ({"selector": "cpow-d", "epsilon": 1.0, "size_cap": 2.0}, True),
        ({"selector": "pow-d", "audit": "quarantine"}, False),  # who is available may change with the round
        ({"selector": "pow-d", "audit": "warn"}, False),
        ({"selector": "rpow-d"}, False),
        ({"selector": "random"}, False),
    ],
    ids=str,
)
def test_who_is_asked_ahead(settings: dict[str, Any], ahead: bool) -> None:
    assert planner(**settings).asks_ahead is ahead


def test_own_selectors_are_asked_when_they_are_planned() -> None:
    assert not planner(OwnPowD(3), selector=f"{M}:OwnPowD").asks_ahead
    assert not planner(Wanderer(3), selector=f"{M}:Wanderer").asks_ahead
    assert planner(PowDSelector(3), selector="own:made").asks_ahead


@pytest.mark.parametrize("name", [name for name in SELECTORS.names if "candidate_loss" in SELECTORS.get(name).needs])
def test_asking_a_built_in_selector_early_and_again_changes_nothing(name: str) -> None:
    made = planner(selector=name, clients=12)
    assert made.asks_ahead
    made.plan(1)
    before = made.state_dict()
    first, again = made.questions(2), made.questions(2)
    assert made.state_dict() == before
    assert [q.client for q in first] == [q.client for q in again]
    assert all(np.array_equal(a.samples, b.samples) for a, b in zip(first, again, strict=True))


@given(st.lists(st.sampled_from([0, 1, 5, 5, 5, 64, 64, 333]), max_size=9), st.randoms(use_true_random=False))
def test_queued_means_are_those_of_each_client_alone(sizes: list[int], draw: Any) -> None:
    total = sum(sizes)
    rng = np.random.default_rng(draw.randrange(2**32))
    values = rng.normal(size=total).astype(np.float32)
    samples = [np.zeros(size, dtype=np.int64) for size in sizes]
    places = np.concatenate([rng.permutation(total), np.full(7, -1)])
    told = torch.from_numpy(np.concatenate([values, np.full(7, np.inf, dtype=np.float32)])[places])
    cut = len(places) // 2
    found = QueuedMeans([told[:cut], told[cut:]], [places[:cut], places[cut:]], samples)
    alone = [values.astype(np.float64)[own] for own in places_of_clients(samples)]
    expected = [own.mean() if len(own) else np.nan for own in alone]
    assert np.array_equal(found.read(), np.array(expected), equal_nan=True)
    assert found.read() is found.read()
