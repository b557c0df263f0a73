"""Calls of `fedentopt select` that share a state file take turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Said, commander
from fedentopt import files
from fedentopt.files import locked_state

Command = Callable[..., Said]


@pytest.fixture
def fedentopt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return commander(monkeypatch, capsys)


@pytest.fixture
def counts(tmp_path: Path) -> Path:
    path = tmp_path / "counts.csv"
    path.write_text("client,a,b\n" + "".join(f"c{k},{k % 5 + 1},{k % 3 + 1}\n" for k in range(12)))
    return path


def test_calls_at_once_pick_different_cohorts(counts: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    words = ["select", str(counts), "--cohort", "2", "--buffer", "9", "--rounds", "1", "--state", str(state), "--json"]
    # Every call says that it is about to select, and then waits for the word: they all start from the same moment.
    source = "import sys; import fedentopt.cli; print('ready', flush=True); sys.stdin.readline(); fedentopt.cli.main()"
    calls = [
        subprocess.Popen([sys.executable, "-c", source, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    for call in calls:
        assert call.stdout is not None
        assert call.stdout.readline().strip() == b"ready"
    for call in calls:
        assert call.stdin is not None
        call.stdin.write(b"\n")
        call.stdin.flush()
    said = [json.loads(call.communicate(timeout=60)[0])["rounds"][0] for call in calls]
    assert [call.returncode for call in calls] == [0] * 4
    assert sorted(entry["round"] for entry in said) == [1, 2, 3, 4]
    assert len({client for entry in said for client in entry["clients"]}) == 8  # the buffer holds all of them
    assert sorted(os.listdir(tmp_path)) == ["counts.csv", "state.json"]


def test_a_state_in_use_is_refused_after_a_wait(
    fedentopt: Command, counts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state.json"
    words = ("select", counts, "--cohort", 2, "--rounds", 1, "--state", state, "--json")
    assert fedentopt(*words).code == 0
    before = state.read_bytes()
    monkeypatch.setattr(files, "STATE_PATIENCE", 0.1)
    with locked_state(state):
        said = fedentopt(*words)
        assert said.code == 2
        assert f"{state}: in use by another fedentopt select" in said.err
        assert said.out == ""
        assert state.read_bytes() == before
        assert fedentopt(*words[:-2], tmp_path / "another.json").code == 0
    assert json.loads(fedentopt(*words).out)["rounds"][0]["round"] == 2


def test_a_call_waits_for_the_one_before(
    fedentopt: Command, counts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state.json"
    monkeypatch.setattr(files, "STATE_PATIENCE", 60)
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with locked_state(state):
            held.set()
            let_go.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(30)
    tried = files._try_lock
    refused: list[bool] = []

    def watched(handle: int, inherited: bool) -> bool:
        got = tried(handle, inherited)
        if not got:
            refused.append(True)
            let_go.set()
        return got

    monkeypatch.setattr(files, "_try_lock", watched)
    said = fedentopt("select", counts, "--cohort", 2, "--rounds", 1, "--state", state, "--json")
    holder.join()
    assert said.code == 0
    assert refused


def test_a_lock_left_behind_by_a_killed_call_is_no_obstacle(fedentopt: Command, counts: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    (tmp_path / ".state.json.lock").touch()
    assert fedentopt("select", counts, "--rounds", 1, "--state", state, "--json").code == 0
    assert sorted(os.listdir(tmp_path)) == ["counts.csv", "state.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="pipes and links in the file system")
def test_a_state_may_be_a_link_but_no_pipe(fedentopt: Command, counts: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    link, target = tmp_path / "link.json", folder / "state.json"
    link.symlink_to(target)
    words = ("select", counts, "--cohort", 2, "--rounds", 1, "--json", "--state")
    for number, path in ((1, link), (2, target), (3, link)):
        assert json.loads(fedentopt(*words, path).out)["rounds"][0]["round"] == number
    assert link.is_symlink()
    assert os.listdir(folder) == ["state.json"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    said = fedentopt(*words, pipe)
    assert said.code == 2
    assert f"{pipe}: not a regular file" in said.err
    said = fedentopt(*words, tmp_path / "no" / "state.json")
    assert said.code == 2
    assert "state.json: No such file or directory" in said.err
