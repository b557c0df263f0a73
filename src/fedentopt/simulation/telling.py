"""Telling the selectors of many runs what a round showed: what they have in common is worked out once for all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import cast

from fedentopt.selection import ClientId, Observation
from fedentopt.selection.inferred import estimate_together
from fedentopt.simulation.run_state import RunState

Told = tuple[RunState, Mapping[int, Observation]]


def tell_selectors(runs: Sequence[RunState]) -> None:
    """`tell_selector` of every run."""
    told = [(run, observations) for run in runs if (observations := run.read_feedback()) is not None]
    expect(told)
    for run, observations in told:
        run.observe(observations)


def expect(told: Sequence[Told]) -> None:
    """Prepare the selectors of these runs for what they are about to observe, and count the time as theirs."""
    inferring = [one for one in told if getattr(one[0].planner.selector, "labels_from_heads", False)]
    started = time.perf_counter()
    estimate_together(
        (run.planner.selector, cast("Mapping[ClientId, Observation]", observations)) for run, observations in inferring
    )
    for run, _ in inferring:
        run.planner.add_selecting((time.perf_counter() - started) / len(inferring))
