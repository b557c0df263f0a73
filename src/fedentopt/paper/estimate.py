"""What is still to be done, in runs, training samples and hours, before anything is started."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from fedentopt.algorithms.fedconcat import LOCAL_BATCHES
from fedentopt.simulation.config import RunConfig


@dataclass(frozen=True)
class Estimate:
    """Runs of one model and data set; samples and seconds are None where the data set or the speed is unknown."""

    model: str
    dataset: str
    runs: int
    samples: int | None
    seconds: float | None


def training_samples(config: RunConfig, train: int) -> int:
    """Samples a run trains on, to be expected where every client is as likely as any other.

    KL uses only part of its clients' data, so this is more than it needs. FedConcat's second stage is counted at
    its longest.
    """
    epochs = config.epochs * (1 - config.stragglers) + (config.epochs + 1) / 2 * config.stragglers
    a_round = config.cohort_size * train / config.clients * epochs * (1 - config.dropout)
    if config.algorithm != "fedconcat":
        return round(config.rounds * a_round)
    stages = config.of("algorithm")
    second = int(stages["max_rounds"]) * config.cohort_size * LOCAL_BATCHES * config.batch_size
    return round(float(stages["share"]) * config.rounds * a_round) + second


def estimate(
    runs: Iterable[RunConfig], train_size: Callable[[str], int | None], speed: Callable[[str], float | None]
) -> list[Estimate]:
    """One line for each model and data set. `train_size` is by data set, `speed` (samples per second) by model."""
    groups: dict[tuple[str, str], list[RunConfig]] = {}
    for run in runs:
        groups.setdefault((run.model, run.dataset), []).append(run)
    lines = []
    for (model, dataset), own in groups.items():
        train, fast = train_size(dataset), speed(model)
        samples = None if train is None else sum(training_samples(run, train) for run in own)
        seconds = None if samples is None or not fast else samples / fast
        lines.append(Estimate(model, dataset, len(own), samples, seconds))
    return lines


def total(lines: Sequence[Estimate]) -> tuple[int, int | None, float | None]:
    """Runs, samples and seconds in all; None as soon as one line does not know."""
    samples = [line.samples for line in lines]
    seconds = [line.seconds for line in lines]
    return (
        sum(line.runs for line in lines),
        None if None in samples else sum(value for value in samples if value is not None),
        None if None in seconds else math.fsum(value for value in seconds if value is not None),
    )


def measured_speed(device: str) -> dict[str, float]:
    """Samples a second by model on `cuda` or `cpu`, from `speed.toml`."""
    text = files(__package__).joinpath("speed.toml").read_text(encoding="utf-8")
    return {model: float(value) for model, value in tomllib.loads(text)[device].items()}
