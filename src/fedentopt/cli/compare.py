"""`fedentopt compare`: several methods on one setting, over the same seeds, in one stack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from fedentopt.cli.conduct import conduct, page_of
from fedentopt.cli.console import out, print_json
from fedentopt.cli.result_table import as_json, print_methods
from fedentopt.cli.settings import command, field_options, fields_of, gather, option, shared_options
from fedentopt.errors import InputError
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.methods import parse_method
from fedentopt.simulation.options import option_fields

METHODS = ["fedavg", "fedentopt", "fedentopt-dp"]
SEEDS = (0, 1, 2)
DEFAULTS: dict[str, Any] = {"out": "out/compare"}
# Digits are learnt in few rounds with larger steps, and a mirrored digit is no digit.
FOR_DIGITS: dict[str, Any] = {"rounds": 30, "lr": 0.03, "flip": 0.0}
SET_BY_METHOD = ("algorithm", "selector")
FIELDS = {name: field for name, field in (fields_of(RunConfig) | option_fields()).items() if name not in SET_BY_METHOD}


def compare(given: dict[str, Any]) -> None:
    """Compare methods on one setting: a table, plots and a page.

    Without options: real digits spread over 100 clients by dir:0.1, random selection (fedavg) against FedEntOpt
    with true and with noisy label counts (fedentopt, fedentopt-dp), three seeds.
    """
    request = gather(given, fields=FIELDS, defaults=DEFAULTS, methods=True)
    settings = request.settings
    if settings.get("dataset", "digits") == "digits":
        settings = FOR_DIGITS | settings
    configs = method_configs(request.methods or METHODS, settings, request.seeds)
    options = request.execution
    runs = conduct(configs, options, also_needs=("matplotlib", "plotly") if options.page else ("matplotlib",))

    from fedentopt.report.curve_plot import plot_accuracy
    from fedentopt.results.aggregate import by_method, reached_by_all

    methods = by_method(runs)
    about = title(configs[0])
    plots = plot_accuracy(methods, options.out_dir, about)
    targets = list(options.target)
    if given["as_json"]:
        files = {"out": options.out, "plots": [str(path) for path in plots], **page_of(options)}
        print_json({**files, **as_json(runs, methods, targets)})
        return
    best = reached_by_all(methods)
    console = out()
    console.print(about, style="bold", markup=False)
    print_methods(methods, targets or ([best] if best else []))
    console.print(f"plots: {', '.join(str(path) for path in plots)}", soft_wrap=True, markup=False)
    for page in page_of(options).values():
        console.print(f"page:  {page}", soft_wrap=True, markup=False)


def method_configs(names: list[str], settings: dict[str, Any], seeds: tuple[int, ...] | None) -> list[RunConfig]:
    """One config per method and seed. `epsilon` among the settings is that of the methods with -dp."""
    parsed = {name: parse_method(name) for name in names}
    if len(parsed) < len(names) or len({tuple(sorted(p.items(), key=str)) for p in parsed.values()}) < len(names):
        raise InputError(f"method: {', '.join(names)} names a method more than once; accepted: each once")
    epsilon = settings.get("epsilon")
    private = [name for name, method in parsed.items() if method["epsilon"] is not None]
    if epsilon is not None and not private:
        raise InputError(
            f"epsilon: {epsilon:g} is used by none of {', '.join(names)}; accepted: with a method such as fedentopt-dp"
        )
    if "epsilon" in settings and epsilon is None and private:
        raise InputError(f"epsilon: none cannot go with {', '.join(private)}; accepted: a number above 0")
    if seeds is None:
        seeds = (settings["seed"],) if "seed" in settings else SEEDS
    configs = []
    for name, method in parsed.items():
        own = method | ({"epsilon": epsilon} if name in private and epsilon is not None else {})
        configs += [RunConfig.from_dict({**settings, **own, "seed": seed}) for seed in seeds]
    return configs


def title(config: RunConfig) -> str:
    """The setting in one line."""
    return (
        f"{Path(config.dataset).name}, {config.partition}, {config.model}: "
        f"{config.cohort_size} of {config.clients} clients a round"
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    text = f"a method, such as fedprox+fedentopt or kl; repeat it for each (default: {', '.join(METHODS)})"
    method = option("method", list[str] | None, "--method", text, metavar="NAME")
    shown = {name: f"{FIELDS[name].default}; digits {value}" for name, value in FOR_DIGITS.items()}
    fields = field_options(FIELDS, {**DEFAULTS, **shown})
    app.command("compare")(command(compare, [method, *fields, *shared_options()]))
