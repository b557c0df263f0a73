"""Simulations from Python, without touching a file.

from fedentopt.simulation import compare

result = compare(["fedavg", "fedentopt", "fedprox:mu=0.1"], dataset="digits", seeds=3)
result.summary              # a pandas DataFrame: accuracy of each method, difference to the first with its interval
result.plot(); result.report("page.html")
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedentopt.errors import InputError
from fedentopt.settings import settings_of
from fedentopt.simulation.config import FIELDS, PARTS, RunConfig
from fedentopt.simulation.jobs import Job, dataset_defaults, make_jobs
from fedentopt.simulation.natural import with_own_clients
from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.result import Result

if TYPE_CHECKING:
    from fedentopt.datasets import Dataset
    from fedentopt.simulation.engine import RoundEvent


def compare(
    methods: Sequence[Any],
    *,
    dataset: Any = "digits",
    model: Any = None,
    seeds: int | Sequence[int] | None = None,
    out: str | Path | None = None,
    progress: bool | Callable[[RoundEvent], None] | None = None,
    options: RunOptions | None = None,
    **settings: Any,
) -> Result:
    """Train several methods on one setting, over the same seeds, and give back everything.

    `methods`: names, with settings behind them (`"fedprox:mu=0.1"`), algorithms and selectors as classes or objects, or
    pairs (algorithm, selector). `dataset`: a name, a path, arrays `(x_train, y_train, x_test, y_test)`, or what
    `fedentopt.datasets.from_arrays` gives, which may name classes and clients. `model`: a name,
    `package.module:factory`, or a callable that takes the number of classes. `seeds`: how many (3 is 0, 1, 2), or
    which. `settings` are those of `RunConfig` (`rounds=50`, `partition="classes:2"`), or of single methods (`mu=0.1`),
    applied where a method has them; an object keeps its own. Without `out` nothing is written; with it, runs are kept
    in that folder, finished ones are read, and unfinished ones continued. `progress`: whether to show a bar (by default
    in terminals, and in notebooks that have ipywidgets), or a function that is called after every round. `options` says
    where and how to run.
    """
    data, name = _data(dataset, settings)
    options = _options(options)
    chosen = {**{k: v for k, v in settings.items() if k in FIELDS}, "dataset": name}
    for reserved in ("algorithm", "selector"):
        if reserved in settings:
            raise InputError(f"{reserved}: is part of a method's name; accepted: in methods, as in fedprox+fedentopt")
    own = {key: value for key, value in settings.items() if key not in FIELDS}
    for key in own.keys() & settings_of(RunOptions):
        raise InputError(f"{key}: says how to run, and is no setting; accepted: options=RunOptions({key}=...)")
    chosen = with_own_clients(chosen, options.data_path, data)
    jobs = make_jobs(methods, settings=chosen, own=own, seeds=seeds, model=model)
    for job in jobs:
        if data is not None and job.config.dataset != name:
            raise InputError(f"method: {job.label!r} names a data set beside the arrays; accepted: one of the two")
    return run_jobs(jobs, data=data, out=out, progress=progress, options=options)


def simulate(
    config: RunConfig | Mapping[str, Any],
    *,
    dataset: Any = None,
    model: Any = None,
    out: str | Path | None = None,
    progress: bool | Callable[[RoundEvent], None] | None = None,
    options: RunOptions | None = None,
) -> Result:
    """Train one run, with data or a model given as objects where wanted (see `compare`).

    A `RunConfig` says everything. In a mapping, settings that it leaves out are those of `compare` on that data set.
    """
    if not isinstance(config, RunConfig | Mapping):
        raise InputError(f"config: {config!r} cannot be used; accepted: a RunConfig, or a mapping of settings")
    options, data = _options(options), None
    if dataset is not None:
        size = config.image_size if isinstance(config, RunConfig) else config.get("image_size")
        data, name = _data(dataset, {"image_size": size})
        config = config.replace(dataset=name) if isinstance(config, RunConfig) else {**config, "dataset": name}
    if not isinstance(config, RunConfig):
        named = config.get("dataset", "")
        if not isinstance(named, str):
            raise InputError(
                f"dataset: {type(named).__name__} is no setting; accepted: a name in the mapping, anything else as the "
                f"argument dataset="
            )
        for part in PARTS:
            if not isinstance(given := config.get(part, ""), str):
                shown = given.__name__ if isinstance(given, type) else repr(given)
                raise InputError(
                    f"{part}: {shown} is no name; accepted: a name, or compare([...], seeds=1), which takes classes "
                    f"and objects"
                )
        settings = with_own_clients(config, options.data_path, data)
        config = RunConfig.from_dict({**dataset_defaults(settings), **settings})
    job = Job(config, config.method)
    if model is not None:
        [made] = make_jobs(["fedavg"], settings={}, seeds=1, model=model)
        job = Job(config.replace(model=made.config.model), config.method, model=made.model, sources=made.sources)
    return run_jobs([job], data=data, out=out, progress=progress, options=options)


def run_jobs(
    jobs: Sequence[Job],
    *,
    data: Dataset | None = None,
    out: str | Path | None = None,
    progress: bool | Callable[[RoundEvent], None] | None = None,
    options: RunOptions,
) -> Result:
    """Bring jobs to their end, in memory or below `out`. `data` takes the place of what the configs name."""
    from rich.console import Console

    from fedentopt.simulation.progress import progress_bar
    from fedentopt.simulation.sweep import run_in_memory, run_sweep

    if out is not None and not isinstance(out, str | Path):
        raise InputError(f"out: {out!r} cannot be used; accepted: a folder for the results, or none")
    configs = [job.config for job in jobs]
    for size in {config.image_size for config in configs} - {None}:
        if data is not None and size != data.image_size:
            raise InputError(f"image_size: {size}, but the data given has {data.image_size}; accepted: that, or none")
    with progress_bar(configs, Console(stderr=True), show=False if callable(progress) else progress) as bar:
        listener = progress if callable(progress) else bar
        if out is None:
            runs = run_in_memory(jobs, options, data=data, progress=listener)
        else:
            options = dataclasses.replace(options, out=str(out))
            runs = run_sweep(jobs, options, data=data, progress=listener, afresh="options=RunOptions(resume=False)")
    return Result(runs, labels=[job.label for job in jobs])


def _options(options: Any) -> RunOptions:
    if options is not None and not isinstance(options, RunOptions):
        raise InputError(f"options: {options!r} cannot be used; accepted: RunOptions(device=..., workers=..., ...)")
    chosen = options or RunOptions()
    if chosen.out != RunOptions().out:
        raise InputError(f"options: out is {chosen.out!r}; accepted: the argument out=, beside options")
    if chosen.log is not None:
        raise InputError(f"options: log is {chosen.log!r}; accepted: none (only commands write these curves)")
    return chosen


def _data(dataset: Any, settings: Mapping[str, Any]) -> tuple[Dataset | None, str]:
    """Data given as arrays, and the name by which a config knows them; None for a name or a path."""
    from fedentopt.datasets import Dataset, from_arrays
    from fedentopt.datasets.arrays import NAME

    if isinstance(dataset, str | Path):
        return None, str(dataset)
    if isinstance(dataset, Dataset):
        return dataset, dataset.name
    if isinstance(dataset, tuple | list) and len(dataset) == 4:
        return from_arrays(*dataset, image_size=settings.get("image_size")), NAME
    raise InputError(
        f"dataset: {type(dataset).__name__} cannot be used; accepted: a name, a path, arrays "
        f"(x_train, y_train, x_test, y_test), or what fedentopt.datasets.from_arrays gives"
    )
