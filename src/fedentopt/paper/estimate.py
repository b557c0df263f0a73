"""What is still to be done, in runs, training samples and hours, before anything is started."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

from fedentopt.algorithms.fedconcat import LOCAL_BATCHES
from fedentopt.errors import InputError
from fedentopt.selection import KLSelector
from fedentopt.simulation.config import RunConfig

MEASURED, ESTIMATED, GIVEN = "measured", "estimated", "given"


@dataclass(frozen=True)
class Speed:
    """Samples per second, and where the figure comes from: `MEASURED`, `ESTIMATED` from others, or `GIVEN`."""

    samples_per_second: float
    source: str


@dataclass(frozen=True)
class Estimate:
    """Runs of one model and data set; samples and seconds are None where the data set or the speed is unknown.

    `speed` is where the samples per second come from.
    """

    model: str
    dataset: str
    runs: int
    samples: int | None
    seconds: float | None
    samples_per_second: float | None = None
    speed: str | None = None


def training_samples(config: RunConfig, train: int) -> int:
    """Samples a run trains on, to be expected where every client is as likely as any other; of KL, which has the same
    large clients in every round, what those hold. What is held out is not trained on. FedConcat's second stage is
    counted at its longest."""
    epochs = config.epochs * (1 - config.stragglers) + (config.epochs + 1) / 2 * config.stragglers
    of_kl = _held_by_kl(config, train) if config.selector == "kl" else None
    held = config.cohort_size * train / config.clients if of_kl is None else of_kl
    a_round = held * (1 - config.validation) * epochs * (1 - config.dropout)
    if config.algorithm != "fedconcat":
        return round(config.rounds * a_round)
    stages = config.of("algorithm")
    second = int(stages["max_rounds"]) * config.cohort_size * LOCAL_BATCHES * config.batch_size
    return round(float(stages["share"]) * config.rounds * a_round) + second


def _held_by_kl(config: RunConfig, train: int) -> int | None:
    """Samples of KL's cohort if all classes were equally large; None where the data set's classes are unknown, or so
    many samples cannot be split so."""
    from fedentopt.datasets.catalog import ENTRIES
    from fedentopt.partition import partition

    if config.dataset not in ENTRIES:
        return None
    classes = ENTRIES[config.dataset].classes
    labels = np.arange(train) % classes
    split = (config.partition, config.clients, config.seed)
    try:
        counts = partition(labels, *split, num_classes=classes, min_samples=config.least_samples).counts
    except InputError:
        return None
    selector = KLSelector(config.cohort_size)
    selector.register(counts)
    limits = selector.select().sample_limits
    assert limits is not None
    return sum(int(np.minimum(counts[int(client)], most).sum()) for client, most in limits.items())


def estimate(
    runs: Iterable[RunConfig],
    train_size: Callable[[str], int | None],
    speed: Callable[[str], Speed | None],
    done: Callable[[RunConfig], int] = lambda run: 0,
) -> list[Estimate]:
    """One line for each model (and precision, where that is another than usual) and data set. `train_size` is by data
    set, `speed` by model, or by model and precision. `done` are the rounds of a run that need not be done again."""

    def samples_left(run: RunConfig, train: int) -> int:
        return round(training_samples(run, train) * max(0.0, 1 - done(run) / run.rounds))

    groups: dict[tuple[str, str], list[RunConfig]] = {}
    for run in runs:
        groups.setdefault((_with_precision(run), run.dataset), []).append(run)
    lines = []
    for (model, dataset), own in groups.items():
        train, fast = train_size(dataset), speed_of(own[0], speed)
        samples = None if train is None else sum(samples_left(run, train) for run in own)
        if fast is None:
            lines.append(Estimate(model, dataset, len(own), samples, None))
            continue
        rate = fast.samples_per_second
        seconds = None if samples is None else samples / rate
        lines.append(Estimate(model, dataset, len(own), samples, seconds, rate, fast.source))
    return lines


def costs(
    runs: Iterable[RunConfig], train_size: Callable[[str], int | None], speed: Callable[[str], Speed | None]
) -> dict[str, float]:
    """Seconds that a round of each run takes, by its id; nothing as soon as one is unknown, since known ones could not
    be compared with it. `train_size` and `speed` as for `estimate`."""
    found: dict[str, float] = {}
    for run in runs:
        train, fast = train_size(run.dataset), speed_of(run, speed)
        if train is None or fast is None:
            return {}
        found[run.run_id] = training_samples(run, train) / fast.samples_per_second / run.rounds
    return found


def speed_of(run: RunConfig, speed: Callable[[str], Speed | None]) -> Speed | None:
    """That of the run's model in its precision, or of the model where that is not known."""
    return speed(_with_precision(run)) or speed(run.model)


def _with_precision(run: RunConfig) -> str:
    return run.model if run.precision == "fp32" else f"{run.model} {run.precision}"


def total(lines: Sequence[Estimate]) -> tuple[int, int | None, float | None]:
    """Runs, samples and seconds in all; None as soon as one line does not know."""
    samples = [line.samples for line in lines]
    seconds = [line.seconds for line in lines]
    return (
        sum(line.runs for line in lines),
        None if None in samples else sum(value for value in samples if value is not None),
        None if None in seconds else math.fsum(value for value in seconds if value is not None),
    )


def known_speeds(device: str) -> tuple[str, dict[str, Speed]]:
    """The machine that stands for `cuda` or `cpu` in `speed.toml`, in words, and each model's speed on it."""
    about = tomllib.loads(files(__package__).joinpath("speed.toml").read_text(encoding="utf-8"))[device]
    speeds = {
        model: Speed(float(value), source) for source in (MEASURED, ESTIMATED) for model, value in about[source].items()
    }
    return about["machine"], speeds
