"""The digits that come with scikit-learn: 1,797 real handwritten digits, 8×8, sixteen grey levels.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
No download: the default of every command that trains. A fixed stratified fifth (`split.held_out`) is the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from fedentopt.datasets.dataset import held_out
from fedentopt.datasets.source import Content, Images, Labels


def digits() -> Content:
    """The images (0..16 scaled to 0..255, one grey channel) and labels."""
    from fedentopt.datasets.pixels import resized

    table = _table()
    images = np.rint(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    labels = table[:, -1].astype(np.int64)
    train, test = held_out(labels)

    def pieces(chosen: np.ndarray) -> Images:
        def iterate(side: int) -> Iterator[np.ndarray]:
            yield from resized(images[chosen], side)

        return iterate

    names = tuple(str(digit) for digit in range(10))
    return Content(1, {"": Labels(names, labels[train], labels[test])}, pieces(train), pieces(test))


def _table() -> np.ndarray:
    """Sixty-four pixels and the label of every image. Read where scikit-learn keeps it, if it is there: to import
    scikit-learn takes longer than a short run."""
    found = find_spec("sklearn")
    if found is not None and found.origin is not None:
        file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    return np.column_stack(load_digits(return_X_y=True))
