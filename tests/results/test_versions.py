"""Files of older versions are read; what newer ones add is where it should be, and unseen where it says nothing."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedentopt.cli.result_table import print_methods
from fedentopt.report import render_runs, write_report
from fedentopt.results.aggregate import by_method
from fedentopt.results.folder import RunFolder
from fedentopt.results.memory import MemoryRecorder
from fedentopt.results.reading import RunResult, find_runs, read_run
from fedentopt.results.records import Outcome
from fedentopt.results.tensorboard import write_missing_curves
from fedentopt.simulation.result import Result
from toy_run import CLASSES, CONFIG, drive, start_of

OLD = Path(__file__).parent / "run_of_version_0_1"


def timed(seconds: float, recorder: RunFolder | MemoryRecorder) -> None:
    """The toy run, each of whose rounds takes so long in simulated time."""
    source = MemoryRecorder(CONFIG)
    drive(source)
    records = tuple(replace(record, simulated_seconds=seconds) for record in source.result().records)
    recorder.start(start_of(CONFIG))
    recorder.finish(Outcome(records, {}, None, len(CLASSES), CONFIG.clients, CONFIG.rounds))


def in_memory(seconds: float, spread: float = 0.0) -> RunResult:
    recorder = MemoryRecorder(CONFIG.replace(speed_spread=spread))
    timed(seconds, recorder)
    return recorder.result()


def test_a_run_of_version_0_1_is_read_as_it_was_written() -> None:
    old, new = read_run(OLD), MemoryRecorder(CONFIG)
    drive(new)
    assert "simulated_seconds" not in (OLD / "rounds.csv").read_text()
    assert old.finished
    assert old.records == new.result().records
    assert {record.simulated_seconds for record in old.records} == {0.0}
    assert old.rounds.simulated_seconds.tolist() == [0.0] * 7
    assert old.summary == {k: v for k, v in new.result().summary.items() if k != "simulated_seconds"}
    assert old.curve == new.result().curve
    assert (old.method, old.seed) == ("fedentopt-dp", 0)


def test_everything_is_made_of_a_run_of_version_0_1(tmp_path: Path) -> None:
    shutil.copytree(OLD, tmp_path / read_run(OLD).run_id)
    assert "fedentopt-dp" in write_report(tmp_path).read_text()
    runs = find_runs(tmp_path)
    (method,) = by_method(runs)
    assert method.to_dict()["simulated_seconds"] == 0
    assert Result(runs, ["old"]).rounds.simulated_seconds.tolist() == [0.0] * 7
    folder = RunFolder(tmp_path, CONFIG)
    assert folder.path == runs[0].path
    assert folder.is_finished()  # not to be repeated


def test_simulated_time_is_kept_in_every_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    timed(1.25, folder)
    header, *rows = (folder.path / "rounds.csv").read_text().splitlines()
    assert header.endswith(",seconds,simulated_seconds")
    assert all(row.endswith(",0.25,1.25") for row in rows)
    run = read_run(folder.path)
    assert run.summary["simulated_seconds"] == 8.75
    assert [record.simulated_seconds for record in run.records] == [1.25] * 7
    drive(RunFolder(tmp_path / "stopped", CONFIG), stop_after=5)
    saved = RunFolder(tmp_path / "stopped", CONFIG).resume()
    assert saved is not None
    assert {record.simulated_seconds for record in saved[1]} == {0.0}


@pytest.mark.parametrize("spread", [0.0, 0.5])
def test_simulated_time_is_shown_only_where_clients_differ_in_speed(
    spread: float, capsys: pytest.CaptureFixture[str]
) -> None:
    run = in_memory(1.25, spread)
    text = render_runs([run])
    assert ("Simulated time (s)" in text) == bool(spread)
    assert bool(re.search(r'data-value="8.75">9</td>', text)) == bool(spread)
    print_methods(by_method([run]), [])
    assert ("simulated" in capsys.readouterr().out) == bool(spread)


@pytest.mark.parametrize("seconds", [0.0, 1.25])
def test_tensorboard_has_simulated_time_where_files_know_it(seconds: float, tmp_path: Path) -> None:
    timed(seconds, RunFolder(tmp_path, CONFIG))
    (read,) = find_runs(tmp_path)
    write_missing_curves(read)
    assert read.path is not None
    curves = EventAccumulator(str(read.path / "tensorboard")).Reload().Tags()["scalars"]
    assert "cohort/entropy" in curves
    assert ("simulated_seconds" in curves) == bool(seconds)
