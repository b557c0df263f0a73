"""The label skews of NIID-Bench, as sizes: how many samples of each class each client gets.

Li, Diao, Chen, He: Federated Learning on Non-IID Data Silos: An Experimental Study (ICDE 2022); the rules stand in the
package's docstring.
"""

from __future__ import annotations

import numpy as np

from fedentopt.errors import InputError

MOST_TRIES = 1000
DRAW = 0x5041  # keeps these draws apart from others made with the same seed


def label_quantity(y: np.ndarray, j: int, clients: int, seed: int, num_classes: int) -> np.ndarray:
    """classes:J as (classes, clients)."""
    if j > num_classes:
        raise InputError(
            f"partition: classes:{j} asks for {j} of {num_classes} classes; accepted: at most {num_classes}"
        )
    rng = np.random.default_rng([seed, DRAW])
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
                f"accepted: more clients (from {num_classes} every class has one) or more classes per client"
            )
        if owners.size and not n:
            raise InputError(
                f"partition: classes:{j} gives class {c} {owners.size} owners, but it has no samples; "
                "accepted: labels without such a class, or dir:BETA"
            )
        if n < owners.size:
            raise InputError(
                f"partition: classes:{j} gives class {c} {owners.size} owners, but it has {n} samples; "
                "accepted: fewer clients or fewer classes per client"
            )
        if owners.size:
            sizes[c, owners] = n // owners.size
            sizes[c, owners[: n % owners.size]] += 1
    return sizes


def dirichlet(y: np.ndarray, beta: float, clients: int, seed: int, num_classes: int, min_samples: int) -> np.ndarray:
    """dir:BETA as (classes, clients)."""
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
    rng = np.random.default_rng([seed, DRAW])
    full = int(per_class.sum()) / clients
    for _ in range(MOST_TRIES):
        sizes = np.zeros((len(per_class), clients), dtype=np.int64)
        held = np.zeros(clients, dtype=np.int64)
        for c, n in enumerate(per_class):
            p = rng.dirichlet(np.full(clients, beta))
            if beta > 1 and not p.sum() > 0:  # a sum beyond floats: as in the limit, all alike
                p = np.full(clients, 1.0 / clients)
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
