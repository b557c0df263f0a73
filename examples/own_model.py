"""A network of your own: a function that takes the number of classes and returns a torch module.

    fedentopt run --model own_model:small_net --rounds 5      (from the folder of this file)

It sees float images (n, 3, size, size) and returns one row of logits an image. Run as a script, it does the same
from Python: python examples/own_model.py [--out FOLDER]
"""

import argparse
import sys
from pathlib import Path

from torch import nn

from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.sweep import run_sweep


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
    sys.path.insert(0, str(Path(__file__).parent))  # where "own_model:small_net" is found
    config = RunConfig(model="own_model:small_net", selector="fedentopt", clients=20, cohort="4", rounds=3, epochs=2)
    (result,) = run_sweep([config], RunOptions(out=str(parser.parse_args().out), device="cpu", workers=1))
    print(f"{config.model}: {result.summary['accuracy']:.1f} % after {config.rounds} rounds")
