"""Progress for people: a bar over all rounds of all runs, with each method's accuracy so far."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from fedentopt.simulation.config import RunConfig

if TYPE_CHECKING:
    from fedentopt.simulation.engine import RoundEvent


_WIDE = 100  # columns from which on the bar is long
_FIGURES = 42  # columns of rounds done and to do, of the time so far and the time left, and the gaps between


class TimeLeftColumn(ProgressColumn):
    """The time left, at the mean speed since the bar began; of `work`, a task's field of what is done and what is to do
    in all, where it has one, otherwise of its steps.

    Rich's own column goes by the last half minute. Runs that train together end their rounds at the same moment, so
    where a round takes longer it would see nothing, or nothing but that moment, and promise the end in a second.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = (0.0, 0.0)  # what was done, and when

    def render(self, task: Task) -> Text:
        """As 1:02:03, counting down until more is done."""
        done, total = task.fields.get("work", (task.completed, task.total))
        if not done or total is None or task.elapsed is None:
            return Text("-:--:--", style="progress.remaining")
        if done != self._last[0]:
            self._last = (done, task.elapsed)
        spent = self._last[1]
        left = round(max(0.0, spent / done * (total - done) - (task.elapsed - spent)))
        return Text(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}", style="progress.remaining")


@contextlib.contextmanager
def progress_bar(
    configs: Sequence[RunConfig], console: Console, *, show: bool | None = None
) -> Iterator[Callable[[RoundEvent], None] | None]:
    """A bar on `console` while the block runs; nothing unless that is a terminal or a notebook, or `show` says so."""
    if not (console.is_terminal or console.is_jupyter if show is None else show):
        yield None
        return
    if console.is_jupyter and importlib.util.find_spec("ipywidgets") is None:  # Rich would warn of it again and again
        console.print("no progress bar: a notebook needs ipywidgets for one (pip install ipywidgets)")
        yield None
        return
    narrow = console.width < _WIDE
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=10 if narrow else 24),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeLeftColumn(),
        console=console,
        transient=True,
    )
    tally = RoundTally(configs)
    room = max(console.width - (_FIGURES + 10 if narrow else _FIGURES + 24), 10)
    with bar:
        task = bar.add_task("starting", total=None)

        def advance(event: RoundEvent) -> None:
            tally.add(event)
            text = tally.describe()
            said = text if len(text) <= room else text[: room - 1] + "…"  # else Rich would cut the figures behind it
            bar.update(task, completed=tally.done, total=tally.total, description=escape(said))

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
        shown = [f"{name} {statistics.fmean(values):.1f} %" for name, values in list(by_method.items())[:4]]
        return " · ".join(shown) + (" …" if len(by_method) > 4 else "") or "training"
