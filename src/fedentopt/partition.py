"""Label-skewed splits of a data set among clients, by the rules of NIID-Bench.

Li, Diao, Chen, He: Federated Learning on Non-IID Data Silos: An Experimental Study (ICDE 2022).

* ``classes:J`` (label quantity, "C = J"): client i owns class i mod C and draws further classes uniformly,
  without repeats, until it owns J. The samples of a class are shuffled and cut into as many nearly equal parts
  as it has owners, handed out by increasing client number.
* ``dir:BETA`` (Dirichlet): for each class in order draw p ~ Dir_K(BETA), set p_i = 0 for every client that
  already holds N/K samples or more, renormalise, and cut the shuffled samples at floor(cumsum(p) * n_c).
  If a client ends with fewer samples than the minimum, everything is drawn anew. Where this never ends well and
  there are classes without samples, these are left out.
* ``iid``: all samples shuffled and cut into K nearly equal parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError
from fedentopt.labels import check_labels

MOST_TRIES = 1000
# Class numbers may have gaps, but numbers far beyond the samples are no class numbers, and would fill the memory.
MOST_EMPTY_CLASSES = 1 << 16
_DRAW = 0x5041  # keeps these draws apart from others made with the same seed
_SHUFFLE = 0x5042


@dataclass(frozen=True)
class PartitionSpec:
    """A kind of split: `kind` is "dir", "classes" or "iid"; `value` is BETA, J, or 0 for iid."""

    kind: str
    value: float

    def __str__(self) -> str:
        if self.kind == "iid":
            return self.kind
        short = f"{self.value:g}"
        exact = str(int(self.value)) if self.kind == "classes" else repr(self.value)
        return f"{self.kind}:{short if short.isdigit() or float(short) == self.value else exact}"


@dataclass(frozen=True)
class Partition:
    """Who holds what: sample numbers per client (sorted), and the (K, C) int64 matrix of label counts."""

    indices: list[np.ndarray]
    counts: np.ndarray


def parse(spec: str) -> PartitionSpec:
    """Read "dir:0.1", "classes:2" or "iid"; anything else is refused."""
    kind, colon, text = str(spec).strip().partition(":")
    if kind == "iid" and not colon:
        return PartitionSpec("iid", 0.0)
    if kind == "dir" and colon:
        try:
            beta = float(text)
        except ValueError:
            beta = math.nan
        if not (math.isfinite(beta) and beta > 0):
            raise InputError(
                f"partition: {spec!r} has the concentration {text!r}; accepted: a number above 0, such as dir:0.1"
            )
        return PartitionSpec("dir", beta)
    if kind == "classes" and colon:
        # No data set has classes beyond fifteen digits; longer numbers would not even fit a float.
        if not (text.isascii() and text.isdigit() and len(text) <= 15 and int(text) >= 1):
            raise InputError(
                f"partition: {spec!r} has {text!r} classes a client; accepted: a whole number from 1, such as classes:2"
            )
        return PartitionSpec("classes", float(int(text)))
    raise InputError(f"partition: {spec!r} is unknown; accepted: dir:BETA, classes:J, iid")


def partition(
    labels: ArrayLike,
    spec: str | PartitionSpec,
    clients: int,
    seed: int,
    *,
    num_classes: int | None = None,
    min_samples: int = 10,
) -> Partition:
    """Split samples with these labels among `clients` clients; the same arguments give the same split.

    `labels` holds whole class numbers from 0; `num_classes` is their number where it is more than the largest
    label tells. `min_samples` is the fewest samples a client may end with under dir:BETA. The parts are
    disjoint and hold every sample. Refused: bad labels or settings, more clients than samples, a class that
    no client would own or that has fewer samples than owners, and a minimum not met in 1000 tries.
    """
    spec = spec if isinstance(spec, PartitionSpec) else parse(spec)
    y = check_labels(labels)
    _at_least("clients", clients, 1)
    _at_least("seed", seed, 0)
    _at_least("min_samples", min_samples, 0)
    if y.size < clients:
        raise InputError(f"clients: {clients} clients for {y.size} samples; accepted: at most one client a sample")
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

    if spec.kind == "iid":
        sizes = None
    elif spec.kind == "classes":
        sizes = _label_quantity(y, int(spec.value), clients, seed, num_classes)
    else:
        sizes = _dirichlet(y, spec.value, clients, seed, num_classes, min_samples)
    indices = _deal(y, sizes, clients, seed)
    counts = np.stack([np.bincount(y[part], minlength=num_classes) for part in indices]).astype(np.int64)
    return Partition(indices, counts)


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


def _label_quantity(y: np.ndarray, j: int, clients: int, seed: int, num_classes: int) -> np.ndarray:
    if j > num_classes:
        raise InputError(
            f"partition: classes:{j} asks for {j} of {num_classes} classes; accepted: at most {num_classes}"
        )
    rng = np.random.default_rng([seed, _DRAW])
    owns = np.zeros((clients, num_classes), dtype=bool)
    for k in range(clients):
        first = k % num_classes
        others = np.delete(np.arange(num_classes), first)
        owns[k, first] = True
        owns[k, rng.permutation(others)[: j - 1]] = True
    sizes = np.zeros((num_classes, clients), dtype=np.int64)
    for c, n in enumerate(np.bincount(y, minlength=num_classes)):
        owners = np.flatnonzero(owns[:, c])
        if n and not owners.size:
            raise InputError(
                f"partition: classes:{j} among {clients} clients leaves class {c} ({n} samples) without an owner; "
                f"accepted: more clients (from {num_classes} every class has one) or more classes a client"
            )
        if owners.size and not n:
            raise InputError(
                f"partition: classes:{j} gives class {c} {owners.size} owners, but it has no samples; "
                "accepted: labels without such a class, or dir:BETA"
            )
        if n < owners.size:
            raise InputError(
                f"partition: classes:{j} gives class {c} {owners.size} owners, but it has {n} samples; "
                "accepted: fewer clients or fewer classes a client"
            )
        if owners.size:
            sizes[c, owners] = n // owners.size
            sizes[c, owners[: n % owners.size]] += 1
    return sizes


def _dirichlet(y: np.ndarray, beta: float, clients: int, seed: int, num_classes: int, min_samples: int) -> np.ndarray:
    if clients * min_samples > y.size:
        raise InputError(
            f"min_samples: {min_samples} samples for each of {clients} clients, but there are {y.size}; "
            f"accepted: at most {y.size // clients}"
        )
    per_class = np.bincount(y, minlength=num_classes)
    there = np.flatnonzero(per_class)
    # An empty class can find all clients full, and a try fails though there is nothing to give. It takes part first
    # all the same: a split that can be drawn with it stays the one that it is for these settings.
    for classes in (np.arange(num_classes), there) if there.size < num_classes else (there,):
        found = _draw_dirichlet(per_class[classes], beta, clients, seed, min_samples)
        if found is not None:
            sizes = np.zeros((num_classes, clients), dtype=np.int64)
            sizes[classes] = found
            return sizes
    raise InputError(
        f"partition: dir:{beta:g} among {clients} clients never gave every client {min_samples} samples in "
        f"{MOST_TRIES} tries; accepted: a larger BETA, fewer clients or a smaller min_samples"
    )


def _draw_dirichlet(per_class: np.ndarray, beta: float, clients: int, seed: int, min_samples: int) -> np.ndarray | None:
    """Samples of each class for each client, (classes, clients); None if no try gave every client its minimum."""
    rng = np.random.default_rng([seed, _DRAW])
    full = int(per_class.sum()) / clients
    for _ in range(MOST_TRIES):
        sizes = np.zeros((len(per_class), clients), dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        for c, n in enumerate(per_class):
            p = rng.dirichlet(np.full(clients, beta))
            p[held >= full] = 0.0
            total = p.sum()
            # With a tiny BETA all the mass can sit, to the last bit, on clients that are full: draw anew.
            if not total > 0:
                break
            cuts = np.floor(np.cumsum(p / total)[:-1] * n).astype(np.int64)
            sizes[c] = np.diff(cuts, prepend=0, append=n)
            held += sizes[c]
        else:
            if held.min() >= min_samples:
                return sizes
    return None


def _at_least(name: str, value: int, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise InputError(f"{name}: {value!r} is out of range; accepted: a whole number, at least {low}")
