"""A share of every client's training data, held out: settings are chosen by it, so that nobody tunes on the test split.

Client k with n_k samples holds out round(share * n_k) of them, drawn by a key of seed and client; the rest is what it
trains on, and what its label counts count. All held-out samples together are evaluated like the test split.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedentopt.errors import InputError
from fedentopt.partition import Partition
from fedentopt.randomness import generator


@dataclass(frozen=True)
class HeldOut:
    """Held-out samples, by client and within a client ascending, and whose they are."""

    samples: np.ndarray
    clients: np.ndarray

    @cached_property
    def key(self) -> bytes:
        """The same for runs that hold out the same samples."""
        return self.samples.tobytes()


def hold_out(parts: Partition, labels: np.ndarray, share: float, seed: int) -> tuple[Partition, HeldOut]:
    """What is left to train on, and what is held out; refused where a client would have nothing left, or nobody would
    hold anything out."""
    left, held = [], []
    for client, samples in enumerate(parts.indices):
        number = round(share * len(samples))
        if len(samples) and number == len(samples):
            raise InputError(
                f"validation: {share:g} holds out all {number} samples of client {client}; accepted: a smaller share, "
                f"or more samples per client"
            )
        order = generator(seed, "validation", client).permutation(samples)
        held.append(np.sort(order[:number]))
        left.append(np.sort(order[number:]))
    sizes = [len(own) for own in held]
    if not sum(sizes):
        largest = max(len(samples) for samples in parts.indices)
        raise InputError(
            f"validation: {share:g} holds out nothing, since no client has more than {largest} samples; "
            f"accepted: a larger share"
        )
    classes = parts.counts.shape[1]
    counts = np.stack([np.bincount(labels[own], minlength=classes) for own in left]).astype(np.int64)
    return Partition(left, counts), HeldOut(np.concatenate(held), np.repeat(np.arange(len(held)), sizes))


def client_accuracies(
    clients: int, *, held_out: HeldOut | None, hits: np.ndarray | None, counts: np.ndarray,
    class_accuracy: tuple[float, ...] | None, chance: float | None,
) -> tuple[list[float], str]:  # fmt: skip
    """Accuracy per client in per cent, NaN where it cannot be told, and what it was measured on.

    "validation": on the client's own held-out samples, as the field does where clients have test data of their own.
    "test": accuracy of each class on the test split, weighted by the client's label distribution, as one does where
    they have none; classes without test samples are left out. `chance` is that of a model that diverged.
    """
    of = "test" if held_out is None else "validation"
    if chance is not None:
        return [chance] * clients, of
    if held_out is not None:
        if hits is None:
            return [np.nan] * clients, of
        number = np.bincount(held_out.clients, minlength=clients)
        right = np.bincount(held_out.clients, weights=hits, minlength=clients)
        with np.errstate(invalid="ignore"):
            return list(100.0 * right / number), of
    if class_accuracy is None:
        return [np.nan] * clients, of
    accuracy = np.array(class_accuracy)
    known = np.isfinite(accuracy)
    weights = counts[:, known].astype(np.float64)
    with np.errstate(invalid="ignore"):
        return list(weights @ accuracy[known] / weights.sum(axis=1)), of
