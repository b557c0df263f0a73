"""How long trials take, estimated from the sizes of the table and the settings alone.

What a plan leaves out of a large table hangs on these estimates and never on a clock: the same table gives the same
plan on a slow machine, or one that is busy. They are seconds of one core, and rough: enough to tell seconds from
minutes.
"""

from __future__ import annotations

import math

from fedentopt.plan.outcome import Choice, Federation
from fedentopt.selection import EntropySelector, RandomSelector, Selector

LARGE = 50_000  # label counts, clients times classes, beyond which selectors may be left out
LONGEST = 30.0  # seconds that one selector may take with all its sizes, and again with clients away
LONGEST_NOISE = 60.0  # seconds that noise may take with all sizes of cohorts; beyond, the recommended size alone has it
PATIENCE = 4.0  # seconds; a choice whose trial takes longer has one


def seconds(federation: Federation, choice: Choice, rounds: int) -> float:
    """Of one trial."""
    clients, classes = len(federation.clients), len(federation.classes)
    held, size, name = federation.held_cells, choice.cohort, choice.selector.name
    anew = rounds if choice.away else 1  # whoever is there, what is made of them is made for them
    greedy = rounds * round_cost(federation, size) / 1000
    if choice.epsilon is not None:  # noise leaves hardly a count at 0
        held = clients * classes
        greedy = 2.5 * greedy + 5e-8 * held
    if choice.selector is RandomSelector or choice.selector is EntropySelector:
        return greedy if choice.selector is EntropySelector else 0.0
    if name == "fedentopt-swap":  # every exchange looks at all clients again, and gathers the cohort again
        return greedy * (2 + size / 8)
    if name == "kl":
        return anew * (3e-7 * clients + 2e-8 * held)
    if name == "fed-cbs":
        screened = clients * classes <= max(4 * held, 32 * clients)  # as `selection.screen` serves tables
        return rounds * size * (1e-4 + 1e-8 * clients + (1e-9 * clients * classes if screened else 8e-9 * held))
    if name == "clustered-size":
        return anew * 2e-7 * clients
    if name == "flips":
        return 8e-9 * min(10 * clients, 1 << 13) * classes * size + rounds * 8e-8 * clients
    if name == "cycle":
        cohorts = math.ceil(clients / size)
        few = cohorts <= 32 and size <= 64
        pairs = 1.5 * cohorts**2 if few else 10 * cohorts
        return max(anew, 1 + rounds // cohorts) * pairs * (5e-5 + 1.2e-8 * classes * min(size, 32) ** 2)
    if choice.selector.all_pairs:
        return anew * 5e-8 * clients**2
    return greedy  # of selectors from elsewhere nothing else is known


def round_cost(federation: Federation, cohort: int) -> float:
    """Milliseconds that FedEntOpt takes for a round, roughly: it looks at every client for every pick."""
    clients, classes = federation.counts.shape
    return float(cohort * (0.02 + 0.004 * classes + 5e-7 * clients * classes))


def may_be_left_out(federation: Federation, cls: type[Selector]) -> bool:
    """Whether the table is so large that this selector is tried only if it is quick."""
    return federation.counts.size > LARGE and cls not in (RandomSelector, EntropySelector)
