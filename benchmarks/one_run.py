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

from timed_runs import Timer, made_with, random_images

from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Task, run_stack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--partitions", nargs="+", default=["classes:2", "dir:0.1"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    data = random_images()
    found: list[dict[str, Any]] = []
    for partition in options.partitions:
        for again in (False, True):
            config = RunConfig(
                dataset="random", model="lenet5", partition=partition, selector="fedentopt", rounds=options.rounds,
                evaluate_every=5,
            )  # fmt: skip
            timer = Timer()
            engine = RunOptions(device=options.device, checkpoint_every=options.rounds)
            run_stack([Task(config, timer)], data, engine)
            total, first = time.perf_counter() - timer.begun, timer.ends[0] - timer.begun
            found.append({
                "partition": partition, "again": again, "rounds": options.rounds, "seconds": round(total, 2),
                "first_round": round(first, 2),
            })  # fmt: skip
            when = "again" if again else "first time"
            print(f"{partition}, {when}: {total:.2f} s, the first round {first:.2f} s", flush=True)
    report = {"device": timer.hardware, **made_with(), "trainer": timer.trainer, "runs": found}
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
