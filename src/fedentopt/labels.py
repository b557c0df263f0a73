"""Label counts: from a client's labels to its vector of counts, and checks on the vectors clients report."""

from __future__ import annotations

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
    y = np.asarray(labels)
    if y.ndim != 1:
        raise InputError(f"labels: an array of shape {y.shape}; accepted: one dimension, one class number a sample")
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
    raw = np.asarray(counts)
    if raw.dtype.kind not in "iuf":
        raise InputError(f"client {client!r}: label counts of type {raw.dtype}; accepted: {num_classes} numbers")
    vector = raw.astype(np.float64)
    if vector.shape != (num_classes,):
        given = str(vector.size) if vector.ndim == 1 else f"an array of shape {vector.shape}"
        raise InputError(
            f"client {client!r}: label counts for {given} classes; accepted: {num_classes} numbers, one a class"
        )
    check_values(vector[None, :], [client], noisy)
    return vector


def check_values(table: np.ndarray, clients: Any, noisy: bool) -> None:
    """Refuse a (clients, classes) table whose values cannot be label counts, naming the first offender."""
    if not table.size:
        return
    low, high = table.min(), table.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        row, column = np.argwhere(~np.isfinite(table))[0]
        raise InputError(
            f"client {clients[row]!r}: the count of class {column} is {table[row, column]}; accepted: finite numbers"
        )
    if max(high, -low) > LARGEST_COUNT:
        row, column = np.argwhere(np.abs(table) > LARGEST_COUNT)[0]
        raise InputError(
            f"client {clients[row]!r}: the count of class {column} is {table[row, column]:g}; accepted: at most 2**53"
        )
    if noisy:
        return
    if low < 0:
        row, column = np.argwhere(table < 0)[0]
        raise InputError(
            f"client {clients[row]!r}: the count of class {column} is {table[row, column]:g}; "
            "accepted: 0 or more (only counts marked noisy may be negative)"
        )
    empty = ~table.any(axis=1)
    if empty.any():
        raise InputError(
            f"client {clients[int(np.argmax(empty))]!r}: all label counts are 0; accepted: at least one sample "
            "(only counts marked noisy may be all zero)"
        )
