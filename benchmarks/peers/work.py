"""The work that every framework does here, and how it reports: the same data, net, optimiser and clock for all.

100 clients of 500 images, ten a round, five local epochs in batches of 64, LeNet-5 (62,006 parameters), SGD with
learning rate 0.01, momentum 0.9 and weight decay 5e-4, two workers on the CPU, no augmentation, no evaluation.
A peer's script imports this file and needs torch and NumPy besides itself. It is called as
`script.py --data FOLDER --rounds N --out RESULT.json`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

CLIENTS, COHORT, SAMPLES, TEST = 100, 10, 500, 1000
EPOCHS, BATCH, CLASSES, WORKERS = 5, 64, 10, 2
LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 5e-4
MEAN, STD = 0.5, 0.25


def make_data(folder: Path) -> None:
    """Random images of ten classes that a net can tell apart: faint class patterns under noise."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    patterns = np.kron(rng.normal(0, 14, (CLASSES, 3, 8, 8)), np.ones((4, 4))).astype(np.float32)
    arrays = {}
    for split, many in (("train", CLIENTS * SAMPLES), ("test", TEST)):
        y = rng.permutation(np.arange(many) % CLASSES)
        x = np.empty((many, 3, 32, 32), dtype=np.uint8)
        for part in np.array_split(np.arange(many), max(1, many // 1000)):
            noise = rng.standard_normal((len(part), 3, 32, 32), dtype=np.float32) * 55
            x[part] = np.clip(patterns[y[part]] + noise + 128, 0, 255).astype(np.uint8)
        arrays |= {f"x_{split}": x, f"y_{split}": y}
        np.save(folder / f"x_{split}.npy", x)
        np.save(folder / f"y_{split}.npy", y)
    np.savez(folder / "work.npz", **arrays)


class LeNet5(nn.Sequential):
    """LeNet-5 for 32x32 RGB images, as everywhere in this benchmark."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES),
        )  # fmt: skip


class Data:
    """The images of a data folder; a client's are standardised when it asks for them."""

    def __init__(self, folder: Path) -> None:
        self._x = {split: np.load(folder / f"x_{split}.npy", mmap_mode="r") for split in ("train", "test")}
        self._y = {split: np.load(folder / f"y_{split}.npy") for split in ("train", "test")}

    def _tensors(self, split: str, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.from_numpy(np.array(self._x[split][part])).float().div_(255).sub_(MEAN).div_(STD)
        return x, torch.from_numpy(self._y[split][part])

    def client(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tensors("train", slice(number * SAMPLES, (number + 1) * SAMPLES))

    def test(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tensors("test", slice(None))


def optimiser(parameters: object, lr: float = LR) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)  # type: ignore[arg-type]


def train_locally(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """What a client does, for the frameworks that leave it to their users."""
    model.train()
    sgd = optimiser(model.parameters())
    for _ in range(EPOCHS):
        order = torch.randperm(len(x))
        for chosen in order.split(BATCH):
            sgd.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            sgd.step()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


class Clock:
    """Notes when rounds end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def round_ended(self) -> None:
        self.ends.append(time.perf_counter())
        print(f"round {len(self.ends)} ended", flush=True)

    def write(self, out: Path, model: nn.Module, data: Data, packages: tuple[str, ...]) -> None:
        """Seconds of every round but the first, and the accuracy on test images: a sign that the work was done."""
        x, y = data.test()
        model.eval()
        with torch.no_grad():
            accuracy = 100 * float((model(x).argmax(1) == y).float().mean())
        result = {
            "rounds": len(self.ends),
            "round_seconds": np.diff(self.ends).round(4).tolist(),
            "accuracy": round(accuracy, 1),
            "parameters": sum(p.numel() for p in model.parameters()),
            "versions": {name: version(name) for name in (*packages, "torch", "numpy")}
            | {"python": sys.version.split()[0]},
        }
        out.write_text(json.dumps(result))
