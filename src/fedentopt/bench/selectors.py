"""How long every selector takes for a round, and for how many clients: a million, or the most that it serves.

A round is what a server does for it: `candidates`, `select` and `observe`, with made-up answers. Those that know a
client by what it told are told of everybody first, since that is when they work hardest (but `inferred`, which keeps
what it is told as counts, of which everybody has some anyway); FedEntOpt is measured in the same process on the same
counts. Every selector runs in a process of its own, so that its peak memory can be told:
`python -m fedentopt.bench.selectors NAME` prints one JSON object.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass

import numpy as np

from fedentopt.bench.selection import Case, dense_counts, peak_mb
from fedentopt.selection import SELECTORS, ClientId, CohortWarning, EntropySelector, Head, Observation, Selector
from fedentopt.selection.everybody_once import EverybodyOnce

CLIENTS, CLASSES, COHORT = 1_000_000, 10, 100
FEATURES = 84  # that enter LeNet-5's last layer
REPEATS = 3


@dataclass(frozen=True)
class SelectorSpeed:
    """What a selector took: `first_ms` for the first round with all preparation, `next_ms` for one afterwards, `times`
    as long as FedEntOpt's on the same counts. `largest` is the most clients it serves, None: no limit; `all_pairs` says
    that it works with all distances between two of them."""

    selector: str
    clients: int
    classes: int
    cohort: int
    first_ms: float
    next_ms: float
    fedentopt_ms: float
    times: float
    largest: int | None
    needs: list[str]
    peak_mb: float | None
    all_pairs: bool = False


def run_selector(name: str) -> SelectorSpeed:
    """Measure one selector in a process of its own; an unknown name is refused."""
    SELECTORS.get(name)
    done = subprocess.run([sys.executable, "-m", __name__, name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the benchmark of {name} failed:\n{done.stderr}")
    return SelectorSpeed(**json.loads(done.stdout))


def measure(name: str, clients: int = CLIENTS, cohort: int = COHORT) -> SelectorSpeed:
    """Measure one selector here, among so many clients or the most that it serves."""
    kind = SELECTORS.get(name)
    clients = min(clients, kind.largest or clients)
    counts = dense_counts(Case(clients, CLASSES, cohort))
    selector = kind(cohort, seed=0)
    selector.register(counts)
    if isinstance(selector, EverybodyOnce) or kind.needs & {"loss", "update"}:
        selector.observe(_answers(selector, range(clients)))
    first = _round(selector)
    later = min(_round(selector) for _ in range(REPEATS))
    peak = peak_mb()
    rival = EntropySelector(cohort, seed=0)
    rival.register(counts)
    _round(rival)
    ours = min(_round(rival) for _ in range(REPEATS))
    return SelectorSpeed(
        selector=name,
        clients=clients,
        classes=CLASSES,
        cohort=cohort,
        first_ms=1e3 * first,
        next_ms=1e3 * later,
        fedentopt_ms=1e3 * ours,
        times=later / ours,
        largest=kind.largest,
        needs=sorted(kind.needs),
        peak_mb=peak,
        all_pairs=kind.all_pairs,
    )


def _round(selector: Selector) -> float:
    """Seconds that a round takes the server; what clients would compute is not counted."""
    start = time.perf_counter()
    asked = selector.candidates()
    spent = time.perf_counter() - start
    losses = None if asked is None else {client: float(i % 7) for i, client in enumerate(asked.ids)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CohortWarning)
        start = time.perf_counter()
        cohort = selector.select(losses=losses)
        spent += time.perf_counter() - start
    told = _answers(selector, cohort.clients) if selector.needs - {"candidate_loss"} else None
    start = time.perf_counter()
    if told is not None:
        selector.observe(told)
    return spent + time.perf_counter() - start


def _answers(selector: Selector, clients: object) -> dict[ClientId, Observation]:
    """What clients would tell, drawn, of what the selector needs; the update is as long as the last layer."""
    rng = np.random.default_rng(selector.round)
    told: dict[ClientId, Observation] = {}
    for client in clients:  # type: ignore[attr-defined]
        loss, seconds = float(rng.uniform(0.1, 3)), float(rng.uniform(1, 9))
        head = weight = None
        if selector.needs & {"head", "update"}:
            weight = rng.normal(size=(CLASSES, FEATURES)).astype(np.float32)
            head = Head(weight, rng.normal(size=CLASSES).astype(np.float32))
        told[client] = Observation(50, loss, 1.1 * loss, head, None if weight is None else weight.ravel(), seconds)
    return told


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1]))))
