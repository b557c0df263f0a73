"""The census: every client trains from the start model before round 1, nothing is averaged, selectors are told.

The clients of all runs that want one train together, in stacks no larger than those of ordinary rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from fedentopt.selection import Observation
from fedentopt.simulation.device import DeviceData, to_device
from fedentopt.simulation.feedback import FeedbackReader
from fedentopt.simulation.planning import ClientWork
from fedentopt.simulation.run_state import RunState
from fedentopt.simulation.telling import expect
from fedentopt.simulation.work import Trained, Work, build_work


def take_censuses(
    runs: Sequence[RunState], train: Callable[[torch.Tensor, Work], Trained], reader: FeedbackReader, data: DeviceData
) -> None:
    """Take the census of those of `runs`, all before their first round, whose selectors want one."""
    plans = {i: plan for i, run in enumerate(runs) if (plan := run.planner.census()) is not None}
    if not plans:
        return
    todo = [(i, task) for i, plan in plans.items() for task in plan.work]
    size = sum(runs[i].config.cohort_size for i in plans)
    found: dict[int, dict[int, Observation]] = {i: {} for i in plans}
    for start in range(0, len(todo), size):
        mine: dict[int, list[ClientWork]] = {}
        for i, task in todo[start : start + size]:
            mine.setdefault(i, []).append(task)
        parts = {i: replace(plans[i], work=tuple(tasks)) for i, tasks in mine.items()}
        models = torch.cat([runs[i].models for i in parts])
        first, rows, firsts = 0, [], {}
        pushes: dict[int, torch.Tensor] = {}
        for i, part in parts.items():
            firsts[i] = first
            rows += runs[i].rows(part, first)
            if runs[i].hooks.pushes:
                pushes[i] = runs[i].memory.pushes(part.trained)
            first += len(runs[i].models)
        work = build_work(
            rows, runs[0].planner.batch_size, data.num_classes, models.device,
            torch.cat(list(pushes.values())) if pushes else None,
        )  # fmt: skip
        trained = train(models, work)
        device = models.device
        done, place = 0, work.places
        for i, part in parts.items():
            run, steps, push = runs[i], runs[i].step_sizes(0), pushes.get(i)
            places = place[done : done + len(part.work)]
            origins = np.array([firsts[i] + run.start_row(c) for c in part.trained])
            reader.forge(part, run.planner.forgers, models, origins, trained.models, places, steps, push)
            needs = run.planner.needs - {"candidate_loss", "loss", "kept"}
            begun, ended = models[to_device(origins, device)], trained.models[to_device(places, device)]
            kept = run.memory.updates_of(part.trained)
            feedback = reader.queue(part, needs, None, begun, ended, None, steps, push, kept_updates=kept)
            sizes = [len(indices) for indices in run.planner.parts.indices]
            told = feedback.read().items()  # who trained on a part of its data still says how much it has
            found[i] |= {client: replace(seen, samples=sizes[client]) for client, seen in told}
            done += len(part.work)
    found = {i: _mirrored(observations) for i, observations in found.items()}
    expect([(runs[i], observations) for i, observations in found.items()])
    for i, observations in found.items():
        runs[i].planner.observe(observations)
        runs[i].census_seconds = plans[i].seconds


def _mirrored(observations: dict[int, Observation]) -> dict[int, Observation]:
    """Of two clients that trained one after the other, only the later one's cosines know both: the earlier one gets
    what they say."""
    rows = [seen.cosines for seen in observations.values() if seen.cosines is not None]
    if not rows or len(rows) < len(observations):
        return observations
    table, clients = np.array(rows), list(observations)
    later = np.tril(table[:, clients], -1)
    table[:, clients] = np.tril(table[:, clients]) + later.T
    return {client: replace(seen, cosines=row) for (client, seen), row in zip(observations.items(), table, strict=True)}
