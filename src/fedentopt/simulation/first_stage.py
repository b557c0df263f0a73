"""An ordinary round of many runs at once: their clients trained in one stack, judged, combined, learned from.

`SecondStages` is its counterpart for the rounds of a second stage. Nothing here waits for the device, but for the soft
labels of an algorithm that judges its clients.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fedentopt.algorithms import Mixing, Round
from fedentopt.simulation.aggregation import Blend, blend_models, exact_products
from fedentopt.simulation.device import to_device
from fedentopt.simulation.evaluation import Evaluator
from fedentopt.simulation.feedback import FROM_DEVICE, FeedbackReader, StepSizes, told_by_host
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.planning import RoundPlan
from fedentopt.simulation.run_state import RunState
from fedentopt.simulation.trainers import MeanLosses, Trainer
from fedentopt.simulation.work import Row, Trained, Work, build_work


class FirstStages:
    """Trains rounds of runs that share a network, data and a trainer; `say` gets lines for people to read."""

    def __init__(
        self, layout: FlatLayout, device: torch.device, trainer: Trainer, evaluator: Evaluator,
        feedback: FeedbackReader, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._layout, self._device, self._say = layout, device, say
        self._trainer, self._evaluator, self._feedback = trainer, evaluator, feedback

    def train(self, runs: list[RunState], plans: list[RoundPlan]) -> tuple[list[tuple[int, ...]], list[torch.Tensor]]:
        """One ordinary round of each run: the clients kept of each, and whether its new models are finite."""
        first_rows = np.cumsum([0, *(len(run.models) for run in runs)]).tolist()
        starts = torch.cat([run.models for run in runs])
        chosen, new = self._train_clients(runs, plans, first_rows, starts)
        # A model that is not finite is never kept; the run is marked when the flag arrives.
        finite = torch.isfinite(new[:, : self._layout.moving_width]).all(1)
        new = torch.where(finite[:, None], new, starts)
        flags = []
        for run, first in zip(runs, first_rows, strict=False):
            mine = slice(first, first + len(run.models))
            run.models = new[mine]
            flags.append(finite[mine].all())
        return chosen, flags

    def within_memory(self, starts: torch.Tensor, work: Work, *, lend: bool = False) -> Trained:
        """Train; when the GPU's memory does not hold the stack, take smaller ones and try again."""
        while True:
            try:
                return self._trainer.train(starts, work, lend=lend)
            except torch.OutOfMemoryError:
                smaller = self._trainer.shrink()
                if smaller is None:
                    raise
                self._say(f"out of GPU memory: the stack is split, going on with {smaller}")

    def _train_clients(
        self, runs: list[RunState], plans: list[RoundPlan], first_rows: list[int], starts: torch.Tensor
    ) -> tuple[list[tuple[int, ...]], torch.Tensor]:
        """Train the clients of all ordinary rounds in one stack; the clients kept of each run, and the new models."""
        rows: list[Row] = []
        owned, pushes = [], {}
        for run, plan, first in zip(runs, plans, first_rows, strict=False):
            tasks = run.rows(plan, first)
            owned.append(np.arange(len(rows), len(rows) + len(tasks)))
            rows.extend(tasks)
            if run.hooks.pushes and tasks:
                pushes[id(run)] = run.memory.pushes(plan.trained)
        chosen = [plan.selected for plan in plans]
        if not rows:
            return chosen, starts
        corrections = torch.cat(list(pushes.values())) if pushes else None
        wants_losses = any("loss" in run.planner.needs for run in runs)
        work = build_work(
            rows, runs[0].planner.batch_size, runs[0].num_classes, self._device, corrections, wants_losses=wants_losses
        )
        asked = self._losses(runs, plans, first_rows, starts)
        # Models that are only averaged are averaged where they were trained.
        trained = self.within_memory(starts, work, lend=not any(_reads_models(run) for run in runs))
        place = work.places
        blends, steps = [], []
        for i, (run, plan, mine, first) in enumerate(zip(runs, plans, owned, first_rows, strict=False)):
            if not len(mine):
                continue
            steps_taken = run.step_sizes(plan.round)
            push = pushes.get(id(run))
            origins = np.array([first + run.start_row(client) for client in plan.trained])
            forgers = run.planner.forgers
            self._feedback.forge(plan, forgers, starts, origins, trained.models, place[mine], steps_taken, push)
            run.has_trained = True
            kept = self._judged(run, plan, trained.models, place[mine])
            chosen[i] = plan.selected if kept is None else kept
            losses = asked[id(run)].read() if id(run) in asked else None
            own = _blends(run, plan, chosen[i], place[mine], first, losses)
            blends += [blend for blend, _ in own]
            if run.hooks.steps:
                steps += [(run, blend, about) for blend, about in own]
            if run.memory.learns:
                run.absorb(plan, starts[first], self._pick(trained.models, place[mine]), losses)
            self._queue_feedback(run, plan, kept, starts, trained, place[mine], origins, steps_taken, push)
        new = blend_models(starts, trained.models, blends, self._layout)
        width = self._layout.parameter_width
        for run, blend, about in steps:
            shares = to_device(blend.factors.astype(np.float32), self._device)
            begun, ended = starts[blend.row, :width], self._pick(trained.models, blend.trained)[:, :width]
            with exact_products():
                new[blend.row, :width] = run.hooks.step(run.memory.server, begun, ended, shares, about)
        return chosen, new

    def _losses(
        self, runs: list[RunState], plans: list[RoundPlan], first_rows: list[int], starts: torch.Tensor
    ) -> dict[int, MeanLosses]:
        """The losses of the models that clients start from, on their way, by the runs whose algorithm reads them."""
        return {
            id(run): self._trainer.mean_losses(
                starts, [first + run.start_row(task.client) for task in plan.work], [task.samples for task in plan.work]
            )
            for run, plan, first in zip(runs, plans, first_rows, strict=False)
            if run.algorithm.reads_losses and plan.work
        }

    def _judged(
        self, run: RunState, plan: RoundPlan, trained: torch.Tensor, place: np.ndarray
    ) -> tuple[int, ...] | None:
        """The clients that an algorithm keeps by their soft labels; None where none judges, or nobody can be judged."""
        if not run.hooks.judges:
            return None
        soft = self._trainer.soft_labels(self._pick(trained, place), [task.samples for task in plan.work])
        if not np.isfinite(soft).all():
            return None
        passed = run.hooks.judge(soft, plan.sizes)
        return tuple(plan.trained[i] for i in passed)

    def _queue_feedback(
        self, run: RunState, plan: RoundPlan, kept: tuple[int, ...] | None, starts: torch.Tensor, trained: Trained,
        places: np.ndarray, origins: np.ndarray, steps: StepSizes, push: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Have what the run's selector needs to know on its way to the host."""
        needs, remaining = run.planner.needs, None if kept is None else frozenset(kept)
        if not needs & FROM_DEVICE:
            run.feedback = told_by_host(plan, needs, remaining)
            return
        own = self._pick(starts, origins)
        losses = None if trained.losses is None else self._pick(trained.losses, places)
        models = self._pick(trained.models, places)
        recalls = self._recalls(run, starts, origins, models)
        run.feedback = self._feedback.queue(
            plan, needs, remaining, own, models, losses, steps, push, recalls, run.memory.updates_of(plan.trained)
        )

    def _recalls(
        self, run: RunState, starts: torch.Tensor, origins: np.ndarray, trained: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """How well the models that clients started from and those they sent know the server's images, (M, C) each."""
        if run.planner.server_images is None:
            return None
        rows, which = np.unique(origins, return_inverse=True)
        models = torch.cat([self._pick(starts, rows), trained])
        recalls = self._evaluator.recalls(models, run.planner.server_images)
        return self._pick(recalls, which), recalls[len(rows) :]

    def _pick(self, rows: torch.Tensor, which: np.ndarray) -> torch.Tensor:
        return rows[to_device(which, self._device)]


def _reads_models(run: RunState) -> bool:
    """Whether anything but averaging wants the models that this run's clients have trained."""
    told = not FROM_DEVICE.isdisjoint(run.planner.needs)
    return bool(run.planner.forgers) or run.hooks.judges or run.hooks.steps or run.memory.learns or told


def _blends(
    run: RunState, plan: RoundPlan, keep: tuple[int, ...], position: np.ndarray, first: int, losses: np.ndarray | None
) -> list[tuple[Blend, Round | None]]:
    """How this run's model rows come out of the round: one blend, or one per group that had a client; with what hooks
    that ask for it are told of the round."""
    blends = []
    kept = np.array([client in keep for client in plan.trained], dtype=bool)
    rows = np.array([run.start_row(client) for client in plan.trained], dtype=np.int64)
    parts = plan.parts
    for row in range(len(run.models)):
        mine = np.flatnonzero(kept & (rows == row))
        if len(mine):
            shares = parts[mine] / parts[mine].sum()
            told = run.hooks.mixes or run.hooks.step_reads_round
            about = run.round_info(plan, mine, losses) if told else None
            mixing = run.hooks.mix(about) if run.hooks.mixes and about is not None else Mixing(0.0, shares)
            blends.append((Blend(first + row, mixing.own, position[mine], mixing.clients, shares), about))
    return blends
