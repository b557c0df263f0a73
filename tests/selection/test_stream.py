"""Cohorts as a stream: the selector's own, one when it is asked for, among those who are there."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from fedentopt import EntropySelector, RandomSelector, cohorts
from fedentopt.errors import InputError
from fedentopt.selection import Candidates, Selector

COUNTS = np.array([[9, 1, 0], [0, 8, 1], [1, 0, 7], [3, 3, 3], [6, 0, 1], [0, 4, 2]])


def made(buffer: int = 2) -> EntropySelector:
    selector = EntropySelector(2, buffer, seed=3)
    selector.register(COUNTS)
    return selector


def test_they_are_those_of_select() -> None:
    asked = made()
    assert [cohort.clients for cohort in cohorts(made(), 7)] == [asked.select().clients for _ in range(7)]


def test_a_stream_goes_on_where_the_selector_stands_and_without_end() -> None:
    selector = made()
    first = [cohort.clients for cohort in cohorts(selector, 3)]
    rest = [cohort.clients for cohort in itertools.islice(cohorts(selector), 50)]
    assert first + rest == [cohort.clients for cohort in cohorts(made(), 53)]
    assert list(cohorts(selector, 0)) == []


def test_nothing_is_chosen_before_it_is_asked_for() -> None:
    selector = made()
    stream = cohorts(selector, 5)
    assert selector.round == 0
    next(stream)
    assert selector.round == 1
    selector.remove([0, 1, 2])
    assert {client for cohort in stream for client in cohort.clients} == {3, 4, 5}


def test_only_who_is_available_is_chosen() -> None:
    def there(number: int) -> Any:
        return None if number == 2 else (client for client in (number % 3, 3, 5))  # an iterator can be read once

    assert all(
        set(cohort.clients) <= {n % 3, 3, 5} for n, cohort in enumerate(cohorts(made(0), 6, available=there)) if n != 2
    )
    with pytest.raises(InputError, match="available: nobody of 6"):
        list(cohorts(made(), 3, available=lambda number: []))
    with pytest.raises(InputError, match="available: client 'x'"):
        list(cohorts(made(), 3, available=lambda number: ["x"]))


class HighestLoss(Selector):
    """Asks everybody who is there and takes those with the highest loss."""

    needs = frozenset({"candidate_loss"})

    def candidates(self, available: Any = None) -> Candidates:
        return Candidates(tuple(self.clients[number] for number in self.available_numbers(available)))

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        assert losses is not None
        return sorted(available.tolist(), key=lambda number: -losses[number])[: self.cohort_size]


def test_losses_are_asked_for_of_those_who_are_there() -> None:
    selector = HighestLoss(2)
    selector.register(COUNTS)
    asked: list[tuple[Any, ...]] = []

    def losses(candidates: Candidates) -> dict[Any, float]:
        asked.append(candidates.ids)
        return {client: float(client) for client in candidates.ids}

    stream = cohorts(selector, 2, available=lambda number: [0, 1, 2 + number], losses=losses)
    assert [cohort.clients for cohort in stream] == [(2, 1), (3, 1)]
    assert asked == [(0, 1, 2), (0, 1, 3)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((made(), -1), "rounds: -1 is out of range"),
        ((made(), 2.5), "rounds: 2.5 is out of range"),
        (("fedentopt", 3), "selector: 'fedentopt'"),
        ((HighestLoss(2), 3), "losses: missing"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        cohorts(*arguments)
    with pytest.raises(InputError, match="available: 3"):
        cohorts(RandomSelector(2), 1, available=3)  # type: ignore[arg-type]
