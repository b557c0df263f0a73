"""Checkpoints that are written while training goes on: each is of its own round, whatever has happened since."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import own_methods
import toy
from fedentopt.errors import InputError
from fedentopt.results.checkpoint import load_tensors, save_tensors
from fedentopt.results.folder import CHECKPOINT, RunFolder
from fedentopt.results.records import Checkpoint, Outcome, RoundRecord
from fedentopt.simulation import checkpoints, engine
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RoundEvent, RunOptions, Task, run_stack
from killed_writes import Killed, killed_after

DATA = toy.images(samples=60)
OPTIONS = RunOptions(device="cpu", workers=1, checkpoint_every=3)


def config(algorithm: str = "scaffold", **settings: object) -> RunConfig:
    return toy.config(algorithm=algorithm, epochs=1, rounds=8, **settings)


class Late(toy.Memory):
    """A recorder that looks at a checkpoint only when two more rounds have been recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.later = threading.Condition()
        self.threads: set[int] = set()

    def record(self, record: RoundRecord) -> None:
        with self.later:
            super().record(record)
            self.later.notify_all()

    def save(self, checkpoint: Checkpoint) -> None:
        with self.later:
            assert self.later.wait_for(lambda: self.records[-1].round >= checkpoint.round + 2, timeout=60)
        self.threads.add(threading.get_ident())
        super().save(checkpoint)


@pytest.fixture(params=["by the thread", "by the engine", "by the engine when waited for"])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hardly any memory for rows on their way, and both ways of copying them: that of CUDA has the engine do it."""
    monkeypatch.setattr(checkpoints, "BLOCK", 1)
    monkeypatch.setattr(checkpoints, "MOST_BLOCKS", 0 if "waited" in request.param else 2)
    if request.param != "by the thread":
        begin = checkpoints.CheckpointWriter.__init__

        def begun(self: checkpoints.CheckpointWriter, device: torch.device) -> None:
            begin(self, device)
            self.by_engine = True

        monkeypatch.setattr(checkpoints.CheckpointWriter, "__init__", begun)


@pytest.mark.usefixtures("small_blocks")
def test_a_checkpoint_written_late_is_that_of_its_round() -> None:
    configs = [config(name, seed=seed) for name in ("scaffold", "feddyn", "own_methods:State") for seed in (0, 1)]
    sets = [[kind() for _ in configs] for kind in (toy.Memory, Late)]
    for memories in sets:
        run_stack([Task(c, m) for c, m in zip(configs, memories, strict=True)], DATA, OPTIONS)
    check_equal(*sets)
    assert all(thread != threading.get_ident() for late in sets[1] for thread in late.threads)


@pytest.mark.usefixtures("small_blocks")
def test_models_of_clients_written_late_are_those_of_their_round() -> None:
    at_once, late = toy.Memory(), Late()
    for memory in (at_once, late):
        run_stack([Task(config("moon"), memory)], DATA, OPTIONS)
    check_equal([at_once], [late])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("model", "size"), [("lenet5", 32), ("toy:wide", 8), ("toy:normed", 8)])
def test_on_a_gpu_a_checkpoint_written_late_is_that_of_its_round(model: str, size: int) -> None:
    data, options = toy.images(samples=60, size=size), replace(OPTIONS, device="cuda")
    configs = [config(model=model, seed=seed) for seed in (0, 1)]
    sets = [[kind() for _ in configs] for kind in (toy.Memory, Late)]
    for memories in sets:
        run_stack([Task(c, m) for c, m in zip(configs, memories, strict=True)], data, options)
    for first, second in zip(*sets, strict=True):
        for (one, _), (other, _) in zip(first.saves, second.saves, strict=True):
            for name, tensor in one.tensors.items():
                torch.testing.assert_close(other.tensors[name], tensor, rtol=1e-3, atol=1e-4)
            rows = {(row.vector, row.client): row.values for row in other.rows}
            assert rows.keys() == {(row.vector, row.client) for row in one.rows}
            for row in one.rows:
                torch.testing.assert_close(rows[row.vector, row.client], row.values, rtol=1e-3, atol=1e-4)


def check_equal(plain: list[toy.Memory], late: list[toy.Memory]) -> None:
    for first, second in zip(plain, late, strict=True):
        assert [saved.round for saved, _ in second.saves] == [3, 6]
        assert toy.difference(first.outcome, second.outcome) == 0
        for (one, records), (other, theirs) in zip(first.saves, second.saves, strict=True):
            assert [record.round for record in theirs] == [record.round for record in records]
            assert one.meta == other.meta
            for name, tensor in one.tensors.items():
                assert torch.equal(tensor, other.tensors[name])
            rows = {(row.vector, row.client): row.values for row in other.rows}
            assert rows.keys() == {(row.vector, row.client) for row in one.rows}
            assert all(torch.equal(row.values, rows[row.vector, row.client]) for row in one.rows)


def test_only_clients_that_trained_since_the_last_checkpoint_are_handed_over() -> None:
    class Noting(toy.Memory):
        def save(self, checkpoint: Checkpoint) -> None:
            given = list(checkpoint.rows)
            told.append([row.client for row in given])
            super().save(replace(checkpoint, rows=given))

    told: list[list[int]] = []
    memory = Noting()
    run_stack([Task(config(clients=12, cohort="2"), memory)], DATA, replace(OPTIONS, checkpoint_every=2))
    for clients, (saved, records) in zip(told, memory.saves, strict=True):
        # Clients that train on meanwhile may be handed over first.
        assert sorted(clients) == sorted({k for record in records[saved.round - 2 :] for k in record.trained})


@pytest.mark.parametrize("algorithm", ["scaffold", "moon"])
def test_stopped_at_any_write_and_continued_is_the_straight_run(tmp_path: Path, algorithm: str) -> None:
    cfg, options = config(algorithm), OPTIONS
    straight = run(tmp_path / "straight", cfg, options)
    moment, resumed = 0, set()
    while True:
        out = tmp_path / str(moment)
        with suppress(Killed), killed_after(moment):
            run(out, cfg, options)
            break
        saved = RunFolder(out, cfg).resume()
        resumed.add(None if saved is None else saved[0].round)
        again = run(out, cfg, options)
        assert toy.difference(straight, again) == 0, f"stopped at write {moment}"
        assert [replace(r, seconds=0) for r in again.records] == [replace(r, seconds=0) for r in straight.records]
        left = {path.name for path in RunFolder(out, cfg).path.iterdir()}
        assert not any(name.startswith(("vectors", "checkpoint")) for name in left)
        moment += 5  # a sample of all moments, of every kind
    assert resumed == {None, 3, 6}


def run(out: Path, cfg: RunConfig, options: RunOptions) -> Outcome:
    folder = RunFolder(out, cfg)
    return run_stack([Task(cfg, folder)], DATA, options)[0]


def test_a_checkpoint_of_an_older_version_is_continued(tmp_path: Path) -> None:
    cfg = config()
    straight = run(tmp_path / "straight", cfg, OPTIONS)
    stop_after(tmp_path, cfg, 3)
    path = RunFolder(tmp_path, cfg).path / CHECKPOINT
    # Rewritten as it was: every client of every vector among the tensors, nothing beside the file.
    tensors, about = load_tensors(path)
    checkpoint, _ = RunFolder(tmp_path, cfg).resume() or pytest.fail("nothing to resume")
    for name, shape in about["meta"].pop("vectors").items():
        tensors[name] = torch.zeros(shape)
        for row in checkpoint.rows:
            tensors[name][row.client] = row.values
    for part in about.pop("vectors"):
        (path.parent / part["file"]).unlink()
    save_tensors(path, tensors, about)
    stop_after(tmp_path, cfg, 6)  # its first checkpoint here has all clients again
    again = run(tmp_path, cfg, OPTIONS)
    assert toy.difference(straight, again) == 0


@pytest.mark.parametrize(("left", "why"), [(None, "No such file or directory"), (-4, r"\d+ bytes, \d+ were written")])
def test_a_damaged_file_of_vectors_is_named(tmp_path: Path, left: int | None, why: str) -> None:
    cfg = config()
    stop_after(tmp_path, cfg, 3)
    (path,) = RunFolder(tmp_path, cfg).path.glob("vectors-*")
    content = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(content[:left])
    with pytest.raises(InputError, match=rf"vectors-\d+\.f32: cannot be read \({why}\); start the run again"):
        run(tmp_path, cfg, OPTIONS)
    path.write_bytes(content)  # nothing was deleted
    assert toy.difference(run(tmp_path, cfg, OPTIONS), run(tmp_path / "straight", cfg, OPTIONS)) == 0


def test_code_that_remembers_less_than_before_is_refused_as_changed_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config("own_methods:State")
    with monkeypatch.context() as patch:
        patch.setattr(own_methods.State, "client_vectors", ("drift", "more"))
        patch.setattr(own_methods.State, "initial", lambda self, vector: 0.0)
        stop_after(tmp_path, cfg, 3)
    monkeypatch.setattr(engine, "code_digest", lambda modules: "another")
    with pytest.raises(InputError, match="code: the code behind own-methods-state has changed"):
        run(tmp_path, cfg, OPTIONS)


def stop_after(out: Path, cfg: RunConfig, round_: int) -> None:
    """Begin or continue a run, and end it, as a crash would, right after the checkpoint of a round."""

    class Ending(RunFolder):
        def save(self, checkpoint: Checkpoint) -> None:
            super().save(checkpoint)
            if checkpoint.round == round_:
                raise Killed

    with pytest.raises(Killed):
        run_stack([Task(cfg, Ending(out, cfg))], DATA, OPTIONS)


def test_a_full_disk_ends_the_run_soon_and_the_checkpoint_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, rounds, saved = config(), [], []
    real = os.fsync

    class Filling(RunFolder):
        def save(self, checkpoint: Checkpoint) -> None:
            saved.append(checkpoint.round)  # not the round in work, which may be later where writing is slow
            super().save(checkpoint)

    def full(handle: int) -> None:
        if saved and saved[-1] >= 4 and Path(os.readlink(f"/proc/self/fd/{handle}")).name.startswith("vectors-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match=r"out: cannot write .*vectors-\d+\.f32: No space left on device"):
            run_stack([Task(cfg, Filling(tmp_path, cfg))], DATA, replace(OPTIONS, checkpoint_every=2), note(rounds))
    assert 4 <= rounds[-1] <= 6  # heard of at the next checkpoint, if not before
    found = RunFolder(tmp_path, cfg).resume()
    assert found is not None
    assert found[0].round == 2
    assert not list(RunFolder(tmp_path, cfg).path.glob("*.part"))
    assert toy.difference(run(tmp_path, cfg, OPTIONS), run(tmp_path / "straight", cfg, OPTIONS)) == 0


def note(rounds: list[int]) -> Callable[[RoundEvent], None]:
    def progress(event: RoundEvent) -> None:
        rounds.append(event.round)

    return progress


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_ends_a_run_leaves_a_whole_checkpoint(tmp_path: Path, error: type[BaseException]) -> None:
    """A second Ctrl-C gives up the write under way; any other end lets it come to its own."""
    cfg, reached = config(), threading.Event()

    class Slow(RunFolder):
        def save(self, checkpoint: Checkpoint) -> None:
            if checkpoint.round == 6:
                assert reached.wait(60)
            super().save(checkpoint)

    def stop(event: RoundEvent) -> None:
        if event.round == 7:
            threading.Timer(0.3, reached.set).start()  # while the engine is giving up
            raise error

    with pytest.raises(error):
        run_stack([Task(cfg, Slow(tmp_path, cfg))], DATA, OPTIONS, stop)
    assert not any(thread.name == "checkpoint" for thread in threading.enumerate())
    found = RunFolder(tmp_path, cfg).resume()
    assert found is not None
    assert found[0].round == (3 if error is KeyboardInterrupt else 6)
    assert toy.difference(run(tmp_path, cfg, OPTIONS), run(tmp_path / "straight", cfg, OPTIONS)) == 0
