"""Cycle: everybody exactly once in ceil(K / M) rounds, in cohorts that are evened together.

A method of this project. At the start of a cycle the available clients are dealt into cohorts of M at random, the last
one smaller if need be. Then clients of two cohorts change places as long as that raises the sum of both cohorts' label
entropies by more than 1e-9 bits: up to 32 cohorts of up to 64 clients, until no exchange between any two of them does;
above, in 20 passes over random pairs, between 32 clients of each. Each round takes the next cohort. Every client trains
equally often, so the normalised entropy of selection is 1 after each cycle, and no client is left out.

A client that is away when its turn comes stays due: whoever is available of those due is dealt anew. When nobody due is
available, a new cycle starts. Clients that join are due at once; counts that change have the rest of the cycle dealt
anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.labels import LARGEST_COUNT
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.measures import row_scores
from fedentopt.selection.per_client import read_ids
from fedentopt.selection.scoring import TIE_BITS
from fedentopt.selection.selector import Selector, selector

ALL_PAIRS = 32
ALL_CLIENTS = 64  # an exchange looks at every pair of their clients: a square, of numbers and of time
PASSES = 20
SOME = 32


@selector("cycle", label="Cycle")
class CycleSelector(Selector):
    """Every client exactly once in K/M rounds; the cohorts of a cycle are evened together by exchanges."""

    smaller_cohorts = True
    largest = 100_000

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self._served: dict[ClientId, None] = {}  # in this cycle
        self._plan: list[list[ClientId]] = []  # its next cohorts

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        ids = self._table.ids
        served = self._served
        due = [number for number in available.tolist() if ids[number] not in served]
        plan = self._plan
        if not due:
            served, plan, due = {}, [], available.tolist()
        waiting = {ids[number] for number in due}
        planned = {client for cohort in plan for client in cohort}
        # A plan may be for cohorts of another size, where that followed the number of clients.
        fits = bool(plan) and len(plan[0]) == min(self.cohort_size, len(due))
        if not fits or not waiting.issuperset(plan[0]) or not planned.issuperset(waiting):
            plan = [[ids[number] for number in cohort] for cohort in self._dealt(np.array(due))]
        self._plan, self._served = plan[1:], served | dict.fromkeys(plan[0])
        return [int(number) for number in self.numbers_of(plan[0])]

    def _dealt(self, numbers: np.ndarray) -> list[np.ndarray]:
        rng = self.rng()
        mixed = rng.permutation(numbers)
        rows, classes = self._table.rows.take(mixed).held_classes(self._table.num_classes or 1)
        starts = range(0, mixed.size, self.cohort_size)
        cohorts = [np.arange(start, min(start + self.cohort_size, mixed.size)) for start in starts]
        even_out(cohorts, rows.dense(classes), rng)
        return [mixed[places] for places in cohorts]

    def update(self, counts: Any, *, noisy: bool = False, ids: Sequence[ClientId] | None = None) -> None:
        super().update(counts, noisy=noisy, ids=ids)
        self._plan = []

    def forget_clients(self, gone: Collection[ClientId]) -> None:
        self._served = {client: None for client in self._served if client not in gone}
        if any(client in gone for cohort in self._plan for client in cohort):
            self._plan = []

    def memory(self) -> dict[str, Any]:
        return {"served": list(self._served), "plan": [list(cohort) for cohort in self._plan]}

    def remember(self, memory: Mapping[str, Any]) -> None:
        served = read_ids("served", memory["served"])
        if not isinstance(memory["plan"], list) or [] in memory["plan"]:
            raise InputError(f"state: plan is {memory['plan']!r}; accepted: a list of cohorts, none of them empty")
        plan = [read_ids("plan", cohort) for cohort in memory["plan"]]
        read_ids("plan", [client for cohort in plan for client in cohort])
        self._served, self._plan = dict.fromkeys(served), plan


def even_out(cohorts: list[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> None:
    """Exchange clients between cohorts, in place, while that makes two of them more even together."""
    sums = [counts[places].sum(axis=0) for places in cohorts]
    exact = bool((counts == np.floor(counts)).all()) and float(counts.sum()) < LARGEST_COUNT
    if len(cohorts) > ALL_PAIRS or max(places.size for places in cohorts) > ALL_CLIENTS:
        for _ in range(PASSES):
            order = rng.permutation(len(cohorts)).tolist()
            pairs = list(zip(order[::2], order[1::2], strict=False))
            if not sum(_exchange(a, b, cohorts, sums, counts, exact, rng) for a, b in pairs):
                break
        return
    changed_at = [1] * len(cohorts)
    seen: dict[tuple[int, int], int] = {}
    clock = 1
    while True:
        open_pairs = [
            (a, b)
            for a in range(len(cohorts))
            for b in range(a + 1, len(cohorts))
            if max(changed_at[a], changed_at[b]) > seen.get((a, b), 0)
        ]
        if not open_pairs:
            return
        for a, b in open_pairs:
            clock += 1
            if _exchange(a, b, cohorts, sums, counts, exact):
                changed_at[a] = changed_at[b] = clock
            seen[a, b] = clock


def _exchange(
    a: int, b: int, cohorts: list[np.ndarray], sums: list[np.ndarray], counts: np.ndarray, exact: bool,
    rng: np.random.Generator | None = None,
) -> bool:  # fmt: skip
    """The best exchange between two cohorts, again and again until none helps; whether any did. With a generator, only
    between some clients of each, drawn by it. `exact` says that sums of counts are not rounded."""
    helped = False
    ours, others = (
        np.arange(cohorts[one].size) if rng is None else rng.permutation(cohorts[one].size)[:SOME] for one in (a, b)
    )
    while True:
        mine, theirs = counts[cohorts[a][ours]], counts[cohorts[b][others]]
        if exact:
            left, right = sums[a] - mine, sums[b] - theirs
        else:
            left, right = _without_each(counts[cohorts[a]])[ours], _without_each(counts[cohorts[b]])[others]
        both = np.concatenate(
            [
                (left[:, None, :] + theirs[None, :, :]).reshape(-1, counts.shape[1]),
                (right[None, :, :] + mine[:, None, :]).reshape(-1, counts.shape[1]),
                [sums[a], sums[b]],
            ]
        )
        scores = row_scores(both)
        pairs = len(mine) * len(theirs)
        together = scores[:pairs] + scores[pairs:-2]
        now = float(scores[-2] + scores[-1])
        best = int(np.argmax(together))
        if not together[best] > now + TIE_BITS:
            return helped
        i, j = ours[best // len(theirs)], others[best % len(theirs)]
        cohorts[a][i], cohorts[b][j] = cohorts[b][j], cohorts[a][i]
        sums[a], sums[b] = counts[cohorts[a]].sum(axis=0), counts[cohorts[b]].sum(axis=0)
        helped = True


def _without_each(rows: np.ndarray) -> np.ndarray:
    """For each row the sum of all others. Nothing is subtracted: a row far larger than the others would leave nothing
    of them, and exchanges that only seem to help could go on for ever."""
    sums = np.zeros_like(rows)
    sums[1:] += rows[:-1].cumsum(axis=0)
    sums[:-1] += rows[:0:-1].cumsum(axis=0)[::-1]
    return sums
