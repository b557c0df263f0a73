"""pfl-research's published CIFAR-10 workload, for every framework: its numbers, its net, the images and the clock.

1,000 users of 50 images (iid), 50 a round, 1,500 rounds, one local epoch in batches of 10, learning rate 0.1, no
momentum, models averaged with equal weights, test accuracy every tenth round: baseline.yaml and simple_cnn of
pfl-research's benchmarks/image_classification. A peer's script imports this file and needs torch and NumPy besides
itself. It is called as `script.py --data FOLDER --rounds N --seed S --device cpu|cuda --progress FILE.jsonl`.

One thing is not as there: pfl-research's download_preprocess.py reads CIFAR-10's colour planes as if they were
interleaved, which scrambles the pictures. Everybody gets them whole here.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

USERS, COHORT, IMAGES, ROUNDS = 1000, 50, 50, 1500
EPOCHS, BATCH, LR, EVALUATE_EVERY, CLASSES = 1, 10, 0.1, 10, 10


def simple_cnn(num_classes: int = CLASSES, *first: nn.Module) -> nn.Module:
    """pfl-research's CNN for CIFAR-10, 1,626,442 parameters, Glorot-initialised as there; `first` goes before it."""
    model = nn.Sequential(
        *first, nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, num_classes),
    )  # fmt: skip
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return model


def write_data(
    folder: Path,
    splits: Mapping[str, tuple[np.ndarray, np.ndarray]],
    scale: tuple[Sequence[float], Sequence[float]],
    users: Mapping[int, np.ndarray],
) -> None:
    """Lay out uint8 images (n, 3, 32, 32) and labels by split, and per seed the samples of every user.

    `scale` is the mean and the deviation of the training images' channels, scaled to 0..1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split, (images, labels) in splits.items():
        np.save(folder / f"x_{split}.npy", np.ascontiguousarray(images))
        np.save(folder / f"y_{split}.npy", np.asarray(labels, dtype=np.int64))
    np.save(folder / "scale.npy", np.asarray(scale, dtype=np.float32))
    for seed, samples in users.items():
        np.save(folder / f"users_{seed}.npy", np.asarray(samples, dtype=np.int64))


class Images:
    """What `write_data` laid out: images by split, and who holds which."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self.users: np.ndarray = np.load(folder / f"users_{seed}.npy")

    def split(self, name: str, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """All images of a split, standardised, float32 (n, 3, 32, 32), and their labels, on a device."""
        files = (f"x_{name}.npy", f"y_{name}.npy", "scale.npy")
        x, y, scale = (torch.from_numpy(np.load(self._folder / file)).to(device) for file in files)
        mean, std = scale.view(2, 3, 1, 1)
        return x.float().div_(255).sub_(mean).div_(std), y


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Per cent right, without dropout, all images in one batch as in the published workload."""
    was = model.training
    model.eval()
    right = (model(x).argmax(1) == y).sum()
    model.train(was)
    return 100 * float(right) / len(y)


class Progress:
    """A line of JSON per round, written at once: what is left of a run that is stopped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_text("")

    def say(self, **facts: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"at": round(time.time(), 4), **facts}) + "\n")

    def round_ended(self, number: int, score: float | None = None) -> None:
        self.say(round=number, **({} if score is None else {"accuracy": round(score, 2)}))


def same_products() -> None:
    """TF32 for convolutions and matrix products, as our engine takes them on a GPU."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    parser.add_argument("--progress", type=Path, required=True)
    parser.add_argument("--actors", type=int, default=1, help="Ray actors of Flower's simulation")
    parser.add_argument("--gloo", action="store_true", help="let several processes of pfl share one GPU")
    return parser.parse_args(words)
