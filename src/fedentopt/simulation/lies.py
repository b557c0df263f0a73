"""Clients that lie about their labels: what they claim; their data and their training stay honest.

uniform     as many samples of every class
inflate     uniform, at three times the size of the largest client
rare        all samples of the globally rarest class
permute     its counts, the classes exchanged at random
mixed       each liar one of these
forge-head  uniform, and the last layer it sends is moved back until an estimate of its labels fits the claim
"""

from __future__ import annotations

import numpy as np

from fedentopt.randomness import generator

FORGE = "forge-head"
LIES = ("uniform", "inflate", "rare", "permute", "mixed", FORGE)
INFLATION = 3


def draw_liars(number: int, clients: int, seed: int) -> tuple[int, ...]:
    """Who lies, ascending."""
    return tuple(sorted(generator(seed, "liars").permutation(clients)[:number].tolist()))


def claims(counts: np.ndarray, liars: tuple[int, ...], lie: str, seed: int) -> np.ndarray:
    """Label counts (K, C) as clients claim to have them: true ones, except for the liars'."""
    claimed = counts.copy()
    largest = int(counts.sum(axis=1).max())
    rarest = int(counts.sum(axis=0).argmin())
    for client in liars:
        draw = generator(seed, "lie", client)
        kind = LIES[int(draw.integers(4))] if lie == "mixed" else lie
        if kind == "rare":
            claimed[client] = 0
            claimed[client, rarest] = counts[client].sum()
        elif kind == "permute":
            claimed[client] = draw.permutation(counts[client])
        else:
            size = INFLATION * largest if kind == "inflate" else int(counts[client].sum())
            claimed[client] = size // counts.shape[1]
            claimed[client, draw.permutation(counts.shape[1])[: size % counts.shape[1]]] += 1
    return claimed
