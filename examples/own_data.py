"""Compare random and entropy selection on your own images: python examples/own_data.py [--out FOLDER]

The data set here is a stand-in (scikit-learn's digits, three of them, saved as an .npz file); put yours in its place.
A folder of class folders with image files works as well: give its path as `dataset`.
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from fedentopt.simulation import compare


def save_images(file: Path) -> None:
    """Images (n, height, width) as uint8, labels as whole numbers, names of the classes."""
    digits = load_digits()
    keep = digits.target < 3
    images, labels = (digits.images[keep] * 15.9).astype(np.uint8), digits.target[keep]
    np.savez(
        file, x_train=images[:400], y_train=labels[:400], x_test=images[400:], y_test=labels[400:],
        class_names=np.array(["zero", "one", "two"]),
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("out/own-data"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    save_images(out / "digits.npz")
    result = compare(
        ["fedavg", "fedentopt:buffer=6"], dataset=out / "digits.npz", seeds=1, out=out, partition="dir:0.2",
        min_samples=1, clients=12, cohort=3, rounds=5, epochs=2, batch_size=16,
    )  # fmt: skip
    for method, accuracy in zip(result.summary["method"], result.summary["accuracy"], strict=True):
        print(f"{method}: {accuracy:.1f} %")
    print(result.report(out / "report.html"))
