"""Runs started from a command: progress for people, a clear end when they are stopped."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.markup import escape

from fedentopt.cli.console import err, note
from fedentopt.errors import InputError
from fedentopt.pages import RESULTS_PAGE, check_page
from fedentopt.simulation.jobs import Job
from fedentopt.simulation.options import RunOptions

if TYPE_CHECKING:
    from fedentopt.results.reading import RunResult


@contextmanager
def terminated_with_care() -> Iterator[None]:
    """SIGTERM, by which a cluster ends a job, is taken like Ctrl-C: what was done is saved first."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def conduct(jobs: Sequence[Job], options: RunOptions, *, also_needs: Sequence[str]) -> list[RunResult]:
    """Bring all runs to their end and return them in order; Ctrl-C and SIGTERM end the command with code 130.

    Packages that are missing are named before anything trains: those of the simulator, and `also_needs`, which
    the command will want for what it makes of the runs.
    """
    missing = [name for name in ("torch", "safetensors", *also_needs) if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"this needs {', '.join(missing)}; pip install 'fedentopt[sim]' brings what is missing")
    from fedentopt.datasets.class_labels import is_text

    if options.page and not is_text(options.out):
        raise InputError(
            f"out: {options.out!r} cannot stand on a page; accepted: a path in UTF-8, or any with --no-page"
        )
    if options.page and os.path.exists(page := options.out_dir / RESULTS_PAGE):
        check_page(page)  # before the work, which may take hours
    try:
        with terminated_with_care():
            return _sweep(jobs, options)
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


def _sweep(jobs: Sequence[Job], options: RunOptions) -> list[RunResult]:
    from fedentopt.results.tensorboard import CurveRecorder, need_tensorboard, write_missing_curves
    from fedentopt.simulation.progress import progress_bar
    from fedentopt.simulation.sweep import run_sweep

    if options.log:
        need_tensorboard()
    console = err()
    options = dataclasses.replace(options, say=lambda line: console.print(escape(line), soft_wrap=True))
    with progress_bar([job.config for job in jobs], console) as progress:
        runs = run_sweep(jobs, options, progress=progress, recorder=CurveRecorder if options.log else None)
    if options.log:
        for run in runs:
            write_missing_curves(run)
    return runs
