"""Ticks in two parts: the same numbers as in one, and when a stack is parted."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import toy
from fedentopt.results.records import Outcome
from fedentopt.simulation import engine
from fedentopt.simulation.engine import RunOptions, Stack, Task, run_stack, works_beside

CPU = RunOptions(device="cpu")


def figures(outcome: Outcome) -> list[Any]:
    return [replace(record, seconds=0.0, selection_seconds=0.0) for record in outcome.records]


def in_halves(self: Stack, runs: list[Any]) -> list[list[Any]]:
    middle = (len(runs) + 1) // 2
    return [part for part in (runs[middle:], runs[:middle]) if part]


def configs() -> list[Any]:
    """Selectors that are told all kinds of things, methods with memories, runs that end early, one that diverges."""
    common = {"clients": 6, "cohort": "2", "dropout": 0.2, "epochs": 1, "evaluate_every": 2}
    changes: list[dict[str, Any]] = [
        {"selector": "hics-fl"}, {"selector": "random"}, {"selector": "clustered-update", "rounds": 9},
        {"selector": "oort", "algorithm": "scaffold", "rounds": 4}, {"selector": "pow-d", "validation": 0.2},
        {"selector": "inferred", "rounds": 5}, {"selector": "divfl", "lr": 1e30}, {"algorithm": "fedentropy"},
        {"algorithm": "fedconcat", "clusters": 2, "rounds": 20},
    ]  # fmt: skip
    return [toy.config(**common | {"rounds": 7, "seed": i} | change) for i, change in enumerate(changes)]


def test_two_parts_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    data, made = toy.images(samples=80), configs()
    whole = toy.run(made, data)
    ticks: list[int] = []
    tick = Stack._tick
    monkeypatch.setattr(Stack, "_tick", lambda self, runs: ticks.append(len(runs)) or tick(self, runs))
    monkeypatch.setattr(Stack, "_parts", in_halves)
    memories = [toy.Memory() for _ in made]
    parted = run_stack(
        [Task(c, m) for c, m in zip(made, memories, strict=True)], data, replace(CPU, checkpoint_every=3)
    )
    assert ticks[:4] == [4, 5, 4, 5]
    assert whole[6].diverged_round is not None
    assert sum(outcome.diverged_round is None for outcome in whole) == len(made) - 1
    for cfg, a, b in zip(made, whole, parted, strict=True):
        assert figures(a) == figures(b), cfg.method
        assert all(a.model[name].equal(b.model[name]) for name in a.model), cfg.method
    resumed = toy.Memory()
    resumed.saved, resumed.records = memories[2].saves[0], list(memories[2].saves[0][1])
    again = run_stack([Task(made[1], toy.Memory()), Task(made[2], resumed)], data, CPU)[1]
    assert figures(again) == figures(whole[2])
    assert all(again.model[name].equal(whole[2].model[name]) for name in again.model)


@pytest.mark.parametrize("ticks_before", [8, 9], ids=["in the first part", "in the second part"])
def test_an_interrupt_within_a_round_saves_all_runs_after_it(
    monkeypatch: pytest.MonkeyPatch, ticks_before: int
) -> None:
    data, made = toy.images(samples=80), configs()[:6]
    whole = toy.run(made, data)
    ticks: list[int] = []
    tick = Stack._tick
    monkeypatch.setattr(Stack, "_tick", lambda self, runs: ticks.append(len(runs)) or tick(self, runs))
    monkeypatch.setattr(Stack, "_parts", in_halves)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "interrupts", lambda say: nullcontext(lambda: len(ticks) > ticks_before))
        memories = [toy.Memory() for _ in made]
        with pytest.raises(KeyboardInterrupt):
            run_stack([Task(c, m) for c, m in zip(made, memories, strict=True)], data, CPU)
    assert len(ticks) == 10
    assert memories[3].outcome is not None, "it had four rounds"
    stopped = [i for i, memory in enumerate(memories) if memory.outcome is None]
    assert len(stopped) == 4, "those of seven and nine rounds"
    again = [toy.Memory() for _ in stopped]
    for i, memory in zip(stopped, again, strict=True):
        (saved, records) = memories[i].saves[-1]
        assert saved.round == len(records) == 5
        memory.saved, memory.records = (saved, records), list(records)
    resumed = run_stack([Task(made[i], m) for i, m in zip(stopped, again, strict=True)], data, CPU)
    for i, outcome in zip(stopped, resumed, strict=True):
        assert figures(outcome) == figures(whole[i]), made[i].method
        assert all(outcome.model[name].equal(whole[i].model[name]) for name in outcome.model), made[i].method


class _ById(SimpleNamespace):
    """Equal to itself only, as runs are."""

    __eq__ = object.__eq__


def stand_in(needs: str, rows: int) -> Any:
    given = frozenset(needs.split())
    planner = SimpleNamespace(needs=given - {"ahead"}, asks_ahead="ahead" in given)
    return _ById(planner=planner, config=SimpleNamespace(cohort_size=rows))


@pytest.mark.parametrize(
    ("runs", "parts"),
    [
        ([("", 10), ("seconds kept", 10), ("candidate_loss", 10)], [[0, 1, 2]]),  # nobody waits for training
        ([("candidate_loss", 10)] * 4, [[0, 1, 2, 3]]),  # a question of one part would wait for the other's training
        ([("candidate_loss ahead", 10)] * 4, [[0, 1], [2, 3]]),
        ([("candidate_loss ahead", 10), ("head", 10), ("candidate_loss", 10), ("loss", 10)], [[0, 2], [1, 3]]),
        ([("head", 10), ("", 10), ("loss", 10), ("", 10)], [[0, 1, 2, 3]]),  # few wait
        ([("head", 10), ("", 10), ("loss", 10), ("update", 10)], [[0, 1], [2, 3]]),
        ([("head", 10), ("", 10), ("loss", 10), ("", 30), ("head seconds", 20)], [[1, 3], [0, 2, 4]]),
        ([("head", 9), ("head", 1), ("head", 1)], [[0], [1, 2]]),
        ([("head", 1), ("head", 1), ("head", 9)], [[0, 1], [2]]),
    ],
)
def test_who_goes_into_which_part(
    runs: list[tuple[str, int]], parts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients are shared evenly, and who waits comes second."""
    monkeypatch.setattr(engine, "MANY_WAIT", 3)
    made = [stand_in(*run) for run in runs]
    found = Stack._parts(SimpleNamespace(beside=True), made)  # type: ignore[arg-type]
    assert [[made.index(run) for run in part] for part in found] == parts
    assert Stack._parts(SimpleNamespace(beside=False), made) == [made]  # type: ignore[arg-type]
    assert works_beside(torch.device("cuda"))
    assert not works_beside(torch.device("cpu"))
