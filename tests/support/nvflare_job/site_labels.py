"""Label counts of the test's sites: site k holds 20 samples of class k % 4 and 5 of the next one."""

import numpy as np

CLASSES = 4


def counts(site: str) -> list[int]:
    number = int(site.rpartition("-")[2])
    row = [0] * CLASSES
    row[number % CLASSES] += 20
    row[(number + 1) % CLASSES] += 5
    return row


def labels(site: str) -> np.ndarray:
    return np.repeat(np.arange(CLASSES), counts(site))
