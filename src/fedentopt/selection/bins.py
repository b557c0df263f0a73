"""Clustered sampling's M distributions, as whole numbers: masses poured into M bins of one size.

A client with n_k samples has the mass M n_k, a bin the capacity N = sum n_k, so that the bins are filled exactly, with
no fraction rounded. Bin j is the distribution r_j, r_jk = mass of k in bin j / N. Over all bins a client's mass is
M n_k, so sum_j r_jk = M p_k with p_k = n_k / N: drawing one client per bin and weighing each by 1/M is unbiased.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MOST = 1 << 62
_UNITS = 1 << 40


def whole_sizes(sizes: np.ndarray, bins: int) -> np.ndarray:
    """Sizes as whole numbers: as they are where they are whole, else in units of 2^-40 of the total.

    Where nobody has any sample (noise can say so), all count alike.
    """
    total = float(sizes.sum())
    if not total > 0:
        return np.ones(sizes.size, dtype=np.int64)
    if (sizes == np.floor(sizes)).all() and total * bins < _MOST:
        return sizes.astype(np.int64)
    return np.asarray(np.rint(sizes / total * _UNITS), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Bins:
    """Pieces of clients in the order poured: bin j holds what lies between j N and (j + 1) N."""

    clients: np.ndarray
    ends: np.ndarray  # sums of the masses
    count: int

    @classmethod
    def pour(cls, clients: np.ndarray, masses: np.ndarray, count: int) -> Bins:
        """Pour pieces into so many bins, one after the other; their masses must fill them exactly."""
        held = masses > 0
        return cls(clients[held], np.cumsum(masses[held]), count)

    @property
    def capacity(self) -> int:
        """N, the mass of a bin."""
        return int(self.ends[-1]) // self.count

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """One client per bin, by mass."""
        spots = rng.integers(self.capacity, size=self.count) + self.capacity * np.arange(self.count)
        return np.asarray(self.clients[np.searchsorted(self.ends, spots, side="right")])

    def masses(self, clients: int) -> np.ndarray:
        """(M, K) mass of every client in every bin, for looking at."""
        table = np.zeros((self.count, clients), dtype=np.int64)
        starts = np.concatenate(([0], self.ends[:-1]))
        for j in range(self.count):
            low, high = j * self.capacity, (j + 1) * self.capacity
            inside = np.minimum(self.ends, high) - np.maximum(starts, low)
            np.add.at(table[j], self.clients, np.maximum(inside, 0))
        return table


def bins_by_size(sizes: np.ndarray, count: int) -> Bins:
    """Algorithm 1: the largest client first, what does not fit into a bin goes on into the next."""
    order = np.argsort(-sizes, kind="stable")
    return Bins.pour(order, count * sizes[order], count)


def bins_by_group(sizes: np.ndarray, groups: Sequence[np.ndarray], count: int, rng: np.random.Generator) -> Bins:
    """Algorithm 2: the heaviest groups get a bin each, the clients of the others fill up what is left of them.

    Each group's mass is at most a bin's. Where a client alone fills bins (p_k >= 1/M), it has them to itself, and only
    the rest of its mass is in its group; the groups must have been cut by those rests.
    """
    total = int(sizes.sum())
    alone, rest = full_and_rest(sizes, count)
    clients: list[int] = np.flatnonzero(alone).tolist()
    masses: list[int] = (alone[clients] * total).tolist()
    open_bins = count - int(alone.sum())
    rests: list[int] = rest.tolist()
    weighed = [(sum(rests[client] for client in group.tolist()), group) for group in groups]
    weighed.sort(key=lambda pair: pair[0])  # stable: lowest client first among equals
    others, kept = weighed[: len(weighed) - open_bins], weighed[len(weighed) - open_bins :]
    spilling: list[int] = []
    for _, group in others:
        shuffled = group.copy()
        if group.size > 1:  # one client alone takes no draw
            rng.shuffle(shuffled)
        spilling += shuffled.tolist()
    left, place = [rests[client] for client in spilling], 0
    for mass, group in kept:
        clients += group.tolist()
        masses += [rests[client] for client in group.tolist()]
        room = total - mass
        while room > 0:
            part = min(room, left[place])
            clients.append(spilling[place])
            masses.append(part)
            left[place] -= part
            room -= part
            place += left[place] == 0
    return Bins.pour(np.array(clients), np.array(masses), count)


def full_and_rest(sizes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """How many bins each client fills alone, and the mass that is left of it."""
    alone, rest = np.divmod(count * sizes, int(sizes.sum()))
    return np.asarray(alone), np.asarray(rest)
