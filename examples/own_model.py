"""A network of your own: a function that takes the number of classes and returns a torch module.

    fedentopt run --model own_model:small_net --rounds 5      (from the folder of this file)

It sees float images (n, 3, size, size) and returns one row of logits per image. Run as a script, it does the same
from Python: python examples/own_model.py [--out FOLDER]
"""

import argparse
from pathlib import Path

from torch import nn

from fedentopt.simulation import compare


def small_net(num_classes: int) -> nn.Module:
    """Two convolutions and two linear layers, for images of any size."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(16 * 4 * 4, 32), nn.ReLU(),
        nn.Linear(32, num_classes),
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/own-model"))
    out = parser.parse_args().out
    result = compare(["fedentopt"], model=small_net, seeds=1, out=out, clients=20, cohort=4, rounds=3, epochs=2)
    print(f"small_net: {result.summary.accuracy[0]:.1f} % after 3 rounds")
