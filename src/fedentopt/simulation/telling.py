"""Telling the selectors of many runs what a round showed: what a class can work out once for all of them, it may."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import cast

from fedentopt.selection import ClientId, Observation, Selector
from fedentopt.simulation.run_state import RunState

Told = tuple[RunState, Mapping[int, Observation]]


def tell_selectors(runs: Sequence[RunState]) -> None:
    """`tell_selector` of every run."""
    told = [(run, observations) for run in runs if (observations := run.read_feedback()) is not None]
    expect(told)
    for run, observations in told:
        run.observe(observations)


def expect(told: Sequence[Told]) -> None:
    """Show every class of selectors what its runs are about to observe; the time counts as the selectors'."""
    kinds: dict[type, list[Told]] = {}
    for run, observations in told:
        kinds.setdefault(type(run.planner.selector), []).append((run, observations))
    for kind, own in kinds.items():
        if issubclass(kind, Selector):
            started = time.perf_counter()
            kind.expect([(run.planner.selector, cast("Mapping[ClientId, Observation]", seen)) for run, seen in own])
            for run, _ in own:
                run.planner.add_selecting((time.perf_counter() - started) / len(own))
