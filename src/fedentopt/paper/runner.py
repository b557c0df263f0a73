"""Stack after stack of a reproduction, so that what is finished can be exported in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fedentopt.paper.measures import TARGETS
from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.sweep import Stack, run_sweep

if TYPE_CHECKING:
    from fedentopt.simulation.engine import RoundEvent


def run_stacks(
    stacks: Sequence[Stack],
    options: RunOptions,
    *,
    progress: Callable[[RoundEvent], None] | None = None,
    begin: Callable[[int], None] = lambda number: None,
    done: Callable[[int], None] = lambda number: None,
) -> None:
    """Bring every run of every stack to its end below `options.out`; finished ones are left alone.

    `begin` and `done` get the number of each stack, from 0, before and after it.
    """
    options = dataclasses.replace(options, target=tuple(map(float, TARGETS)))
    for number, stack in enumerate(stacks):
        begin(number)
        run_sweep(stack, options, progress=progress, afresh="another folder")
        done(number)
