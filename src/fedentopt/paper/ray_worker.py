"""What happens on a Ray worker: one stack, and word of it to the driver."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.sweep import ELSEWHERE, Stack, run_sweep

if TYPE_CHECKING:
    from fedentopt.simulation.engine import RoundEvent

Files = dict[str, dict[str, bytes]]
"""Content of finished run folders, by run id and file name."""


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


def work(number: int, stack: Stack, options: RunOptions, token: str, inbox: Any) -> Files:
    """On a worker: run a stack where its results belong, or in a folder of its own whose content goes back.

    `token` names a file in `options.out`: a worker that sees it shares the disk.
    """
    import ray

    me = (number, os.getpid(), ray.get_runtime_context().get_node_id()[:8])
    inbox.put.remote(WorkerReport(*me))
    news: dict[str, tuple[int, int, float | None]] = {}
    sent = time.monotonic()

    def progress(event: RoundEvent) -> None:
        nonlocal sent
        news[event.run_id] = (event.round, event.rounds, event.accuracy)
        if time.monotonic() - sent > 1:
            inbox.put.remote(WorkerReport(*me, rounds=dict(news)))
            news.clear()
            sent = time.monotonic()

    options = dataclasses.replace(options, say=lambda line: inbox.put.remote(WorkerReport(*me, line=line)))
    if (options.out_dir / token).exists():
        run_sweep(stack, options, progress=progress, afresh=ELSEWHERE)
        inbox.put.remote(WorkerReport(*me, rounds=dict(news)))
        return {}
    with tempfile.TemporaryDirectory(prefix="fedentopt-") as folder:
        run_sweep(stack, dataclasses.replace(options, out=folder), progress=progress, afresh=ELSEWHERE)
        return {run.run_id: _read_folder(Path(folder) / run.run_id) for run in stack}


def _read_folder(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.is_file()}
