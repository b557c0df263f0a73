"""The command line: parse, call, print. Every command sits in a module of its own."""

from __future__ import annotations

import sys

import typer

from fedentopt import __version__
from fedentopt.cli import bench, compare, data, partition, report, reproduce, run, select
from fedentopt.cli.console import fail
from fedentopt.errors import InputError

app = typer.Typer(
    name="fedentopt",
    help="Balanced cohorts for federated learning under label skew.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"fedentopt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version and stop.", callback=_version, is_eager=True
    ),
) -> None:
    pass


for _module in (compare, run, reproduce, select, partition, data, report, bench):
    _module.register(app)


def main() -> None:
    """Entry point: a wrong input ends with its message and exit code 2, never with a traceback."""
    try:
        app()
    except InputError as error:
        fail(str(error))
        sys.exit(2)
