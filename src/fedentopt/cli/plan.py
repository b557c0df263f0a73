"""`fedentopt plan`: what selection would do for one's own federation, from its label counts; needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedentopt.cli.console import err, note, print_json, print_table, progress
from fedentopt.cli.console import out as console
from fedentopt.cli.select import COUNTS_HELP, DROP_HELP
from fedentopt.errors import InputError
from fedentopt.tables import read_counts

if TYPE_CHECKING:
    from rich.console import Console

    from fedentopt.plan import Plan
    from fedentopt.plan.outcome import Outcome

LARGE_FILE = 1 << 20  # bytes
PAUSE = 10.0  # seconds between two lines of progress in a log


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("plan")(plan)


def plan(
    counts: Annotated[Path, typer.Argument(help=COUNTS_HELP)],
    cohort: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Sizes of cohorts to try, such as 5,10,20%. Default: from the least that could hold "
            "every class up to five times that, and 10%.",
        ),
    ] = None,
    buffer: Annotated[
        str | None, typer.Option(metavar="LIST", help="FedEntOpt's buffers to try. Default: 0%,25%,50%,75%.")
    ] = None,
    epsilon: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Privacy budgets to try. The recommendation is for true counts if `none` is among "
            "them, else for the largest. Default: none,5,1,0.5,0.1.",
        ),
    ] = None,
    away: Annotated[str, typer.Option(help="Share of the clients that is away in a round, tried beside none.")] = "20%",
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of each trial. Default: 100, fewer for large tables.")
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="Trials of each choice, with seeds of their own. Default: 3.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first repetition.")] = 0,
    noisy: Annotated[
        bool, typer.Option("--noisy", help="The file holds noisy counts: those below 0 are read as 0.")
    ] = False,
    drop: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help=DROP_HELP)] = None,
    all_: Annotated[
        bool, typer.Option("--all", help="Of a large table, try the selectors that take long, too.")
    ] = False,
    out: Annotated[Path, typer.Option(help="The page's file.")] = Path("plan.html"),
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Plan cohorts for your own label counts: which selector, M, Q and ε, and why; a table and a page."""
    from fedentopt.plan import check_page, make_plan, write_page

    check_page(out)  # before the work, which may take a minute
    in_log = _is_log() and counts.is_file() and counts.stat().st_size >= LARGE_FILE
    if in_log:
        note(f"reading {counts}")
    with progress("reading"):
        table = read_counts(counts, noisy, drop or ())
    for line in table.notes:
        note(line)
    with _progress(in_log) as (advance, starting):
        found = make_plan(
            table.counts, clients=table.clients, classes=table.classes, cohorts=cohort, buffers=buffer,
            epsilon=epsilon, away=away, rounds=rounds, repetitions=repetitions, seed=seed, noisy=noisy,
            source=str(counts), drop=drop or (), everything=all_, progress=advance, starting=starting,
        )  # fmt: skip
    page, refusal = None, None
    try:
        page = write_page(found, out)
    except InputError as error:  # told behind the plan, which is not lost with its page
        refusal = error
    if json:
        print_json({"page": None if page is None else str(page), **found.to_json()})
    else:
        _show(found, page)
    if refusal is not None:
        raise refusal
    if open_ and page is not None:
        typer.launch(page.resolve().as_uri())


def _is_log() -> bool:
    return not err().is_terminal


@contextmanager
def _progress(in_log: bool) -> Iterator[tuple[Callable[[int, int], None], Callable[[str], None]]]:
    """What is told how far trials are, and what is tried next: a bar for people, in a log a line from time to time."""
    started = time.monotonic()
    last, share = -PAUSE, 0.0
    with progress("trying") as bar:

        def advance(done: int, total: int) -> None:
            nonlocal share
            share = done / max(total, 1)
            bar(completed=done, total=total)

        def starting(text: str) -> None:
            nonlocal last
            bar(description=f"trying {escape(text)}")
            taken = time.monotonic() - started
            if in_log and taken - last >= PAUSE:
                last = taken
                left = f", about {taken * (1 - share) / share:.0f} s left" if share else ""
                note(f"{share:.0%} tried{left}; now {text}")

        yield advance, starting


def _show(found: Plan, page: Path | None) -> None:
    from fedentopt.plan.costs import round_number
    from fedentopt.plan.recommendation import headline

    screen = console()
    federation, settings, best = found.federation, found.settings, found.recommendation
    size = best.chosen.choice.cohort
    screen.print(
        f"{settings['file']}: {len(federation.clients)} clients, {len(federation.classes)} classes, "
        f"{round_number(found.samples)} samples per client at the median; {settings['rounds']} rounds, "
        f"{settings['repetitions']} repetitions",
        markup=False,
    )
    if settings["sampled"]:
        screen.print(settings["sampled"], markup=False)
    screen.print(f"\n[bold]cohorts of {size}[/]")
    here = [o for o in found.by_size if o.choice.cohort == size]
    _table(screen, "selector", [(_named(o), o) for o in here], best.chosen)
    screen.print("\n[bold]cohort sizes[/]: random, and the recommended choice or what comes nearest")
    lines = []
    for cohort in settings["cohorts"]:
        of_size = [o for o in found.by_size if o.choice.cohort == cohort]
        lines.append((f"{cohort}, random", of_size[0]))
        cls = best.chosen.choice.selector
        near = [o for o in of_size if o.choice.selector is cls and o is not of_size[0]]
        if near:
            wanted = best.chosen.choice.buffer or 0
            nearest = min(near, key=lambda o: abs((o.choice.buffer or 0) - wanted))
            lines.append((f"{cohort}, {_named(nearest)}", nearest))
    _table(screen, "M", lines, best.chosen)
    noised = [o for o in found.by_noise if o.choice.cohort == size and o.choice.epsilon is not None]
    if noised:
        screen.print("\n[bold]noise[/]")
        words = [
            (f"ε = {o.choice.epsilon:g}, ε·n = {round_number((o.choice.epsilon or 0) * found.samples)}", o)
            for o in noised
        ]
        _table(screen, _named(noised[0]), words, best.chosen)
    if found.by_absence:
        screen.print(f"\n[bold]{100 * settings['away']:g} % of the clients away[/]")
        _table(screen, "selector", [(_named(o), o) for o in found.by_absence], best.chosen)
    for one in found.skipped:
        screen.print(f"not tried: {one.label}: {one.reason}", markup=False)
    screen.print(f"\n[bold]recommended: {escape(headline(federation, best.chosen))}[/]")
    for text in (best.reason, best.trade, found.privacy, found.availability):
        if text:
            screen.print(text, markup=False)
    screen.print("\n[bold]to carry it out[/] (the cohorts of the first repetition)")
    for text in (found.command(), "", found.python()):
        screen.print(text, markup=False, soft_wrap=True)
    if page is not None:
        screen.print(f"\npage: {page}", markup=False, soft_wrap=True)


def _named(outcome: Outcome) -> str:
    buffer = outcome.choice.buffer
    return outcome.name + ("" if buffer is None else f", Q = {buffer}")


def _table(screen: Console, heading: str, rows: Sequence[tuple[str, Outcome]], chosen: Outcome) -> None:
    """One line per outcome, the recommended one marked."""
    from rich.table import Table

    from fedentopt.plan.costs import round_number
    from fedentopt.plan.recommendation import share

    table = Table(box=None, pad_edge=False)
    table.add_column(heading, no_wrap=True)
    for name in ("entropy", "worst", "miss a class", "H_norm", "never"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, outcome in rows:
        style = "bold" if outcome is chosen else None
        table.add_row(
            escape(name) + (" *" if outcome is chosen else ""),
            f"{outcome.entropy:.3f}",
            f"{outcome.entropies.min():.3f}",
            share(float(1 - outcome.covered.mean())),
            f"{outcome.h_norm.mean():.3f}",
            round_number(float(outcome.never.mean())),
            style=style,
        )
    print_table(screen, table)
