"""How fast selection is, against the naive NumPy that the definition suggests, on the same counts.

Both must find the same cohort. Every case runs in a process of its own, so that its peak memory can be told:
`python -m fedentopt.bench.selection CASE` prints one JSON object.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection.entropy import EntropySelector
from fedentopt.selection.scoring import TIE_BITS


@dataclass(frozen=True)
class Case:
    """K clients with C classes, a cohort of M.

    `held` is the most labels a client of a sparse case holds; `epsilon` the budget of counts with noise.
    """

    clients: int
    classes: int
    cohort: int
    held: int | None = None
    epsilon: float | None = None


@dataclass(frozen=True)
class Speed:
    """What a case took. `first_ms` is the first cohort, with all preparation; `ours_ms` and `naive_ms` are one
    cohort afterwards, and `times` their ratio; the naive way has no figure where it would not fit in memory.
    """

    case: str
    clients: int
    classes: int
    cohort: int
    register_ms: float
    first_ms: float
    ours_ms: float
    naive_ms: float | None
    times: float | None
    same_cohort: bool | None
    peak_mb: float | None


CASES = {
    "paper": Case(100, 10, 10),
    "thousands": Case(10_000, 10, 100),
    "million": Case(1_000_000, 10, 100),
    "million-noisy": Case(1_000_000, 10, 100, epsilon=0.5),
    "million-sparse": Case(1_000_000, 1_000, 100, held=5),
}


def check_case(name: str) -> None:
    """Refuse a case that is none."""
    if name not in CASES:
        raise InputError(f"case: {name!r} is unknown; accepted: {', '.join(CASES)}")


def run_case(name: str) -> Speed:
    """Run one case in a process of its own."""
    check_case(name)
    done = subprocess.run([sys.executable, "-m", __name__, name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the benchmark case {name} failed:\n{done.stderr}")
    return Speed(**json.loads(done.stdout))


def naive_cohort(counts: np.ndarray, first: int, size: int) -> list[int]:
    """The definition in a few lines: every entropy anew for every pick."""
    gathered = counts[first].astype(np.float64)
    open_rows = np.ones(len(counts), dtype=bool)
    open_rows[first] = False
    picked = [first]
    while len(picked) < size:
        sums = counts + gathered
        p = sums / sums.sum(axis=1, keepdims=True)
        entropies = -(p * np.log2(np.where(p > 0, p, 1.0))).sum(axis=1)
        entropies[~open_rows] = -np.inf
        best = int(np.argmax(entropies >= entropies.max() - TIE_BITS))
        open_rows[best] = False
        gathered += counts[best]
        picked.append(best)
    return picked


def measure(name: str) -> Speed:
    """Run one case here."""
    case = CASES[name]
    counts = dense_counts(case) if case.held is None else _sparse(case)
    started = time.perf_counter()
    selector = EntropySelector(case.cohort, seed=0)
    selector.register(counts)
    registered = time.perf_counter()
    selector.select()
    first = time.perf_counter()
    cohort, ours = _best_of(20 if case.clients < 1000 else 3, selector.select)
    peak = peak_mb()  # of ours alone: the naive way comes after
    naive_ms, same = None, None
    if isinstance(counts, np.ndarray):
        repeats = 20 if case.clients < 1000 else 1
        picked, naive = _best_of(repeats, lambda: naive_cohort(counts, int(cohort.clients[0]), case.cohort))
        naive_ms, same = 1e3 * naive, picked == list(cohort.clients)
    return Speed(
        case=name,
        clients=case.clients,
        classes=case.classes,
        cohort=case.cohort,
        register_ms=1e3 * (registered - started),
        first_ms=1e3 * (first - registered),
        ours_ms=1e3 * ours,
        naive_ms=naive_ms,
        times=None if naive_ms is None else naive_ms / (1e3 * ours),
        same_cohort=same,
        peak_mb=peak,
    )


def _best_of(repeats: int, action: Any) -> tuple[Any, float]:
    """The last result and the least time of several calls: what the machine can do when nothing else disturbs."""
    least = np.inf
    for _ in range(repeats):
        start = time.perf_counter()
        result = action()
        least = min(least, time.perf_counter() - start)
    return result, float(least)


def dense_counts(case: Case) -> np.ndarray:
    """Counts (K, C). Sizes and label shares that differ widely: log-normal around 55 samples, Dirichlet(0.3).

    With noise: two classes of 25 samples each, and what a client reports of them.
    """
    rng = np.random.default_rng(0)
    if case.epsilon is not None:
        held = rng.permuted(np.tile(np.arange(case.classes), (case.clients, 1)), axis=1)[:, :2]
        counts = np.zeros((case.clients, case.classes))
        np.put_along_axis(counts, held, 25, axis=1)
        return np.maximum(counts + rng.laplace(0, 1 / case.epsilon, counts.shape), 0)
    shares = rng.dirichlet(np.full(case.classes, 0.3), size=case.clients)
    return rng.multinomial(np.maximum(rng.lognormal(4, 1, case.clients).astype(int), 10), shares)


def _sparse(case: Case) -> SimpleNamespace:
    """Compressed rows with 1 to `held` different classes a client."""
    assert case.held is not None
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, case.held + 1, case.clients)
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    place = np.arange(indptr[-1]) - np.repeat(indptr[:-1], lengths)
    start = np.repeat(rng.integers(0, case.classes, case.clients), lengths)
    stride = np.repeat(rng.integers(1, case.classes // case.held, case.clients), lengths)
    classes = ((start + place * stride) % case.classes).astype(np.int32)
    counts = rng.integers(1, 100, indptr[-1], dtype=np.int32)
    return SimpleNamespace(indptr=indptr, indices=classes, data=counts, shape=(case.clients, case.classes))


def peak_mb() -> float | None:
    """Most memory in MB this process ever had, where the system tells."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux hands its parent's figure to a new process through getrusage, not through this file
        found = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return int(found[1]) * 1024 / 1e6
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1]))))
