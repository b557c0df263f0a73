"""One run inside a stack: its plans, its global model, its memory, its records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedentopt.algorithms import (
    Algorithm,
    ControlVariates,
    FedConcat,
    FedEntropy,
    FedLC,
    FedNova,
    FedProx,
    FedRS,
    Scaffold,
    cluster_clients,
    concat_budget,
)
from fedentopt.algorithms.fedconcat import LOCAL_BATCHES
from fedentopt.errors import InputError
from fedentopt.own_code import make_own
from fedentopt.results.records import Checkpoint, Outcome, RoundRecord, RunRecorder
from fedentopt.simulation.concat import ConcatStage, head_sizes
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.planning import RoundPlan, RunPlanner
from fedentopt.simulation.work import CORRECTION_MODES, Row

LABEL_BYTES = 4  # of one label count or one soft label on the wire
PARAMETER_BYTES = 4


def build_algorithm(config: RunConfig) -> Algorithm:
    """The algorithm a config names."""
    known: dict[str, Callable[[], Algorithm]] = {
        "fedavg": lambda: Algorithm(),
        "fedprox": lambda: FedProx(config.mu),
        "fednova": lambda: FedNova(),
        "scaffold": lambda: Scaffold(config.scaffold_variant),
        "fedrs": lambda: FedRS(config.fedrs_alpha, soft=config.fedrs_soft),
        "fedlc": lambda: FedLC(config.fedlc_tau),
        "fedconcat": lambda: FedConcat(config.clusters),
        "fedentropy": lambda: FedEntropy(),
    }
    if config.algorithm in known:
        return known[config.algorithm]()
    made = make_own("algorithm", config.algorithm, config)
    if not isinstance(made, Algorithm):
        raise InputError(f"algorithm: {config.algorithm!r} made a {type(made).__name__}; accepted: an Algorithm")
    return made


class RunState:
    """A run in progress. `models` holds its global model, or one row per cluster for FedConcat."""

    def __init__(
        self, config: RunConfig, recorder: RunRecorder, labels: np.ndarray, num_classes: int, model: nn.Module,
        layout: FlatLayout, device: torch.device,
    ) -> None:  # fmt: skip
        self.config, self.recorder, self.layout, self.device = config, recorder, layout, device
        self.model, self.num_classes = model, num_classes
        self.algorithm = build_algorithm(config)
        self.planner = RunPlanner(config, labels, num_classes, self.algorithm)
        self.round = 0  # rounds planned so far
        self.records: list[RoundRecord] = []
        self.diverged_round: int | None = None
        self.stage: ConcatStage | None = None
        self.head: torch.Tensor | None = None  # of a second stage to be continued
        self.clusters: np.ndarray | None = None
        start = layout.pack(model.state_dict()).to(device)
        self.first_stage = self.rounds = config.rounds
        if isinstance(self.algorithm, FedConcat):
            self.clusters = cluster_clients(self.planner.read_counts, self.algorithm.clusters, config.seed)
            sizes = head_sizes(model, self.algorithm.clusters)
            budget = concat_budget(
                config.rounds, config.concat_share, config.concat_max_rounds, config.cohort_size, config.clients,
                self.algorithm.clusters, sizes,
            )  # fmt: skip
            self.first_stage, self.rounds = budget.first, budget.first + budget.second
            start = start.expand(self.algorithm.clusters, -1)
        self.models = start.reshape(-1, layout.width).clone()
        self.variates = None
        if self.algorithm.correction is not None:
            self.variates = ControlVariates(config.clients, layout.parameter_width, device)

    @property
    def finished(self) -> bool:
        return self.round >= self.rounds

    @property
    def in_second_stage(self) -> bool:
        return self.round > self.first_stage

    def lr(self, round_: int) -> float:
        """Round 1 runs at the initial rate; FedConcat's second stage starts the schedule again."""
        since = round_ - 1 if round_ <= self.first_stage else round_ - self.first_stage - 1
        return self.config.lr * self.config.lr_decay**since

    def evaluates(self, round_: int) -> bool:
        """Every n-th round, and always the last ten."""
        return round_ % self.config.evaluate_every == 0 or round_ > self.rounds - 10

    def next_plan(self) -> RoundPlan:
        """Plan the next round."""
        self.round += 1
        plan = self.planner.plan(self.round)
        if self.diverged_round is not None:  # nothing is left to train; selection goes on for the record
            return replace(plan, work=())
        if self.in_second_stage:
            # Enough epochs for the second stage's few batches, whatever the client's size.
            work = [
                replace(task, epochs=-(-LOCAL_BATCHES // -(-len(task.samples) // task.batch_size)))
                for task in plan.work
            ]
            plan = replace(plan, work=tuple(work))
        return plan

    def start_row(self, client: int) -> int:
        """Which of the run's model rows a client starts from."""
        return 0 if self.clusters is None else int(self.clusters[client])

    def rows(self, plan: RoundPlan, first_row: int) -> list[Row]:
        """The plan as rows of a stack in which this run's models start at `first_row`."""
        config = self.config
        made = []
        for task in plan.work:
            terms = self.algorithm.local_terms(task.label_counts)
            made.append(
                Row(
                    task=task,
                    start_row=first_row + self.start_row(task.client),
                    order_key=self.planner.order_key(plan.round, task.client),
                    augment_key=self.planner.augment_key(plan.round, task.client),
                    dropout_key=self.planner.dropout_key(plan.round, task.client),
                    lr=self.lr(plan.round),
                    weight_decay=config.weight_decay,
                    momentum=config.momentum,
                    mu=terms.mu,
                    logit_scale=terms.logit_scale,
                    logit_shift=terms.logit_shift,
                    correction_mode=CORRECTION_MODES[self.algorithm.correction],
                )
            )
        return made

    def traffic(self, plan: RoundPlan) -> tuple[int, int]:
        """Bytes up and down in a round. A client that dropped out has received its model and sends nothing."""
        sends, gets = len(plan.work), len(plan.selected)
        up = down = self.layout.model_bytes * self.algorithm.model_vectors
        if plan.round > self.first_stage:
            whole, encoder, layer = head_sizes(self.model, len(self.models))
            up = down = layer * PARAMETER_BYTES
            first = plan.round == self.first_stage + 1
            encoders = self.config.clients * len(self.models) * (self.layout.model_bytes - (whole - encoder) * 4)
            extra_down = encoders if first else 0
        else:
            extra_down = 0
        bytes_up, bytes_down = sends * up, gets * down + extra_down
        if self.algorithm.judges_soft_labels:
            bytes_up += sends * self.num_classes * LABEL_BYTES
        if plan.round == 1 and (self.config.selector != "random" or self.algorithm.reads_label_counts):
            bytes_up += self.config.clients * self.num_classes * LABEL_BYTES
        return bytes_up, bytes_down

    def checkpoint(self) -> Checkpoint:
        """Everything needed to go on after the last planned round."""
        tensors = {"models": self.layout.to_canonical(self.models)}
        if self.variates is not None:
            tensors["scaffold.server"] = self.layout.to_canonical(self.variates.server[None])[0]
            tensors["scaffold.client"] = self.layout.to_canonical(self.variates.client)
        if self.stage is not None:
            tensors["concat.head"] = self.stage.head.cpu()
        meta: dict[str, Any] = {"planner": self.planner.state_dict(), "diverged_round": self.diverged_round}
        return Checkpoint(self.round, tensors, meta)

    def restore(self, checkpoint: Checkpoint, records: list[RoundRecord]) -> None:
        """Continue from a checkpoint of this run."""
        if checkpoint.tensors["models"].shape != self.models.shape:
            raise InputError(
                f"checkpoint of {self.config.run_id}: models of shape {tuple(checkpoint.tensors['models'].shape)}, "
                f"this run needs {tuple(self.models.shape)}; start anew without resuming"
            )
        self.round, self.records = checkpoint.round, list(records)
        self.models = self.layout.from_canonical(checkpoint.tensors["models"]).to(self.device)
        if self.variates is not None:
            server, client = checkpoint.tensors["scaffold.server"], checkpoint.tensors["scaffold.client"]
            self.variates.server = self.layout.from_canonical(server[None])[0].to(self.device)
            self.variates.client = self.layout.from_canonical(client).to(self.device)
        self.head = checkpoint.tensors.get("concat.head")
        self.planner.load_state_dict(checkpoint.meta["planner"])
        self.diverged_round = checkpoint.meta["diverged_round"]

    def outcome(self) -> Outcome:
        """The finished run."""
        if self.stage is not None:
            model = self.stage.state(self.layout)
        elif self.clusters is not None:
            model = {f"encoder.{i}.{k}": v for i, m in enumerate(self.models) for k, v in self.layout.unpack(m).items()}
        else:
            model = self.layout.unpack(self.models[0])
        return Outcome(
            tuple(self.records), model, self.diverged_round, self.num_classes, self.config.clients, self.rounds
        )
