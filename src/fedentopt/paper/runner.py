"""From runs to folders on disk: runs of one data set and model train together, in stacks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedentopt.errors import InputError
from fedentopt.paper.measures import TARGETS
from fedentopt.simulation.config import RunConfig

if TYPE_CHECKING:
    from fedentopt.simulation.engine import EngineOptions, RoundEvent

Stack = list[RunConfig]


def plan_stacks(runs: Iterable[RunConfig], max_stack: int | None = None) -> list[Stack]:
    """Runs that may train together, in stacks of at most `max_stack`, in the order they are first needed."""
    from fedentopt.simulation.engine import stack_key

    if max_stack is not None and max_stack < 1:
        raise InputError(f"max-stack: {max_stack} is out of range; accepted: at least 1")
    groups: dict[tuple[object, ...], Stack] = {}
    for run in runs:
        groups.setdefault(stack_key(run), []).append(run)
    stacks = []
    for group in groups.values():
        size = max_stack or len(group)
        # Equal parts rather than full ones and a small rest: the rest would leave the device half idle.
        parts = -(-len(group) // size)
        stacks += [group[len(group) * part // parts : len(group) * (part + 1) // parts] for part in range(parts)]
    return stacks


def run_stacks(
    stacks: Sequence[Stack],
    out_dir: Path,
    options: EngineOptions,
    *,
    data_dir: Path | None,
    progress: Callable[[RoundEvent], None] | None = None,
    begin: Callable[[int], None] = lambda number: None,
    done: Callable[[int], None] = lambda number: None,
) -> None:
    """Bring every run of every stack to its end below `out_dir`; finished ones are left alone.

    `begin` and `done` are told the number of each stack, from 0, before and after it.
    """
    from fedentopt.simulation.sweep import run_sweep

    _allow_files(max((len(stack) for stack in stacks), default=0))
    for number, stack in enumerate(stacks):
        begin(number)
        run_sweep(
            stack, out_dir, options, data_dir=data_dir, targets=TARGETS, progress=progress, afresh="another --out"
        )
        done(number)


def _allow_files(runs: int) -> None:
    """Let this process hold a file open for every run of a stack (their locks); systems start with 1,024 or less."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = runs + 512
    if soft != resource.RLIM_INFINITY and soft < wanted and (hard == resource.RLIM_INFINITY or hard > soft):
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
