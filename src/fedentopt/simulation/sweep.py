"""Many runs at once: grouped so that runs of a kind train in one stack, each in a folder of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from fedentopt import datasets
from fedentopt.datasets.catalog import may_differ
from fedentopt.errors import InputError
from fedentopt.files import file_digest
from fedentopt.results.folder import RunFolder
from fedentopt.results.reading import RunResult, read_run
from fedentopt.results.records import RunRecorder
from fedentopt.simulation.command import command_of
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.jobs import Job
from fedentopt.simulation.options import RunOptions

if TYPE_CHECKING:
    from fedentopt.datasets import Dataset
    from fedentopt.simulation.engine import RoundEvent

DataKey = tuple[str, bool, int | None]
Stack = list[RunConfig]
"""Runs that train together."""
Run = TypeVar("Run", RunConfig, Job)
ELSEWHERE = "another folder"
"""What a person does to have runs repeated by a command that has no option for it."""


def form_stacks(runs: Iterable[Run], max_stack: int | None = None) -> list[list[Run]]:
    """Runs that may train together, in stacks of at most `max_stack`, those of one data set after one another."""
    if max_stack is not None and max_stack < 1:
        raise InputError(f"max-stack: {max_stack} is out of range; accepted: at least 1")
    by_data: dict[DataKey, dict[tuple[object, ...], list[Run]]] = {}
    for run in runs:
        job = _job(run)
        by_data.setdefault(_data_key(job.config), {}).setdefault(job.stack_key, []).append(run)
    stacks = []
    for alike in (alike for of_data in by_data.values() for alike in of_data.values()):
        # Equal parts rather than full ones and a small rest: the rest would leave the device half idle.
        parts = -(-len(alike) // (max_stack or len(alike)))
        stacks += [alike[len(alike) * part // parts : len(alike) * (part + 1) // parts] for part in range(parts)]
    return stacks


def run_sweep(
    runs: Iterable[RunConfig | Job],
    options: RunOptions,
    *,
    data: Dataset | None = None,
    progress: Callable[[RoundEvent], None] | None = None,
    recorder: Callable[[RunFolder], RunRecorder] | None = None,
    afresh: str = "--no-resume",
) -> list[RunResult]:
    """Bring every run to its end below `options.out`; results come in the order of the runs.

    A finished run is read, not repeated (unless `options.resume` is off), an unfinished one continued; refused where
    its data, or the user's own code behind it, are others by now. Runs given twice run once. Data sets are all loaded
    before anything trains, so that a missing one is known at once; what a person should know about them is said.
    `data` takes the place of what the configs name. `afresh` is what a person does to have runs repeated.
    `recorder` may wrap a run's folder, to record elsewhere as well. A `KeyboardInterrupt` passes through after
    every run of the stack in work has saved a checkpoint.
    """
    from fedentopt.simulation.engine import run_stack

    say, resume = options.say or (lambda line: None), options.resume
    wanted = [_job(run) for run in runs]
    unique = {job.config.digest(): job for job in wanted}
    if len(unique) < len(wanted):
        say(f"{len(wanted) - len(unique)} of {len(wanted)} runs are given more than once; each runs once")
    codes = _codes(unique)
    folders: dict[str, RunFolder] = {}
    finished: list[Job] = []
    pending: list[Job] = []
    for digest, job in unique.items():
        folders[digest] = RunFolder(
            options.out_dir, job.config, resume=resume, targets=options.target, command=_command(job, data)
        )
        (finished if resume and folders[digest].is_finished() else pending).append(job)

    def folder_of(job: Job) -> RunFolder:
        return folders[job.config.digest()]

    begun = [job for job in pending if folder_of(job).can_resume()]
    for job in [*finished, *begun]:
        folder_of(job).check_code(codes[job.config.digest()], _ways_out("code", afresh))
        folder_of(job).check_weights(file_digest(job.config.weights), _ways_out("file", afresh))
    _check_data(finished, folder_of, options.data_path, data, _ways_out("data", afresh))
    for job in finished:
        folder_of(job).clear_lock()
    if finished:
        say(f"{len(finished)} of {len(unique)} runs are finished already ({afresh} repeats them)")
    if begun:
        say(f"{len(begun)} of {len(unique)} runs go on from their checkpoints ({afresh} starts them afresh)")

    stacks = form_stacks(pending)
    _allow_files(max(map(len, stacks), default=0))
    loaded = _load_all(pending, options.data_path, data, say)
    for number, stack in enumerate(stacks):
        key = _data_key(stack[0].config)
        with contextlib.ExitStack() as locks:
            for job in stack:
                locks.enter_context(folder_of(job).locked())
            # Looked at again under the lock: another process may have finished it in the meantime.
            todo = [job for job in stack if not (resume and folder_of(job).is_finished())]
            tasks = [
                job.task(recorder(folder_of(job)) if recorder else folder_of(job), codes[job.config.digest()])
                for job in todo
            ]
            if tasks:
                run_stack(tasks, loaded[key], options, progress)
        if not any(_data_key(later[0].config) == key for later in stacks[number + 1 :]):
            del loaded[key]  # nothing needs it any more
    done = {digest: read_run(folder.path) for digest, folder in folders.items()}
    return [done[job.config.digest()] for job in wanted]


def run_in_memory(
    runs: Iterable[RunConfig | Job],
    options: RunOptions,
    *,
    data: Dataset | None = None,
    progress: Callable[[RoundEvent], None] | None = None,
) -> list[RunResult]:
    """Bring every run to its end without writing anything; results come in the order of the runs."""
    from fedentopt.results.memory import MemoryRecorder
    from fedentopt.simulation.engine import run_stack

    wanted = [_job(run) for run in runs]
    unique = {job.config.digest(): job for job in wanted}
    loaded = _load_all(unique.values(), options.data_path, data, options.say or (lambda line: None))
    recorders = {
        digest: MemoryRecorder(job.config, targets=options.target, command=_command(job, data))
        for digest, job in unique.items()
    }
    for stack in form_stacks(unique.values()):
        tasks = [job.task(recorders[job.config.digest()]) for job in stack]
        run_stack(tasks, loaded[_data_key(stack[0].config)], options, progress)
    return [recorders[job.config.digest()].result() for job in wanted]


def _job(run: RunConfig | Job) -> Job:
    return run if isinstance(run, Job) else Job(run, run.method)


def _command(job: Job, data: Dataset | None) -> str:
    """The command that makes the run again; empty where objects or arrays of the caller's stand behind it."""
    return "" if job.sources or data is not None else command_of(job.config)


def _codes(jobs: Mapping[str, Job]) -> dict[str, str]:
    """The digests of the user's own code behind runs that are kept on disk; refused where one cannot be told."""
    known: dict[tuple[object, ...], str | None] = {}
    codes = {}
    for digest, job in jobs.items():
        key = (job.config.own_code, tuple(map(id, job.sources)))
        if key not in known:
            known[key] = job.code
        code = known[key]
        if code is None:
            raise InputError(
                f"out: the source of {job.label} cannot be read, or it holds more than plain values (or reads more by "
                f"a global name), so a later run could not be told from this one; accepted: without out, or code in a "
                f"file, with its values in it"
            )
        codes[digest] = code
    return codes


def _load_all(
    jobs: Iterable[Job], data_dir: Path | None, data: Dataset | None, say: Callable[[str], None]
) -> dict[DataKey, Dataset]:
    """The data of all runs, with what a person should know about them."""
    keys = {_data_key(job.config) for job in jobs}
    loaded = _load(keys, data_dir) if data is None else dict.fromkeys(keys, data)
    for line in dict.fromkeys(line for one in loaded.values() for line in one.notes):
        say(line)
    return loaded


def _check_data(
    finished: Iterable[Job],
    folder_of: Callable[[Job], RunFolder],
    data_dir: Path | None,
    given: Dataset | None,
    ways_out: str,
) -> None:
    """Refuse finished runs of data that is other by now (see `may_differ`); where it is gone, they stand. `ways_out` is
    what a person can do."""
    loaded: dict[DataKey, str] = {}
    for job in finished:
        config = job.config
        if given is None and not may_differ(config.dataset):
            continue
        key = _data_key(config)
        if key not in loaded:
            loaded[key] = find_digest(config, data_dir) if given is None else given.digest
        folder = folder_of(job)
        if not folder.is_of(loaded[key]):
            raise InputError(f"dataset: {config.dataset!r} is not what {folder.path} was made from; {ways_out}")


def find_digest(config: RunConfig, data_dir: Path | None) -> str:
    """Digest of the data of a run as it is now; empty where it is gone."""
    key = _data_key(config)
    try:
        return _load([key], data_dir)[key].digest
    except InputError:
        return ""


def _ways_out(what: str, afresh: str) -> str:
    """What a person can do whose data or code are not those of the runs in the folder."""
    again = "" if afresh == ELSEWHERE else f", or repeat the runs ({afresh})"
    return f"bring the old {what} back{',' if again else ' or'} give another folder{again}"


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


def _load(keys: Iterable[DataKey], data_dir: Path | None) -> dict[DataKey, Dataset]:
    return {
        key: datasets.load(key[0], data_dir, fine_labels=key[1], image_size=key[2]) for key in sorted(keys, key=str)
    }
