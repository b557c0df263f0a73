"""A run in memory is the run that its folder would be read as."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import toy
from fedentopt.errors import InputError
from fedentopt.report import render_runs, write_page, write_report
from fedentopt.results.folder import RunFolder
from fedentopt.results.memory import MemoryRecorder
from fedentopt.results.reading import RunResult, read_run
from fedentopt.simulation.engine import Task, run_stack
from fedentopt.simulation.options import RunOptions
from toy_run import CONFIG, drive, start_of


def in_memory(**more: object) -> RunResult:
    recorder = MemoryRecorder(CONFIG, **more)
    drive(recorder)
    return recorder.result()


def on_disk(out: Path, **more: object) -> RunResult:
    folder = RunFolder(out, CONFIG, **more)
    drive(folder)
    return read_run(folder.path)


def test_memory_and_folder_hold_the_same_run(tmp_path: Path) -> None:
    ours, theirs = in_memory(targets=[12.5]), on_disk(tmp_path, targets=[12.5])
    assert (ours.path, theirs.path) == (None, tmp_path / CONFIG.run_id)
    assert (ours.run_id, ours.method, ours.seed) == (CONFIG.run_id, CONFIG.method, CONFIG.seed)
    assert ours.config == theirs.config == CONFIG.to_dict()
    assert {**ours.about, "started": ""} == {**theirs.about, "started": ""}
    assert ours.summary == theirs.summary
    assert "12.5" in ours.summary["rounds_to"]
    assert ours.records == theirs.records
    assert ours.curve == theirs.curve
    assert (ours.labels.clients, ours.labels.classes) == (theirs.labels.clients, theirs.labels.classes)
    assert np.array_equal(ours.labels.counts, theirs.labels.counts)
    assert ours.times_selected.tolist() == theirs.times_selected.tolist()
    assert ours.model is not None
    assert theirs.model is not None
    assert ours.model.keys() == theirs.model.keys()
    assert torch.equal(ours.model["layer.weight"], theirs.model["layer.weight"])


def test_the_page_from_memory_is_the_page_from_the_folder(tmp_path: Path) -> None:
    command = "fedentopt run --rounds 7"
    on_disk(tmp_path / "mine", command=command)
    from_folder = write_report(tmp_path / "mine").read_text()
    assert command in from_folder
    run = in_memory(command=command)
    assert render_runs([run], title="mine") == from_folder
    page = write_page([run], tmp_path / "new" / "page.html", title="mine")
    assert page == tmp_path / "new" / "page.html"
    assert page.read_text() == from_folder


def test_a_run_that_is_under_way_can_be_looked_at() -> None:
    recorder = MemoryRecorder(CONFIG)
    with pytest.raises(RuntimeError, match="has not been started"):
        recorder.result()
    recorder.start(start_of(CONFIG))
    with pytest.raises(InputError, match=f"{CONFIG.run_id} has finished no round yet"):
        render_runs([recorder.result()])
    recorder = MemoryRecorder(CONFIG)
    drive(recorder, stop_after=5)
    run = recorder.result()
    assert (run.finished, run.summary, run.model, len(run.rounds)) == (False, {}, None, 5)
    assert "1 unfinished, round 5 of 7" in render_runs([run])


def test_no_runs_make_no_page() -> None:
    with pytest.raises(InputError, match="there are no runs"):
        render_runs([])


def test_the_engine_fills_it(tmp_path: Path) -> None:
    config = toy.config(selector="fedentopt", epsilon=0.5)
    recorder, folder = MemoryRecorder(config), RunFolder(tmp_path, config)
    (outcome,) = run_stack([Task(config, recorder)], toy.images(), RunOptions(device="cpu"))
    run_stack([Task(config, folder)], toy.images(), RunOptions(device="cpu"))
    run, read = recorder.result(), read_run(folder.path)
    assert run.model is outcome.model
    assert [(r.accuracy, r.clients, r.entropy) for r in run.records] == [
        (r.accuracy, r.clients, r.entropy) for r in read.records
    ]
    times = {"seconds": 0, "selection_seconds": 0}
    assert {**run.summary, **times} == {**read.summary, **times}
