"""`fedentopt run`: one setting, one seed or several."""

from __future__ import annotations

from typing import Any

import typer

from fedentopt.cli.conduct import conduct, page_of
from fedentopt.cli.console import out, print_json
from fedentopt.cli.result_table import as_json, print_methods
from fedentopt.cli.settings import (
    Request,
    command,
    gather,
    note_unused,
    run_settings,
    setting_options,
    shared_options,
)
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.jobs import Job, with_own
from fedentopt.simulation.natural import with_own_clients

DEFAULTS = {"out": "out/run"}


def run(given: dict[str, Any]) -> None:
    """Train one method on one setting, with one seed or several: a table, a folder with everything, a page.

    A run that was stopped continues where it was; a finished one is not repeated.
    """
    request = gather(given, settings=run_settings(), defaults=DEFAULTS)
    jobs = run_jobs(request)
    note_unused(request.offered, jobs)
    options = request.options
    runs = conduct(jobs, options, also_needs=("plotly",) if options.page else ())

    from fedentopt.results.aggregate import by_method

    methods = by_method(runs)
    targets = list(options.target)
    if given["as_json"]:
        files = {"out": options.out, **page_of(options)}
        print_json({**files, **as_json(runs, methods, targets)})
        return
    print_methods(methods, targets)
    for one in runs:
        out().print(f"results: {one.path}", soft_wrap=True, markup=False)
    for page in page_of(options).values():
        out().print(f"page: {page}", soft_wrap=True, markup=False)


def run_jobs(request: Request) -> list[Job]:
    """One run per seed."""
    settings = with_own(with_own_clients(request.settings, request.options.data_path), request.own, request.offered)
    config = RunConfig.from_dict(settings)
    return [Job(config.replace(seed=seed), config.method) for seed in request.seeds or (config.seed,)]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run")(command(run, [*setting_options(run_settings(), DEFAULTS), *shared_options()]))
