"""A run without training: a number that depends on all rounds before it, told to a recorder as the engine tells it.

Small enough to be stopped at every single write, which the real engine is too slow for.
"""

from __future__ import annotations

import numpy as np
import torch

from fedentopt.results.records import Checkpoint, ClientRow, Outcome, RoundRecord, RunRecorder, RunStart
from fedentopt.simulation.config import RunConfig

CLASSES = ("cat", "dog, wet", "fish")
CONFIG = RunConfig(clients=6, cohort="2", rounds=7, selector="fedentopt", settings={"buffer": "2"}, epsilon=0.5)


def label_counts(config: RunConfig) -> np.ndarray:
    return np.random.default_rng(config.seed).integers(0, 30, (config.clients, len(CLASSES)))


def start_of(config: RunConfig, counts: np.ndarray | None = None) -> RunStart:
    counts = label_counts(config) if counts is None else counts
    noise = np.random.default_rng(config.seed + 1).laplace(scale=2.0, size=counts.shape)
    return RunStart(
        label_counts=counts,
        reported_counts=None if config.epsilon is None else counts + noise,
        class_names=CLASSES,
        train_samples=int(counts.sum()),
        test_samples=30,
        trainer="toy",
        device="cpu",
    )


def drive(
    recorder: RunRecorder, config: RunConfig = CONFIG, *, stop_after: int | None = None, every: int = 2
) -> Outcome | None:
    """Run to the end, or to just after round `stop_after`, as if killed there (nothing more is saved)."""
    state = recorder.resume()
    value = torch.tensor([0.1 + config.seed, 1 / 3], dtype=torch.float64)
    records: list[RoundRecord] = []
    memory = torch.zeros(config.clients, 2)  # what is remembered of every client
    changed: set[int] = set()
    if state is not None:
        checkpoint, records = state
        value = checkpoint.tensors["value"]
        assert checkpoint.meta == {"draws": checkpoint.round}
        for row in checkpoint.rows:
            assert row.vector == "memory"
            memory[row.client] = row.values
    recorder.start(start_of(config))
    for number in range(len(records) + 1, config.rounds + 1):
        value = (value * 1.7 + 0.1).fmod(1.0)
        record = _record(config, number, value)
        records = [*records, record]
        recorder.record(record)
        changed.update(record.clients)
        memory[list(record.clients)] += value.float() * number
        if stop_after == number:
            return None
        if number % every == 0:
            # A view into a larger tensor and the same tensor twice: the engine's states are such.
            both = torch.stack([value, value])
            tensors = {"value": both[0], "again": both, "twin": both}
            rows = [ClientRow("memory", client, memory[client]) for client in sorted(changed)]
            recorder.save(Checkpoint(number, tensors, {"draws": number}, rows=rows))
            changed = set()
    model = {"layer.weight": torch.cat([value, memory.flatten()])}
    outcome = Outcome(tuple(records), model, None, len(CLASSES), config.clients, config.rounds)
    recorder.finish(outcome)
    return outcome


def _record(config: RunConfig, number: int, value: torch.Tensor) -> RoundRecord:
    evaluated = number % 3 != 1 or number == config.rounds
    share = float(value[0])
    return RoundRecord(
        round=number,
        clients=(number % config.clients, (number + 1) % config.clients),
        trained=(number % config.clients,),
        entropy=share / 3,
        classes_covered=2,
        bytes_up=100 + number,
        bytes_down=200,
        seconds=0.25,
        accuracy=100 * share if evaluated else None,
        loss=1 / (share + 1e-3) if evaluated else None,
        class_accuracy=(100 * share, 100 * float(value[1]), 50.0) if evaluated else None,
    )
