"""pfl (pip install pfl): a user sampler that hands out cohorts of maximum label entropy, user by user.

sampler = EntropyUserSampler(counts_by_user, cohort_size=20, buffer_size=100)
data = FederatedDataset(make_dataset, sampler)
for user, seed in data.get_cohort(20): ...         # the cohort size that the sampler was made with
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from fedentopt import ClientId, EntropySelector, cohorts


class EntropyUserSampler:
    """pfl asks for one user a call, and takes `cohort_size` calls for a cohort."""

    def __init__(
        self, counts: Mapping[ClientId, Sequence[int]], cohort_size: int, buffer_size: int = 0, seed: int = 0
    ) -> None:
        if len(counts) < cohort_size:
            raise ValueError(f"{len(counts)} users make no cohort of {cohort_size}")
        selector = EntropySelector(cohort_size, buffer_size, seed=seed)
        selector.register(counts)
        self._users = chain.from_iterable(cohort.clients for cohort in cohorts(selector))

    def __call__(self) -> ClientId:
        return next(self._users)
