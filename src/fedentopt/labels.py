"""Label counts: from a client's labels to its vector of counts, and checks on the vectors clients report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError

# Above this, whole numbers no longer fit a float64 and counts would stop being counts.
LARGEST_COUNT = 2.0**53


def label_counts(labels: ArrayLike, num_classes: int) -> np.ndarray:
    """Count how often each class occurs.

    `labels` is a vector of whole class numbers 0 .. num_classes-1 (an empty one gives zeros); the result is
    an int64 vector of length `num_classes`. Anything else is refused with the first offending position.
    """
    if isinstance(num_classes, bool) or not isinstance(num_classes, (int, np.integer)) or num_classes < 1:
        raise InputError(f"num_classes: {num_classes!r} is not a number of classes; accepted: 1 or more")
    y = check_labels(labels)
    if y.size and y.max() >= num_classes:
        at = int(np.argmax(y >= num_classes))
        raise InputError(f"labels: label {y[at]} at position {at}; accepted: 0 to {num_classes - 1}")
    return np.bincount(y, minlength=num_classes).astype(np.int64)


def check_labels(labels: ArrayLike) -> np.ndarray:
    """Class numbers as an int64 vector; refused unless one-dimensional, whole and not negative."""
    try:
        y = np.asarray(labels)
    except ValueError as error:
        raise InputError("labels: rows of different lengths; accepted: one class number per sample") from error
    if y.ndim != 1:
        raise InputError(f"labels: an array of shape {y.shape}; accepted: one dimension, one class number per sample")
    if y.size == 0:
        return np.zeros(0, dtype=np.int64)
    if y.dtype.kind not in "iu":
        raise InputError(f"labels: values of type {y.dtype}; accepted: whole class numbers from 0")
    if y.dtype.kind == "u" and y.max() > np.iinfo(np.int64).max:
        raise InputError(f"labels: label {y.max()} is too large for a class number")
    y = y.astype(np.int64, copy=False)
    if y.min() < 0:
        at = int(np.argmax(y < 0))
        raise InputError(f"labels: label {y[at]} at position {at}; accepted: whole class numbers from 0")
    return y


def validate_report(client: object, counts: Any, num_classes: int, noisy: bool) -> np.ndarray:
    """Check the label counts one client reports; returns them, as they are, as a float64 vector.

    Refused: another length than `num_classes`, values that are no numbers, not finite or beyond 2**53, and,
    unless the report is marked `noisy`, negative counts or no samples at all. Every refusal names the client.
    """
    try:
        raw = np.asarray(counts)
    except (ValueError, TypeError, RuntimeError):  # ragged, or a tensor that NumPy cannot read
        raw = np.asarray(None)
    if raw.dtype.kind not in "iuf" or raw.shape != (num_classes,):
        given = f"{raw.size} label counts" if raw.ndim == 1 else f"label counts of shape {raw.shape}"
        raise InputError(
            f"client {client!r}: {given} of type {raw.dtype}; accepted: {num_classes} numbers, one for each class"
        )
    vector = raw.astype(np.float64)
    check_counts(vector, noisy, lambda c: f"client {client!r}: the count of class {c}")
    if not noisy and not vector.any():
        raise no_samples(f"client {client!r}")
    return vector


def check_counts(values: np.ndarray, noisy: bool, name: Callable[[int], str]) -> None:
    """Refuse float64 values that cannot be label counts; `name(i)` says which one the i-th is."""
    tests = [(~np.isfinite(values), "finite numbers"), (np.abs(values) > LARGEST_COUNT, "at most 2**53")]
    if not noisy:
        tests.append((values < 0, "0 or more (only counts marked noisy may be negative)"))
    for bad, accepted in tests:
        if bad.any():
            at = int(np.argmax(bad))
            raise InputError(f"{name(at)} is {values[at]:g}; accepted: {accepted}")


def no_samples(name: str) -> InputError:
    """The refusal of a client that reports, without noise, no sample at all."""
    return InputError(
        f"{name}: all label counts are 0; accepted: at least one sample (only counts marked noisy may be all 0)"
    )
