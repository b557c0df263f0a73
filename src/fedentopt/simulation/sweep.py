"""Many runs at once: grouped so that runs of a kind train in one stack, each in a folder of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fedentopt import datasets
from fedentopt.datasets.catalog import ENTRIES
from fedentopt.errors import InputError
from fedentopt.results.folder import RunFolder
from fedentopt.results.reading import RunResult, read_run
from fedentopt.results.records import RunRecorder
from fedentopt.simulation.command import command_of
from fedentopt.simulation.config import RunConfig

if TYPE_CHECKING:
    from fedentopt.datasets import Dataset
    from fedentopt.simulation.engine import EngineOptions, RoundEvent

DataKey = tuple[str, bool, int | None]


def run_sweep(
    configs: Iterable[RunConfig],
    out_dir: Path,
    options: EngineOptions,
    *,
    data_dir: Path | None = None,
    resume: bool = True,
    targets: Iterable[float] = (),
    progress: Callable[[RoundEvent], None] | None = None,
    recorder: Callable[[RunFolder], RunRecorder] | None = None,
    afresh: str = "--no-resume",
) -> list[RunResult]:
    """Bring every config to its finished run below `out_dir`; results come in the order of the configs.

    A finished run is read, not repeated (unless `resume` is off), an unfinished one continued. Configs given
    twice run once. Data sets are all loaded before anything trains, so that a missing one is known at once; what a
    person should know about them is said.
    `afresh` is what a person does to have runs repeated.
    `recorder` may wrap a run's folder, to record elsewhere as well. A `KeyboardInterrupt` passes through after
    every run of the stack in work has saved a checkpoint.
    """
    from fedentopt.simulation.engine import Task, simulate, stack_key

    say = options.say or (lambda line: None)
    wanted = list(configs)
    unique = list({config.digest(): config for config in wanted}.values())
    if len(unique) < len(wanted):
        say(f"{len(wanted) - len(unique)} of {len(wanted)} runs are given more than once; each runs once")
    out_dir = Path(out_dir)
    targets = tuple(targets)
    folders = [
        RunFolder(out_dir, config, resume=resume, targets=targets, command=command_of(config)) for config in unique
    ]
    pending = [folder for folder in folders if not (resume and folder.is_finished())]
    _check_finished([folder for folder in folders if folder not in pending], data_dir, afresh)
    if len(pending) < len(folders):
        say(f"{len(folders) - len(pending)} of {len(folders)} runs are finished already ({afresh} repeats them)")
    begun = sum(folder.can_resume() for folder in pending)
    if begun:
        say(f"{begun} of {len(folders)} runs go on from their checkpoints ({afresh} starts them afresh)")

    stacks = _stacks(pending, stack_key)
    data = _load({_data_key(folder.config) for folder in pending}, data_dir)
    for told in dict.fromkeys(told for loaded in data.values() for told in loaded.notes):
        say(told)
    for number, stack in enumerate(stacks):
        key = _data_key(stack[0].config)
        with contextlib.ExitStack() as locks:
            for folder in stack:
                locks.enter_context(folder.locked())
            # Looked at again under the lock: another process may have finished it in the meantime.
            todo = [folder for folder in stack if not (resume and folder.is_finished())]
            tasks = [Task(folder.config, recorder(folder) if recorder else folder) for folder in todo]
            if tasks:
                simulate(tasks, data[key], options, progress)
        if not any(_data_key(later[0].config) == key for later in stacks[number + 1 :]):
            del data[key]  # nothing needs it any more
    done = {folder.config.digest(): read_run(folder.path) for folder in folders}
    return [done[config.digest()] for config in wanted]


def _check_finished(folders: Iterable[RunFolder], data_dir: Path | None, afresh: str) -> None:
    """Refuse finished runs of a user's file or folder that holds other data by now; where it is gone, they stand."""
    loaded: dict[DataKey, str] = {}
    for folder in folders:
        if folder.config.dataset in ENTRIES:
            continue
        key = _data_key(folder.config)
        if key not in loaded:
            try:
                loaded[key] = _load([key], data_dir)[key].digest
            except InputError:
                loaded[key] = ""
        if not folder.is_of(loaded[key]):
            raise InputError(
                f"dataset: {folder.config.dataset!r} is not what {folder.path} was made from; bring the old data back, "
                f"give another --out, or repeat the finished runs ({afresh})"
            )


def _stacks(
    folders: Iterable[RunFolder], stack_key: Callable[[RunConfig], tuple[object, ...]]
) -> list[list[RunFolder]]:
    """Folders whose runs may train together, those of one data set after one another."""
    stacks: dict[DataKey, dict[tuple[object, ...], list[RunFolder]]] = {}
    for folder in folders:
        of_data = stacks.setdefault(_data_key(folder.config), {})
        of_data.setdefault(stack_key(folder.config), []).append(folder)
    return [stack for of_data in stacks.values() for stack in of_data.values()]


def _data_key(config: RunConfig) -> DataKey:
    return (config.dataset, config.fine_labels, config.image_size)


def _load(keys: Iterable[DataKey], data_dir: Path | None) -> dict[DataKey, Dataset]:
    return {
        key: datasets.load(key[0], data_dir, fine_labels=key[1], image_size=key[2]) for key in sorted(keys, key=str)
    }
