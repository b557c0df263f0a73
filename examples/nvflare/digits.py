"""What a site holds: a part of scikit-learn's digits with few of the ten classes. Yours reads the site's own files."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

SITES = 6


def samples(site: str) -> tuple[np.ndarray, np.ndarray]:
    """Images, as rows of 64 numbers and a 1, and labels of site-1 to site-6: half of three classes and a few others."""
    number = int(site.rpartition("-")[2]) - 1
    images, labels = load_digits(return_X_y=True)
    own = [(2 * number + step) % 10 for step in range(3)]
    mine = np.isin(labels, own) & (np.arange(len(labels)) % 2 == number % 2)
    mine |= np.equal(labels, (2 * number + 3) % 10) & (np.arange(len(labels)) % 10 == number)
    return np.hstack([images[mine] / 16, np.ones((mine.sum(), 1))]), labels[mine]


def labels(site: str) -> np.ndarray:
    """What the site counts."""
    return samples(site)[1]
