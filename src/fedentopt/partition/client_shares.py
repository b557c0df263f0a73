"""Splits in which sizes are settled first and every client then fills its own: shards, drawn sizes, shares per client.

Every draw here ends, whatever the concentration: nothing is drawn again until it happens to fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedentopt.errors import InputError

DRAW, SHUFFLE = 0x5051, 0x5052  # keep these draws apart from others made with the same seed


def shards(y: np.ndarray, each: int, clients: int, seed: int) -> list[np.ndarray]:
    """Samples of every client: `each` of the clients * `each` nearly equal pieces of the samples sorted by label."""
    if clients * each > y.size:
        raise InputError(
            f"partition: shards:{each} among {clients} clients are {clients * each} shards, but there are {y.size} "
            f"samples; accepted: at most {y.size // clients} shards per client"
        )
    rng = np.random.default_rng([seed, SHUFFLE])
    mixed = rng.permutation(y.size)  # within a class, which samples lie side by side is drawn
    by_label = mixed[np.argsort(y[mixed], kind="stable")]
    pieces = np.array_split(by_label, clients * each)
    order = np.random.default_rng([seed, DRAW]).permutation(len(pieces)).reshape(clients, each)
    return [np.sort(np.concatenate([pieces[piece] for piece in own])) for own in order]


def drawn_sizes(samples: int, beta: float, clients: int, seed: int, least: int) -> np.ndarray:
    """Sizes of the clients: `least` for each, and the rest in shares drawn from Dir_K(beta)."""
    if clients * least > samples:
        raise InputError(
            f"min_samples: {least} samples for each of {clients} clients, but there are {samples}; "
            f"accepted: at most {samples // clients}"
        )
    shares = _dirichlet(np.random.default_rng([seed, DRAW]), beta, clients)
    return least + _apportion(samples - clients * least, shares)


def equal_sizes(samples: int, clients: int) -> np.ndarray:
    """Sizes that differ by one at most."""
    return np.diff(np.arange(clients + 1) * samples // clients)[::-1].copy()


def cut(y: np.ndarray, sizes: np.ndarray, seed: int) -> list[np.ndarray]:
    """Shuffled samples, cut into these sizes: the labels of every client are a draw from those of all."""
    order = np.random.default_rng([seed, SHUFFLE]).permutation(y.size)
    return [np.sort(part) for part in np.split(order, np.cumsum(sizes)[:-1])]


def fill(per_class: np.ndarray, betas: Sequence[float], sizes: np.ndarray, seed: int) -> np.ndarray:
    """Samples of each class for each client, (classes, clients), all samples handed out once.

    Client i has the concentration number i mod len(betas). In an order that is drawn, each client draws its class
    shares from Dir_C(beta) and takes its size by them, rounded by largest remainders. A class that has run out leaves
    its part to the client's other classes by their shares, and where all of these are zero, to shares drawn anew over
    the classes that are left, which for a Dirichlet is the same draw. Each step fills the client or empties a class, so
    it ends.
    """
    rng = np.random.default_rng([seed, DRAW, 1])
    left = per_class.astype(np.int64).copy()
    taken = np.zeros((per_class.size, sizes.size), dtype=np.int64)
    for client in rng.permutation(sizes.size):
        beta, need = betas[client % len(betas)], int(sizes[client])
        shares = _dirichlet(rng, beta, per_class.size)
        while need:
            there = left > 0
            if not shares[there].sum() > 0:
                shares = np.zeros(per_class.size)
                shares[there] = _dirichlet(rng, beta, int(there.sum()))
            wanted = np.zeros(per_class.size, dtype=np.int64)
            wanted[there] = _apportion(need, shares[there])
            now = np.minimum(wanted, left)
            taken[:, client] += now
            left -= now
            need -= int(now.sum())
    return taken


def _dirichlet(rng: np.random.Generator, beta: float, parts: int) -> np.ndarray:
    shares: np.ndarray = rng.dirichlet(np.full(parts, beta))
    if not shares.sum() > 0:  # lost to rounding: as in the limit, all to one for a tiny BETA, equal for a huge one
        shares = np.zeros(parts) if beta < 1 else np.ones(parts)
        shares[rng.integers(parts)] = 1.0
    return shares


def _apportion(total: int, shares: np.ndarray) -> np.ndarray:
    """Whole numbers in these proportions that add up to `total`, by largest remainders."""
    exact = shares / shares.sum() * total
    whole: np.ndarray = np.floor(exact).astype(np.int64)
    short = total - int(whole.sum())
    if short < 0:  # rounding took a product up to the next whole number
        whole[whole.argmax()] += short
    else:
        whole[np.argsort(whole - exact, kind="stable")[:short]] += 1
    return whole
