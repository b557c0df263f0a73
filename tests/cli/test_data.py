"""`fedentopt data` as a user runs it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from command_line import Said, commander
from fedentopt.datasets.catalog import ENTRIES
from file_server import serving
from tiny_data import CIFAR10_FILES, cifar10, class_folders, tar_gz


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return commander(monkeypatch, capsys)


def test_list_shows_every_set_and_its_state(tmp_path: Path, command: Callable[..., Said]) -> None:
    cifar10(tmp_path)
    said = command("data", "list", "--data-dir", tmp_path)
    assert said.code == 0
    rows = {line.split()[0]: line for line in said.out.splitlines() if line.strip()}
    assert rows["digits"].rstrip().endswith("built in")
    assert rows["cifar10"].rstrip().endswith("there")
    assert "fedentopt data fetch cinic10" in said.out
    assert "kaggle.com" in said.out
    assert str(tmp_path) in said.out


def test_list_cuts_no_name_where_there_is_little_room(
    tmp_path: Path, command: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    said = command("data", "list", "--data-dir", tmp_path, columns=60)
    table = said.out.partition("data folder")[0]
    assert {line.split()[0] for line in table.splitlines()[1:] if line[:1].strip()} == set(ENTRIES)
    assert "165,466" in table
    assert "…" not in table


def test_list_as_json(tmp_path: Path, command: Callable[..., Said], monkeypatch: pytest.MonkeyPatch) -> None:
    cifar10(tmp_path)
    monkeypatch.setenv("FEDENTOPT_DATA", str(tmp_path))
    assert command("data", "verify").code == 0
    assert command("data", "fetch", "digits").code == 2
    from fedentopt.datasets import load

    load("cifar10", image_size=16)
    listed = json.loads(command("data", "list", "--json").out)
    assert listed["data_dir"] == str(tmp_path)
    by_name = {row["name"]: row for row in listed["datasets"]}
    assert list(by_name) == list(ENTRIES)
    assert (by_name["cifar10"]["state"], by_name["cifar10"]["converted"]) == ("converted", [16])
    assert by_name["cifar100"]["state"] == "missing"


def test_fetch_downloads_converts_and_is_idle_the_second_time(
    tmp_path: Path, command: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cifar10(tmp_path / "made")
    tar_gz(tmp_path / "a.tar.gz", {f"cifar-10-batches-bin/{n}": made[n].tobytes() for n in CIFAR10_FILES})
    content = (tmp_path / "a.tar.gz").read_bytes()
    entry = ENTRIES["cifar10"]
    download = dataclasses.replace(entry.downloads[0], md5=hashlib.md5(content).hexdigest())
    monkeypatch.setitem(ENTRIES, "cifar10", dataclasses.replace(entry, downloads=(download,), train=100, test=20))
    words = ("data", "fetch", "cifar10", "--data-dir", tmp_path / "data", "--json")
    with serving({"cifar-10-binary.tar.gz": content}) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        said = command(*words)
    assert said.code == 0, said.err
    assert json.loads(said.out) == {
        "name": "cifar10",
        "data_dir": str(tmp_path / "data"),
        "downloaded": True,
        "train": 100,
        "test": 20,
        "image_size": 32,
    }
    assert (tmp_path / "data" / ".fedentopt" / "cifar10-32" / "meta.json").is_file()
    again = command(*words)  # the server is gone, so nothing can be downloaded
    assert again.code == 0
    assert json.loads(again.out)["downloaded"] is False


def test_fetch_refuses_with_exit_code_2(
    tmp_path: Path, command: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving({"cifar-100-binary.tar.gz": b"something else"}) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        wrong = command("data", "fetch", "cifar100", "--data-dir", tmp_path / "data")
    assert wrong.code == 2
    assert "published 03b5dce01913d631647c71ecec9e9cb8" in wrong.err
    assert not (tmp_path / "data").exists()
    kaggle = command("data", "fetch", "brain-tumor-mri", "--data-dir", tmp_path)
    assert kaggle.code == 2
    assert "brain-tumor-mri/Training/<class>" in kaggle.err
    unknown = command("data", "fetch", "imagenet", "--data-dir", tmp_path)
    assert unknown.code == 2
    assert "'imagenet' is unknown" in unknown.err


def test_verify_names_what_is_wrong_and_ends_with_2(tmp_path: Path, command: Callable[..., Said]) -> None:
    cifar10(tmp_path)
    fine = command("data", "verify", "--data-dir", tmp_path, "--json")
    assert fine.code == 0
    assert {row["name"] for row in json.loads(fine.out)["findings"]} == {"digits", "cifar10"}
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin"
    path.write_bytes(path.read_bytes()[:-1])
    wrong = command("data", "verify", "cifar10", "--data-dir", tmp_path, "--json")
    assert wrong.code == 2
    assert json.loads(wrong.out)["findings"][0]["ok"] is False
    assert "data_batch_1.bin" in wrong.err
    assert "wrong cifar10" in command("data", "verify", "cifar10", "--data-dir", tmp_path).out
    missing = command("data", "verify", "cinic10", "--data-dir", tmp_path)
    assert missing.code == 2
    assert "is not there" in missing.err


def test_verify_misses_a_file_that_was_removed(tmp_path: Path, command: Callable[..., Said]) -> None:
    cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    said = command("data", "verify", "--data-dir", tmp_path)
    assert said.code == 2
    assert "data_batch_4.bin is not there" in said.err
    assert "cifar100" not in said.out + said.err  # of which nothing was ever there


def test_verify_takes_ones_own_data_too(tmp_path: Path, command: Callable[..., Said]) -> None:
    class_folders(tmp_path / "own", {"train": 2, "test": 1}, ("a", "b"))
    assert command("data", "verify", tmp_path / "own", "--data-dir", tmp_path).code == 0
    (tmp_path / "own" / "test" / "a" / "000.png").write_bytes(b"broken")
    said = command("data", "verify", tmp_path / "own", "--data-dir", tmp_path)
    assert said.code == 2
    assert "000.png" in said.err
    x, y = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert "4 + 4 images" in command("data", "verify", tmp_path / "own.npz", "--data-dir", tmp_path).out


def test_a_folder_that_the_system_refuses_is_named(tmp_path: Path, command: Callable[..., Said]) -> None:
    long = tmp_path / ("x" * 300)
    for words in (("list",), ("verify",), ("fetch", "cifar10")):
        said = command("data", *words, "--data-dir", long)
        assert said.code == 2
        assert f"{long}" in said.err
    said = command("data", "verify", "y" * 300, "--data-dir", tmp_path)
    assert said.code == 2
    assert "y" * 300 in said.err


def test_a_size_that_cannot_be_loaded_is_refused_before_anything_is_fetched(
    tmp_path: Path, command: Callable[..., Said]
) -> None:
    said = command("data", "fetch", "cifar10", "--image-size", 100_000, "--data-dir", tmp_path)
    assert said.code == 2
    assert "image_size: 100000 is out of range; accepted: 8 to 1024" in said.err
    assert not list(tmp_path.iterdir())


def test_the_command_that_gets_a_set_can_be_pasted(tmp_path: Path, command: Callable[..., Said]) -> None:
    said = command("partition", "iid", "--dataset", "cifar10", "--data-dir", tmp_path / "my data")
    assert said.code == 2
    assert f"fedentopt data fetch cifar10 --data-dir '{tmp_path / 'my data'}'" in said.err
