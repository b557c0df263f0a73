"""A cohort: the clients that train together in one round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

ClientId: TypeAlias = str | int


class CohortWarning(UserWarning):
    """A cohort came out smaller than asked for because too few clients were available."""


@dataclass(frozen=True, eq=False)
class Cohort:
    """The clients of one round and what their reported labels add up to.

    `clients` is in the order picked. `label_counts` is the sum of their counts as the selector reads them
    (noisy ones clamped at 0): int64 where all counts are whole, else float64; `entropy` (bits) and
    `classes_covered` are taken from it. `released` names the buffered clients that were let go early because
    others were away, oldest first. `sample_limits` gives, for selectors that use only part of a client's data,
    how many samples of each class it may use. `divergence` is KL(cohort || target) in bits where a target
    was set. `weights`, where a selector defines them, are the clients' parts in the average, in the order of `clients`;
    such a cohort may be smaller than asked for because a client drawn twice counts once, with double weight.
    """

    clients: tuple[ClientId, ...]
    label_counts: np.ndarray
    entropy: float
    classes_covered: int
    released: tuple[ClientId, ...] = ()
    sample_limits: dict[ClientId, np.ndarray] | None = None
    divergence: float | None = None
    weights: tuple[float, ...] | None = None
