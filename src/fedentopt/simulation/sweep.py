"""Many runs at once: grouped so that runs of a kind train in one stack, each in a folder of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fedentopt import datasets
from fedentopt.datasets.catalog import ENTRIES
from fedentopt.errors import InputError
from fedentopt.results.folder import RunFolder
from fedentopt.results.memory import MemoryRecorder
from fedentopt.results.reading import RunResult, read_run
from fedentopt.results.records import RunRecorder
from fedentopt.simulation.command import command_of
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.options import RunOptions

if TYPE_CHECKING:
    from fedentopt.datasets import Dataset
    from fedentopt.simulation.engine import RoundEvent

DataKey = tuple[str, bool, int | None]
Stack = list[RunConfig]
"""Runs that train together."""


def form_stacks(configs: Iterable[RunConfig], max_stack: int | None = None) -> list[Stack]:
    """Runs that may train together, in stacks of at most `max_stack`, those of one data set after one another."""
    from fedentopt.simulation.engine import stack_key

    if max_stack is not None and max_stack < 1:
        raise InputError(f"max-stack: {max_stack} is out of range; accepted: at least 1")
    by_data: dict[DataKey, dict[tuple[object, ...], Stack]] = {}
    for config in configs:
        by_data.setdefault(_data_key(config), {}).setdefault(stack_key(config), []).append(config)
    stacks = []
    for alike in (alike for of_data in by_data.values() for alike in of_data.values()):
        # Equal parts rather than full ones and a small rest: the rest would leave the device half idle.
        parts = -(-len(alike) // (max_stack or len(alike)))
        stacks += [alike[len(alike) * part // parts : len(alike) * (part + 1) // parts] for part in range(parts)]
    return stacks


def run_sweep(
    configs: Iterable[RunConfig],
    options: RunOptions,
    *,
    data: Dataset | None = None,
    progress: Callable[[RoundEvent], None] | None = None,
    recorder: Callable[[RunFolder], RunRecorder] | None = None,
    afresh: str = "--no-resume",
    code_digest: Callable[[RunConfig], str] = lambda config: "",
) -> list[RunResult]:
    """Bring every config to its finished run below `options.out`; results come in the order of the configs.

    A finished run is read, not repeated (unless `options.resume` is off), an unfinished one continued; refused where
    its data, or its own code as `code_digest` knows it, are others by now. Configs given twice run once. Data sets are
    all loaded before anything trains, so that a missing one is known at once; what a person should know about them is
    said. `data` takes the place of what the configs name.
    `afresh` is what a person does to have runs repeated.
    `recorder` may wrap a run's folder, to record elsewhere as well. A `KeyboardInterrupt` passes through after
    every run of the stack in work has saved a checkpoint.
    """
    from fedentopt.simulation.engine import Task, simulate

    say, resume = options.say or (lambda line: None), options.resume
    wanted = list(configs)
    unique = {config.digest(): config for config in wanted}
    if len(unique) < len(wanted):
        say(f"{len(wanted) - len(unique)} of {len(wanted)} runs are given more than once; each runs once")
    folders: dict[str, RunFolder] = {}
    finished: list[RunConfig] = []
    pending: list[RunConfig] = []
    for digest, config in unique.items():
        folders[digest] = RunFolder(
            options.out_dir, config, resume=resume, targets=options.target, command=command_of(config)
        )
        (finished if resume and folders[digest].is_finished() else pending).append(config)

    def folder_of(config: RunConfig) -> RunFolder:
        return folders[config.digest()]

    begun = [config for config in pending if folder_of(config).can_resume()]
    for config in [*finished, *begun]:
        folder_of(config).check_code(code_digest(config), _ways_out("code", afresh))
    _check_data(finished, folder_of, lambda keys: _load(keys, options.data_path, data), afresh)
    if finished:
        say(f"{len(finished)} of {len(unique)} runs are finished already ({afresh} repeats them)")
    if begun:
        say(f"{len(begun)} of {len(unique)} runs go on from their checkpoints ({afresh} starts them afresh)")

    stacks = form_stacks(pending)
    _allow_files(max(map(len, stacks), default=0))
    loaded = _load(map(_data_key, pending), options.data_path, data)
    _say_notes(loaded, say)
    for number, stack in enumerate(stacks):
        key = _data_key(stack[0])
        with contextlib.ExitStack() as locks:
            for config in stack:
                locks.enter_context(folder_of(config).locked())
            # Looked at again under the lock: another process may have finished it in the meantime.
            todo = [config for config in stack if not (resume and folder_of(config).is_finished())]
            tasks = [Task(config, recorder(folder_of(config)) if recorder else folder_of(config)) for config in todo]
            if tasks:
                simulate(tasks, loaded[key], options, progress)
        if not any(_data_key(later[0]) == key for later in stacks[number + 1 :]):
            del loaded[key]  # nothing needs it any more
    done = {digest: read_run(folder.path) for digest, folder in folders.items()}
    return [done[config.digest()] for config in wanted]


def run_in_memory(
    configs: Iterable[RunConfig],
    options: RunOptions,
    *,
    data: Dataset | None = None,
    progress: Callable[[RoundEvent], None] | None = None,
) -> list[RunResult]:
    """Bring every config to its end without writing a file; results, with their models, come in the order given.

    Configs given twice run once. `data` takes the place of what the configs name.
    """
    from fedentopt.simulation.engine import Task, simulate

    wanted = list(configs)
    unique = {config.digest(): config for config in wanted}
    recorders = {
        digest: MemoryRecorder(config, targets=options.target, command=command_of(config))
        for digest, config in unique.items()
    }
    loaded = _load(map(_data_key, unique.values()), options.data_path, data)
    _say_notes(loaded, options.say or (lambda line: None))
    for stack in form_stacks(unique.values()):
        tasks = [Task(config, recorders[config.digest()]) for config in stack]
        simulate(tasks, loaded[_data_key(stack[0])], options, progress)
    done = {digest: recorder.result() for digest, recorder in recorders.items()}
    return [done[config.digest()] for config in wanted]


def _check_data(
    finished: Iterable[RunConfig],
    folder_of: Callable[[RunConfig], RunFolder],
    load: Callable[[Iterable[DataKey]], dict[DataKey, Dataset]],
    afresh: str,
) -> None:
    """Refuse finished runs of a user's own data that are others by now; where they are gone, the runs stand."""
    digests: dict[DataKey, str] = {}
    for config in finished:
        if config.dataset in ENTRIES:
            continue
        key = _data_key(config)
        if key not in digests:
            try:
                digests[key] = load([key])[key].digest
            except InputError:
                digests[key] = ""
        folder = folder_of(config)
        if not folder.is_of(digests[key]):
            raise InputError(
                f"dataset: {config.dataset!r} is not what {folder.path} was made from; {_ways_out('data', afresh)}"
            )


def _ways_out(what: str, afresh: str) -> str:
    """What a person can do whose data or code are not those of the runs in the folder."""
    again = "" if afresh == "another --out" else f", or repeat the runs ({afresh})"
    return f"bring the old {what} back{',' if again else ' or'} give another --out{again}"


def _allow_files(runs: int) -> None:
    """Let this process hold a file open for every run of a stack (their locks); systems start with 1,024 or less."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = runs + 512
    if soft != resource.RLIM_INFINITY and soft < wanted and (hard == resource.RLIM_INFINITY or hard > soft):
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _data_key(config: RunConfig) -> DataKey:
    return (config.dataset, config.fine_labels, config.image_size)


def _load(keys: Iterable[DataKey], data_dir: Path | None, given: Dataset | None) -> dict[DataKey, Dataset]:
    """Data sets by what configs name; what was `given` stands for all of them."""
    return {
        key: datasets.load(key[0], data_dir, fine_labels=key[1], image_size=key[2]) if given is None else given
        for key in sorted(set(keys), key=str)
    }


def _say_notes(loaded: Mapping[DataKey, Dataset], say: Callable[[str], None]) -> None:
    """What a person should know about the data, each line once."""
    for line in dict.fromkeys(line for one in loaded.values() for line in one.notes):
        say(line)
