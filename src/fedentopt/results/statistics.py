"""What a handful of seeds allows to say: mean, spread, and whether a difference is more than noise.

All methods of a seed share its partition and its start model, so methods are compared seed by seed: the interval
is Student's, mean(d) ± t(0.975, n-1) · s(d)/√n over the differences d of n seeds.

Where many methods are compared with one, some differ by luck alone. Holm's step-down correction (S. Holm: A Simple
Sequentially Rejective Multiple Test Procedure, Scandinavian Journal of Statistics 6, 1979) keeps the chance that any of
m comparisons is called different wrongly at the level of one: with p values in ascending order, the adjusted one is
p'_(i) = max over j ≤ i of min(1, (m - j + 1) · p_(j)).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Spread:
    """Mean of some values and their sample standard deviation, which is NaN for fewer than two."""

    mean: float
    std: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Leaves out values that are not finite; none at all gives a mean of NaN."""
        kept = [value for value in values if math.isfinite(value)]
        centre, std = mean(kept), sample_std(kept)
        return cls(math.nan if centre is None else centre, math.nan if std is None else std, len(kept))

    def to_dict(self) -> dict[str, float | None]:
        """JSON form; what does not exist is null."""
        return {"mean": finite(self.mean), "std": finite(self.std)}


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


def paired_differences(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Ours minus theirs in every seed that both have, by seed."""
    return [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def paired_interval(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """95 % interval of ours - theirs over the seeds both have; None where fewer than two are shared."""
    return mean_interval(paired_differences(ours, theirs))


def mean_interval(values: Sequence[float]) -> Interval | None:
    """95 % interval of the mean; None for fewer than two values."""
    centre, std = mean(values), sample_std(values)
    if centre is None or std is None:
        return None
    half = student_quantile(len(values) - 1) * std / math.sqrt(len(values))
    return Interval(centre, centre - half, centre + half, len(values))


@lru_cache
def student_quantile(freedom: int, inside: float = 0.95) -> float:
    """The t with P(|T| ≤ t) = `inside` for T with `freedom` degrees of freedom."""
    if freedom < 1 or not 0 < inside < 1:
        raise ValueError(f"no quantile for {freedom} degrees of freedom and probability {inside}")
    # The function behind scipy.stats.t.ppf, without the second that importing scipy.stats takes.
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + inside) / 2))


def paired_p_value(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """Two-sided p value of Student's paired test that both are the same; None where fewer than two seeds are shared."""
    differences = paired_differences(ours, theirs)
    centre, std = mean(differences), sample_std(differences)
    if centre is None or std is None:
        return None
    if std == 0:
        return 1.0 if centre == 0 else 0.0
    from scipy.special import stdtr

    t = abs(centre) / (std / math.sqrt(len(differences)))
    return float(2 * stdtr(len(differences) - 1, -t))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P values adjusted by Holm's correction, in their order; a comparison that could not be made (None) stays one and
    does not count."""
    made = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(made):
        largest = max(largest, min(1.0, (len(made) - rank) * p))
        adjusted[place] = largest
    return adjusted


def finite(value: float | None) -> float | None:
    """The value, or None where it is missing, NaN or infinite, which JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
