"""A finished Flower run as a results folder of fedentopt's, so that `fedentopt report` shows it beside others."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

import numpy as np
from flwr.app import MetricRecord, UserConfig
from flwr.serverapp.strategy import Result

from fedentopt.datasets import Dataset
from fedentopt.experiments.results import RunFolder
from fedentopt.flower import LabelAware
from fedentopt.partition import partition
from fedentopt.selection.measures import classes_covered, entropy
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.recording import Outcome, RoundRecord, RunStart


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
        row = {client: number for number, client in enumerate(self._clients())}
        picked = [row[client] for client in last.cohort.clients]
        labels = self._counts()[picked].sum(axis=0)
        asked = 8 * len(row) * self.data.num_classes if last.round == 1 else 0
        return MetricRecord(
            {
                "accuracy": scores[0],
                "loss": scores[1],
                "class-accuracy": scores[2],
                "entropy": float(entropy(labels)),
                "classes-covered": int(classes_covered(labels)),
                "clients": picked,
                "trained": [row[client] for client in last.answered],
                "bytes-up": model_bytes * len(last.answered) + asked,
                "bytes-down": model_bytes * len(picked),
                "seconds": seconds,
            }
        )

    def write(self, out: Path, run_config: UserConfig, result: Result) -> Path:
        """Write the folder; returns it."""
        records = [_record(number, told) for number, told in sorted(result.evaluate_metrics_serverapp.items())]
        words = [f"{name}={_toml(value)}" for name, value in run_config.items() if name not in ("out", "checkpoint")]
        folder = RunFolder(
            out, self.config, resume=False, command=shlex.join(["flwr", "run", ".", "--run-config", " ".join(words)])
        )
        diverged = next((record.round for record in records if not math.isfinite(record.loss or 0.0)), None)
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

    def _clients(self) -> list[int | str]:
        if self._true is not None:
            return list(range(len(self._true)))
        return list(self.strategy.selector.clients)  # type: ignore[attr-defined]

    def _reported(self) -> np.ndarray | None:
        """What the server saw instead of true counts, or None without noise; zeros for a client it never met."""
        members = self.strategy.census.members
        if not any(member.report.noisy for member in members.values()):
            return None
        nothing = np.zeros(self.data.num_classes)
        return np.stack([members[c].report.counts if c in members else nothing for c in self._clients()])

    def _counts(self) -> np.ndarray:
        """True counts where the server cut the data; else what nodes reported, as the selector reads it."""
        if self._true is not None:
            return self._true
        members = self.strategy.census.members
        return np.stack([np.maximum(members[client].report.counts, 0.0) for client in self._clients()])


def _record(number: int, told: MetricRecord) -> RoundRecord:
    return RoundRecord(
        round=number,
        clients=tuple(told["clients"]),
        trained=tuple(told["trained"]),
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
