"""What checkpoints cost a stack of runs whose method remembers a vector per client.

    python benchmarks/checkpoints.py [--device cuda] [--model vgg11] [--algorithm scaffold] [--runs 2] [--clients 100]
                                     [--rounds 12] [--every 5] [--out FILE.json]

Random images of CIFAR-10's shape, one epoch. For every checkpoint: bytes written, and seconds until they were on disk.
For every round: the seconds it took, so that a round in which training stood still shows. The largest memory of the
process on the host is that of the whole run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from timed_runs import made_with, random_images

from fedentopt.results.folder import RunFolder
from fedentopt.results.records import Checkpoint, RoundRecord
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Task, run_stack


class TimedFolder(RunFolder):
    """A run's folder that tells how long a checkpoint took and how large it was."""

    def __init__(self, out: Path, config: RunConfig, told: list[dict[str, Any]]) -> None:
        super().__init__(out, config)
        self._told = told
        self.ends: list[float] = []

    def record(self, record: RoundRecord) -> None:
        super().record(record)
        self.ends.append(time.perf_counter())

    def save(self, checkpoint: Checkpoint) -> None:
        before, begun = {path: path.stat().st_mtime_ns for path in self.path.iterdir()}, time.perf_counter()
        super().save(checkpoint)
        new = [path for path in self.path.iterdir() if path.stat().st_mtime_ns != before.get(path)]
        self._told.append({
            "round": checkpoint.round, "seconds": round(time.perf_counter() - begun, 2),
            "bytes": sum(path.stat().st_size for path in new),
        })  # fmt: skip
        print("checkpoint after round {round}: {seconds} s, {bytes} bytes".format(**self._told[-1]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--model", default="vgg11")
    parser.add_argument("--algorithm", default="scaffold")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    told: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        folders = [
            TimedFolder(Path(folder), config, told)
            for config in (
                RunConfig(
                    dataset="random", model=options.model, algorithm=options.algorithm, partition="iid",
                    clients=options.clients, rounds=options.rounds, epochs=1, seed=seed,
                )
                for seed in range(options.runs)
            )
        ]  # fmt: skip
        tasks = [Task(folder.config, folder) for folder in folders]  # type: ignore[arg-type]
        run_stack(tasks, random_images(), RunOptions(device=options.device, checkpoint_every=options.every))
    ends = folders[0].ends
    rounds = [round(after - before, 2) for before, after in itertools.pairwise(ends)]
    peak = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2)
    print(f"seconds of rounds 2 to {options.rounds}: {' '.join(map(str, rounds))}; at most {peak} GB of host memory")
    if options.out is not None:
        report = {**made_with(), "checkpoints": told, "rounds": rounds, "host_memory_gb": peak}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
