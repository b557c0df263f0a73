"""`fedentopt compare`: several methods on one setting, over the same seeds, in one stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedentopt.cli.conduct import conduct, page_of
from fedentopt.cli.console import out, print_json
from fedentopt.cli.result_table import as_json, print_methods
from fedentopt.cli.settings import command, gather, note_unused, option, run_settings, setting_options, shared_options
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.jobs import DEFAULT_METHODS, make_jobs
from fedentopt.simulation.natural import with_own_clients

SET_BY_METHOD = ("algorithm", "selector")
DEFAULTS: dict[str, Any] = {"out": "out/compare"}


def compare(given: dict[str, Any]) -> None:
    """Compare methods on one setting: a table, plots and a page.

    Without options: real digits spread over 100 clients by dir:0.1, random selection (fedavg) against FedEntOpt
    with true and with noisy label counts (fedentopt, fedentopt-dp), three seeds.
    """
    request = gather(given, settings=run_settings(SET_BY_METHOD), defaults=DEFAULTS, methods=True)
    settings = with_own_clients(request.settings, request.options.data_path)
    jobs = make_jobs(
        request.methods or DEFAULT_METHODS,
        settings=settings,
        own=request.own,
        offered=request.offered,
        seeds=request.seeds,
    )
    note_unused(request.offered, jobs)
    options = request.options
    ended = conduct(jobs, options, also_needs=("matplotlib", "plotly") if options.page else ("matplotlib",))
    # `fedavg` and `fedavg:lr=0.03` are the same runs where 0.03 is the data set's: no seed counts twice.
    runs = list({run.path: run for run in ended}.values())

    from fedentopt.report.curve_plot import plot_accuracy
    from fedentopt.results.aggregate import by_method

    methods = by_method(runs)
    about = title(jobs[0].config)
    targets = list(options.target)
    if given["as_json"]:
        plots = plot_accuracy(methods, options.out_dir, about)
        files = {"out": options.out, "plots": [str(path) for path in plots], **page_of(options)}
        print_json({**files, **as_json(runs, methods, targets)})
        return
    console = out()
    console.print(about, style="bold", markup=False)
    print_methods(methods, targets)
    plots = plot_accuracy(methods, options.out_dir, about)  # behind the table, which needs no room on the disk
    console.print(f"plots: {', '.join(str(path) for path in plots)}", soft_wrap=True, markup=False)
    for page in page_of(options).values():
        console.print(f"page:  {page}", soft_wrap=True, markup=False)


def title(config: RunConfig) -> str:
    """The setting in one line."""
    return (
        f"{Path(config.dataset).name}, {config.partition}, {config.model}: "
        f"{config.cohort_size} of {config.clients} clients per round"
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    text = (
        "a method, such as fedprox+fedentopt:mu=0.1 or kl; repeat it for each, or put commas between those without "
        f"settings (default: {','.join(DEFAULT_METHODS)})"
    )
    method = option("method", list[str] | None, "--method", text, metavar="NAME")
    listed = setting_options(run_settings(SET_BY_METHOD), DEFAULTS)
    app.command("compare")(command(compare, [method, *listed, *shared_options()]))
