"""The engine: takes the runs of a stack through their rounds, together.

One tick advances every unfinished run by one round: plan on the host, train all clients of all runs in one stack,
combine, evaluate. On CUDA nothing inside a tick waits for the device, unless a selector needs to be told something or
an algorithm judges its clients, and then only for those figures; a tick's results are read while the next one trains.
Where many selectors wait, a stack ticks in two parts, so that the device has one to train while the other is planned;
candidates for the next round are asked behind a part's training, before the other's (`asking`).
State is consistent between ticks, where checkpoints are taken and an interrupt is honoured.
Algorithms are known here by their hooks (`hooks`), selectors by what they need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from fedentopt.algorithms import Algorithm, overrides
from fedentopt.datasets import Dataset
from fedentopt.errors import InputError
from fedentopt.files import file_digest
from fedentopt.models import build
from fedentopt.own_code import code_digest, importing_from_here, is_import_path
from fedentopt.partition import NATURAL
from fedentopt.randomness import key
from fedentopt.results.records import Outcome, RunRecorder, RunStart
from fedentopt.selection import Selector
from fedentopt.simulation.asking import Questions
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.census import take_censuses
from fedentopt.simulation.checkpoints import CheckpointWriter
from fedentopt.simulation.combinations import check_combination
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.device import DeviceData, free_memory, interrupts, to_host, torch_settings
from fedentopt.simulation.evaluation import TEST_BATCH, Evaluator
from fedentopt.simulation.feedback import FROM_DEVICE, FeedbackReader, told_by_host
from fedentopt.simulation.first_stage import FirstStages
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.memory_check import check_memory, least_memory
from fedentopt.simulation.methods import build_algorithm, build_selector
from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.own_models import check_training, refusing_own_model
from fedentopt.simulation.planning import RoundPlan
from fedentopt.simulation.run_state import RunState
from fedentopt.simulation.second_stage import SecondStages
from fedentopt.simulation.telling import tell_selectors
from fedentopt.simulation.tick import Tick, TickReader
from fedentopt.simulation.trainers import (
    Trainer,
    choose_trainer,
    make_trainer,
    resolve_device,
    wants_channels_last,
)
from fedentopt.simulation.work import Room

MANY_WAIT = 8
"""Runs from which on it takes longer to plan them than a stack of small models loses by being halved."""


@dataclass(frozen=True)
class Task:
    """A run to do, and who keeps it.

    Objects of the user's own take the place of what the config names: an algorithm, a function that makes the selector
    from the config, one that makes the model from the number of classes. `code` is the digest of their source.
    """

    config: RunConfig
    recorder: RunRecorder
    algorithm: Algorithm | None = None
    selector: Callable[[RunConfig], Selector] | None = None
    model: Callable[[int], nn.Module] | None = None
    code: str | None = None

    @property
    def names_own_code(self) -> bool:
        """Whether code of the user's is found by its name, for which modules of the current directory count. What was
        handed over has been imported already, from wherever its program imports."""
        config = self.config
        parts = ((config.algorithm, self.algorithm), (config.selector, self.selector), (config.model, self.model))
        return any(given is None and is_import_path(name) for name, given in parts)

    def make_algorithm(self) -> Algorithm:
        return build_algorithm(self.config) if self.algorithm is None else self.algorithm

    def make_selector(self, algorithm: Algorithm) -> Selector:
        return build_selector(self.config, algorithm) if self.selector is None else self.selector(self.config)


@dataclass(frozen=True)
class RoundEvent:
    """A round has been recorded."""

    run_id: str
    round: int
    rounds: int
    accuracy: float | None


def works_beside(device: torch.device) -> bool:
    """Whether what is queued on the device runs while the host goes on."""
    return device.type != "cpu"


def stack_key(task: Task) -> tuple[object, ...]:
    """Tasks with equal keys can share a stack: same data, same model, same shapes, same augmentation, and none with a
    local objective of its own among those without, which train faster."""
    config = task.config
    return (
        config.dataset, config.fine_labels, config.image_size, config.model, id(task.model), config.weights,
        config.initialisation, config.batch_size, config.jitter, config.flip, config.grayscale, config.precision,
        overrides(task.make_algorithm(), "local_loss"),
    )  # fmt: skip


def run_stack(
    tasks: Sequence[Task], data: Dataset, options: RunOptions, progress: Callable[[RoundEvent], None] | None = None
) -> list[Outcome]:
    """Run all tasks to their end, in one stack, and return their outcomes in order.

    Each recorder is asked for a checkpoint to continue from, told every round, and handed the outcome. An interrupt
    (Ctrl-C) saves every run after the current round and raises KeyboardInterrupt.
    """
    if not tasks:
        return []
    if len({stack_key(task) for task in tasks}) > 1:
        raise InputError("these runs differ in data set, model, batch size or augmentation and cannot share a stack")
    device = resolve_device(options.device)
    say = options.say or (lambda line: None)
    config, factory = tasks[0].config, tasks[0].model
    own = factory is not None or is_import_path(config.model)
    with (
        importing_from_here(last=True) if any(task.names_own_code for task in tasks) else nullcontext(),
        refusing_own_model(config.model) if own else nullcontext(),
        torch_settings(device, config.precision),
        interrupts(say) as interrupted,
    ):
        stack = Stack(tasks, data, device, options, progress)
        try:
            return stack.run(interrupted)
        except BaseException as error:
            stack.checkpoints.close(at_once=isinstance(error, KeyboardInterrupt))
            raise
        finally:
            stack.trainer.close()


class Stack:
    """The runs of one `run_stack` call and everything they share."""

    def __init__(
        self, tasks: Sequence[Task], data: Dataset, device: torch.device, options: RunOptions,
        progress: Callable[[RoundEvent], None] | None,
    ) -> None:  # fmt: skip
        config = tasks[0].config
        self.options, self.device, self._progress = options, device, progress
        self.beside = works_beside(device)
        self._say = options.say or (lambda line: None)

        def network(seed: int, purpose: str = "model", weights: str | None = None) -> nn.Module:
            return build(
                config.model, data.num_classes, seed=key(seed, purpose) >> 1, image_size=data.image_size,
                weights=weights, factory=tasks[0].model, channels=data.x_train.shape[1],
                initialisation=config.initialisation,
            )  # fmt: skip

        seeds = sorted({task.config.seed for task in tasks})
        models = {seed: network(seed, weights=config.weights) for seed in seeds}
        model = models[config.seed]
        algorithms = [task.make_algorithm() for task in tasks]
        with_code = overrides(algorithms[0], "local_loss")
        if tasks[0].model is not None or is_import_path(config.model):
            check_training(model, config.model, data.num_classes, data.image_size, plain_loss=not with_code)
        batch = max(min(config.batch_size, len(data.y_train)), TEST_BATCH)
        chosen = choose_trainer(
            options.trainer, model, device, data.image_size, code=with_code, batch=batch, precision=config.precision
        )
        last = wants_channels_last(chosen, model, data.image_size, device, config.precision)
        self.layout = FlatLayout(model, channels_last=last)
        self.data = DeviceData.place(data, device)
        self.transform = ImageTransform(data.mean, data.std, config.jitter, config.flip, config.grayscale)
        self.trainer: Trainer = make_trainer(
            chosen, model, self.layout, self.data, self.transform, precision=config.precision, workers=options.workers
        )
        self.second = SecondStages(model, self.layout, self.data, self.transform, self.trainer)
        self.evaluator = Evaluator(self.trainer, self.second, self.data)
        self.feedback = FeedbackReader(model, self.layout)
        self.first = FirstStages(self.layout, device, self.trainer, self.evaluator, self.feedback, self._say)
        self.questions = Questions(self.trainer)
        self.checkpoints = CheckpointWriter(device)
        hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        selectors = [task.make_selector(algorithm) for task, algorithm in zip(tasks, algorithms, strict=True)]
        parts = zip(tasks, algorithms, selectors, strict=True)
        if (free := free_memory(device)) is not None:
            check_memory([least_memory(t.config, a, s, self.layout) for t, a, s in parts], free, hardware)
        # All of them before the first is written down: a setting that is refused leaves no other run begun.
        about = data.y_train, data.num_classes
        clients = data.clients
        if clients is not None and not any(task.config.partition == NATURAL for task in tasks):
            self._say(f"{data.name} names {len(clients.names)} clients of its own; --partition natural uses them")
        self.runs = [
            RunState(
                task.config, task.recorder, *about, models[task.config.seed], self.layout, device, algorithm,
                selector, None if clients is None else clients.numbers, partial(network, task.config.seed, "vectors"),
            )
            for task, algorithm, selector in zip(tasks, algorithms, selectors, strict=True)
        ]  # fmt: skip
        for run in self.runs:
            check_combination(run, self.feedback.outputs)
        weights = file_digest(config.weights)
        codes: dict[tuple[str, ...], str] = {}  # reading a module's sources once serves all runs of a sweep
        for task, run in zip(tasks, self.runs, strict=True):
            if task.code is None and task.config.own_code not in codes:
                codes[task.config.own_code] = code_digest(task.config.own_code)
            code = codes[task.config.own_code] if task.code is None else task.code
            saved = task.recorder.resume()
            if saved is not None:  # before anything is written: it may turn out to be damaged
                run.restore(*saved)
            task.recorder.start(
                RunStart(
                    run.planner.counts, run.planner.reported, data.class_names, len(data.y_train), len(data.y_test),
                    self.trainer.describe(), hardware, data.digest, code,
                    weights, clients.names if clients is not None and run.config.partition == NATURAL else (),
                )
            )  # fmt: skip
        self.trainer.reserve(
            Room(
                rows=sum(run.config.cohort_size for run in self.runs),
                steps=max(run.planner.most_steps for run in self.runs),
                starts=sum(len(run.models) for run in self.runs),
                corrections=sum(run.config.cohort_size for run in self.runs if run.hooks.pushes),
            )
        )
        self._reader = TickReader(self.evaluator.class_sizes, self._say)
        self._say(f"{len(tasks)} run(s) on {hardware}: {self.trainer.describe()}")

    def run(self, interrupted: Callable[[], bool]) -> list[Outcome]:
        """Tick until all runs are finished."""
        outcomes: dict[int, Outcome] = {}
        queued: deque[Tick] = deque()
        self._close_finished(outcomes)
        take_censuses([run for run in self.runs if run.round == 0], self.first.within_memory, self.feedback, self.data)
        while len(outcomes) < len(self.runs):
            active = [run for i, run in enumerate(self.runs) if i not in outcomes and not run.finished]
            parts = self._parts(active) if active else []
            for part in parts:
                queued.append(self._tick(part))
                self._flush(queued, len(parts))  # the round before, while this one trains
                if self.beside:
                    self.questions.ask_ahead(part)
            due = any(run.round % self.options.checkpoint_every == 0 for run in active)
            ends = not active or any(run.finished for run in active)
            if due or ends or interrupted() or not self.beside:
                self._flush(queued, 0)
                if due or ends or interrupted():
                    self.checkpoints.wait()
                self._close_finished(outcomes)
                stop = interrupted()
                left = [run for i, run in enumerate(self.runs) if i not in outcomes]
                saved = [run for run in left if stop or run.round % self.options.checkpoint_every == 0]
                for run in saved:
                    run.tell_selector()  # what a round taught belongs to the state after it
                if saved:
                    self.checkpoints.save(saved)
                if stop and left:
                    self.checkpoints.wait()
                    raise KeyboardInterrupt
        return [outcomes[i] for i in range(len(self.runs))]

    def _close_finished(self, outcomes: dict[int, Outcome]) -> None:
        for i, run in enumerate(self.runs):
            if i not in outcomes and run.finished and len(run.records) == run.rounds:
                outcomes[i] = run.outcome()
                run.recorder.finish(outcomes[i])
                run.stage = None

    def _parts(self, runs: list[RunState]) -> list[list[RunState]]:
        """The runs of a round, in two parts where many selectors wait for the device: one is planned while the other
        trains. No run's numbers depend on it.

        A selector that asks only when its round is planned gains nothing: its question would wait for the other part.
        """
        waits = [bool(run.planner.needs & FROM_DEVICE) or run.planner.asks_ahead for run in runs]
        if not self.beside or sum(waits) < max(MANY_WAIT, 2):
            return [runs]
        order = sorted(range(len(runs)), key=lambda i: waits[i])
        rows = np.cumsum([runs[i].config.cohort_size for i in order])
        cut = int(np.abs(rows[:-1] - rows[-1] / 2).argmin()) + 1
        return [[runs[i] for i in sorted(some)] for some in (order[:cut], order[cut:])]

    def _tick(self, runs: list[RunState]) -> Tick:
        """Queue one round of every run."""
        plans = self._plan(runs)
        second = [i for i, run in enumerate(runs) if run.in_second_stage]
        first = [i for i, run in enumerate(runs) if not run.in_second_stage]
        chosen = [plan.selected for plan in plans]
        flags: dict[int, torch.Tensor] = {}
        if second:
            finite = self.second.train([runs[i] for i in second], [plans[i] for i in second])
            flags.update(zip(second, finite, strict=True))
            for i in second:
                runs[i].feedback = told_by_host(plans[i], runs[i].planner.needs)
        if first:
            kept, finite = self.first.train([runs[i] for i in first], [plans[i] for i in first])
            flags.update(zip(first, finite, strict=True))
            for i, clients in zip(first, kept, strict=True):
                chosen[i] = clients
        evaluated = [run for run, plan in zip(runs, plans, strict=True) if run.evaluates(plan.round)]
        scores = self.evaluator.evaluate(evaluated) if evaluated else None
        validated = [run for run in evaluated if run.planner.held_out is not None]
        held_out = self.evaluator.validate(validated) if validated else None
        host = to_host(torch.stack([flags[i] for i in range(len(runs))]))
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        self.checkpoints.proceed()
        return Tick(runs, plans, chosen, evaluated, scores, validated, held_out, host, ready)

    def _plan(self, runs: list[RunState]) -> list[RoundPlan]:
        """The next round of every run: of those first that need not wait for the device."""
        ready = [run.feedback is None and "candidate_loss" not in run.planner.needs for run in runs]
        plans = {id(run): run.next_plan() for run, now in zip(runs, ready, strict=True) if now}
        others = [run for run, now in zip(runs, ready, strict=True) if not now]
        tell_selectors(others)
        answers = self.questions.answers(others)
        plans |= {id(run): run.next_plan(losses) for run, losses in zip(others, answers, strict=True)}
        return [plans[id(run)] for run in runs]

    def _flush(self, queued: deque[Tick], left: int) -> None:
        """Read and record the oldest ticks until so many are left."""
        while len(queued) > left:
            for run, record in self._reader.read(queued.popleft()):
                if self._progress is not None:
                    self._progress(RoundEvent(run.config.run_id, record.round, run.rounds, record.accuracy))
