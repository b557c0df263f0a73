"""Many clients' own training samples through their models: grouped by model, cut into even blocks, averaged by client.

All samples lie one client after another; a place is a position among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedentopt.simulation.device import to_host

NARROW, WIDE = 64, 1024  # columns of a block: multiples of the one, no more than the other
UNLIKE_TRAINING = 2 * NARROW  # instead of the one, where batches as wide as those that train have sums in another order


def joined_samples(samples: Sequence[np.ndarray]) -> np.ndarray:
    """All clients' samples, int64."""
    return np.concatenate([np.zeros(0, dtype=np.int64), *samples]).astype(np.int64)


def places_of_clients(samples: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Where each client's samples are."""
    sizes = [len(own) for own in samples]
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]) if sizes else []


def places_of_models(rows: Sequence[int], samples: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """Where the samples of each model's clients are; client i has model rows[i]. Those with most samples come first."""
    own: dict[int, list[np.ndarray]] = {}
    for row, places in zip(rows, places_of_clients(samples), strict=True):
        own.setdefault(row, []).append(places)
    lines = {row: np.concatenate(parts) for row, parts in own.items()}
    return dict(sorted(lines.items(), key=lambda item: -len(item[1])))


@dataclass(frozen=True)
class Block:
    """Some lines side by side: which lines, and the places in them, (lines, columns) with -1 where a line has ended."""

    lines: slice
    places: np.ndarray


def even_blocks(lines: Sequence[np.ndarray], room: int, narrow: int = NARROW) -> Iterator[Block]:
    """Cut lines of places, the longest first, into blocks of at most `room` entries, `narrow` columns or multiples.

    A block ends about where its shortest line does, so that little of it is empty.
    """
    lengths = np.array([len(line) for line in lines])
    done = 0
    while (lengths > done).any():
        active = int((lengths > done).sum())
        shortest = int(lengths[active - 1]) - done
        columns = min(-(-shortest // narrow) * narrow, WIDE, max(1, room))
        at_once = max(1, room // columns)
        for first in range(0, active, at_once):
            some = slice(first, min(first + at_once, active))
            places = np.full((some.stop - some.start, columns), -1, dtype=np.int64)
            for into, line in zip(places, lines[some], strict=True):
                part = line[done : done + columns]
                into[: len(part)] = part
            yield Block(some, places)
        done += columns


class QueuedMeans:
    """Each client's mean over its samples, on its way from the device."""

    def __init__(
        self, values: Sequence[torch.Tensor], places: Sequence[np.ndarray], samples: Sequence[np.ndarray]
    ) -> None:
        """values[i] (m,) belong to places[i] (m,), in any order, -1 to none. Nothing is waited for."""
        self._places, self._sizes = places, np.array([len(own) for own in samples], dtype=np.int64)
        self._values = to_host(torch.cat(list(values))) if values else torch.zeros(0)
        self._ready: torch.cuda.Event | None = None
        if values and values[0].is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()
        self._means: np.ndarray | None = None

    def read(self) -> np.ndarray:
        """(n,) float64, NaN for a client without samples; waits for the device the first time."""
        if self._means is None:
            if self._ready is not None:
                self._ready.synchronize()
            every = np.empty(int(self._sizes.sum()) + 1)  # what belongs to no place ends up in the last
            every[np.concatenate([np.zeros(0, dtype=np.int64), *self._places])] = self._values.numpy()
            self._means = _means_in_turn(every, self._sizes)
            self._values, self._places = torch.zeros(0), ()  # page-locked memory is scarce
        return self._means


@dataclass(frozen=True)
class KnownMeans:
    """Means that were worked out at once, as on the CPU."""

    means: np.ndarray

    def read(self) -> np.ndarray:
        """(n,) float64, NaN for a client without samples."""
        return self.means


def _means_in_turn(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Means of the clients' values, which lie one client after another; NaN for none.

    Neighbours of equal size are averaged together, each in the order of additions that it would have alone.
    """
    means, ends = np.full(len(sizes), np.nan), np.cumsum(sizes)
    for equal in np.split(np.arange(len(sizes)), np.flatnonzero(np.diff(sizes)) + 1):
        if len(equal) and (size := int(sizes[equal[0]])):
            own = values[ends[equal[0]] - size : ends[equal[-1]]]
            means[equal] = own.reshape(-1, size).mean(axis=1)
    return means
