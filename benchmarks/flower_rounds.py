"""How long the Flower strategy itself takes per round, and its checkpoint, in a federation of many nodes.

    python benchmarks/flower_rounds.py --nodes 10000 --classes 1000 --rounds 5

The nodes answer at once (a grid in memory, a tiny model), so what is measured is the server's own work: asking for
label counts in round 1, then selection, replies and checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedentopt.flower import FedEntOpt

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


class ReadyGrid(Grid):
    """Nodes that have their answers ready."""

    def __init__(self, counts: np.ndarray, epsilon: float | None) -> None:
        self.counts, self.epsilon = counts, epsilon
        self._waiting: dict[str, Message] = {}
        self._sent = 0

    def get_node_ids(self) -> Iterable[int]:
        return range(1000, 1000 + len(self.counts))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            self._sent += 1
            message.metadata.__dict__["_message_id"] = f"m{self._sent}"
            self._waiting[f"m{self._sent}"] = self._answer(message)
            names.append(f"m{self._sent}")
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._waiting.pop(name) for name in list(message_ids) if name in self._waiting]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - 1000
        if message.metadata.message_type.startswith("query"):
            about = ConfigRecord({"client-id": client} | ({} if self.epsilon is None else {"epsilon": self.epsilon}))
            labels = MetricRecord({"label-counts": self.counts[client].tolist()})
            return Message(RecordDict({"labels": labels, "client": about}), reply_to=message)
        metrics = MetricRecord({"num-examples": 10, "train_loss": 0.5})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError


def note_time(times: list[float], *_: Any) -> None:
    """Stands for an evaluation, and for a callback."""
    times.append(time.perf_counter())


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--held", type=int, default=20, help="classes per node")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--buffer", type=int, default=2_000)
    parser.add_argument("--epsilon", type=float, default=None, help="with noise on every count of every class")
    told = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rng = np.random.default_rng(0)
    counts = np.zeros((told.nodes, told.classes))
    for row in counts:
        row[rng.choice(told.classes, told.held, replace=False)] = rng.integers(1, 100, told.held)
    if told.epsilon is not None:
        counts += np.round(rng.laplace(0, 1 / told.epsilon, counts.shape))
    grid = ReadyGrid(counts, told.epsilon)
    start = ArrayRecord({"w": Array(np.zeros((10, 10), dtype=np.float32))})
    rounds: list[float] = []
    saved: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        strategy = FedEntOpt(
            cohort_size=told.cohort,
            buffer_size=told.buffer,
            num_classes=told.classes,
            min_available_nodes=told.nodes,
            fraction_evaluate=0.0,
            checkpoint_dir=Path(folder),
            callbacks=[functools.partial(note_time, saved)],
        )
        strategy.start(grid, start, num_rounds=told.rounds, evaluate_fn=functools.partial(note_time, rounds))
    begun = [rounds[0], *saved[:-1]]  # a round begins when the one before has been saved
    work = [end - begin for begin, end in zip(begun, rounds[1:], strict=True)]
    checkpoints = [end - begin for begin, end in zip(rounds[1:], saved, strict=True)]
    print(
        json.dumps(
            {
                "nodes": told.nodes,
                "classes": told.classes,
                "first_round_s": round(work[0], 3),
                "later_round_s": round(statistics.median(work[1:]), 3),
                "first_checkpoint_s": round(checkpoints[0], 3),
                "later_checkpoint_s": round(statistics.median(checkpoints[1:]), 3),
            }
        )
    )


if __name__ == "__main__":
    main()
