"""The command line: parse, call, print. Every command sits in a module of its own."""

from __future__ import annotations

import sys

import typer

from fedentopt import __version__
from fedentopt.cli import bench, compare, data, methods, partition, plan, report, reproduce, run, select
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


for _module in (compare, run, reproduce, plan, select, methods, partition, data, report, bench):
    _module.register(app)


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


def main() -> None:
    """Entry point: a wrong input or a missing extra ends with a message and exit code 2, never with a traceback."""
    try:
        app()
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
    except OSError as error:  # a path that was given and that the system will not take
        if error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror or error}")
        sys.exit(2)
