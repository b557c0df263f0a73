"""Small worlds for engine tests: random images, a linear model, a recorder that keeps everything in memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedentopt.datasets import Dataset
from fedentopt.results.records import Checkpoint, ClientRow, Outcome, RoundRecord, RunStart
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Task, run_stack


def images(samples: int = 60, classes: int = 3, size: int = 8, seed: int = 0, channels: int = 3) -> Dataset:
    """Random images with a faint class-dependent brightness, so that there is something to learn."""
    rng = np.random.default_rng(seed)

    def split(n: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(n) % classes
        x = rng.integers(0, 200, (n, channels, size, size)) + (y * 50 // max(1, classes - 1))[:, None, None, None]
        return x.astype(np.uint8), y.astype(np.int64)

    (x, y), (tx, ty) = split(samples), split(30)
    names = tuple(f"class {c}" for c in range(classes))
    return Dataset("toy", x, y, tx, ty, names, (0.4, 0.4, 0.4), (0.25, 0.25, 0.25))


def linear(num_classes: int) -> nn.Module:
    """One linear layer on 8x8 RGB images."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, num_classes))


def normed(num_classes: int) -> nn.Module:
    """A small network with BatchNorm and dropout: what cannot be stacked."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 36, num_classes)
    )


def wide(num_classes: int) -> nn.Module:
    """Convolutions with many channels, for 8x8 images: with pool after ReLU, without pool, with pool before ReLU."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(128 * 4, num_classes),
    )  # fmt: skip


def wide_normed(num_classes: int) -> nn.Module:
    """Convolutions with many channels and BatchNorm, one of them without a bias, for 4x4 images; the last map is one
    pixel, of which a batch of one sample has a lone value."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16, num_classes),
    )  # fmt: skip


def pooled(num_classes: int) -> nn.Module:
    """A LeNet-5 for 8x8 images: convolution, ReLU and pool that one kernel takes, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 6), nn.ReLU(),
        nn.Linear(6, num_classes),
    )  # fmt: skip


def dropping(num_classes: int) -> nn.Module:
    """A plain CNN with dropout behind its map and between its linear layers, for 8x8 images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(32 * 4, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, num_classes),
    )  # fmt: skip


def narrow(num_classes: int) -> nn.Module:
    """BatchNorm over single values: a batch of one sample has no variance in it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4), nn.BatchNorm1d(4), nn.Linear(4, num_classes))


def branching(num_classes: int) -> nn.Module:
    """A module that is no Sequential: the stack runs it through vmap."""
    return Branching(num_classes)


class Branching(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Linear(4 * 64 + 3 * 64, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.first(x).relu().flatten(1), x.flatten(1)], 1))


class Memory:
    """A recorder without a disk."""

    def __init__(self) -> None:
        self.records: list[RoundRecord] = []
        self.saved: tuple[Checkpoint, list[RoundRecord]] | None = None
        self.saves: list[tuple[Checkpoint, list[RoundRecord]]] = []
        self.rows: dict[tuple[str, int], ClientRow] = {}
        self.outcome: Outcome | None = None

    def start(self, start: RunStart) -> None:
        self.begun = start

    def resume(self) -> tuple[Checkpoint, list[RoundRecord]] | None:
        if self.saved is not None:
            self.rows = {(row.vector, row.client): row for row in self.saved[0].rows}
        return self.saved

    def record(self, record: RoundRecord) -> None:
        self.records.append(record)

    def save(self, checkpoint: Checkpoint) -> None:
        self.rows |= {(r.vector, r.client): r._replace(values=r.values.clone()) for r in checkpoint.rows}
        whole = replace(checkpoint, rows=list(self.rows.values()))
        self.saves.append((whole, [record for record in list(self.records) if record.round <= checkpoint.round]))

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome


PLAIN = {"jitter": 0.0, "flip": 0.0, "grayscale": 0.0}


def config(**settings: object) -> RunConfig:
    """A small config: few clients, everything else as given."""
    base: dict[str, object] = {
        "dataset": "toy", "model": "toy:linear", "partition": "dir:0.5", "min_samples": 1, "clients": 6, "cohort": "3",
        "rounds": 3, "epochs": 2, "batch_size": 8,
    }  # fmt: skip
    return RunConfig.from_dict(base | settings)  # type: ignore[arg-type]


def run(configs: list[RunConfig], data: Dataset, **options: object) -> list[Outcome]:
    """Simulate in memory on the CPU."""
    tasks = [Task(c, Memory()) for c in configs]
    return run_stack(tasks, data, RunOptions(**({"device": "cpu"} | options)))  # type: ignore[arg-type]


def difference(a: Outcome, b: Outcome) -> float:
    """Largest difference between two models' entries; NaN counts as infinite."""
    assert a.model.keys() == b.model.keys()
    gaps = [float((a.model[n].double() - b.model[n].double()).abs().max()) for n in a.model]
    return float("inf") if any(g != g for g in gaps) else max(gaps)


METHODS = [
    {"algorithm": "fedavg"},
    {"algorithm": "fedavg", "selector": "fedentopt"},
    {"algorithm": "fedavg", "selector": "kl"},
    {"algorithm": "fedprox", "mu": 0.3},
    {"algorithm": "fednova"},
    {"algorithm": "scaffold"},
    {"algorithm": "scaffold", "scaffold_variant": "gradient"},
    {"algorithm": "fedrs"},
    {"algorithm": "fedlc"},
    {"algorithm": "fedentropy"},
    {"algorithm": "scaffold", "scaffold_start": "random"},
    {"algorithm": "fedconcat", "clusters": 2, "rounds": 60, "concat_max_rounds": 10},
]


def layered(num_classes: int) -> nn.Module:
    """Two linear layers: the features that enter the last one have parameters behind them."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 12), nn.ReLU(), nn.Linear(12, num_classes))
