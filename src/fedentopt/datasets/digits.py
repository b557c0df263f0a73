"""The digits that come with scikit-learn: 1,797 real handwritten digits, 8×8, sixteen grey levels.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
No download: the default of every command that trains. A fixed stratified fifth (`split.held_out`) is the test.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedentopt.datasets.dataset import held_out
from fedentopt.datasets.source import Content, Images, Labels


def digits() -> Content:
    """The images (0..16 scaled to 0..255, one grey channel) and labels."""
    from sklearn.datasets import load_digits

    from fedentopt.datasets.pixels import resized

    bunch = load_digits()
    images = np.rint(bunch.images[:, None] * (255 / 16)).astype(np.uint8)
    labels = bunch.target.astype(np.int64)
    train, test = held_out(labels)

    def pieces(chosen: np.ndarray) -> Images:
        def iterate(side: int) -> Iterator[np.ndarray]:
            yield from resized(images[chosen], side)

        return iterate

    names = tuple(str(digit) for digit in range(10))
    return Content(1, {"": Labels(names, labels[train], labels[test])}, pieces(train), pieces(test))
