"""pfl-research's own published workload in our engine: its CIFAR-10 baseline, cohort for cohort.

1,000 users of 50 images (iid), 50 a round, 1,500 rounds, one local epoch in batches of 10, learning rate 0.1, no
momentum, evaluation every tenth round, and its "simple CNN" of 1,626,442 parameters (two 3x3 convolutions of 32 and
64 channels, a 2x2 pool, 128 units, dropout of 0.25 and 0.5).

    python benchmarks/peers/pfl_cifar10.py --device cuda [--dataset cifar10] [--rounds 1500] [--out FILE.json]

Without --dataset, random images of CIFAR-10's shape are used: the time is the same, the accuracy is chance.
The configuration is that of benchmarks/image_classification/configs/baseline.yaml in pfl-research (`cifar10_work.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

from fedentopt.datasets import load
from fedentopt.partition import partition
from fedentopt.results.records import Outcome, RoundRecord, RunStart
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RoundEvent, RunOptions, Task, run_stack

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # where "cifar10_work:simple_cnn" and what follows are found

import cifar10_work as work  # noqa: E402
from timed_runs import Timer, made_with, random_images  # noqa: E402


def users(labels: np.ndarray, seed: int) -> np.ndarray:
    """The samples of every user under a seed: those of our own runs."""
    return np.stack(partition(labels, "iid", work.USERS, seed, num_classes=work.CLASSES).indices)


class TimerInFile(Timer):
    """A timer that also writes every round down as it ends."""

    def __init__(self, progress: work.Progress) -> None:
        super().__init__()
        self._progress = progress

    def start(self, start: RunStart) -> None:
        super().start(start)
        self._progress.say(ready=True, device=start.device, trainer=start.trainer)

    def record(self, record: RoundRecord) -> None:
        super().record(record)
        self._progress.round_ended(len(self.ends), record.accuracy)

    def finish(self, outcome: Outcome) -> None:
        super().finish(outcome)
        parameters = sum(t.numel() for t in outcome.model.values())
        self._progress.say(done=True, parameters=parameters, accuracy=round(self.accuracies[-1], 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dataset", help="cifar10, once `fedentopt data fetch cifar10` has brought it")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rounds", type=int, default=work.ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", default="fp32", help="fp32 (TF32 products on CUDA), fp32-exact or bf16")
    parser.add_argument("--trainer", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--progress", type=Path, help="a file that gets a line per round as it ends")
    options = parser.parse_args()

    data = random_images() if options.dataset is None else load(options.dataset, options.data_dir)
    if len(data.y_train) != work.USERS * work.IMAGES:
        parser.error(
            f"--dataset {options.dataset} has {len(data.y_train)} training images; needed: {work.USERS * work.IMAGES}"
        )
    config = RunConfig(
        dataset=data.name, model="cifar10_work:simple_cnn", partition="iid", clients=work.USERS,
        cohort=str(work.COHORT), rounds=options.rounds, epochs=work.EPOCHS, batch_size=work.BATCH, lr=work.LR,
        lr_decay=1.0, momentum=0.0, weight_decay=0.0,
        jitter=0.0, flip=0.0, grayscale=0.0, evaluate_every=work.EVALUATE_EVERY, precision=options.precision,
        seed=options.seed,
    )  # fmt: skip
    timer = Timer() if options.progress is None else TimerInFile(work.Progress(options.progress))

    def progress(event: RoundEvent) -> None:
        if event.round % 100 == 0 or event.round == event.rounds:
            spent = time.perf_counter() - timer.started
            print(f"round {event.round}: {spent:.1f} s, accuracy {event.accuracy}", flush=True)

    engine = RunOptions(device=options.device, trainer=options.trainer, checkpoint_every=options.rounds, say=print)
    run_stack([Task(config, timer)], data, engine, progress)
    total = time.perf_counter() - timer.begun
    # Round 1 holds the compilation and capture of what later rounds replay.
    steady = (timer.ends[-1] - timer.ends[0]) / max(1, len(timer.ends) - 1)
    report = {
        "rounds": options.rounds,
        "parameters": sum(t.numel() for t in timer.outcome.model.values()),
        "seconds": round(total, 2),
        "seconds_a_round": round(steady, 5),
        "samples_a_second": round(work.COHORT * work.IMAGES / steady) if steady else None,
        "accuracy": timer.accuracies[-1],
        "dataset": data.name,
        "precision": options.precision,
        "device": timer.hardware,
        "trainer": timer.trainer,
        **made_with(),
    }
    print(json.dumps(report, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
