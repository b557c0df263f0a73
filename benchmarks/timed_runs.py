"""What scripts that time whole runs share: images whose labels mean nothing, and a recorder that keeps only times."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedentopt.datasets import Dataset
from fedentopt.results.environment import environment, source_digest
from fedentopt.results.records import Checkpoint, Outcome, RoundRecord, RunStart


def random_images(train: int = 50_000, test: int = 10_000) -> Dataset:
    """Random images of CIFAR-10's shape, as many unless said: the time is the same, the accuracy is chance."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (train + test, 3, 32, 32), dtype=np.uint8)
    y = rng.permutation(np.arange(train + test) % 10)
    names = tuple(str(c) for c in range(10))
    return Dataset("random", x[:train], y[:train], x[train:], y[train:], names, (0.5,) * 3, (0.29,) * 3)


def made_with() -> dict[str, Any]:
    """The command (of full paths the names), the code, the libraries and the machine something was measured with."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    command = shlex.join(["python", *words])
    return {"command": command, **environment(), "sources": source_digest()}


class Timer:
    """A recorder that keeps nothing but the clock, the accuracies, the final model and what ran."""

    def __init__(self) -> None:
        self.begun = self.started = time.perf_counter()
        self.ends: list[float] = []
        self.accuracies: list[float] = []
        self.trainer = self.hardware = ""

    def start(self, start: RunStart) -> None:
        self.trainer, self.hardware = start.trainer, start.device
        self.started = time.perf_counter()

    def resume(self) -> tuple[Checkpoint, list[RoundRecord]] | None:
        return None

    def record(self, record: RoundRecord) -> None:
        self.ends.append(time.perf_counter())
        if record.accuracy is not None:
            self.accuracies.append(record.accuracy)

    def save(self, checkpoint: Checkpoint) -> None:
        pass

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
