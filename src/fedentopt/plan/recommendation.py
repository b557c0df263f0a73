"""Which selector, cohort and buffer to take, and why; random selection where it is as good.

1. A choice is *even* when it asks clients nearly as evenly as random selection of the same size does: H_norm at least
   `EVEN` of random's, and no more than `FORGOTTEN` of the clients beyond random's are never asked. A selector that
   trains on the same few clients every round has balanced cohorts and a model that never sees the others.
2. For every cohort size, and selector, the buffer is the one with the highest H_norm among those whose mean entropy is
   within `NEAR` of the best even one.
3. The cohort is the smallest with which some even choice covers every class in `FULL` of the rounds and comes within
   `ENOUGH` of the best mean entropy of all sizes; where no size covers every class, the second alone decides.
4. At that size random selection is taken where nothing beats it by more than `NEAR` of the largest possible entropy
   and by more rounds with every class than `NEAR`; else FedEntOpt where it does, unless another selector beats it by as
   much; else the first of the others that does, likewise.

Near a threshold chance decides. Where single repetitions would lead to another choice than all of them together, the
recommendation says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedentopt.plan.outcome import Federation, Outcome
from fedentopt.selection import EntropySelector, RandomSelector

EVEN, FORGOTTEN = 0.9, 0.05
NEAR = 0.02
FULL = 0.99
ENOUGH = 0.95
KEPT_GAIN = 0.9  # of the gain over random selection, for a privacy budget to be called affordable


@dataclass(frozen=True, eq=False)
class Recommendation:
    """The outcome to go for, random selection of the same size, and the sentences that say why."""

    chosen: Outcome
    random: Outcome
    reason: str
    trade: str

    @property
    def is_random(self) -> bool:
        """Whether random selection is as good."""
        return self.chosen.choice.selector is RandomSelector


def recommend(federation: Federation, outcomes: Sequence[Outcome]) -> Recommendation:
    """The recommendation from outcomes without absence, all with the same noise; random selection among them."""
    random = _random_of(outcomes)
    best, size, full = _decide(federation, outcomes)
    chosen = best[size]
    if chosen is random[size]:
        contender = max(_by_selector(federation, outcomes, chosen), key=lambda o: o.entropy, default=None)
        reason = _random_reason(federation, chosen, contender)
    else:
        reason = _reason(federation, chosen, random)
    trade = _trade(federation, best, random, size, full) + _as_good(federation, outcomes, chosen, random[size])
    return Recommendation(chosen, random[size], reason, trade + _close_call(federation, outcomes, chosen))


def _random_of(outcomes: Sequence[Outcome]) -> dict[int, Outcome]:
    return {o.choice.cohort: o for o in outcomes if o.choice.selector is RandomSelector}


def _decide(federation: Federation, outcomes: Sequence[Outcome]) -> tuple[dict[int, Outcome], int, bool]:
    """The best choice of every cohort size, the size to take, and whether its cohorts cover every class."""
    random = _random_of(outcomes)
    best = {size: _best_of(federation, outcomes, random[size]) for size in sorted(random)}
    most = max(outcome.entropy for outcome in best.values())
    enough = [size for size, outcome in best.items() if outcome.entropy >= ENOUGH * most - 1e-9]
    full = [size for size in enough if best[size].covered.mean() >= FULL]
    return best, (full or enough)[0], bool(full)


def _close_call(federation: Federation, outcomes: Sequence[Outcome], chosen: Outcome) -> str:
    """What single repetitions would lead to, where that is not the same; a choice with fewer has its last again."""
    repetitions = max(len(outcome.entropies) for outcome in outcomes)
    alone: Counter[str] = Counter()
    for number in range(repetitions):
        best, size, _ = _decide(federation, [outcome.repetition(number) for outcome in outcomes])
        if best[size].choice != chosen.choice:
            alone[f"{describe(best[size])} and cohorts of {size}"] += 1
    if not alone:
        return ""
    (what, times), *more = alone.most_common()
    others = "".join(f", {times} to {what}" for what, times in more)
    own, leads = ("itself", "leads") if times == 1 else ("themselves", "lead")
    return f" A close call: by {own}, {times} of {repetitions} repetitions {leads} to {what}{others}."


def gain(federation: Federation, ours: Outcome, theirs: Outcome) -> float:
    """Mean entropy of ours minus theirs, as a share of the largest possible, over the repetitions both have."""
    both = min(len(ours.entropies), len(theirs.entropies))
    if not federation.top:
        return 0.0
    return float(ours.entropies[:both].mean() - theirs.entropies[:both].mean()) / federation.top


def _is_even(federation: Federation, outcome: Outcome, random: Outcome) -> bool:
    forgotten = outcome.never.mean() - random.never.mean()
    return bool(
        outcome.h_norm.mean() >= EVEN * random.h_norm.mean() and forgotten <= FORGOTTEN * len(federation.clients)
    )


def _by_selector(federation: Federation, outcomes: Sequence[Outcome], random: Outcome) -> list[Outcome]:
    """Every selector but random, FedEntOpt first, with the buffer to take; those that are not even left out."""
    of_size = [o for o in outcomes if o.choice.cohort == random.choice.cohort and o is not random]
    found = []
    for cls in sorted({o.choice.selector for o in of_size}, key=lambda cls: (cls is not EntropySelector, cls.name)):
        even = [o for o in of_size if o.choice.selector is cls and _is_even(federation, o, random)]
        if even:
            top = max(o.entropy for o in even)
            near = [o for o in even if o.entropy >= top - NEAR * federation.top]
            found.append(max(near, key=lambda o: (float(o.h_norm.mean()), -(o.choice.buffer or 0))))
    return found


def _beats(federation: Federation, ours: Outcome, theirs: Outcome) -> bool:
    more_rounds = float(ours.covered.mean() - theirs.covered.mean())
    ahead = gain(federation, ours, theirs)
    return ahead > NEAR or (more_rounds > NEAR and ahead > -NEAR)


def _best_of(federation: Federation, outcomes: Sequence[Outcome], random: Outcome) -> Outcome:
    best = random
    for outcome in _by_selector(federation, outcomes, random):
        if _beats(federation, outcome, best):
            best = outcome
    return best


def describe(outcome: Outcome) -> str:
    """Selector and buffer in words."""
    buffer = outcome.choice.buffer
    return outcome.name + (f" with a buffer of {buffer}" if buffer is not None else "")


def headline(federation: Federation, outcome: Outcome) -> str:
    """The whole choice in words."""
    choice = outcome.choice
    noise = "" if choice.epsilon is None else f", ε = {choice.epsilon:g}"
    return f"{describe(outcome)}, {choice.cohort} of {len(federation.clients)} clients per round{noise}"


def share(value: float) -> str:
    """A share in per cent that is 0 or 100 only where it is."""
    if 0 < value < 0.005:
        return "under 1 %"
    if 0.995 < value < 1:
        return "over 99 %"
    return f"{100 * value:.0f} %"


def missing_words(federation: Federation, outcome: Outcome, most: int = 2) -> str:
    """In how many rounds a class was missing, and which most often."""
    lacking = float(1 - outcome.covered.mean())
    if not lacking:
        return "miss no class in any round"
    missed = outcome.missed.mean(axis=0)
    worst = [c for c in np.argsort(-missed, kind="stable")[:most].tolist() if missed[c]]
    names = ", ".join(f"{federation.classes[c]} in {share(float(missed[c]))}" for c in worst)
    return f"miss a class in {share(lacking)} of rounds" + (f" ({names})" if names else "")


def _reason(federation: Federation, chosen: Outcome, random: dict[int, Outcome]) -> str:
    choice, beside = chosen.choice, random[chosen.choice.cohort]
    first = (
        f"With {choice.cohort} of {len(federation.clients)} clients per round, {chosen.name}'s cohorts reach "
        f"{chosen.entropy:.2f} of {federation.top:.2f} bits and {missing_words(federation, chosen)}, while random ones "
        f"of the same size reach {beside.entropy:.2f} and {missing_words(federation, beside)}."
    )
    as_good = [
        size for size, outcome in random.items() if size > choice.cohort and not _beats(federation, chosen, outcome)
    ]
    needed = (
        f"random selection needs cohorts of {as_good[0]} for as much"
        if as_good
        else "random selection does not get there with any size tried"
    )
    kept = "It" if choice.buffer is None else f"A buffer of {choice.buffer}"
    return (
        f"{first} {kept} keeps the asking even (H_norm {chosen.h_norm.mean():.2f}, random "
        f"{beside.h_norm.mean():.2f}; {_never(chosen)}), and {needed}."
    )


def _random_reason(federation: Federation, random: Outcome, contender: Outcome | None) -> str:
    size = f"With {random.choice.cohort} of {len(federation.clients)} clients per round, random cohorts"
    if not federation.top:
        return (
            "All samples are of one class, so every cohort holds the same labels. Random selection is as good as any, "
            "and nobody has to report label counts."
        )
    first = f"{size} reach {random.entropy:.2f} of {federation.top:.2f} bits and {missing_words(federation, random)}."
    if contender is None:
        return f"{first} Nothing that chooses by labels asks clients nearly as evenly, so take random selection."
    more = max(gain(federation, contender, random), 0.0) * federation.top
    return (
        f"{first} {contender.name} would add {more:.3f} bits, too little to ask clients for their label counts: take "
        "random selection."
    )


def _never(outcome: Outcome) -> str:
    never, reachable = float(outcome.never.mean()), outcome.entropies.shape[1] * outcome.choice.cohort
    if reachable < len(outcome.times):
        return f"the rounds tried reach at most {reachable} of {len(outcome.times)} clients"
    told = f"{never:.2g}" if never < 10 else f"{never:,.0f}"
    return "everybody is asked" if not never else f"{told} clients never asked, on average"


def _as_good(federation: Federation, outcomes: Sequence[Outcome], chosen: Outcome, random: Outcome) -> str:
    """Other even selectors of the same size that the chosen one does not beat; what speaks for more than random's."""
    if chosen is random:
        return (
            " Labels alone ask for no more; a larger cohort also averages over more samples." if federation.top else ""
        )
    others = [o for o in _by_selector(federation, outcomes, random) if o.choice.selector is not chosen.choice.selector]
    equal = [f"{describe(o)} ({o.entropy:.2f} bits)" for o in others if not _beats(federation, chosen, o)]
    return f" As good at this size: {', '.join(equal)}." if equal else ""


def _trade(federation: Federation, best: dict[int, Outcome], random: dict[int, Outcome], size: int, full: bool) -> str:
    """What the best of smaller and larger cohorts would give, named where it is another than the recommended one:
    traffic and time of a round grow with M."""
    here = best[size]

    def reach(cohort: int) -> str:
        other, beside = best[cohort], random[cohort]
        named = "" if other is beside or describe(other) == describe(here) else f"{describe(other)}; "
        return (
            f"reach {other.entropy:.2f} bits ({named}random {beside.entropy:.2f}) and "
            f"{missing_words(federation, other, 0)}"
        )

    smaller, larger = [s for s in best if s < size], [s for s in best if s > size]
    parts = []
    if smaller:
        less = share(1 - smaller[-1] / size)
        parts.append(f"cohorts of {smaller[-1]} cost {less} less per round, {reach(smaller[-1])}")
    if larger:
        parts.append(f"cohorts of {larger[0]} cost {share(larger[0] / size - 1)} more, {reach(larger[0])}")
    text = "; ".join(parts)
    lacking = "" if full or not federation.top else " No size tried covers every class in nearly all rounds."
    if not text:
        return f"No other size was tried, here with {here.entropy:.2f} bits.{lacking}"
    return f"{text[0].upper()}{text[1:]}.{lacking}"
