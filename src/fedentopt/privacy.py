"""The Laplace mechanism on label counts.

What is promised: epsilon-differential privacy of a client's whole vector of label counts, where two data sets
are neighbours when one *sample* is added to or removed from the client. Such a change moves one count by 1, so
the L1 sensitivity is 1, and independent Laplace noise of scale 1/epsilon on every class suffices (Dwork, Roth:
The Algorithmic Foundations of Differential Privacy, 2014, theorem 3.6). The promise is per sample, not per
client or person: someone with n samples is protected with n * epsilon. It holds for one release; noise drawn
anew for the same data would add another epsilon, so a client draws once and keeps repeating the answer.
Replacing a sample (one removed, another added) costs 2 * epsilon.

Noisy counts may be negative. They leave the client as they are; the reader clamps them at 0, which is
post-processing and costs no privacy.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError
from fedentopt.labels import LARGEST_COUNT

LEAST_EPSILON = 1e-12  # of the budgets that surely do: counts grow beyond 2**53 once in 10**3900 draws


def laplace_noise(counts: ArrayLike, epsilon: float, rng: np.random.Generator) -> np.ndarray:
    """Counts plus Laplace noise of scale 1/epsilon, float64, drawn from `rng`: for simulation only.

    NumPy's sampler works on ordinary floating-point numbers, whose low bits can give the true count away
    (Mironov 2012). A real client uses `secure_laplace`. Refused: an epsilon so small that a count leaves the numbers
    that can be counts.
    """
    values = _finite(counts)
    return _countable(values, values + rng.laplace(0.0, 1.0 / check_epsilon(epsilon), size=values.shape), epsilon)


def secure_laplace(counts: ArrayLike, epsilon: float) -> np.ndarray:
    """Counts plus Laplace noise of scale 1/epsilon from OpenDP's sampler, float64: for a real client.

    Needs the extra `fedentopt[flower]`. The randomness is the operating system's and cannot be seeded. The
    mechanism's own privacy map is asked whether it keeps `epsilon` for one sample added or removed. Refused: as
    `laplace_noise`.
    """
    epsilon = check_epsilon(epsilon)
    values = _finite(counts)
    try:
        import opendp.prelude as dp
    except ImportError as error:
        raise InputError("epsilon: a real client's noise needs OpenDP; install fedentopt[flower]") from error
    dp.enable_features("contrib")
    domain = dp.vector_domain(dp.atom_domain(T=float, nan=False))
    scale = 1.0 / epsilon
    mechanism = dp.m.make_laplace(domain, dp.l1_distance(T=float), scale=scale)
    while not mechanism.check(1.0, epsilon):  # 1/epsilon was rounded down: the next scale up keeps the promise
        scale = math.nextafter(scale, math.inf)
        mechanism = dp.m.make_laplace(domain, dp.l1_distance(T=float), scale=scale)
    noisy = mechanism(values.ravel().tolist())
    return _countable(values, np.asarray(noisy, dtype=np.float64).reshape(values.shape), epsilon)


def check_epsilon(epsilon: float) -> float:
    """The privacy budget as a float; refused unless finite and above 0."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float, np.integer, np.floating)):
        raise InputError(f"epsilon: {epsilon!r} is not a number; accepted: a number above 0")
    try:
        value = float(epsilon)
    except OverflowError:  # a whole number that no float can hold
        value = math.inf
    if not (math.isfinite(value) and value > 0 and math.isfinite(1.0 / value)):
        raise InputError(f"epsilon: {epsilon!r} is out of range; accepted: a finite number above 0")
    return value


def _countable(counts: np.ndarray, noisy: np.ndarray, epsilon: float) -> np.ndarray:
    """The noisy counts; refused, by the budget's name, where noise alone made one larger than a count may be."""
    if ((np.abs(counts) <= LARGEST_COUNT) & ~(np.abs(noisy) <= LARGEST_COUNT)).any():
        raise InputError(
            f"epsilon: {epsilon!r} gives noise of scale {1.0 / epsilon:g}, beyond what a count can be (2**53); "
            f"accepted: a larger one, such as {LEAST_EPSILON:g}"
        )
    return noisy


def _finite(counts: ArrayLike) -> np.ndarray:
    try:
        values = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):  # the last: whole numbers that no float can hold
        values = np.asarray(np.nan)
    if not np.isfinite(values).all():
        raise InputError("counts: noise can only be added to finite numbers; accepted: label counts of 0 or more")
    return values
