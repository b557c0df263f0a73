"""The command line: parse, call, print. Every command sits in a module of its own."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import sys
import traceback

import typer

from fedentopt.cli import (
    bench,
    compare,
    console,
    data,
    methods,
    partition,
    plan,
    report,
    reproduce,
    run,
    select,
    version,
)
from fedentopt.cli.console import fail
from fedentopt.errors import InputError

app = typer.Typer(
    name="fedentopt",
    cls=console.Commands,
    help="Balanced cohorts for federated learning under label skew.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    show_version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    json: bool = typer.Option(False, "--json", help="With --version: all versions and the devices."),
) -> None:
    if show_version:
        version.show(json)
        raise typer.Exit
    if json:
        raise InputError("json: goes with --version here; accepted: --version --json, or behind a command")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


for _module in (compare, run, reproduce, plan, select, methods, partition, data, report, bench):
    _module.register(app)

# One line per command at 80 columns; what else a command says of itself is in its own help.
SUMMARIES = {
    "compare": "Compare methods on one setting: a table, plots, a page.",
    "run": "Train one method on one setting.",
    "reproduce": "Run the paper cell by cell, ours beside the printed figures.",
    "plan": "Say what selection would do for a table of label counts.",
    "select": "Select balanced cohorts from a table of label counts.",
    "methods": "List the algorithms and selectors with their settings.",
    "partition": "Split samples among clients with label skew.",
    "data": "List, fetch and check data sets.",
    "report": "Make one self-contained HTML page of runs.",
    "bench": "Measure the speed of selection and training.",
}
for _command in app.registered_commands:
    _command.short_help = SUMMARIES.get(str(_command.name or getattr(_command.callback, "__name__", "")))
for _group in app.registered_groups:
    _group.short_help = SUMMARIES.get(str(_group.name))
for _commands in (app, *(_group.typer_instance for _group in app.registered_groups)):
    for _command in _commands.registered_commands if _commands else ():
        # typer keeps the line breaks of later paragraphs, which are the source's and not the terminal's.
        _paragraphs = inspect.cleandoc(getattr(_command.callback, "__doc__", "") or "").split("\n\n")
        _command.help = "\n\n".join(" ".join(_paragraph.split()) for _paragraph in _paragraphs)


# What the code imports, by the extra that brings it.
_BROUGHT_BY = {
    "sim": (
        "torch", "torchvision", "sklearn", "scipy", "pandas", "safetensors", "PIL", "platformdirs", "matplotlib",
        "plotly", "numba",
    ),
    "flower": ("flwr", "opendp"),
    "ray": ("ray",),
    "tables": ("openpyxl", "pyarrow"),
    "tensorboard": ("tensorboard",),
}  # fmt: skip


# These may come without a path: of standard output, or of a file that was open already, such as a library's cache.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def main() -> None:
    """Entry point: a wrong input or a missing extra ends with a message and exit code 2, never with a traceback.

    So does a standard output that has no room; one that nobody reads any more ends with exit code 1, without a word.
    """
    if os.environ.get("COLUMNS") == "0":  # a width nobody knows, which Rich takes for no room at all
        del os.environ["COLUMNS"]
    try:
        try:
            with console.warnings_as_notes():
                app()
        finally:
            console.flush_out()  # Python's own flush at the end would come too late for the exit code
    except InputError as error:
        fail(str(error))
        sys.exit(2)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        extra = next((extra for extra, brought in _BROUGHT_BY.items() if missing in brought), None)
        if extra is None:  # not the user's doing
            raise
        fail(f"this needs {missing}; pip install 'fedentopt[{extra}]' brings it")
        sys.exit(2)
    except BrokenPipeError:
        _give_up_output()
        sys.exit(1)
    except OSError as error:  # a path that was given and that the system will not take
        if error.filename is None and error.errno not in _NO_ROOM:
            raise
        nameless = "standard output" if _is_of_output(error) else "a file that the system does not name"
        fail(f"{error.filename or nameless}: {error.strerror or error}")
        if error.filename is None:
            _give_up_output()
        sys.exit(2)


def _is_of_output(error: OSError) -> bool:
    """Whether it was standard output that could not be written: by who wrote. What is still in its buffer fails again
    in the flush of `main`, so only without a buffer it is somebody else."""
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    writer = last.f_globals.get("__name__", "")
    return writer in (__name__, console.__name__) or writer.partition(".")[0] in ("json", "rich", "click", "typer")


def _give_up_output() -> None:
    """Let what could not be printed go, or Python would try again at the end and have the last word."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a stream of a test's, or none
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
