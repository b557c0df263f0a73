"""Time a first run: three rounds of ten clients with 200 images each and an evaluation, then the same again.

    TRITON_CACHE_DIR=$(mktemp -d) python benchmarks/first_run.py [--model lenet5] [--device cuda]

With an empty cache, the difference of the two is what compiling kernels and capturing steps takes.
"""

from __future__ import annotations

import argparse
import time

from timed_runs import Timer, random_images

from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Task, run_stack


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    data = random_images(4000, 100)
    config = RunConfig(
        dataset="random", model=options.model, partition="iid", clients=20, cohort="10", rounds=3, epochs=1,
        evaluate_every=3,
    )  # fmt: skip
    for which in ("first", "second"):
        start = time.perf_counter()
        run_stack([Task(config, Timer())], data, RunOptions(device=options.device))
        print(f"{options.model}, {which} run: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
