"""Splits of a data set among clients: those of NIID-Bench, and others that the field uses.

Li, Diao, Chen, He: Federated Learning on Non-IID Data Silos: An Experimental Study (ICDE 2022):

* ``classes:J`` (label quantity, "C = J"): client i owns class i mod C and draws further classes uniformly,
  without repeats, until it owns J. The samples of a class are shuffled and cut into as many nearly equal parts
  as it has owners, handed out by increasing client number.
* ``dir:BETA`` (Dirichlet): for each class in order draw p ~ Dir_K(BETA), set p_i = 0 for every client that
  already holds N/K samples or more, renormalise, and cut the shuffled samples at floor(cumsum(p) * n_c).
  If a client ends with fewer samples than the minimum, everything is drawn anew. Where this never ends well and
  there are classes without samples, these are left out.
* ``quantity:BETA`` (sizes alone): every client gets the minimum, and the rest of the shuffled samples is cut in
  shares p ~ Dir_K(BETA). (NIID-Bench draws anew until all have the minimum, which 100 clients never see.)
* ``iid``: all samples shuffled and cut into K nearly equal parts.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from
Decentralized Data (AISTATS 2017):

* ``shards:S``: the samples are sorted by label (in drawn order within a class), cut into K * S nearly equal shards,
  and every client gets S of them. Two shards of one client may be of one class.

After Chen, Vikalo: Heterogeneity-Guided Client Sampling (NeurIPS 2024), whose clients differ in how skewed they are:

* ``mixed:BETA,BETA,...``: client i draws its own class shares from Dir_C with BETA number i mod G of the G given, and
  takes N/K samples by them, without replacement (`client_shares.fill` says what happens when a class has run out).
* ``dir:BETA+quantity:BETA``, ``mixed:BETA,...+quantity:BETA``: shares per client as in ``mixed``, sizes as in
  ``quantity``: skewed in labels and in sizes, independently.

And ``natural``: the data says which client a sample belongs to, and nothing is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError
from fedentopt.labels import check_labels
from fedentopt.partition.client_shares import cut, drawn_sizes, equal_sizes, fill, shards
from fedentopt.partition.niid_bench import dirichlet, label_quantity
from fedentopt.partition.spec import FORMS, NATURAL, PartitionSpec, parse

__all__ = ["FORMS", "NATURAL", "Partition", "PartitionSpec", "parse", "partition"]

# Class numbers may have gaps, but numbers far beyond the samples are no class numbers, and would fill the memory.
MOST_EMPTY_CLASSES = 1 << 16
_SHUFFLE = 0x5042  # keeps these draws apart from others made with the same seed


@dataclass(frozen=True)
class Partition:
    """Who holds what: sample numbers per client (sorted), and the (K, C) int64 matrix of label counts."""

    indices: list[np.ndarray]
    counts: np.ndarray


def partition(
    labels: ArrayLike,
    spec: str | PartitionSpec,
    clients: int,
    seed: int,
    *,
    num_classes: int | None = None,
    min_samples: int = 10,
    owners: ArrayLike | None = None,
) -> Partition:
    """Split samples with these labels among `clients` clients; the same arguments give the same split.

    `labels` holds whole class numbers from 0; `num_classes` is their number where it is more than the largest
    label tells. `min_samples` is the fewest samples a client may end with under dir:BETA and where sizes are drawn.
    `owners`, for natural, holds the client number of every sample. The parts are disjoint and hold every sample.
    Refused: bad labels or settings, more clients than samples, a class that no client would own or that has fewer
    samples than owners, a minimum not met in 1000 tries, owners that are no numbers of so many clients.
    """
    spec = parse(str(spec) if isinstance(spec, PartitionSpec) else spec)  # one built by hand is checked as well
    y = check_labels(labels)
    _at_least("clients", clients, 1)
    _at_least("seed", seed, 0)
    _at_least("min_samples", min_samples, 0)
    natural = _owned(owners, y.size, clients) if spec.kind == NATURAL else None  # how many they are, the data knows
    if y.size < clients:
        raise InputError(f"clients: {clients} clients for {y.size} samples; accepted: at most one client per sample")
    present = int(y.max()) + 1
    if present > y.size + MOST_EMPTY_CLASSES:
        raise InputError(
            f"labels: label {present - 1} at position {int(y.argmax())} with {y.size} samples; accepted: class numbers "
            f"from 0, at most {y.size + MOST_EMPTY_CLASSES - 1}"
        )
    if num_classes is None:
        num_classes = present
    _at_least("num_classes", num_classes, 1)
    if num_classes < present:
        raise InputError(
            f"num_classes: {num_classes}, but the labels go up to {present - 1}; accepted: {present} or more"
        )

    if natural is not None:
        indices = natural
    elif spec.kind == "shards":
        indices = shards(y, int(spec.value), clients, seed)
    elif spec.kind == "quantity":
        indices = cut(y, drawn_sizes(y.size, spec.value, clients, seed, min_samples), seed)
    else:
        indices = _deal(y, _class_sizes(y, spec, clients, seed, num_classes, min_samples), clients, seed)
    counts = np.stack([np.bincount(y[part], minlength=num_classes) for part in indices]).astype(np.int64)
    return Partition(indices, counts)


def _class_sizes(
    y: np.ndarray, spec: PartitionSpec, clients: int, seed: int, num_classes: int, min_samples: int
) -> np.ndarray | None:
    """How many samples of each class each client gets, (classes, clients); None: no matter which."""
    if spec.kind == "iid":
        return None
    if spec.kind == "classes":
        return label_quantity(y, int(spec.value), clients, seed, num_classes)
    if spec.kind == "dir" and spec.quantity is None:
        return dirichlet(y, spec.value, clients, seed, num_classes, min_samples)
    betas = spec.betas or (spec.value,)
    if len(betas) > clients:
        raise InputError(
            f"partition: {spec} has {len(betas)} concentrations for {clients} clients; accepted: at most one per client"
        )
    if spec.quantity is None:
        sizes = equal_sizes(y.size, clients)
    else:
        sizes = drawn_sizes(y.size, spec.quantity, clients, seed, min_samples)
    return fill(np.bincount(y, minlength=num_classes), betas, sizes, seed)


def _owned(owners: ArrayLike | None, samples: int, clients: int) -> list[np.ndarray]:
    """The samples of every client, from the client number of every sample."""
    if owners is None:
        raise InputError(
            "partition: natural needs data that says which client a sample belongs to; accepted: an .npz file or "
            "arrays with client_train, or folders train/CLIENT/CLASS/* beside test/CLASS/*"
        )
    try:
        numbers = np.asarray(owners)
    except ValueError:  # lists of several lengths
        numbers = np.empty(0, dtype=object)
    if numbers.dtype.kind not in "iu" or numbers.shape != (samples,):
        raise InputError(
            f"owners: {numbers.dtype} of shape {numbers.shape}; accepted: a client number for each of {samples} samples"
        )
    present = np.unique(numbers)
    if present.size != clients:
        raise InputError(
            f"clients: {clients} asked for, but the data names {present.size} clients; accepted: {present.size}, or "
            f"nothing said"
        )
    if not np.array_equal(present, np.arange(clients)):
        raise InputError(
            f"owners: {clients} clients with numbers from {present[0]} to {present[-1]}; accepted: 0 to {clients - 1}"
        )
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.cumsum(np.bincount(numbers.astype(np.int64)))[:-1])


def _deal(y: np.ndarray, sizes: np.ndarray | None, clients: int, seed: int) -> list[np.ndarray]:
    """Shuffle and hand out the samples: `sizes[c, k]` of class c to client k, or all alike where it is None."""
    rng = np.random.default_rng([seed, _SHUFFLE])
    if sizes is None:
        return [np.sort(part) for part in np.array_split(rng.permutation(y.size), clients)]
    parts: list[list[np.ndarray]] = [[np.zeros(0, dtype=np.int64)] for _ in range(clients)]
    by_class = np.split(np.argsort(y, kind="stable"), np.cumsum(sizes.sum(axis=1))[:-1])
    for members, row in zip(by_class, sizes, strict=True):
        owners = np.flatnonzero(row)  # few of many where there are many classes
        if owners.size:
            pieces = np.split(rng.permutation(members), np.cumsum(row[owners])[:-1])
            for k, piece in zip(owners, pieces, strict=True):
                parts[k].append(piece)
    return [np.sort(np.concatenate(part)) for part in parts]


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise InputError(f"{name}: {value!r} is out of range; accepted: a whole number, at least {low}")
