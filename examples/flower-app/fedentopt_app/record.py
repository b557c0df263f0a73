"""A finished Flower run as a results folder of fedentopt's, so that `fedentopt report` shows it beside others.

The folder numbers clients by their rows in `label_counts.csv`, which are known only at the end: a node that joins
late takes its place among the names. Until then a round names its clients by the order in which the server let them
in, which never changes and is kept in the strategy's checkpoint.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import MetricRecord, UserConfig
from flwr.serverapp.strategy import Result

from fedentopt.datasets import Dataset
from fedentopt.flower import LabelAware
from fedentopt.flower.report import ClientId, id_order
from fedentopt.partition import partition
from fedentopt.results.folder import RunFolder
from fedentopt.results.records import Outcome, RoundRecord, RunStart
from fedentopt.selection.measures import classes_covered, entropy
from fedentopt.simulation.config import RunConfig


class Bookkeeper:
    """Knows the counts and turns rounds into metrics, which survive a stop in the strategy's checkpoint."""

    def __init__(self, config: RunConfig, data: Dataset, strategy: LabelAware, own_data: bool) -> None:
        self.config, self.data, self.strategy = config, data, strategy
        self._true: np.ndarray | None = None
        if not own_data:  # the server cut the data itself, so it knows; of nodes' own data it sees reports only
            self._true = partition(
                data.y_train, config.partition, config.clients, config.seed,
                num_classes=data.num_classes, min_samples=config.least_samples,
            ).counts  # fmt: skip

    def round_metrics(self, seconds: float, model_bytes: int, scores: tuple[float, float, list[float]]) -> MetricRecord:
        """The last round in numbers."""
        last = self.strategy.history[-1]
        place = {client: number for number, client in enumerate(self.strategy.census.members)}
        picked = [place[client] for client in last.cohort.clients]
        labels = np.sum([self._counts_of(client) for client in last.cohort.clients], axis=0)
        asked = 8 * len(self._clients()) * self.data.num_classes if last.round == 1 else 0
        return MetricRecord(
            {
                "accuracy": scores[0],
                "loss": scores[1],
                "class-accuracy": scores[2],
                "entropy": float(entropy(labels)),
                "classes-covered": int(classes_covered(labels)),
                "clients": picked,
                "trained": [place[client] for client in last.answered],
                "bytes-up": model_bytes * len(last.answered) + asked,
                "bytes-down": model_bytes * len(picked),
                "seconds": seconds,
            }
        )

    def write(self, out: Path, run_config: UserConfig, result: Result) -> Path:
        """Write the folder; returns it."""
        row = {client: number for number, client in enumerate(self._clients())}
        rows = [row[client] for client in self.strategy.census.members]
        told = sorted(result.evaluate_metrics_serverapp.items())
        diverged = next((number for number, metrics in told if not math.isfinite(metrics["loss"])), None)
        records = [_record(number, metrics, rows) for number, metrics in told]
        if diverged is not None:
            records = [self._at_chance(record) if record.round >= diverged else record for record in records]
        words = [f"{name}={_toml(value)}" for name, value in run_config.items() if name not in ("out", "checkpoint")]
        folder = RunFolder(
            out, self.config, resume=False, command=shlex.join(["flwr", "run", ".", "--run-config", " ".join(words)])
        )
        with folder.locked():
            samples = int(self._counts().sum()), len(self.data.y_test)
            folder.start(
                RunStart(
                    self._counts(), self._reported(), self.data.class_names, *samples, trainer="flower", device="cpu"
                )
            )
            for record in records:
                folder.record(record)
            model = result.arrays.to_torch_state_dict()
            clients, rounds = len(self._counts()), self.config.rounds
            folder.finish(Outcome(tuple(records), model, diverged, self.data.num_classes, clients, rounds))
        return folder.path

    def _at_chance(self, record: RoundRecord) -> RoundRecord:
        """A round from the divergence on, as the simulator books it: what such a model guesses is no accuracy."""
        chance = 100 / self.data.num_classes
        return replace(record, accuracy=chance, loss=None, class_accuracy=(chance,) * self.data.num_classes)

    def _clients(self) -> list[ClientId]:
        """The clients in the order of their rows: every share of the data, or by name those that the server met."""
        met = sorted(self.strategy.census.members, key=id_order)
        if self._true is not None and all(self._is_share(client) for client in met):
            return list(range(len(self._true)))
        return met

    def _is_share(self, client: ClientId) -> bool:
        """Whether this is the number of a share; whose share a node with a name of its own holds, it does not say."""
        return self._true is not None and isinstance(client, int) and 0 <= client < len(self._true)

    def _reported(self) -> np.ndarray | None:
        """What the server saw instead of true counts, or None without noise; zeros for a client it never met."""
        members = self.strategy.census.members
        if not any(member.report.noisy for member in members.values()):
            return None
        nothing = np.zeros(self.data.num_classes)
        return np.stack([members[c].report.counts if c in members else nothing for c in self._clients()])

    def _counts(self) -> np.ndarray:
        """One row a client."""
        return np.stack([self._counts_of(client) for client in self._clients()])

    def _counts_of(self, client: ClientId) -> np.ndarray:
        """True counts of a share that the server cut; else what the node reported, as the selector reads it."""
        if self._true is not None and self._is_share(client):
            return np.asarray(self._true[int(client)])
        return np.maximum(self.strategy.census.members[client].report.counts, 0.0)


def _record(number: int, told: MetricRecord, rows: Sequence[int]) -> RoundRecord:
    """A round from its metrics; `rows` are the clients' rows, in the order in which the server let them in."""
    return RoundRecord(
        round=number,
        clients=tuple(rows[place] for place in told["clients"]),
        trained=tuple(rows[place] for place in told["trained"]),
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
