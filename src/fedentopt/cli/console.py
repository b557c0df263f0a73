"""What every command prints with: people get rich text, machines get JSON on standard output."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from typer.core import TyperGroup

from fedentopt.errors import InputError
from fedentopt.selection import CohortWarning


def out() -> Console:
    """Console on standard output, made anew so that redirections made later are honoured."""
    _show_anything(sys.stdout)
    return Console(highlight=False)


def err() -> Console:
    """Console on standard error: warnings, progress, refusals."""
    _show_anything(sys.stderr)
    return Console(stderr=True, highlight=False)


def fail(message: str) -> None:
    """Print a refusal. The text may hold anything a user typed, so markup in it is not interpreted.

    Where it cannot be printed, the exit code has to do.
    """
    with contextlib.suppress(OSError):
        err().print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)


def note(message: str) -> None:
    """Print a line for people on standard error."""
    err().print(escape(message), soft_wrap=True)


@contextlib.contextmanager
def warnings_as_notes() -> Iterator[None]:
    """While a command runs, say what a selector warns of as any other line: where in our code is nothing to a user."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, CohortWarning):
            note(str(message))
        else:
            usual(message, category, *place, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual


class Commands(TyperGroup):
    """A group of commands. A name that is near one of them is suggested once, though both typer and click (from 8.4
    on) would."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if "Did you mean" in str(getattr(error, "message", "")) and hasattr(error, "possibilities"):
                vars(error)["possibilities"] = None
            raise


@contextlib.contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """A bar with the time left, on standard error and only for people; what moves it takes `completed`, `advance` and
    `total`."""
    from rich.progress import Progress

    console = err()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        yield partial(bar.update, bar.add_task(what, total=total))


def print_table(console: Console, table: Table) -> None:
    """Print a table in which columns that may not wrap keep their width, and others that of their longest word: where a
    terminal has no room for them, lines run on, and neither a figure nor a word is cut."""
    room = console.options.update(width=10_000)  # measures are cut to the width that they are asked for
    for column in table.columns:
        measures = [Measurement.get(console, room, cell) for cell in (column.header, *column.cells)]
        column.min_width = max(one.maximum if column.no_wrap else one.minimum for one in measures)
    least = Measurement.get(console, room, table).minimum
    if least > console.width:  # Rich would leave whole columns out
        table.width = least
    console.print(table, crop=False)


def print_json(value: Any) -> None:
    """Write one JSON document; NaN and infinity have no place in it."""
    if sys.stdout is None:
        raise InputError("--json: standard output is closed; accepted: one that can be written to")
    json.dump(value, sys.stdout, allow_nan=False)
    sys.stdout.write("\n")


def flush_out() -> None:
    """Have all that was printed leave the process, or fail, now and not at its end."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _show_anything(stream: TextIO | None) -> None:
    """Let a stream write what its encoding lacks as an escape such as \\u6771: names are the user's, and a name that
    cannot be shown is no reason to stop halfway.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return
    if stream.errors == "strict" or (stream.errors == "surrogateescape" and not stream.encoding.startswith("utf")):
        stream.reconfigure(errors="backslashreplace")
