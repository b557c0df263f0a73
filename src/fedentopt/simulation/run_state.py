"""One run inside a stack: its plans, its global model, its records, and how all of it is saved and restored."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedentopt.algorithms import AFTER_STEP, Algorithm, Client, Round, overrides
from fedentopt.errors import InputError
from fedentopt.models import head_name
from fedentopt.own_code import is_import_path
from fedentopt.results.records import Checkpoint, ClientRow, Outcome, RoundRecord, RunRecorder
from fedentopt.selection import Observation, Selector
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.device import to_device, to_host
from fedentopt.simulation.feedback import Feedback, StepSizes
from fedentopt.simulation.head_stage import HeadStage, model_sizes
from fedentopt.simulation.hooks import Hooks
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.method_memory import MethodMemory
from fedentopt.simulation.planning import RoundPlan, RunPlanner
from fedentopt.simulation.validation import client_accuracies
from fedentopt.simulation.work import CORRECTION_MODES, LocalCode, Row

SELECTOR, WATCH = "selector.", "watch."


class RunState:
    """A run in progress. `models` holds its global model, or one row per group of clients."""

    def __init__(
        self, config: RunConfig, recorder: RunRecorder, labels: np.ndarray, num_classes: int, model: nn.Module,
        layout: FlatLayout, device: torch.device, algorithm: Algorithm, selector: Selector,
        owners: np.ndarray | None = None, fresh: Callable[[], nn.Module] | None = None,
    ) -> None:  # fmt: skip
        """`fresh` draws another network of the same kind, for vectors that start as one."""
        self.config, self.recorder, self.layout, self.device = config, recorder, layout, device
        self.model, self.num_classes = model, num_classes
        self.hooks = Hooks(algorithm, config.algorithm, layout.padding(device))
        self.planner = RunPlanner(config, labels, num_classes, selector, owners)
        self.round = 0  # rounds planned so far
        self.records: list[RoundRecord] = []
        self.diverged_round: int | None = None
        self.hits: np.ndarray | None = None  # which held-out samples the last model got right
        self.stage: HeadStage | None = None
        self.head: torch.Tensor | None = None  # of a second stage to be continued
        self.feedback: Feedback | None = None  # of the last round, not told to the selector yet
        start = layout.pack(model.state_dict()).to(device)
        self.groups = self.hooks.groups(self.planner.read_counts, config.seed)
        self.first_stage = self.rounds = config.rounds
        self.local_batches: int | None = None
        stages = None
        if overrides(algorithm, "second_stage"):
            head_name(model)  # a model without a last layer is refused
            sizes = model_sizes(model)
            assert sizes is not None
            stages = self.hooks.second_stage(config.rounds, config.cohort_size, config.clients, sizes)
        if stages is not None:
            self.first_stage, self.rounds = stages.first, stages.first + stages.rounds
            self.local_batches = stages.local_batches
        rows = 1 if self.groups is None else int(self.groups.max()) + 1
        self.models = start.expand(rows, -1).reshape(-1, layout.width).clone()
        self.memory = MethodMemory(self.hooks, selector, layout, config.clients, device, fresh)
        self.has_trained = False  # whether any round had a client that trained
        self.census_seconds = 0.0

    @property
    def algorithm(self) -> Algorithm:
        return self.hooks.algorithm

    @property
    def finished(self) -> bool:
        return self.round >= self.rounds

    @property
    def in_second_stage(self) -> bool:
        return self.round > self.first_stage

    def lr(self, round_: int) -> float:
        """Round 1 runs at the initial rate; a second stage starts the schedule again."""
        since = max(round_ - 1, 0) if round_ <= self.first_stage else round_ - self.first_stage - 1
        return self.config.lr * self.config.lr_decay**since

    def evaluates(self, round_: int) -> bool:
        """Every n-th round, and always the last ten."""
        return round_ % self.config.evaluate_every == 0 or round_ > self.rounds - 10

    def next_plan(self, losses: Mapping[int, float] | None = None) -> RoundPlan:
        """Plan the next round; `losses` are what the candidates for it answered."""
        self.round += 1
        if self.diverged_round is not None and "candidate_loss" in self.planner.needs:
            # Nobody can be asked any more: the last cohort stands for the record.
            return RoundPlan(self.round, self.records[-1].clients if self.records else (), ())
        plan = self.planner.plan(self.round, losses)
        if self.diverged_round is not None:  # nothing is left to train; selection goes on for the record
            return replace(plan, work=())
        if self.in_second_stage and self.local_batches is not None:
            # Enough epochs for the second stage's few batches, whatever the client's size.
            work = []
            for task in plan.work:
                epochs = -(-self.local_batches // -(-len(task.samples) // task.batch_size))
                trained_on = min(self.local_batches * task.batch_size, epochs * len(task.samples))
                seconds = self.planner.seconds(task.client, trained_on)
                work.append(replace(task, epochs=epochs, seconds=seconds))
            plan = replace(plan, work=tuple(work))
        return plan

    def start_row(self, client: int) -> int:
        """Which of the run's model rows a client starts from."""
        return 0 if self.groups is None else int(self.groups[client])

    def rows(self, plan: RoundPlan, first_row: int) -> list[Row]:
        """The plan as rows of a stack in which this run's models start at `first_row`."""
        config = self.config
        mode = CORRECTION_MODES[self.algorithm.push_enters if self.hooks.pushes else None]
        lr, has_code = self.lr(plan.round), self.hooks.has_code
        if has_code:
            self.memory.before_change(plan.trained)  # own code is handed the rows themselves
        keys = self.planner.row_keys(plan.round, plan.trained)
        made = []
        for task, (order_key, augment_key, dropout_key) in zip(plan.work, keys, strict=True):
            terms = self.hooks.local_terms(Client(task.client, task.label_counts))
            made.append(
                Row(
                    task=task,
                    start_row=first_row + self.start_row(task.client),
                    order_key=order_key,
                    augment_key=augment_key,
                    dropout_key=dropout_key,
                    lr=lr,
                    weight_decay=config.weight_decay,
                    momentum=config.momentum,
                    mu=terms.mu,
                    logit_scale=terms.logit_scale,
                    logit_shift=terms.logit_shift,
                    correction_mode=mode,
                    code=self._code(task.client, task.label_counts, plan.round) if has_code else None,
                )
            )
        return made

    def _code(self, client: int, label_counts: np.ndarray, round_: int) -> LocalCode:
        vectors, kept = self.memory.of(client)
        model = self.config.model
        return LocalCode(
            loss=self.algorithm.local_loss,
            method=self.config.algorithm,
            client=client,
            round=round_,
            label_counts=label_counts.copy() if self.hooks.own else label_counts,
            vectors=vectors,
            previous=kept,
            key=self.planner.code_key(round_, client),
            own="algorithm" if self.hooks.own else f"model: {model!r}" if is_import_path(model) else None,
        )

    def round_info(self, plan: RoundPlan, which: np.ndarray, losses: np.ndarray | None) -> Round:
        """What the algorithm is told of a round, for the trained clients with these places in the plan; `losses` are
        what all of its clients told, where it reads them."""
        parts, trained = plan.parts[which], plan.trained
        clients = tuple(trained[i] for i in which)
        return Round(
            number=plan.round,
            clients=clients,
            shares=parts / parts.sum(),
            steps=plan.steps[which],
            label_counts=self.planner.read_counts[list(clients)],
            lr=self.lr(plan.round),
            momentum=self.config.momentum,
            total_clients=self.config.clients,
            tensor=self._put,
            losses=None if losses is None else losses[which],
            seed=self.config.seed,
        )

    def _put(self, values: np.ndarray) -> torch.Tensor:
        return to_device(values, self.device)

    def absorb(self, plan: RoundPlan, start: torch.Tensor, trained: torch.Tensor, losses: np.ndarray | None) -> None:
        """Let the algorithm learn from a round: its clients went from `start` (width,) to `trained` (M, width)."""
        about = self.round_info(plan, np.arange(len(plan.work)), losses) if self.hooks.absorbs else None
        self.memory.absorb(plan.trained, start, trained, about)

    def evaluated_models(self) -> torch.Tensor:
        """The models that are evaluated and saved, (rows, width)."""
        if not self.hooks.evaluates or not self.has_trained:
            return self.models
        width = self.layout.parameter_width
        shown = self.models.clone()
        for row in shown:
            row[:width] = self.hooks.evaluated(dict(self.memory.server), row[:width].clone())
        return shown

    def step_sizes(self, round_: int) -> StepSizes:
        """How local training of a round moves parameters."""
        untrained = self.config.weights is None and not self.has_trained
        after = self.algorithm.push_enters == AFTER_STEP
        return StepSizes(self.lr(round_), self.config.momentum, after, untrained)

    def tell_selector(self) -> None:
        """Tell the selector of the last round what it needs to know, once the device has the figures."""
        if (observations := self.read_feedback()) is not None:
            self.observe(observations)

    def read_feedback(self) -> dict[int, Observation] | None:
        """What the last round tells, to be observed; None where there is nothing, or it has been read."""
        if self.feedback is None:
            return None
        feedback, self.feedback = self.feedback, None
        observations = feedback.read()
        if recalls := feedback.recalls():
            self.planner.observe_recalls(recalls)
        return observations

    def observe(self, observations: Mapping[int, Observation]) -> None:
        """Tell the selector what `read_feedback` gave."""
        try:
            self.planner.observe(observations)
        except InputError as error:  # one of many in a stack, perhaps one that was continued
            raise InputError(f"{self.config.run_id}: {error}") from error

    def checkpoint(self, rows: Iterable[ClientRow]) -> Callable[[], Checkpoint]:
        """Copy everything needed to go on after the last planned round, but for what `rows` gives of single clients.

        The copies may still be on their way from the device. What is returned makes the checkpoint of them when they
        have arrived, in any thread, while the run goes on.
        """
        copies = {name: _copied(tensor) for name, tensor in ({"models": self.models} | self.memory.server_rows).items()}
        others = {} if self.stage is None else {"head": _copied(self.stage.head)}
        others |= {f"{SELECTOR}{name}": torch.from_numpy(array) for name, array in self.planner.arrays().items()}
        others |= {f"{WATCH}{name}": torch.from_numpy(array) for name, array in self.planner.watch.arrays().items()}
        meta: dict[str, Any] = {"planner": self.planner.state_dict(), "diverged_round": self.diverged_round}
        meta["has_trained"] = self.has_trained
        if self.memory.models is not None:
            meta["seen"] = sorted(self.memory.seen)
        meta["vectors"] = {name: list(kept.shape) for name, kept in self.memory.client_rows.items()}
        round_, kept_meta, plain = self.round, copy.deepcopy(meta), self.layout.to_canonical
        clients = self.planner.watch.client_records(self.records)

        def finish() -> Checkpoint:
            tensors = {
                name: plain(tensor.view(-1, tensor.shape[-1])).view_as(tensor) for name, tensor in copies.items()
            }
            return Checkpoint(round_, tensors | others, kept_meta, clients, rows)

        return finish

    def restore(self, checkpoint: Checkpoint, records: list[RoundRecord]) -> None:
        """Continue from a checkpoint of this run."""
        self._check_shapes(checkpoint)
        tensors, meta = checkpoint.tensors, checkpoint.meta
        self.round, self.records = checkpoint.round, list(records)
        self.models = self.layout.from_canonical(tensors["models"]).to(self.device)
        self.memory.restore(tensors, checkpoint.rows, () if self.memory.models is None else meta["seen"])
        self.head = tensors.get("head")
        arrays, watched = (
            {name.removeprefix(whose): t.numpy() for name, t in tensors.items() if name.startswith(whose)}
            for whose in (SELECTOR, WATCH)
        )
        try:
            self.planner.load_state_dict(meta["planner"], arrays, watched)
        except InputError as error:  # one of many in a stack, and perhaps of an older version
            raise InputError(
                f"checkpoint of {self.config.run_id}: {error}; delete it, or start anew without resuming"
            ) from error
        self.diverged_round = meta["diverged_round"]
        self.has_trained = bool(meta["has_trained"])

    def _check_shapes(self, checkpoint: Checkpoint) -> None:
        found = {name: tuple(shape) for name, shape in checkpoint.meta.get("vectors", {}).items()}
        found |= {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
        needed = {"models": self.models} | self.memory.server_rows | self.memory.client_rows
        for name, tensor in needed.items():
            if found.get(name) != tuple(tensor.shape):
                raise InputError(
                    f"checkpoint of {self.config.run_id}: {name} of shape {found.get(name, 'nothing')}, "
                    f"this run needs {tuple(tensor.shape)}; delete it, or start anew without resuming"
                )

    def outcome(self) -> Outcome:
        """The finished run."""
        models = self.evaluated_models()
        if self.stage is not None:
            model = self.stage.state(self.layout)
        elif self.groups is not None:
            model = {f"encoder.{i}.{k}": v for i, m in enumerate(models) for k, v in self.layout.unpack(m).items()}
        else:
            model = self.layout.unpack(models[0])
        if self.planner.watch.doubts_reports:
            self.tell_selector()  # what is known of clients at the end includes the last round
        per_client, of = self._client_accuracies() if self.config.client_accuracy else (None, "")
        return Outcome(
            tuple(self.records), model, self.diverged_round, self.num_classes, self.config.clients, self.rounds,
            per_client, of, self.planner.watch.client_records(self.records),
        )  # fmt: skip

    def _client_accuracies(self) -> tuple[tuple[float, ...], str]:
        """Of the final model, per client, and what it was measured on."""
        last = self.records[-1].class_accuracy if self.records else None
        values, of = client_accuracies(
            self.config.clients, held_out=self.planner.held_out, hits=self.hits, counts=self.planner.counts,
            class_accuracy=last, chance=None if self.diverged_round is None else 100.0 / self.num_classes,
        )  # fmt: skip
        return tuple(map(float, values)), of


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host; from CUDA it may still be on its way."""
    return to_host(tensor.detach()) if tensor.is_cuda else tensor.detach().clone()
