"""Stacks on the workers of a Ray cluster, one for each GPU: the same runs, the same folders on disk.

Every stack is one Ray task. A task whose worker is lost (killed, out of memory, its machine gone) is handed out
again, a bounded number of times, and continues at the last checkpoint where the workers see the results folder.
Where they do not (another machine without a shared disk), a worker keeps its runs in a folder of its own and sends
them back when they are finished. Data sets are read on the workers, from the data folder given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import os
import shutil
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError
from fedentopt.files import make_folder
from fedentopt.paper.ray_worker import Inbox, WorkerReport, work
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.sweep import Stack, form_stacks

LOST_AT_MOST = 3
"""How often a stack's worker may be lost before the stack is given up."""

ANSWERS_WITHIN = 10.0
"""Seconds that a cluster's machine has to take a connection."""


def run_on_ray(
    runs: Sequence[RunConfig],
    options: RunOptions,
    *,
    address: str,
    workers: int | None = None,
    max_stack: int | None = None,
    report: Callable[[WorkerReport], None] = lambda report: None,
    done: Callable[[int], None] = lambda number: None,
) -> None:
    """Bring all runs to their end on a Ray cluster; `local` starts one here, of `workers` CPU workers if given.

    Refused: no Ray, an address where none answers, an error in a worker's input, a stack whose worker is lost
    again and again. `KeyboardInterrupt` passes through after the workers have been asked to save.
    """
    say = options.say or (lambda line: None)
    with _connected(address, workers, options.device) as (ray, slots, on_gpu):
        out_dir, data_dir = options.out_dir.resolve(), options.data_path
        make_folder(out_dir)
        stacks = form_stacks(runs, max_stack or max(1, -(-len(runs) // slots)))
        stacks.sort(key=lambda stack: stack[0].seed)
        say(f"{len(runs)} runs in {len(stacks)} stacks on {slots} {'GPU' if on_gpu else 'CPU'} workers")
        token = out_dir / f".shared-{uuid.uuid4().hex}"
        token.touch()
        there = dataclasses.replace(
            options,
            out=str(out_dir),
            data_dir=str(data_dir.resolve()) if data_dir else None,
            device=options.device if on_gpu else "cpu",
            # CPU workers share the machine among themselves already.
            workers=None if on_gpu else 1,
            say=None,  # a worker has its own way to the driver
        )
        try:
            _Dispatcher(ray, stacks, there, token.name, on_gpu, say, report, done).run()
        finally:
            token.unlink(missing_ok=True)


class _Dispatcher:
    """Hands stacks out and takes them back until all are done."""

    def __init__(
        self,
        ray: Any,
        stacks: list[Stack],
        options: RunOptions,
        token: str,
        on_gpu: bool,
        say: Callable[[str], None],
        report: Callable[[WorkerReport], None],
        done: Callable[[int], None],
    ) -> None:
        self._ray, self._stacks, self._options, self._token = ray, stacks, options, token
        self._say, self._report, self._done = say, report, done
        self._inbox = ray.remote(num_cpus=0)(Inbox).remote()
        needs = {"num_gpus": 1} if on_gpu else {"num_cpus": 1}
        # Ray's own retries are off: a lost worker is to be seen, counted and reported.
        self._task = ray.remote(max_retries=0, **needs)(work)
        self._lost = dict.fromkeys(range(len(stacks)), 0)
        self._waiting: dict[Any, int] = {}

    def run(self) -> None:
        """Until every stack is done."""
        try:
            for number in range(len(self._stacks)):
                self._hand_out(number)
            while self._waiting:
                ready, _ = self._ray.wait(list(self._waiting), num_returns=1, timeout=0.5)
                self._fetch_reports()
                for reference in ready:
                    self._take_back(reference, self._waiting.pop(reference))
        except BaseException:
            self._cancel()
            raise

    def _hand_out(self, number: int) -> None:
        reference = self._task.remote(number, self._stacks[number], self._options, self._token, self._inbox)
        self._waiting[reference] = number

    def _take_back(self, reference: Any, number: int) -> None:
        errors = self._ray.exceptions
        try:
            files = self._ray.get(reference)
        except errors.RayTaskError as error:
            if isinstance(error.cause, InputError):
                raise error.cause from None
            raise
        except (
            errors.WorkerCrashedError,
            errors.NodeDiedError,
            errors.OutOfMemoryError,
            errors.LocalRayletDiedError,
            errors.ObjectLostError,
        ) as error:
            self._lost[number] += 1
            if self._lost[number] >= LOST_AT_MOST:
                raise InputError(
                    f"ray: the worker of stack {number + 1} was lost {self._lost[number]} times "
                    f"({type(error).__name__}); smaller stacks (--max-stack) need less memory"
                ) from None
            self._say(f"stack {number + 1}: its worker was lost ({type(error).__name__}); the stack is run again")
            self._hand_out(number)
            return
        for run_id, content in files.items():
            _write_folder(self._options.out_dir / run_id, content)
        self._say(f"stack {number + 1} of {len(self._stacks)} is done")
        self._done(number)

    def _fetch_reports(self) -> None:
        try:
            reports = self._ray.get(self._inbox.fetch.remote(), timeout=5)
        except self._ray.exceptions.RayError:
            return  # without progress the work goes on all the same
        for report in reports:
            if report.line:
                self._say(f"stack {report.stack + 1}: {report.line}")
            self._report(report)

    def _cancel(self) -> None:
        """Ask all workers to save and stop, and give them a moment for it."""
        self._say("the workers are asked to save and to stop")
        for reference in self._waiting:
            with contextlib.suppress(Exception):
                self._ray.cancel(reference, force=False)
        with contextlib.suppress(Exception):
            self._ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=20)


def _write_folder(path: Path, content: dict[str, bytes]) -> None:
    """Put a finished run's folder in place in one step; an unfinished one of the same run makes way."""
    aside = path.with_name(f".{path.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    make_folder(aside)
    for name, data in content.items():
        (aside / Path(name).name).write_bytes(data)
    if path.exists():
        shutil.rmtree(path)
    aside.rename(path)


def _check_answers(address: str) -> None:
    """Refuse HOST:PORT where nothing listens, for which Ray itself waits without end or word."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # local, auto, or what Ray refuses at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWERS_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"ray: nothing answers at {address!r} ({error}); accepted: local, auto or HOST:PORT") from None


@contextlib.contextmanager
def _connected(address: str, workers: int | None, device: str) -> Iterator[tuple[Any, int, bool]]:
    """Ray, the number of stacks it can work on at a time, and whether on GPUs. Telemetry and dashboard are off."""
    if importlib.util.find_spec("ray") is None:
        raise InputError("ray: Ray is not installed; pip install 'fedentopt[ray]'")
    if workers is not None and address != "local":
        raise InputError(f"ray-workers: {workers} only goes with --ray local; a cluster has the workers it has")
    if workers is not None and workers < 1:
        raise InputError(f"ray-workers: {workers} is out of range; accepted: at least 1")
    _check_answers(address)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default; it warns without
    ray: Any = importlib.import_module("ray")
    handler = signal.getsignal(signal.SIGTERM)
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address == "local":
            ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise InputError(f"ray: {address!r} cannot be used: {error}; accepted: local, auto or HOST:PORT") from None
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has put one of its own there, which ends at once
        there = ray.cluster_resources()
        on_gpu = device != "cpu" and there.get("GPU", 0) >= 1
        yield ray, max(1, int(there.get("GPU" if on_gpu else "CPU", 1))), on_gpu
    finally:
        ray.shutdown()
