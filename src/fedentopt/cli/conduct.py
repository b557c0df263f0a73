"""Runs started from a command: progress for people, a clear end when they are stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedentopt.cli.console import err, note
from fedentopt.errors import InputError
from fedentopt.results.statistics import Spread
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.options import RunOptions

if TYPE_CHECKING:
    from fedentopt.results.reading import RunResult
    from fedentopt.simulation.engine import RoundEvent


def conduct(configs: Sequence[RunConfig], options: RunOptions, *, also_needs: Sequence[str] = ()) -> list[RunResult]:
    """Bring all runs to their end and return them in order; Ctrl-C ends the command with code 130.

    Packages that are missing are named before anything trains: those of the simulator, and `also_needs`, which
    the command will want for what it makes of the runs.
    """
    missing = [name for name in ("torch", "safetensors", *also_needs) if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"this needs {', '.join(missing)}; pip install 'fedentopt[sim]' brings what is missing")
    from fedentopt.datasets.npz import is_text

    if options.page and not is_text(options.out):
        raise InputError(
            f"out: {options.out!r} cannot stand on a page; accepted: a path in UTF-8, or any with --no-page"
        )
    try:
        return _sweep(configs, options)
    except KeyboardInterrupt:
        again = "" if options.resume else " without --no-resume"
        note(f"stopped; what was done is saved in {options.out}: the same command{again} continues there")
        raise typer.Exit(130) from None


def page_of(options: RunOptions) -> dict[str, str]:
    """Write the HTML page of the results' folder; its path as {"page": ...}, or nothing where none is wanted."""
    if not options.page:
        return {}
    from fedentopt.report import write_report

    return {"page": str(write_report(options.out_dir))}


def _sweep(configs: Sequence[RunConfig], options: RunOptions) -> list[RunResult]:
    from fedentopt.results.tensorboard import CurveRecorder, need_tensorboard, write_missing_curves
    from fedentopt.simulation.sweep import run_sweep

    if options.log:
        need_tensorboard()
    console = err()
    options = dataclasses.replace(options, say=lambda line: console.print(escape(line), soft_wrap=True))
    with _progress(configs, console) as progress:
        runs = run_sweep(configs, options, progress=progress, recorder=CurveRecorder if options.log else None)
    if options.log:
        for run in runs:
            write_missing_curves(run)
    return runs


@contextlib.contextmanager
def _progress(configs: Sequence[RunConfig], console: Console) -> Iterator[Callable[[RoundEvent], None] | None]:
    """A bar over all rounds of all runs, with each method's accuracy so far; nothing unless on a terminal."""
    if not console.is_terminal:
        yield None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    tally = RoundTally(configs)
    with bar:
        task = bar.add_task("starting", total=None)

        def advance(event: RoundEvent) -> None:
            tally.add(event)
            bar.update(task, completed=tally.done, total=tally.total, description=escape(tally.describe()))

        yield advance


class RoundTally:
    """Counts rounds over many runs, and keeps each method's last accuracies.

    Rounds that an earlier command did are left out of both sums, so that the time left is an honest guess;
    runs not heard of yet (finished long ago, or still to come) are counted in only once they report.
    """

    def __init__(self, configs: Sequence[RunConfig]) -> None:
        self._methods = {config.run_id: config.method for config in configs}
        self._first: dict[str, int] = {}
        self._rounds: dict[str, tuple[int, int]] = {}
        self._accuracy: dict[str, float] = {}

    def add(self, event: RoundEvent) -> None:
        """Take note of one round of one run."""
        self._first.setdefault(event.run_id, event.round)
        self._rounds[event.run_id] = (event.round, event.rounds)
        if event.accuracy is not None:
            self._accuracy[event.run_id] = event.accuracy

    @property
    def done(self) -> int:
        """Rounds done by this command."""
        return sum(now - self._first[run] + 1 for run, (now, _) in self._rounds.items())

    @property
    def total(self) -> int:
        """Rounds that this command has to do in the runs it has begun."""
        return sum(total - self._first[run] + 1 for run, (_, total) in self._rounds.items())

    def describe(self) -> str:
        """Accuracy so far, mean over the seeds, of up to four methods."""
        by_method: dict[str, list[float]] = {}
        for run, accuracy in self._accuracy.items():
            by_method.setdefault(self._methods.get(run, run), []).append(accuracy)
        shown = [f"{name} {Spread.of(values).mean:.1f} %" for name, values in list(by_method.items())[:4]]
        return " · ".join(shown) + (" …" if len(by_method) > 4 else "") or "training"
