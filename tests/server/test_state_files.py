"""A server's state on disk: what lies there stays whole, what earlier versions wrote is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedentopt.errors import InputError
from fedentopt.server import state_files
from fedentopt.server.state_files import StateFiles

FILES = StateFiles("some state", 3, "new.npz", "old.npz", "state")
WEIGHTS = np.arange(6, dtype=np.float32).reshape(2, 3)


class StopError(BaseException):
    """The process was killed here."""


def save(folder: Path, rounds: int) -> None:
    groups = {"model": {"w": WEIGHTS * rounds}, "memory": {}}
    FILES.save(folder, {"rounds": rounds}, groups, {"noise": 0.1 + 0.2})


def rounds_in(path: Path) -> int:
    return int(FILES.read(path)[0]["rounds"])


def test_groups_numbers_and_settings_come_back_as_they_were(tmp_path: Path) -> None:
    save(tmp_path, 2)
    header, groups = FILES.read(tmp_path / "new.npz")
    assert (header["rounds"], header["meta"]) == (2, {"noise": 0.30000000000000004})
    assert list(groups) == ["model", "memory"]
    assert groups["model"]["w"].dtype == np.float32
    np.testing.assert_array_equal(groups["model"]["w"], WEIGHTS * 2)
    assert groups["memory"] == {}
    assert (tmp_path / "new.npz").stat().st_mode & 0o077 == 0


def test_a_file_put_together_by_hand_is_read(tmp_path: Path) -> None:
    """The layout on disk, which files written by any version have."""
    header = {
        "format": "some state",
        "version": 3,
        "rounds": 7,
        "groups": ["a", "b"],
        "names": [["b", "x"]],
        "meta": {},
    }
    document = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    np.savez(tmp_path / "new.npz", header=document, **{"000000": WEIGHTS})
    found, groups = FILES.read(tmp_path / "new.npz")
    assert found == header
    assert groups["a"] == {}
    np.testing.assert_array_equal(groups["b"]["x"], WEIGHTS)


@pytest.mark.parametrize("moment", ["write_archive", "name_again", "replace"])
def test_a_stop_while_saving_leaves_the_newest_whole_and_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    def stop(*args: Any) -> None:
        raise StopError

    monkeypatch.setattr(os if moment == "replace" else state_files, moment, stop)
    with pytest.raises(StopError):
        save(tmp_path, 3)
    assert {path.name: rounds_in(path) for path in tmp_path.iterdir()} == {"new.npz": 2, "old.npz": 1}


def test_without_hard_links_the_one_before_is_a_copy_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*args: Any) -> None:
        raise OSError("no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    save(tmp_path, 1)
    save(tmp_path, 2)
    assert {path.name: rounds_in(path) for path in tmp_path.iterdir()} == {"new.npz": 2, "old.npz": 1}
    assert (tmp_path / "old.npz").stat().st_mode & 0o077 == 0


def test_objects_and_other_kinds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="state: array 'w' holds Python objects; accepted: numbers"):
        FILES.save(tmp_path, {}, {"model": {"w": np.array([None])}}, {})
    assert list(tmp_path.iterdir()) == []
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="format 'some state', version 3, not 'some state', 4"):
        StateFiles("some state", 4, "new.npz", "old.npz", "state").read(tmp_path / "new.npz")


def test_a_folder_that_cannot_be_made_is_refused_by_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"checkpoint_dir: .*file: .*; accepted: a folder that can be written to"):
        state_files.make_writable(tmp_path / "file", "checkpoint_dir")
