"""Many clients' own training samples through their models: grouped by model, cut into even blocks, averaged by client.

All samples lie one client after another; a place is a position among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

NARROW, WIDE = 64, 1024  # columns of a block: multiples of the one, no more than the other


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


def even_blocks(lines: Sequence[np.ndarray], room: int) -> Iterator[Block]:
    """Cut lines of places, the longest first, into blocks of at most `room` entries.

    A block ends about where its shortest line does, so that little of it is empty.
    """
    lengths = np.array([len(line) for line in lines])
    done = 0
    while (lengths > done).any():
        active = int((lengths > done).sum())
        shortest = int(lengths[active - 1]) - done
        columns = min(-(-shortest // NARROW) * NARROW, WIDE, max(1, room))
        at_once = max(1, room // columns)
        for first in range(0, active, at_once):
            some = slice(first, min(first + at_once, active))
            places = np.full((some.stop - some.start, columns), -1, dtype=np.int64)
            for into, line in zip(places, lines[some], strict=True):
                part = line[done : done + columns]
                into[: len(part)] = part
            yield Block(some, places)
        done += columns


def means_of_clients(
    values: Sequence[torch.Tensor], places: Sequence[np.ndarray], samples: Sequence[np.ndarray]
) -> np.ndarray:
    """Each client's mean over its samples, (n,) float64; NaN for one without any.

    values[i] (m,) belong to places[i] (m,), in any order, -1 to none. They are read from the device here, once.
    """
    every = np.full(sum(len(own) for own in samples), np.nan)
    if values:
        where, read = np.concatenate(places), torch.cat(list(values)).cpu().double().numpy()
        every[where[where >= 0]] = read[where >= 0]
    return np.array([every[own].mean() if len(own) else np.nan for own in places_of_clients(samples)])
