"""FL-bench and others that draw all cohorts before round 1: the whole stream, as lists of client numbers.

FL-bench's server builds `self.client_sample_stream` when it is made. A server of yours puts another in its place:

    class EntropyServer(FedAvgServer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.client_sample_stream = sample_stream(
                self.dataset.targets, [part["train"] for part in self.data_indices],
                rounds=self.args.common.global_epoch, join_ratio=self.args.common.join_ratio)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedentopt import EntropySelector, cohorts
from fedentopt.labels import label_counts


def sample_stream(
    targets: Sequence[int],
    indices: Sequence[Sequence[int]],
    *,
    rounds: int,
    join_ratio: float,
    buffer_share: float = 0.5,
) -> list[list[int]]:
    """One list of client numbers per round; `indices` are each client's places in `targets`."""
    labels = np.asarray(targets)
    size = max(1, int(len(indices) * join_ratio))
    selector = EntropySelector(size, int(buffer_share * (len(indices) - size)))
    selector.register([label_counts(labels[np.asarray(places)], int(labels.max()) + 1) for places in indices])
    return [[int(client) for client in cohort.clients] for cohort in cohorts(selector, rounds)]
