"""What happens on a Ray worker: one stack, and word of it to the driver."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedentopt.paper.runner import Stack, run_stacks

Files = dict[str, dict[str, bytes]]
"""Content of finished run folders, by run id and file name."""


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker needs to know besides its runs."""

    out_dir: str
    token: str  # a file in out_dir: whoever sees it shares the disk
    data_dir: str | None
    device: str
    trainer: str
    threads: int | None
    checkpoint_every: int


@dataclass(frozen=True)
class WorkerReport:
    """A worker's word on its stack: where it runs, and how far each of its runs is (round, of, accuracy)."""

    stack: int
    pid: int
    node: str
    rounds: dict[str, tuple[int, int, float | None]] = field(default_factory=dict)
    line: str | None = None


class Inbox:
    """Keeps what workers report until it is fetched; lives in the cluster as an actor."""

    def __init__(self) -> None:
        self._reports: list[WorkerReport] = []

    def put(self, report: WorkerReport) -> None:
        """Called by workers."""
        self._reports.append(report)

    def fetch(self) -> list[WorkerReport]:
        """Called by the driver: everything since the last time."""
        reports, self._reports = self._reports, []
        return reports


def work(number: int, stack: Stack, options: WorkerOptions, inbox: Any) -> Files:
    """On a worker: run a stack where its results belong, or in a folder of its own whose content goes back."""
    import ray

    from fedentopt.simulation.engine import EngineOptions, RoundEvent

    me = (number, os.getpid(), ray.get_runtime_context().get_node_id()[:8])
    inbox.put.remote(WorkerReport(*me))
    news: dict[str, tuple[int, int, float | None]] = {}
    told = time.monotonic()

    def progress(event: RoundEvent) -> None:
        nonlocal told
        news[event.run_id] = (event.round, event.rounds, event.accuracy)
        if time.monotonic() - told > 1:
            inbox.put.remote(WorkerReport(*me, rounds=dict(news)))
            news.clear()
            told = time.monotonic()

    engine = EngineOptions(
        device=options.device, trainer=options.trainer, workers=options.threads,
        checkpoint_every=options.checkpoint_every, say=lambda line: inbox.put.remote(WorkerReport(*me, line=line)),
    )  # fmt: skip
    data_dir = Path(options.data_dir) if options.data_dir else None
    shared = Path(options.out_dir)
    if (shared / options.token).exists():
        run_stacks([stack], shared, engine, data_dir=data_dir, progress=progress)
        inbox.put.remote(WorkerReport(*me, rounds=dict(news)))
        return {}
    with tempfile.TemporaryDirectory(prefix="fedentopt-") as folder:
        run_stacks([stack], Path(folder), engine, data_dir=data_dir, progress=progress)
        return {run.run_id: _read_folder(Path(folder) / run.run_id) for run in stack}


def _read_folder(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.is_file()}
