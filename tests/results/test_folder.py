"""What a run leaves on disk, and that nothing short of deleting it takes it away."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import toy
from fedentopt.errors import InputError
from fedentopt.results import environment
from fedentopt.results.checkpoint import load_tensors, save_tensors
from fedentopt.results.folder import RunFolder
from fedentopt.results.reading import find_runs, read_run
from fedentopt.results.records import Checkpoint, Outcome
from fedentopt.results.rounds import read_rounds
from fedentopt.simulation.command import command_of
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.engine import RunOptions, Task, run_stack
from killed_writes import Killed, killed_after
from toy_run import CLASSES, CONFIG, drive, label_counts, start_of

HEADER = (
    "round,accuracy,loss,worst_class_accuracy,class_accuracy,entropy,classes_covered,clients,trained,"
    "bytes_up,bytes_down,seconds,simulated_seconds"
)


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run but the one that holds times of day."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "run.json"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = RunFolder(tmp_path_factory.mktemp("straight"), CONFIG)
    drive(folder)
    return folder.path


def test_a_finished_run_has_all_its_files_and_reads_back_equal(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    outcome = drive(folder)
    assert outcome is not None
    assert {path.name for path in folder.path.iterdir()} == {
        "run.json", "rounds.csv", "label_counts.csv", "reported_counts.csv", "summary.json", "model.safetensors",
    }  # fmt: skip
    assert folder.path == tmp_path / CONFIG.run_id
    text = (folder.path / "rounds.csv").read_text()
    assert text.splitlines()[0] == HEADER
    assert read_run(folder.path).records == list(outcome.records)
    with (folder.path / "label_counts.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["client", *CLASSES]
    assert [[int(cell) for cell in row] for row in rows] == [
        [client, *counts] for client, counts in enumerate(label_counts(CONFIG).tolist())
    ]
    with (folder.path / "reported_counts.csv").open(newline="") as file:
        _, *rows = csv.reader(file)
    noisy = np.array([[float(cell) for cell in row[1:]] for row in rows])
    assert (noisy == start_of(CONFIG).reported_counts).all()
    with safe_open(str(folder.path / "model.safetensors"), framework="pt") as file:
        assert torch.equal(file.get_tensor("layer.weight"), outcome.model["layer.weight"])
    assert len({path.stat().st_mode for path in folder.path.iterdir()}) == 1  # who may read one may read all
    assert folder.is_finished()
    assert [run.config for run in find_runs(tmp_path)] == [CONFIG.to_dict()]


def test_run_json_tells_how_and_where_but_not_on_whose_machine(straight: Path) -> None:
    about = json.loads((straight / "run.json").read_text())
    assert about["config"] == CONFIG.to_dict()
    assert about["method"] == "fedentopt-dp"
    assert about["run_id"] == CONFIG.run_id
    assert about["torch"] == torch.__version__
    assert about["python"] == ".".join(map(str, sys.version_info[:3]))
    assert about["dataset"] == {
        "name": "digits", "classes": list(CLASSES), "train": int(label_counts(CONFIG).sum()), "test": 30,
    }  # fmt: skip
    text = (straight / "run.json").read_text()
    assert str(straight.parent) not in text
    assert str(Path.cwd()) not in text
    assert str(Path.home()) + "/" not in text
    assert socket.gethostname() not in re.findall(r"[\w.-]+", text)


def test_no_reported_counts_without_noise(tmp_path: Path) -> None:
    config = replace(CONFIG, epsilon=None)
    folder = RunFolder(tmp_path, config)
    drive(folder, config)
    assert not (folder.path / "reported_counts.csv").exists()


@pytest.mark.parametrize("stop_after", range(1, CONFIG.rounds + 1))
def test_killed_after_any_round_and_resumed_is_the_straight_run(
    tmp_path: Path, straight: Path, stop_after: int
) -> None:
    drive(RunFolder(tmp_path, CONFIG), stop_after=stop_after)
    folder = RunFolder(tmp_path, CONFIG)
    assert not folder.is_finished()
    drive(folder)
    assert contents(folder.path) == contents(straight)
    resumed = json.loads((folder.path / "run.json").read_text()).get("resumed", [])
    # Checkpoints come every second round; the work goes on behind the last one.
    assert [part["round"] for part in resumed] == ([] if stop_after <= 2 else [(stop_after - 1) // 2 * 2 + 1])


def test_killed_at_any_moment_of_any_write_leaves_a_run_that_resumes(tmp_path: Path, straight: Path) -> None:
    survived = False
    for moment in range(1000):
        out = tmp_path / str(moment)
        with suppress(Killed), killed_after(moment):
            drive(RunFolder(out, CONFIG))
            survived = True
        folder = RunFolder(out, CONFIG)
        remains = {"checkpoint.safetensors"} if folder.is_finished() else set()  # killed between summary and removal
        if not folder.is_finished():
            drive(folder)
        left = {name: data for name, data in contents(folder.path).items() if not name.endswith(".part")}
        left = {name: data for name, data in left.items() if not (remains and name.startswith("vectors-"))}
        left = {name: data for name, data in left.items() if name not in remains}
        assert left == contents(straight), f"killed at write {moment}"
        if survived:
            break
    assert survived
    assert moment > 20


def test_a_checkpoint_holds_the_rounds_so_far_in_one_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    drive(folder, stop_after=5)
    (folder.path / "rounds.csv").unlink()  # the readable copy is not what a run continues from
    checkpoint, records = RunFolder(tmp_path, CONFIG).resume() or pytest.fail("nothing to resume")
    assert checkpoint.round == 4
    assert [record.round for record in records] == [1, 2, 3, 4]
    assert set(checkpoint.tensors) == {"value", "again", "twin"}


def _cut(data: bytes) -> bytes:
    return data[: len(data) - 7]


def _flip_tensor(data: bytes) -> bytes:
    return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]


def _flip_header(data: bytes) -> bytes:
    at = data.index(b"bytes_down") + 15
    return data[:at] + (b"7" if data[at : at + 1] != b"7" else b"8") + data[at + 1 :]


@pytest.mark.parametrize(
    "damage", [_cut, _flip_tensor, _flip_header, lambda _: b"", lambda _: b"not safetensors at all"]
)
def test_a_damaged_checkpoint_is_refused_and_kept(tmp_path: Path, damage) -> None:
    drive(RunFolder(tmp_path, CONFIG), stop_after=5)
    folder = RunFolder(tmp_path, CONFIG)
    path = folder.path / "checkpoint.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    before = contents(folder.path)
    with pytest.raises(InputError, match=r"checkpoint\.safetensors: .*--no-resume"):
        drive(folder)
    assert contents(folder.path) == before


def test_another_runs_checkpoint_is_refused_naming_what_differs(tmp_path: Path) -> None:
    drive(RunFolder(tmp_path, CONFIG), stop_after=5)
    other = replace(CONFIG, seed=4, lr=0.5)
    shutil.copytree(tmp_path / CONFIG.run_id, tmp_path / other.run_id)
    with pytest.raises(InputError, match=r"other settings \(lr, seed\)"):
        RunFolder(tmp_path, other).resume()
    (tmp_path / other.run_id / "summary.json").write_text('{"finished": true}')
    with pytest.raises(InputError, match="other settings"):
        RunFolder(tmp_path, other).is_finished()


def test_a_damaged_summary_is_refused_by_name(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    drive(folder)
    (folder.path / "summary.json").write_text('{"finished": tr')
    with pytest.raises(InputError, match=r"summary\.json: is not JSON"):
        folder.is_finished()


def typed(partition: str, **changes: object) -> RunConfig:
    """The config of a version that kept a partition as it was typed, in its identity too."""
    config = CONFIG.replace(partition=partition, **changes)
    object.__setattr__(config, "partition", partition)
    return config


@pytest.mark.parametrize("spelling", ["dir:.1", "dir:0.10", "dir:1e-1"])
def test_a_run_whose_partition_was_spelt_otherwise_is_known_and_continued(
    tmp_path: Path, straight: Path, spelling: str
) -> None:
    old = typed(spelling)
    assert old.run_id != CONFIG.run_id
    for other in (typed("dir:.2"), typed(spelling, lr=0.5), typed(spelling, seed=1), typed("iid")):
        drive(RunFolder(tmp_path, other), other)
    broken = tmp_path / old.run_id.replace("_dir", "_0")
    broken.mkdir()
    (broken / "run.json").write_text("{")
    assert not RunFolder(tmp_path, CONFIG).is_finished()
    assert RunFolder(tmp_path, CONFIG).path.name == CONFIG.run_id
    begun = RunFolder(tmp_path, old)
    drive(begun, old, stop_after=5)
    folder = RunFolder(tmp_path, CONFIG)
    assert folder.can_resume()
    drive(folder)
    assert folder.path == begun.path
    assert contents(folder.path) == contents(straight)
    assert RunFolder(tmp_path, CONFIG).is_finished()
    assert read_run(folder.path).config == json.loads(json.dumps(CONFIG.to_dict()))
    afresh = RunFolder(tmp_path, CONFIG, resume=False)
    drive(afresh)
    assert afresh.path.name == CONFIG.run_id
    assert RunFolder(tmp_path, CONFIG).path == afresh.path, "the name of now comes first"


def test_changed_data_are_refused_on_resume(tmp_path: Path) -> None:
    drive(RunFolder(tmp_path, CONFIG), stop_after=5)
    folder = RunFolder(tmp_path, CONFIG)
    folder.resume()
    counts = label_counts(CONFIG)
    counts[3, 1] += 1
    before = contents(folder.path)
    with pytest.raises(InputError, match=r"dataset: 'digits' is not what .*label_counts\.csv"):
        folder.start(start_of(CONFIG, counts))
    assert contents(folder.path) == before


def test_counts_that_are_no_text_any_more_are_refused_on_resume(tmp_path: Path) -> None:
    drive(RunFolder(tmp_path, CONFIG), stop_after=5)
    folder = RunFolder(tmp_path, CONFIG)
    folder.resume()
    path = folder.path / "label_counts.csv"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    before = contents(folder.path)
    with pytest.raises(InputError, match=r"dataset: 'digits' is not what .*label_counts\.csv"):
        folder.start(start_of(CONFIG))
    assert contents(folder.path) == before


def test_starting_afresh_keeps_the_old_run_until_there_is_something_new(tmp_path: Path) -> None:
    old = RunFolder(tmp_path, CONFIG)
    drive(old)
    before = contents(old.path)
    afresh = RunFolder(tmp_path, CONFIG, resume=False)
    drive(afresh, stop_after=1)  # killed before its first checkpoint
    assert contents(old.path) == before
    assert RunFolder(tmp_path, CONFIG).is_finished()
    drive(RunFolder(tmp_path, CONFIG, resume=False), stop_after=3)
    assert not RunFolder(tmp_path, CONFIG).is_finished()
    assert "model.safetensors" not in contents(old.path)
    drive(RunFolder(tmp_path, CONFIG))
    assert contents(old.path) == before


def test_starting_afresh_ignores_the_checkpoint(tmp_path: Path) -> None:
    drive(RunFolder(tmp_path, CONFIG), stop_after=5)
    path = tmp_path / CONFIG.run_id / "checkpoint.safetensors"
    path.write_bytes(b"damaged")
    folder = RunFolder(tmp_path, CONFIG, resume=False)
    assert folder.resume() is None
    drive(folder)
    assert folder.is_finished()
    assert not path.exists()


def test_starting_afresh_leaves_no_checkpoint_of_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drive(RunFolder(tmp_path, CONFIG), stop_after=5)

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("fedentopt.results.folder.save_checkpoint", killed)
        with pytest.raises(SystemExit):
            drive(RunFolder(tmp_path, CONFIG, resume=False))
    # The folder speaks of the new start by now: what the old one had trained must not go on under its name.
    assert RunFolder(tmp_path, CONFIG).resume() is None


def test_a_history_longer_than_headers_may_be_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.safetensors"
    about = {"rounds": ["é" * 1000] * 100}
    monkeypatch.setattr("fedentopt.results.checkpoint.MOST_IN_HEADER", 1000)
    save_tensors(path, {"a": torch.arange(3.0)}, about)
    assert int.from_bytes(path.read_bytes()[:8], "little") < 1000
    tensors, read = load_tensors(path)
    assert read == about
    assert list(tensors) == ["a"]
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1
    path.write_bytes(whole)
    with pytest.raises(InputError, match="was changed or damaged"):
        load_tensors(path)


def test_a_folder_that_the_system_refuses_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"out: .* cannot be used: File name too long"):
        RunFolder(tmp_path / ("x" * 300), CONFIG).is_finished()


def test_a_full_disk_is_an_input_error_and_the_last_checkpoint_survives(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    drive(folder, stop_after=3)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(InputError, match=r"out: cannot write .*No space left"):
            folder.save(Checkpoint(4, {"value": torch.zeros(2)}, {}))
    assert not list(folder.path.glob("*.part"))
    again = RunFolder(tmp_path, CONFIG)
    drive(again)
    assert contents(again.path) == contents(straight)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(InputError, match="out: cannot create the folder"):
        drive(RunFolder(tmp_path / "out", CONFIG))


HOLDER = """
import sys, time
from pathlib import Path
from fedentopt.files import locked_folder
with locked_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_two_processes_never_work_on_one_folder_and_a_dead_one_does_not_block(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    folder.path.mkdir()
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder.path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(InputError, match=f"in use by another fedentopt .process {holder.pid}."), folder.locked():
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    assert (folder.path / ".lock").exists()  # left behind, and no obstacle
    with folder.locked():
        drive(folder)
    assert folder.is_finished()
    assert not (folder.path / ".lock").exists()


def test_a_finished_run_loses_the_lock_of_a_killed_process_and_no_other(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    drive(folder)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder.path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        folder.clear_lock()
        assert (folder.path / ".lock").read_text() == f"{holder.pid}\n"  # as long as somebody has it
        with pytest.raises(InputError, match=f"in use by another fedentopt .process {holder.pid}."), folder.locked():
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    folder.clear_lock()
    assert not (folder.path / ".lock").exists()
    assert folder.is_finished()
    (folder.path / ".lock").mkdir()  # nothing that can be locked: left where it is
    folder.clear_lock()
    assert (folder.path / ".lock").is_dir()


def test_a_lock_without_a_run_leaves_no_empty_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    with folder.locked():
        assert folder.path.exists()
    assert not folder.path.exists()


def test_a_run_that_is_not_finite_can_be_written_and_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG)
    folder.start(start_of(CONFIG))
    outcome = drive(RunFolder(tmp_path / "source", CONFIG))
    assert outcome is not None
    bad = [
        replace(r, loss=float("inf"), class_accuracy=r.class_accuracy and (*r.class_accuracy[:2], float("nan")))
        for r in outcome.records
    ]
    folder.finish(Outcome(tuple(bad), {"w": torch.tensor([float("nan")])}, 5, len(CLASSES), CONFIG.clients, 7))
    run = read_run(folder.path)
    assert run.summary["diverged_round"] == 5
    assert run.summary["final_accuracy"] == pytest.approx(100 / 3)
    assert [run.curve[number] for number in (5, 6, 7)] == [100 / 3] * 3
    assert run.records[1].loss == float("inf")
    assert np.isnan(run.records[1].class_accuracy).tolist() == [False, False, True]


@pytest.mark.parametrize(("model", "fewer"), [("toy:linear", True), ("toy:wide", False)])
def test_the_accuracy_of_fedconcat_is_that_of_its_own_last_ten_rounds(tmp_path: Path, model: str, fewer: bool) -> None:
    # Two stages within one budget: fewer rounds than were asked for, or more.
    config = toy.config(algorithm="fedconcat", model=model, clusters=2, rounds=40, concat_max_rounds=20)
    run_stack([Task(config, RunFolder(tmp_path, config))], toy.images(), RunOptions(device="cpu"))
    (run,) = find_runs(tmp_path)
    last = [r.accuracy for r in run.records[-10:]]
    assert None not in last
    assert (len(run.records) < 40) == fewer
    assert run.summary["rounds"] == len(run.records)
    assert run.summary["accuracy"] == pytest.approx(np.mean(last))
    assert run.summary["final_accuracy"] == run.records[-1].accuracy


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x,1,1,1,[1],1,1,[0],[0],1,1,1,0", r"line 2, column round: 'x' is not a whole number"),
        ("1,1,1,1,[1],,1,[0],[0],1,1,1,0", r"round 1, column entropy: is empty; accepted: a number"),
        ("1,1,1,1,[1],1,1,[0,[0],1,1,1,0", r"round 1, column clients: '\[0' is not a JSON list"),
        ("1,1,1,1,[1],1,1,,[0],1,1,1,0", r"round 1, column clients: is empty; accepted: a JSON list"),
        ("1,1,1,1,[1],1,1,[true],[0],1,1,1,0", r"round 1, column clients: client 'True' has no row"),
        ("1,1,1,1,[1],1,1,[-1],[0],1,1,1,0", r"round 1, column clients: client '-1' has no row"),
        ("1,1,1,1,[1],1,1,[0],[0],1.5,1,1,0", r"round 1, column bytes_up: '1.5' is not a whole number"),
        (f"1,1,1,1,[1],1,1,[0],[0],{10**30},1,1,0", r"round 1, column bytes_up: '10+' is not a whole number"),
        ('1,1,1,1,"[""a""]",1,1,[0],[0],1,1,1,0', r"round 1, column class_accuracy: .* is not a list of numbers"),
        ("1,1,1", r"line 2 has 3 cells, the header has 13"),
    ],
)
def test_a_damaged_table_is_refused_by_file_line_and_cell(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "rounds.csv"
    path.write_text(f"{HEADER}\n{line}\n")
    with pytest.raises(InputError, match=rf"rounds\.csv: {message}"):
        read_rounds(path, clients=("0",), num_classes=1)


def test_the_commit_is_that_of_a_checkout_and_of_nothing_else(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        settings = ["-c", "user.name=x", "-c", "user.email=x@x"]
        done = subprocess.run(["git", "-C", str(tmp_path), *settings, *words], check=True, capture_output=True)
        return done.stdout.decode().strip()

    package = tmp_path / "src" / "fedentopt"
    package.mkdir(parents=True)
    (package / "code.py").write_text("a = 1\n")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    assert environment.commit(package) == git("rev-parse", "HEAD")
    (package / "code.py").write_text("a = 2\n")
    assert environment.commit(package) == git("rev-parse", "HEAD") + "+changes"
    installed = tmp_path / "venv" / "lib" / "site-packages" / "fedentopt"
    installed.mkdir(parents=True)
    assert environment.commit(installed) is None


def test_the_command_names_every_setting_that_is_not_the_default() -> None:
    assert command_of(CONFIG.replace(algorithm="fedrs", settings={"soft": True}, model="my.nets:make it")) == (
        "fedentopt run --clients 6 --model 'my.nets:make it' --algorithm fedrs --selector fedentopt --cohort 2 "
        "--epsilon 0.5 --rounds 7 --fedrs-soft --buffer 2 --lr 0.01 --flip 0.5"
    )
