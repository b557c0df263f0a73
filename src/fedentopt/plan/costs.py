"""What noise and absent clients cost the recommended choice, in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fedentopt.plan.outcome import Choice, Federation, Outcome
from fedentopt.plan.recommendation import KEPT_GAIN, NEAR, Recommendation, gain, share
from fedentopt.selection import RandomSelector


def privacy_words(
    federation: Federation,
    recommendation: Recommendation,
    by_size: Sequence[Outcome],
    by_noise: Sequence[Outcome],
    noisy: bool,
) -> str:
    """What noise costs at these sizes, with epsilon times samples per client."""
    if noisy:
        return "The counts hold noise already: all figures are of the counts as reported, and no more noise was tried."
    size, random = recommendation.chosen.choice.cohort, recommendation.random
    if not federation.top or not by_noise:
        return ""
    tried = next((o.choice for o in by_noise if o.choice.cohort == size), None)
    alike = [] if tried is None else with_every_budget((*by_size, *by_noise), tried)
    if tried is None or len(alike) < 2 or alike[-1].choice.epsilon is not None:
        return ""
    clean, noised = alike[-1], alike[-2::-1]
    samples = federation.samples
    buffer = "" if tried.buffer is None else f"a buffer of {tried.buffer}, "
    parts = [
        f"by {o.entropy - clean.entropy:+.3f} bits with ε = {o.choice.epsilon:g} "
        f"(ε·n = {round_number(o.choice.epsilon * samples)})"
        for o in noised
        if o.choice.epsilon is not None
    ]
    text = (
        f"Noise moves the mean entropy of {clean.name} ({buffer}cohorts of {size}; n = {round_number(samples)} samples "
        f"per client at the median) {', '.join(parts)}."
    )
    whole = gain(federation, clean, random)
    if whole <= NEAR:
        return text
    kept = [gain(federation, o, random) >= KEPT_GAIN * whole for o in noised]
    if not any(kept):
        return f"{text} None of these budgets keeps {share(KEPT_GAIN)} of the gain over random selection."
    if not kept[0]:  # and a smaller one does: few rounds tell budgets apart only roughly
        return text
    least = noised[(*kept, False).index(False) - 1].choice.epsilon
    return f"{text} Down to ε = {least:g} at least {share(KEPT_GAIN)} of the gain over random selection stays."


def with_every_budget(outcomes: Sequence[Outcome], tried: Choice) -> list[Outcome]:
    """Outcomes of this choice but for its privacy budget, the smallest budget first and true counts last."""
    alike = [o for o in outcomes if replace(o.choice, epsilon=None) == replace(tried, epsilon=None)]
    return sorted(alike, key=lambda o: math.inf if o.choice.epsilon is None else o.choice.epsilon)


def round_number(value: float) -> str:
    """Three digits of a number, whole from 100 on."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def absence_words(recommendation: Recommendation, by_absence: Sequence[Outcome], away: float) -> str:
    """What clients that are away cost."""
    chosen = recommendation.chosen
    for outcome in by_absence:
        if outcome.choice == replace(chosen.choice, away=away):
            random = next(o for o in by_absence if o.choice.selector is RandomSelector)
            beside = "" if outcome is random else f", random {random.entropy:.2f}"
            name = "random selection" if outcome is random else chosen.name
            return (
                f"With {share(away)} of the clients away in every round, {name} reaches {outcome.entropy:.2f} "
                f"instead of {chosen.entropy:.2f} bits{beside}, and {share(float(1 - outcome.covered.mean()))} of "
                "rounds miss a class."
            )
    return ""
