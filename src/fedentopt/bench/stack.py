"""What selectors with feedback cost a stack: training samples a second of whole runs, beside random selection.

The same runs with every selector that needs to be told something, and with random selection, in turn, several times;
the best time of each counts. Clients have equally many samples, so that all train on as many, whoever is chosen.
Samples that candidates look at before (power-of-choice) are told beside: forward passes that no training replaces. A
census is training like any other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from fedentopt.bench.engine import as_json
from fedentopt.datasets import Dataset
from fedentopt.errors import InputError
from fedentopt.results.records import Checkpoint, Outcome, RoundRecord, RunStart
from fedentopt.selection import SELECTORS
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import Task, run_stack
from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.trainers import resolve_device

BASELINE = "random"


@dataclass(frozen=True)
class StackCase:
    """`runs` runs side by side, each with `clients` clients of `samples` samples, `cohort` a round."""

    runs: int
    clients: int
    samples: int
    cohort: int
    rounds: int
    epochs: int


GPU_CASE = StackCase(runs=40, clients=100, samples=500, cohort=10, rounds=40, epochs=5)
CPU_CASE = StackCase(runs=2, clients=20, samples=100, cohort=4, rounds=12, epochs=1)


@dataclass(frozen=True)
class StackSpeed:
    """`share` is the speed over that of random selection; `asked` the samples that candidates looked at, per sample of
    training."""

    selector: str
    samples_per_second: float
    share: float
    asked: float


def feedback_selectors() -> list[str]:
    """The selectors that need to be told something."""
    return [name for name in SELECTORS.names if SELECTORS.get(name).needs]


def bench_stack(
    device: str = "auto", *, case: StackCase | None = None, names: list[str] | None = None, repeats: int = 3,
    workers: int | None = None,
) -> Iterator[StackSpeed]:  # fmt: skip
    """Measure selector by selector, random selection first; each has a turn beside a run of random selection."""
    place = resolve_device(device)
    case = case or (GPU_CASE if place.type == "cuda" else CPU_CASE)
    for name in names or []:
        SELECTORS.get(name)
    data = _images(case)
    options = RunOptions(device=str(place), workers=workers)
    _run(case, BASELINE, data, options)  # compiles what has to be compiled
    plain = _run(case, BASELINE, data, options)
    yield StackSpeed(BASELINE, plain[1] / plain[0], 1.0, 0.0)
    for name in names or feedback_selectors():
        pairs = [(_run(case, name, data, options), _run(case, BASELINE, data, options)) for _ in range(repeats)]
        (own, trained, asked), (other, plainly, _) = (min(turn) for turn in zip(*pairs, strict=True))
        # A client drawn twice trains once: by time alone, clustered sampling would seem faster than it is.
        yield StackSpeed(name, trained / own, (trained / own) / (plainly / other), asked / trained)


def _run(case: StackCase, selector: str, data: Dataset, options: RunOptions) -> tuple[float, int, int]:
    """Seconds, samples trained on (each as often as it was), and samples that candidates looked at."""
    configs = [
        RunConfig(
            dataset="bench", partition="iid", clients=case.clients, cohort=str(case.cohort), rounds=case.rounds,
            epochs=case.epochs, evaluate_every=case.rounds, selector=selector, seed=seed,
        )
        for seed in range(case.runs)
    ]  # fmt: skip
    recorders = [_Tally() for _ in configs]
    if options.device.startswith("cuda"):
        torch.cuda.synchronize()
    start = time.perf_counter()
    run_stack([Task(c, r) for c, r in zip(configs, recorders, strict=True)], data, options)
    seconds = time.perf_counter() - start
    trained = sum(recorder.trained for recorder in recorders) * case.samples * case.epochs
    census = SELECTORS.get(selector)(case.cohort).census()
    if census is not None:  # everybody trains once more
        trained += case.runs * case.clients * min(census.samples or case.samples, case.samples) * census.epochs
    asks = "candidate_loss" in SELECTORS.get(selector).needs
    batch = SELECTORS.settings(selector)["batch"].default if "batch" in SELECTORS.settings(selector) else case.samples
    asked = case.runs * case.rounds * 2 * case.cohort * min(batch, case.samples) if asks else 0
    return seconds, trained, asked


class _Tally:
    """A recorder that counts who trained and keeps nothing."""

    def __init__(self) -> None:
        self.trained = 0

    def start(self, start: RunStart) -> None: ...

    def resume(self) -> tuple[Checkpoint, list[RoundRecord]] | None:
        return None

    def record(self, record: RoundRecord) -> None:
        self.trained += len(record.trained)

    def save(self, checkpoint: Checkpoint) -> None: ...

    def finish(self, outcome: Outcome) -> None: ...


def _images(case: StackCase) -> Dataset:
    rng = np.random.default_rng(0)
    total = case.clients * case.samples
    if total > 200_000:
        raise InputError(f"case: {total} images; accepted: at most 200000")
    pixels = rng.integers(0, 256, (total, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(total) % 10
    names = tuple(f"class {c}" for c in range(10))
    return Dataset("bench", pixels, labels, pixels[:100], labels[:100], names, (0.5,) * 3, (0.25,) * 3)


def stack_json(speeds: list[StackSpeed], device: str) -> dict[str, Any]:
    """The measurement for machines, with the code, the libraries and the hardware it was made with."""
    made_with = {key: value for key, value in as_json([], device).items() if key != "speeds"}
    return {**made_with, "selectors": [asdict(speed) for speed in speeds]}
