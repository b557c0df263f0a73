"""What a handful of seeds allows to say: mean, spread, and whether a difference is more than noise.

All methods of a seed share its partition and its start model, so methods are compared seed by seed: the interval
is Student's, mean(d) ± t(0.975, n-1) · s(d)/√n over the differences d of n seeds. Student's distribution function
has a closed form for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4), which is inverted here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Interval:
    """Mean of paired differences with its 95 % interval, over this many seeds."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def clear(self) -> bool:
        """Whether zero lies outside."""
        return self.low > 0 or self.high < 0


def mean(values: Sequence[float]) -> float | None:
    """Mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def sample_std(values: Sequence[float]) -> float | None:
    """Sample standard deviation (n - 1); None for fewer than two values."""
    if len(values) < 2:
        return None
    centre = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def paired_interval(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """95 % interval of ours - theirs over the seeds both have; None where fewer than two are shared."""
    shared = sorted(ours.keys() & theirs.keys())
    return mean_interval([ours[seed] - theirs[seed] for seed in shared])


def mean_interval(values: Sequence[float]) -> Interval | None:
    """95 % interval of the mean; None for fewer than two values."""
    centre, spread = mean(values), sample_std(values)
    if centre is None or spread is None:
        return None
    half = student_quantile(len(values) - 1) * spread / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half, len(values))


@lru_cache
def student_quantile(freedom: int, inside: float = 0.95) -> float:
    """The t with P(|T| ≤ t) = `inside` for T with `freedom` degrees of freedom."""
    if freedom < 1 or not 0 < inside < 1:
        raise ValueError(f"no quantile for {freedom} degrees of freedom and probability {inside}")
    low, high = 0.0, 1.0
    while _student_inside(high, freedom) < inside:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if _student_inside(middle, freedom) < inside:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_inside(t: float, freedom: int) -> float:
    """P(|T| ≤ t) for a whole number of degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    odd = freedom % 2 == 1
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
