"""How far a reproduction is: a bar on a terminal, otherwise a line every half minute, so that a log shows life."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fedentopt.cli.console import err
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.progress import TimeLeftColumn

if TYPE_CHECKING:
    from fedentopt.paper.ray_worker import WorkerReport
    from fedentopt.simulation.engine import RoundEvent

EVERY = 30.0
"""Seconds between two lines in a log."""


class RoundCount:
    """Rounds done and to do over all runs, and how fast they go.

    A run that is continued reports from a later round on; what an earlier command did is no work of this one, so
    the time left stays an honest guess. `costs` are by run what a round takes beside those of the others: a round of
    VGG-11 as long as many of LeNet-5. Without them all take the same.
    """

    def __init__(self, runs: Sequence[RunConfig], now: float, costs: Mapping[str, float] | None = None) -> None:
        self._rounds = {run.run_id: run.rounds for run in runs}
        self._costs = costs or {}
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        self._start = now

    def add(self, run_id: str, number: int, rounds: int) -> None:
        """Take note that a run has done a round; FedConcat tells only now how many it will have."""
        self._rounds[run_id] = rounds
        self._first.setdefault(run_id, number)
        self._last[run_id] = max(number, self._last.get(run_id, 0))

    def leave_out(self, run_ids: Iterable[str]) -> None:
        """Take note that these runs are not to be done after all."""
        for run_id in run_ids:
            self._rounds.pop(run_id, None)

    @property
    def done(self) -> int:
        """Rounds this command has done."""
        return sum(last - self._first[run] + 1 for run, last in self._last.items())

    @property
    def total(self) -> int:
        """Rounds this command has to do."""
        return sum(rounds - self._first.get(run, 1) + 1 for run, rounds in self._rounds.items())

    @property
    def work(self) -> tuple[float, float]:
        """Done and to do in all, each round counted by what it costs."""
        done = {run: last - self._first[run] + 1 for run, last in self._last.items()}
        total = {run: rounds - self._first.get(run, 1) + 1 for run, rounds in self._rounds.items()}
        return self._cost(done), self._cost(total)

    def _cost(self, rounds: Mapping[str, int]) -> float:
        return math.fsum(number * self._costs.get(run, 1.0) for run, number in rounds.items())

    def line(self, now: float) -> str:
        """How far, how long yet."""
        finished = sum(self._last.get(run) == rounds for run, rounds in self._rounds.items())
        text = f"{self.done:,} of {self.total:,} rounds, {finished} of {len(self._rounds)} runs"
        done, total = self.work
        if not done:
            return text
        left = (now - self._start) / done * (total - done)
        return f"{text}, {duration(now - self._start)} so far, about {duration(left)} left"


def duration(seconds: float) -> str:
    """Seconds for people: 45 s, 12 min, 3.4 h, 2.1 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


class Reporter:
    """Takes rounds from the engine or from Ray workers and shows them."""

    def __init__(self, runs: Sequence[RunConfig], costs: Mapping[str, float]) -> None:
        """`costs`: see `RoundCount`."""
        self._console = err()
        self._count = RoundCount(runs, time.monotonic(), costs)
        self._told = time.monotonic()
        self.others: set[RunConfig] = set()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def found_finished(self, runs: Sequence[RunConfig]) -> None:
        """From a stack that begins: these runs were another command's work by then."""
        self.others.update(runs)
        self._count.leave_out(run.run_id for run in runs)
        self._show()

    def say(self, line: str) -> None:
        """A line of its own, above the bar where there is one."""
        self._console.print(line, soft_wrap=True, markup=False)

    def round_done(self, event: RoundEvent) -> None:
        """From the engine."""
        self._count.add(event.run_id, event.round, event.rounds)
        self._show()

    def worker_report(self, report: WorkerReport) -> None:
        """From a Ray worker."""
        for run_id, (number, of, _) in report.rounds.items():
            self._count.add(run_id, number, of)
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._count.done, total=self._count.total, work=self._count.work)
        elif now - self._told >= EVERY:
            self._told = now
            self.say(f"{time.strftime('%H:%M:%S')} {self._count.line(now)}")

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """The bar, while work goes on; nothing unless on a terminal."""
        if not self._console.is_terminal:
            yield
            return
        self._bar = Progress(
            TextColumn("rounds"),
            BarColumn(bar_width=32),
            TextColumn("{task.percentage:.1f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeLeftColumn(),
            console=self._console,
            transient=True,
        )
        with self._bar:
            self._task = self._bar.add_task("rounds", total=self._count.total)
            yield
        self._bar = None
