"""Milliseconds of one LeNet-5 training step on one CPU thread: compiled kernels against the torch module.

Both take turns on the same client in one process; the figure is the thread's own CPU time, the minimum over repeats,
since other work on the machine only ever adds.
Run: python benchmarks/cpu_step.py [--repeats 20] [--batch 64] [--samples 512] [--plain]
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from fedentopt.models import build
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.planning import ClientWork
from fedentopt.simulation.trainers.loop import Worker
from fedentopt.simulation.work import Row, build_work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--plain", action="store_true", help="without augmentation")
    options = parser.parse_args()
    torch.set_num_threads(1)

    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (options.samples, 3, 32, 32), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 10, options.samples))
    data = DeviceData(images, labels, images[:0], labels[:0], 10)
    strengths = (0.0, 0.0, 0.0) if options.plain else (0.2, 0.5, 0.1)
    transform = ImageTransform((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), *strengths)
    model = build("lenet5", 10, seed=1)
    layout = FlatLayout(model, channels_last=True)
    start = layout.pack(model.state_dict())
    task = ClientWork(0, np.arange(options.samples), np.ones(10), 1, options.batch)
    row = Row(task, 0, 1, 2, 3, 0.01, 5e-4, 0.9, 0.0, None, None)
    work = build_work([row], options.batch, 10, torch.device("cpu"))

    workers = {"compiled": Worker(model, layout), "module": Worker(model, layout, compiled=False)}
    result = {name: torch.empty_like(start) for name in workers}
    best = dict.fromkeys(workers, float("inf"))
    for _ in range(options.repeats):
        for name, worker in workers.items():
            begun = time.thread_time()
            worker.train(start, work, 0, data, transform, result[name])
            best[name] = min(best[name], (time.thread_time() - begun) / task.steps)
    for name, seconds in best.items():
        print(f"{name:9} {1000 * seconds:7.3f} ms per step, {options.batch / seconds:9.0f} samples/s")
    gap = float((result["compiled"] - result["module"]).abs().max())
    print(f"ratio     {best['module'] / best['compiled']:7.2f}     largest difference of a parameter {gap:.1e}")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
