"""Images that the server has: a few of every class, drawn from the training data and taken from the clients.

The audit looks at them through the models that clients send (`fedentopt.audit.recall`). The test split is not touched:
what is measured there would no longer be new to the run.
"""

from __future__ import annotations

import numpy as np

from fedentopt.errors import InputError
from fedentopt.partition import Partition
from fedentopt.randomness import generator


def take_server_images(parts: Partition, labels: np.ndarray, number: int, seed: int) -> tuple[Partition, np.ndarray]:
    """What is left to the clients, and the server's samples: `number` of every class, class by class.

    Nobody gives its last sample away. Refused where a class has too few others.
    """
    classes = parts.counts.shape[1]
    left = parts.counts.sum(axis=1)
    owner = np.full(len(labels), -1, dtype=np.int64)
    for client, samples in enumerate(parts.indices):
        owner[samples] = client
    held = np.flatnonzero(owner >= 0)
    taken = []
    for c in range(classes):
        own: list[int] = []
        for sample in generator(seed, "server-images", c).permutation(held[labels[held] == c]).tolist():
            if len(own) == number:
                break
            if left[owner[sample]] > 1:
                left[owner[sample]] -= 1
                own.append(sample)
        if len(own) < number:
            raise InputError(
                f"server_images: {number} of every class, and of class {c} the clients have only {len(own)} to spare; "
                f"accepted: 0, or at most as many as there are of every class"
            )
        taken.append(np.array(own, dtype=np.int64))
    server = np.concatenate(taken)
    gone = np.zeros(len(labels), dtype=bool)
    gone[server] = True
    indices = [samples[~gone[samples]] for samples in parts.indices]
    counts = np.stack([np.bincount(labels[own], minlength=classes) for own in indices]).astype(np.int64)
    return Partition(indices, counts), server
