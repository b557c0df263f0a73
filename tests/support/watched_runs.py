"""Small real runs whose servers doubt reports, kept in folders or in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import toy
from fedentopt.results.folder import RunFolder
from fedentopt.results.memory import MemoryRecorder
from fedentopt.results.records import RunRecorder
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Task, run_stack

CLIENTS, COHORT, ROUNDS, LIARS = 20, 4, 8, 5
DATA = toy.images(samples=400, classes=4)
SHARED = {
    "clients": CLIENTS, "cohort": str(COHORT), "rounds": ROUNDS, "epochs": 1, "partition": "classes:1", "lr": 0.02,
    "selector": "fedentopt", "selector.buffer": "10",
}  # fmt: skip
LYING = {"liars": str(LIARS), "lie": "uniform"}
METHODS: tuple[dict[str, Any], ...] = (
    LYING,
    LYING | {"audit": "quarantine"},
    LYING | {"audit": "replace"},
    LYING | {"selector": "inferred"},
)


def config(**settings: Any) -> RunConfig:
    return toy.config(**toy.PLAIN | SHARED | settings)


def carry_out(configs: list[RunConfig], recorder: Callable[[RunConfig], Any]) -> list[Any]:
    """Run these in one stack; the recorders, in order."""
    recorders: list[RunRecorder] = [recorder(one) for one in configs]
    tasks = [Task(one, kept) for one, kept in zip(configs, recorders, strict=True)]
    run_stack(tasks, DATA, RunOptions(device="cpu"))
    return recorders


def write_watched(directory: Path, *methods: dict[str, Any], seeds: int = 2) -> Path:
    """Folders of these methods, in `directory`."""
    configs = [config(**method, seed=seed) for method in methods for seed in range(seeds)]
    carry_out(configs, lambda one: RunFolder(directory, one))
    return directory


def in_memory(**settings: Any) -> Any:
    """One run, as `RunResult`."""
    [recorder] = carry_out([config(**settings)], MemoryRecorder)
    return recorder.result()
