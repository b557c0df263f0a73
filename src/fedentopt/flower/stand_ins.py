"""Who stands in for clients that failed in the middle of a round.

With FedEntOpt each is the client that, added to those of the cohort that are left, makes their labels most even (or
closest to the target): the greedy step itself, without the buffer, which is not changed. Clients outside the buffer go
before those in it. Other selectors are not asked twice in a round; for them stand-ins are drawn uniformly, with the
seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedentopt.randomness import generator
from fedentopt.selection import ClientId, EntropySelector, Selector
from fedentopt.selection.measures import row_scores


def draw(
    selector: Selector, kept: Sequence[ClientId], free: Sequence[ClientId], number: int, round: int
) -> list[ClientId]:
    """At most `number` of the `free` clients to join those that are `kept`."""
    number = min(number, len(free))
    if not number:
        return []
    if not isinstance(selector, EntropySelector):
        places = generator(selector.seed, "stand-in", round).choice(len(free), number, replace=False)
        return [free[place] for place in places.tolist()]
    log_target = None if selector.target is None else np.log2(np.maximum(selector.target, 2.0**-1000))
    counts = selector.counts
    labels = counts[selector.numbers_of(kept)].sum(axis=0) if kept else np.zeros(counts.shape[1])
    buffered = set(selector.buffer)
    drawn: list[ClientId] = []
    while len(drawn) < number:
        left = [client for client in free if client not in drawn]
        left = [client for client in left if client not in buffered] or left
        rows = counts[selector.numbers_of(left)]
        best = int(np.argmax(row_scores(labels + rows, log_target)))
        labels = labels + rows[best]
        drawn.append(left[best])
    return drawn
