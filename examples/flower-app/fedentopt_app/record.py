"""A Flower run as a results folder of fedentopt's, so that `fedentopt report` shows it beside others.

The folder is tried before the first round and brought up to date after each; a run that has ended has its model and
its summary there too.

The folder numbers clients by their rows in `label_counts.csv`, which are known only at the end: a node that joins
late takes its place among the names. Until then rounds name their clients, in the strategy's checkpoint too. A client
that was forgotten or excluded keeps its row; its counts are zeros where this process never saw them.
"""

from __future__ import annotations

import math
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import MetricRecord, UserConfig

from fedentopt.datasets import Dataset
from fedentopt.errors import InputError
from fedentopt.files import make_folder, write_text
from fedentopt.flower import LabelAware
from fedentopt.flower.checkpoint import load as load_checkpoint
from fedentopt.flower.progress import SelectionResult
from fedentopt.flower.report import ClientId, Report, id_order
from fedentopt.partition import partition
from fedentopt.results.folder import RunFolder
from fedentopt.results.reading import ROUNDS, SUMMARY
from fedentopt.results.records import Outcome, RoundRecord, RunStart
from fedentopt.results.rounds import rounds_csv
from fedentopt.selection.measures import classes_covered, entropy
from fedentopt.simulation.config import RunConfig


class Bookkeeper:
    """Knows the counts and turns rounds into metrics, which survive a stop in the strategy's checkpoint."""

    def __init__(self, config: RunConfig, data: Dataset, strategy: LabelAware, own_data: bool) -> None:
        self.config, self.data, self.strategy = config, data, strategy
        self._folder: RunFolder | None = None
        self._told: dict[int, Mapping[str, Any]] = {}  # records of rounds
        self._met: dict[ClientId, Report | None] = {}  # everybody that was ever known or trained
        self._true: np.ndarray | None = None
        if not own_data:  # the server cut the data itself, so it knows; of nodes' own data it sees reports only
            self._true = partition(
                data.y_train, config.partition, config.clients, config.seed,
                num_classes=data.num_classes, min_samples=config.least_samples,
            ).counts  # fmt: skip

    def round_metrics(
        self, seconds: float, model_bytes: int, scores: tuple[float, float, list[float]], head_bytes: int = 0
    ) -> MetricRecord:
        """The last round in numbers; `head_bytes` are those of the last layer, which a census brings."""
        last = self.strategy.history[-1]
        self._meet()
        labels = np.sum([self._counts_of(client) for client in last.cohort.clients], axis=0)
        census = len(self._clients()) if last.round == 1 and self._has_census() else 0
        asked = 8 * len(self._clients()) * self.data.num_classes if last.round == 1 and self._asks() else 0
        return MetricRecord(
            {
                "accuracy": scores[0],
                "loss": scores[1],
                "class-accuracy": scores[2],
                "entropy": float(entropy(labels)),
                "classes-covered": int(classes_covered(labels)),
                "bytes-up": model_bytes * len(last.answered) + asked + head_bytes * census,
                "bytes-down": model_bytes * (len(last.cohort.clients) + census),
                "seconds": seconds,
            }
        )

    def _asks(self) -> bool:
        """Whether nodes are asked for their label counts."""
        return not self.strategy.roster.nobody_reports

    def _has_census(self) -> bool:
        """Whether all nodes train once before round 1 and send their last layers."""
        return not self._asks() and self.config.of("selector")["census_epochs"] > 0

    def begin(self, out: Path, run_config: UserConfig) -> None:
        """Try the folder before a round is spent; rounds that a checkpoint holds are written again."""
        self._folder = self._folder_in(out, run_config)
        make_folder(self._folder.path)
        try:
            with tempfile.TemporaryFile(dir=self._folder.path):
                pass
        except OSError as error:
            raise InputError(
                f"out: {self._folder.path}: {error.strerror or error}; accepted: a folder that can be written to"
            ) from error
        place = self.strategy.checkpoint_dir
        before = None if place is None else load_checkpoint(place)
        rounds = {} if before is None else before.meta["rounds"]
        self._told = {int(number): record for number, record in rounds.items()}

    def note(self, record: Mapping[str, Any]) -> None:
        """A round is over: bring the folder up to date."""
        assert self._folder is not None
        self._told[record["round"]] = record
        records, _ = self._records(self._told)
        with self._folder.locked():
            (self._folder.path / SUMMARY).unlink(missing_ok=True)  # of a run that is now going on
            self._folder.start(self._start())
            write_text(self._folder.path / ROUNDS, rounds_csv(records), durable=False)

    def write(self, out: Path, run_config: UserConfig, result: SelectionResult) -> Path:
        """Write the folder of a run that has ended; returns it."""
        records, diverged = self._records(result.rounds)
        folder = self._folder_in(out, run_config)
        with folder.locked():
            folder.start(self._start())
            for record in records:
                folder.record(record)
            model = result.arrays.to_torch_state_dict()
            clients, rounds = len(self._counts()), self.config.rounds
            folder.finish(Outcome(tuple(records), model, diverged, self.data.num_classes, clients, rounds))
        return folder.path

    def _folder_in(self, out: Path, run_config: UserConfig) -> RunFolder:
        words = [f"{name}={_toml(value)}" for name, value in run_config.items() if name not in ("out", "checkpoint")]
        command = shlex.join(["flwr", "run", ".", "--run-config", " ".join(words)])
        return RunFolder(out, self.config, resume=False, command=command)

    def _start(self) -> RunStart:
        samples = int(self._counts().sum()), len(self.data.y_test)
        return RunStart(
            self._counts(), self._reported(), self.data.class_names, *samples, trainer="flower", device="cpu"
        )

    def _records(self, told: Mapping[int, Mapping[str, Any]]) -> tuple[list[RoundRecord], int | None]:
        """The rounds, and the one in which the run diverged."""
        self._meet(client for record in told.values() for client in (*record["cohort"], *record["answered"]))
        row = {client: number for number, client in enumerate(self._clients())}
        ordered = sorted(told.items())
        diverged = next((number for number, record in ordered if not _is_finite(record["server"]["loss"])), None)
        records = [_record(number, record, row) for number, record in ordered]
        if diverged is not None:
            records = [self._at_chance(record) if record.round >= diverged else record for record in records]
        return records, diverged

    def _at_chance(self, record: RoundRecord) -> RoundRecord:
        """A round from the divergence on, as the simulator books it: what such a model guesses is no accuracy."""
        chance = 100 / self.data.num_classes
        return replace(record, accuracy=chance, loss=None, class_accuracy=(chance,) * self.data.num_classes)

    def _meet(self, clients: Iterable[ClientId] = ()) -> None:
        """Remember these clients and those that are known now."""
        for client in clients:
            self._met.setdefault(client, None)
        members, roster = self.strategy.census.members, self.strategy.roster
        self._met.update({client: member.report for client, member in members.items()})
        if not self._asks():  # all that the server knows is what training has shown
            self._met.update({c: replace(m.report, counts=roster.counts_of(c)) for c, m in members.items()})

    def _clients(self) -> list[ClientId]:
        """The clients in the order of their rows: every share of the data, or by name those that the server met."""
        met = sorted(self._met, key=id_order)
        if self._true is not None and all(self._is_share(client) for client in met):
            return list(range(len(self._true)))
        return met

    def _is_share(self, client: ClientId) -> bool:
        """Whether this is the number of a share; whose share a node with a name of its own holds, it does not say."""
        return self._true is not None and isinstance(client, int) and 0 <= client < len(self._true)

    def _reported(self) -> np.ndarray | None:
        """What the server saw instead of true counts, or None without noise; zeros for a client it never met."""
        if not any(report.noisy for report in self._met.values() if report is not None):
            return None
        return np.stack([self._reported_by(client) for client in self._clients()])

    def _reported_by(self, client: ClientId) -> np.ndarray:
        report = self._met.get(client)
        return np.zeros(self.data.num_classes) if report is None else report.counts

    def _counts(self) -> np.ndarray:
        """One row per client."""
        return np.stack([self._counts_of(client) for client in self._clients()])

    def _counts_of(self, client: ClientId) -> np.ndarray:
        """True counts of a share that the server cut; else what the node reported, as the selector reads it."""
        if self._true is not None and self._is_share(client):
            return np.asarray(self._true[int(client)])
        return np.maximum(self._reported_by(client), 0.0)


def _is_finite(loss: Any) -> bool:
    return loss is not None and math.isfinite(loss)


def _record(number: int, record: Mapping[str, Any], row: Mapping[ClientId, int]) -> RoundRecord:
    """A round from its record; `row` has the clients' rows."""
    told = record["server"]
    return RoundRecord(
        round=number,
        clients=tuple(row[client] for client in record["cohort"]),
        trained=tuple(row[client] for client in record["answered"]),
        entropy=float(told["entropy"]),
        classes_covered=int(told["classes-covered"]),
        bytes_up=int(told["bytes-up"]),
        bytes_down=int(told["bytes-down"]),
        seconds=float(told["seconds"]),
        accuracy=float(told["accuracy"]),
        loss=float(told["loss"]),
        class_accuracy=tuple(told["class-accuracy"]),
    )


def _toml(value: bool | float | int | str) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)
