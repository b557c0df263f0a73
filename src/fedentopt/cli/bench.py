"""`fedentopt bench`: our speed. Every benchmark sits in a module of its own and is added to the group below."""

from __future__ import annotations

import typer

from fedentopt.cli.bench_engine import engine
from fedentopt.cli.bench_selection import selection

bench = typer.Typer(help="Measure our speed.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command group to the command line."""
    bench.command("selection")(selection)
    bench.command("engine")(engine)
    app.add_typer(bench, name="bench")
