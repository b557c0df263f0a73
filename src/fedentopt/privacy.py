"""The Laplace mechanism on label counts, per sample or per person.

What is promised: epsilon-differential privacy of a client's whole vector of label counts, where two data sets
are neighbours when one *sample* is added to or removed from the client. Such a change moves one count by 1, so
the L1 sensitivity is 1, and independent Laplace noise of scale 1/epsilon on every class suffices (Dwork, Roth:
The Algorithmic Foundations of Differential Privacy, 2014, theorem 3.6). A real client draws from the discrete
Laplace distribution, P(x) proportional to exp(-epsilon |x|) on the whole numbers (Ghosh, Roughgarden, Sundararajan:
Universally Utility-Maximizing Privacy Mechanisms, 2012), which has the same bound by the same argument and no low bits
in which the true count could show.

The promise is per sample: someone with n samples is protected with n * epsilon. It is per *person* where each
person's samples are first clipped to at most k (`clip_persons`) and the noise has scale k/epsilon: whoever is added or
removed brings or takes at most k samples, so the L1 sensitivity is k. That needs the choice of a person's k samples to
be independent of everybody else's: if removing one person changed which samples of another are kept, the counts could
move by more than k.

Either promise holds for one release; noise drawn anew for the same data would add another epsilon, so a client draws
once and keeps repeating the answer (`fedentopt.release`). Replacing a sample, or a person's data (one removed, another
added), costs 2 * epsilon. So does, where the unit is a person, one sample more or less of somebody with more than k:
other samples of theirs may be kept then.

Noisy counts may be negative. They leave the client as they are; the reader clamps them at 0, which is
post-processing and costs no privacy.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

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
    """Counts plus Laplace noise of scale 1/epsilon from OpenDP's sampler, float64: for numbers that are not whole.

    Needs the extra `fedentopt[flower]`. The randomness is the operating system's and cannot be seeded. The
    mechanism's own privacy map is asked whether it keeps `epsilon` for one sample added or removed. Refused: as
    `laplace_noise`.
    """
    epsilon = check_epsilon(epsilon)
    values = _finite(counts)
    noisy = _mechanism(float, 1, epsilon)(values.ravel().tolist())
    return _countable(values, np.asarray(noisy, dtype=np.float64).reshape(values.shape), epsilon)


def discrete_laplace(counts: ArrayLike, epsilon: float, *, sensitivity: int = 1) -> np.ndarray:
    """Whole counts plus discrete Laplace noise of scale sensitivity/epsilon, int64: what a real client sends.

    `sensitivity` is by how much one sample (1) or one person (`samples_per_person`) can move the counts in all. Sampler
    and randomness are those of `secure_laplace`. Refused: counts that are not whole numbers from 0, and an epsilon
    whose noise could leave the numbers that can be counts; that is said of epsilon alone, before any draw, since a draw
    that is refused and repeated would be another release.
    """
    epsilon = check_epsilon(epsilon)
    sensitivity = check_sensitivity(sensitivity)
    if epsilon < LEAST_EPSILON * sensitivity:
        raise InputError(
            f"epsilon: {epsilon!r} gives noise of scale {sensitivity / epsilon:g}, beyond what a count can be (2**53); "
            f"accepted: a larger one, such as {LEAST_EPSILON * sensitivity:g}"
        )
    values = _finite(counts)
    if ((values < 0) | (values != np.floor(values)) | (values > LARGEST_COUNT)).any():
        raise InputError("counts: noise of whole numbers needs whole numbers; accepted: label counts of 0 to 2**53")
    noisy = _mechanism("i64", sensitivity, epsilon)(values.astype(np.int64).ravel().tolist())
    limit = int(LARGEST_COUNT)
    return np.clip(np.asarray(noisy, dtype=np.int64), -limit, limit).reshape(values.shape)


def clip_persons(labels: ArrayLike, persons: ArrayLike, samples_per_person: int) -> np.ndarray:
    """The labels that are left when at most `samples_per_person` samples of each person are kept, in their order.

    `persons` names the person of each sample, by whole number or text. Which samples stay is decided by a hash of the
    person's name and of the sample's rank among that person's own, so it neither depends on anybody else's data, which
    the sensitivity argument needs, nor on the order of the classes, as "the first k" would in sorted data. The same
    data give the same choice. Refused: names of another length or kind, and a missing name.
    """
    most = check_sensitivity(samples_per_person, "samples_per_person")
    y, who = np.asarray(labels), np.asarray(persons)
    if who.ndim != 1 or y.ndim != 1 or len(who) != len(y):
        raise InputError(f"persons: shape {who.shape} beside labels of shape {y.shape}; accepted: one name per sample")
    if who.size == 0:
        return y
    if who.dtype.kind == "O" and all(isinstance(name, str) for name in who):
        who = who.astype(str)
    if who.dtype.kind not in "iuU" or (who.dtype.kind == "U" and (np.char.strip(who) == "").any()):
        raise InputError("persons: a name is missing or neither whole number nor text; accepted: one name per sample")
    names, person, sizes = np.unique(who, return_inverse=True, return_counts=True)
    order = np.argsort(person, kind="stable")
    keep = np.ones(len(y), dtype=bool)
    for number, samples in enumerate(np.split(order, np.cumsum(sizes)[:-1])):
        if len(samples) > most:
            lots = [_lot(str(names[number]), rank) for rank in range(len(samples))]
            ranks = sorted(range(len(samples)), key=lots.__getitem__)
            keep[samples[ranks[most:]]] = False
    return np.asarray(y[keep])


def check_sensitivity(value: int, name: str = "sensitivity") -> int:
    """A whole number from 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= 2**31:
        raise InputError(f"{name}: {value!r} is not accepted; accepted: a whole number from 1")
    return int(value)


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


def _mechanism(kind: Any, sensitivity: int, epsilon: float) -> Any:
    """OpenDP's mechanism that keeps `epsilon` for counts that move by `sensitivity` in all, by its own privacy map."""
    try:
        import opendp.prelude as dp
    except ImportError as error:
        raise InputError("epsilon: a real client's noise needs OpenDP; install fedentopt[flower]") from error
    dp.enable_features("contrib")
    atom = dp.atom_domain(T=float, nan=False) if kind is float else dp.atom_domain(T=kind)
    space = dp.vector_domain(atom), dp.l1_distance(T=kind)
    scale, distance = sensitivity / epsilon, float(sensitivity) if kind is float else sensitivity
    mechanism = dp.m.make_laplace(*space, scale=scale)
    while not mechanism.check(distance, epsilon):  # the scale was rounded down: the next one up keeps the promise
        scale = math.nextafter(scale, math.inf)
        mechanism = dp.m.make_laplace(*space, scale=scale)
    return mechanism


def _lot(name: str, rank: int) -> bytes:
    return hashlib.blake2b(f"{rank} {name}".encode(), digest_size=16, person=b"clip_persons").digest()
