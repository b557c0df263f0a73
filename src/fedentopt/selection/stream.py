"""Cohorts one after the other, for programs that want a list of them or a stream, and not a selector to ask."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from fedentopt.errors import InputError
from fedentopt.selection.cohort import ClientId, Cohort
from fedentopt.selection.feedback import Candidates
from fedentopt.selection.selector import Selector, check_int


def cohorts(
    selector: Selector,
    rounds: int | None = None,
    *,
    available: Callable[[int], Iterable[ClientId] | None] | None = None,
    losses: Callable[[Candidates], Mapping[ClientId, float]] | None = None,
) -> Iterator[Cohort]:
    """The next `rounds` cohorts of a selector, or cohorts without end.

    Each is selected when it is asked for, so a selector may be told in between what training taught (`observe`), and
    counts may change. `available(round)` names who can be chosen in a round, by the selector's number of it (0, 1,
    ...); None stands for everybody. `losses(candidates)` answers selectors that ask for the loss of the current model;
    one that does, without it, is refused here, and not in the middle of a run.
    """
    if not isinstance(selector, Selector):
        raise InputError(f"selector: {selector!r}; accepted: a selector, such as EntropySelector(cohort_size=10)")
    if rounds is not None:
        rounds = check_int("rounds", rounds, 0)
    for name, function in (("available", available), ("losses", losses)):
        if function is not None and not callable(function):
            raise InputError(f"{name}: {function!r}; accepted: a function")
    if "candidate_loss" in selector.needs and losses is None:
        raise InputError(
            f"losses: missing; {selector.name!r} asks for losses before it chooses; accepted: a function of candidates"
        )
    return _stream(selector, rounds, available, losses)


def _stream(
    selector: Selector,
    rounds: int | None,
    available: Callable[[int], Iterable[ClientId] | None] | None,
    losses: Callable[[Candidates], Mapping[ClientId, float]] | None,
) -> Iterator[Cohort]:
    for _ in itertools.count() if rounds is None else range(rounds):
        here = None if available is None else available(selector.round)
        here = None if here is None else list(here)  # read twice, where losses are asked for
        asked = None if losses is None else selector.candidates(here)
        answers = None if asked is None or losses is None else losses(asked)
        yield selector.select(here, losses=answers)
