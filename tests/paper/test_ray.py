"""Stacks on Ray workers: the same results, also when a worker is killed on the way."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from fedentopt.errors import InputError
from fedentopt.paper import ray_runner
from fedentopt.paper.blocks import cells_from_file
from fedentopt.paper.cells import distinct_runs
from fedentopt.paper.ray_worker import WorkerReport
from fedentopt.results.reading import read_run
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.options import RunOptions
from fedentopt.simulation.sweep import form_stacks, run_sweep

CELLS = """
[settings]
clients = 10
participation = 20
rounds = 30
seeds = 2
epochs = 1

[[cells]]
table = "mini"
metric = "accuracy"
model = "lenet5"
dataset = "digits"
partition = "classes:2"
method = ["fedavg", "fedentopt"]
"""


@pytest.fixture
def runs(tmp_path: Path) -> list[RunConfig]:
    path = tmp_path / "cells.toml"
    path.write_text(CELLS)
    return distinct_runs(cells_from_file(path))


def figures(folder: Path, run: RunConfig) -> list[tuple[object, ...]]:
    found = read_run(folder / run.run_id)
    return [(r.round, r.accuracy, r.loss, r.clients, r.entropy) for r in found.records]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_killed_worker_s_stack_is_run_again_with_the_same_results(runs: list[RunConfig], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    killed: list[int] = []
    lines: list[str] = []
    done: list[int] = []

    def report(said: WorkerReport) -> None:
        if said.rounds and not killed:
            killed.append(said.pid)
            os.kill(said.pid, signal.SIGKILL)

    out = tmp_path / "out"
    options = RunOptions(out=str(out), device="cpu", checkpoint_every=1, say=lines.append)
    ray_runner.run_on_ray(runs, options, address="local", workers=2, report=report, done=done.append)
    assert len(killed) == 1
    assert sum("its worker was lost" in line for line in lines) == 1
    assert sorted(done) == [0, 1]
    assert not list(out.glob(".shared-*"))
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"

    straight = tmp_path / "straight"
    run_sweep(runs, RunOptions(out=str(straight), device="cpu", workers=1))
    for run in runs:
        assert figures(out, run) == figures(straight, run)


def test_a_stack_that_loses_every_worker_is_given_up(runs: list[RunConfig], tmp_path: Path) -> None:
    ray = FakeRay(tmp_path, outcomes=[FakeRay.exceptions.WorkerCrashedError()] * 9)
    with pytest.raises(InputError, match=r"stack 1 was lost 3 times \(WorkerCrashedError\); smaller stacks"):
        ray.dispatch([runs])
    assert ray.handed_out == 3


def test_what_a_worker_refuses_is_refused_here(runs: list[RunConfig], tmp_path: Path) -> None:
    refusal = FakeRay.exceptions.RayTaskError()
    refusal.cause = InputError("dataset: is not there")
    with pytest.raises(InputError, match="dataset: is not there"):
        FakeRay(tmp_path, outcomes=[refusal]).dispatch([runs])


def test_runs_of_a_worker_without_the_shared_disk_are_sent_back(runs: list[RunConfig], tmp_path: Path) -> None:
    run = runs[0]
    (tmp_path / run.run_id).mkdir()
    (tmp_path / run.run_id / "checkpoint.safetensors").write_bytes(b"of an earlier, unfinished run")
    FakeRay(tmp_path, outcomes=[{run.run_id: {"summary.json": b"{}", "../../evil": b"x"}}]).dispatch([[run]])
    assert sorted(path.name for path in (tmp_path / run.run_id).iterdir()) == ["evil", "summary.json"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_stacks_are_of_one_kind_and_about_equal() -> None:
    digits = [RunConfig(seed=seed) for seed in range(7)]
    other = [RunConfig(seed=seed, model="vgg11") for seed in range(2)]
    mixed = [digits[0], other[0], *digits[1:], other[1]]
    assert form_stacks(mixed) == [digits, other]
    assert [len(stack) for stack in form_stacks(mixed, 5)] == [3, 4, 2]
    assert [run for stack in form_stacks(mixed, 3) for run in stack] == [*digits, *other]
    with pytest.raises(InputError, match="max-stack: 0"):
        form_stacks(mixed, 0)


@pytest.mark.parametrize(
    ("address", "workers", "message"),
    [
        ("10.0.0.1:6379", 2, "ray-workers: 2 only goes with --ray local"),
        ("local", 0, "ray-workers: 0 is out of range"),
    ],
)
def test_workers_are_only_for_a_local_cluster(runs, tmp_path, address: str, workers: int, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError, match=message):
        ray_runner.run_on_ray(runs, RunOptions(out=str(tmp_path)), address=address, workers=workers)


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "127.0.0.1:{}000000"])
def test_an_address_where_nothing_answers_is_refused(runs: list[RunConfig], tmp_path: Path, form: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # taken, and not listened at
        address = form.format(held.getsockname()[1])
        with pytest.raises(InputError, match=f"ray: nothing answers at '{address}'"):
            ray_runner.run_on_ray(runs, RunOptions(out=str(tmp_path)), address=address)


def test_without_ray_the_message_says_how_to_get_it(runs: list[RunConfig], tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(ray_runner.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'fedentopt\[ray\]'"):
        ray_runner.run_on_ray(runs, RunOptions(out=str(tmp_path)), address="local")


class FakeRay:
    """The few functions of Ray that handing out needs; each task ends with the next of `outcomes`."""

    class exceptions:
        class RayError(Exception):
            pass

        class RayTaskError(RayError):
            cause: Exception | None = None

        class WorkerCrashedError(RayError):
            pass

        NodeDiedError = OutOfMemoryError = LocalRayletDiedError = ObjectLostError = WorkerCrashedError

    def __init__(self, out: Path, outcomes: list[object]) -> None:
        self.out, self.outcomes, self.handed_out = out, list(outcomes), 0

    def dispatch(self, stacks: list[list[RunConfig]]) -> None:
        options = RunOptions(out=str(self.out), device="cpu", workers=1)
        dispatcher = ray_runner._Dispatcher(
            self, stacks, options, "token", False, print, lambda report: None, lambda number: None
        )
        dispatcher.run()

    def remote(self, **needs: object):  # type: ignore[no-untyped-def]
        fake = self

        class Handle:
            def __init__(self, wrapped: object) -> None:
                self.wrapped = wrapped

            def remote(self, *arguments: object) -> object:
                if isinstance(self.wrapped, type):
                    return self
                fake.handed_out += 1
                return object()

            @property
            def fetch(self) -> Handle:
                return Handle(list)

        return Handle

    def wait(self, references: list[object], num_returns: int, timeout: float) -> tuple[list[object], list[object]]:
        return references[:num_returns], references[num_returns:]

    def get(self, reference: object, timeout: float | None = None) -> object:
        if timeout is not None:
            return []  # the inbox
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def cancel(self, reference: object, force: bool) -> None:
        pass
