"""The paper's table 6: how evenly clients are selected for four buffer sizes (K=100, M=10, 500 rounds).

Label counts alone decide it, so it needs no training: balanced labels as in CIFAR-10 (10 x 5,000) and CIFAR-100
with coarse labels (20 x 2,500). The mean of ten partitions must come within 0.025 of the printed figure.
"""

from __future__ import annotations

import numpy as np
import pytest

from fedentopt import EntropySelector
from fedentopt.partition import partition
from fedentopt.selection.measures import selection_entropy

BUFFERS = (0, 25, 50, 75)
PRINTED = {
    ("CIFAR-10", "classes:2"): (0.715, 0.918, 0.976, 0.998),
    ("CIFAR-10", "dir:0.1"): (0.896, 0.947, 0.979, 0.998),
    ("CIFAR-100", "classes:2"): (0.818, 0.945, 0.982, 0.998),
    ("CIFAR-100", "dir:0.1"): (0.853, 0.933, 0.970, 0.993),
}
CLASSES = {"CIFAR-10": (10, 5000), "CIFAR-100": (20, 2500)}


def h_norm(counts: np.ndarray, buffer_size: int, seed: int) -> float:
    selector = EntropySelector(10, buffer_size=buffer_size, seed=seed)
    selector.register(counts)
    times = np.zeros(100)
    for _ in range(500):
        times[list(selector.select().clients)] += 1
    assert times.sum() == 5000
    return selection_entropy(times)


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "spec"), PRINTED)
def test_selection_entropy_of_table_6(dataset: str, spec: str) -> None:
    classes, each = CLASSES[dataset]
    labels = np.repeat(np.arange(classes), each)
    tables = [partition(labels, spec, 100, seed).counts for seed in range(10)]
    ours = [np.mean([h_norm(table, q, seed) for seed, table in enumerate(tables)]) for q in BUFFERS]
    assert ours == pytest.approx(PRINTED[dataset, spec], abs=0.025)
