"""Which sizes a plan tries, and how many rounds of each: enough to tell them apart, in a time that can be waited for.

Without being told, the smallest cohort tried is the one that could just hold every class, C divided by the classes
that a client holds at the median; larger ones are multiples of it, and 10 % of the clients are among them. Rounds and
repetitions are cut by an estimate of the work that depends on the table alone, never on a clock, so that the same
table gives the same plan on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from fedentopt.errors import InputError
from fedentopt.plan.outcome import Federation
from fedentopt.plan.work import round_cost
from fedentopt.privacy import check_epsilon
from fedentopt.settings import amount

Given = str | float | Iterable[str | float | None] | None

BUFFERS = ("0%", "25%", "50%", "75%")
EPSILONS: tuple[float | None, ...] = (None, 5.0, 1.0, 0.5, 0.1)
ROUNDS, FEWEST_ROUNDS = 100, 10
REPETITIONS, FEWEST_REPETITIONS = 3, 2
LARGEST_COHORT = 100  # tried without being asked for
SMALL = 2_000  # label counts up to which nothing is saved
BUDGET = 12_000.0  # of larger tables: milliseconds of FedEntOpt, as estimated


def as_words(option: str, given: Given) -> list[str] | None:
    """Sizes or budgets as text: one, several, or several in one text with commas between; none at all are refused."""
    if given is None:
        return None
    several = given.split(",") if isinstance(given, str) else given if isinstance(given, Iterable) else [given]
    words = ["none" if one is None else str(one).strip() for one in several]
    if not words:
        raise InputError(f"{option}: an empty list; accepted: one or several, or nothing for the usual ones")
    return words


def cohort_sizes(federation: Federation, given: Sequence[str] | None) -> list[int]:
    """Sizes of cohorts, smallest first."""
    clients = len(federation.clients)
    if given is not None:
        sizes = sorted({amount(text, clients, "--cohort") for text in given})
        if not sizes or sizes[0] < 1 or sizes[-1] > clients:
            raise InputError(f"--cohort: {','.join(given)} gives {sizes}; accepted: 1 to {clients} clients")
        return sizes
    most = max(clients - 1, 1)
    if clients <= 5:  # one client alone is no cohort, unless there is no other
        return list(range(min(2, most), most + 1))
    each = max(float(np.median((federation.counts > 0).sum(axis=1))), 1.0)
    least = max(math.ceil(federation.held.sum() / each), 2)
    wanted = {least, math.ceil(1.5 * least), 2 * least, 3 * least, 5 * least}
    if clients // 10 <= LARGEST_COHORT:
        wanted.add(max(clients // 10, 2))
    return sorted({min(size, max(LARGEST_COHORT, least), most) for size in wanted})


def buffer_sizes(cohort: int, clients: int, given: Sequence[str] | None) -> list[int]:
    """Sizes of buffers that leave room for the cohort, smallest first."""
    sizes = {amount(text, clients, "--buffer") for text in given or BUFFERS}
    fitting = sorted(size for size in sizes if size + cohort <= clients)
    if fitting:
        return fitting
    if given is not None:
        raise InputError(
            f"--buffer: {','.join(given)} leaves no room for cohorts of {cohort} among {clients} clients; accepted: at "
            f"most {clients - cohort}"
        )
    return [0]


def that_differ(buffers: Sequence[int], cohort: int, rounds: int) -> list[int]:
    """The buffers without those that so many rounds cannot tell apart: nobody leaves one that is never full."""
    full = [size for size in buffers if size < cohort * rounds]
    return [*full, *[size for size in buffers if size >= cohort * rounds][:1]]


def epsilons(given: Sequence[str] | None) -> list[float | None]:
    """Privacy budgets, none (true counts) first, then the largest first."""
    if given is None:
        return list(EPSILONS)
    found: set[float] = set()
    with_none = False
    for word in given:
        if word.strip().lower() == "none":
            with_none = True
            continue
        try:
            found.add(check_epsilon(float(word)))
        except ValueError as error:
            raise InputError(f"--epsilon: {word!r}; accepted: numbers above 0, or none") from error
    return [*([None] if with_none else []), *sorted(found, reverse=True)]


def away_share(text: str) -> float:
    """A per cent of the clients, as a share below 1."""
    raw = text.strip()
    try:
        share = float(raw[:-1]) / 100 if raw.endswith("%") else float(raw)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise InputError(f"--away: {text!r}; accepted: a share of the clients from 0% to below 100%, such as 20%")
    return share


def amount_of_work(
    federation: Federation, cohorts: Sequence[int], choices: int, rounds: int | None, repetitions: int | None
) -> tuple[int, int, str | None]:
    """Rounds, repetitions, and a sentence where they are fewer than usual; what is given is kept.

    `choices` is about how many selectors and settings are tried with every cohort size.
    """
    clients, classes = federation.counts.shape
    each = choices * sum(round_cost(federation, cohort) + 0.3 for cohort in cohorts)
    affordable = math.inf if clients * classes <= SMALL else BUDGET / each
    used_repetitions = REPETITIONS if repetitions is None else repetitions
    used_rounds = ROUNDS if rounds is None else rounds
    if rounds is None and used_rounds * used_repetitions > affordable:
        if repetitions is None:
            used_repetitions = min(max(int(affordable / 40), FEWEST_REPETITIONS), REPETITIONS)
        used_rounds = min(max(int(affordable / used_repetitions) // 10 * 10, FEWEST_ROUNDS), ROUNDS)
    if used_rounds == (rounds or ROUNDS) and used_repetitions == (repetitions or REPETITIONS):
        return used_rounds, used_repetitions, None
    return (
        used_rounds,
        used_repetitions,
        f"Sampled: {used_rounds} rounds and {used_repetitions} repetitions of each choice, to be quick with {clients} "
        f"clients and {classes} classes (tables of up to {SMALL:,} label counts have {ROUNDS} and {REPETITIONS}); all "
        "clients were used.",
    )
