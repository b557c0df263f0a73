"""Time one LeNet-5 run of the paper's size alone: 100 clients, 10 a round, 500 rounds, evaluation every fifth.

    python benchmarks/one_run.py [--device cuda] [--rounds 500] [--partitions classes:2 dir:0.1] [--out FILE.json]

Random images of CIFAR-10's shape and number: the time is the same, the accuracy is chance. Every partition is run
twice; the first run of a process compiles kernels and captures graphs, the second shows what is left without that.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedentopt.datasets import Dataset
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import EngineOptions, RoundEvent, Task, simulate
from fedentopt.simulation.recording import Checkpoint, Outcome, RoundRecord, RunStart


class Forgetful:
    """A recorder that keeps only what ran and where."""

    def start(self, start: RunStart) -> None:
        self.trainer, self.hardware = start.trainer, start.device

    def resume(self) -> tuple[Checkpoint, list[RoundRecord]] | None:
        return None

    def record(self, record: RoundRecord) -> None: ...

    def save(self, checkpoint: Checkpoint) -> None: ...

    def finish(self, outcome: Outcome) -> None: ...


def random_images() -> Dataset:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60_000, 3, 32, 32), dtype=np.uint8)
    y = rng.permutation(np.arange(60_000) % 10)
    names = tuple(str(c) for c in range(10))
    return Dataset("random", x[:50_000], y[:50_000], x[50_000:], y[50_000:], names, (0.5,) * 3, (0.29,) * 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--partitions", nargs="+", default=["classes:2", "dir:0.1"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data = random_images()
    found: list[dict[str, Any]] = []
    recorder = Forgetful()
    for partition in options.partitions:
        for again in (False, True):
            config = RunConfig(
                dataset="random", model="lenet5", partition=partition, selector="fedentopt", rounds=options.rounds,
                evaluate_every=5,
            )  # fmt: skip
            ends: dict[int, float] = {}

            def progress(event: RoundEvent, ends: dict[int, float] = ends) -> None:
                ends[event.round] = time.perf_counter()

            begun = time.perf_counter()
            engine = EngineOptions(device=options.device, checkpoint_every=options.rounds)
            simulate([Task(config, recorder)], data, engine, progress)
            total = time.perf_counter() - begun
            result = {"partition": partition, "again": again, "rounds": options.rounds, "seconds": round(total, 2)}
            result["first_round"] = round(ends[1] - begun, 2)
            found.append(result)
            when = "again" if again else "first time"
            print(f"{partition}, {when}: {total:.2f} s, the first round {ends[1] - begun:.2f} s", flush=True)
    report = {"device": recorder.hardware, "torch": torch.__version__, "trainer": recorder.trainer, "runs": found}
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
