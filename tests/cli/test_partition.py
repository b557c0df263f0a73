"""`fedentopt partition` as a user runs it."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from command_line import Said, commander
from fedentopt.partition import partition
from fedentopt.tables import read_counts

Command = Callable[..., Said]


@pytest.fixture
def fedentopt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return commander(monkeypatch, capsys)


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "y.npy"
    np.save(path, np.random.default_rng(0).integers(0, 5, 1000).astype(np.uint8))
    return path


@pytest.mark.parametrize("spec", ["dir:0.5", "classes:2", "iid"])
def test_writes_what_the_library_gives(fedentopt: Command, labels: Path, tmp_path: Path, spec: str) -> None:
    table, numbers = tmp_path / "counts.csv", tmp_path / "parts.npz"
    said = fedentopt("partition", spec, "--labels", labels, "--clients", 12, "--seed", 7, "--out", table,
                     "--indices", numbers)  # fmt: skip
    assert said.code == 0
    assert "1,000 samples of 5 classes among 12 clients" in said.out
    expected = partition(np.load(labels), spec, 12, 7)
    file = read_counts(table, noisy=False)
    assert file.clients == tuple(map(str, range(12)))
    assert file.classes == ("0", "1", "2", "3", "4")
    assert np.array_equal(file.counts, expected.counts)
    with np.load(numbers, allow_pickle=False) as parts:
        assert parts.files == [str(k) for k in range(12)]
        for k, part in enumerate(expected.indices):
            assert np.array_equal(parts[str(k)], part)
    first = table.read_bytes(), numbers.read_bytes()
    fedentopt("partition", spec, "--labels", labels, "--clients", 12, "--seed", 7, "--out", table, "--indices", numbers)
    assert (table.read_bytes(), numbers.read_bytes()) == first
    chosen = fedentopt("select", table, "--cohort", 3, "--rounds", 2, "--json")
    assert len(json.loads(chosen.out)["rounds"]) == 2


def test_json(fedentopt: Command, labels: Path, tmp_path: Path) -> None:
    table = tmp_path / "counts.csv"
    said = fedentopt("partition", "dir:0.5", "--labels", labels, "--clients", 12, "--out", table, "--json")
    document = json.loads(said.out)
    sizes = partition(np.load(labels), "dir:0.5", 12, 0).counts.sum(axis=1)
    assert document["partition"] == "dir:0.5"
    assert document["samples"] == 1000
    assert document["samples_per_client"] == {"min": sizes.min(), "median": np.median(sizes), "max": sizes.max()}
    assert document["out"] == str(table)
    assert document["indices"] is None


def test_minimum(fedentopt: Command, labels: Path, tmp_path: Path) -> None:
    said = fedentopt("partition", "dir:0.1", "--labels", labels, "--clients", 12, "--min-samples", 30, "--json")
    assert json.loads(said.out)["samples_per_client"]["min"] >= 30
    said = fedentopt("partition", "dir:0.01", "--labels", labels, "--clients", 60, "--out", tmp_path / "no.csv")
    assert said.code == 2
    assert "dir:0.01 among 60 clients never gave every client 10 samples in 1000 tries" in said.err
    assert not (tmp_path / "no.csv").exists()


def test_data_set(fedentopt: Command, tmp_path: Path) -> None:
    table = tmp_path / "counts.csv"
    said = fedentopt("partition", "dir:0.1", "--dataset", "digits", "--clients", 40, "--out", table, "--json")
    assert said.code == 0
    document = json.loads(said.out)
    assert len(document["classes"]) == 10
    assert document["samples_per_client"]["min"] >= 1  # small data sets: one sample is enough
    assert read_counts(table, noisy=False).counts.sum() == document["samples"]


def test_bad_input_is_refused(fedentopt: Command, labels: Path, tmp_path: Path) -> None:
    floats, table, text, objects = (tmp_path / f"{name}.npy" for name in ("floats", "table", "text", "objects"))
    np.save(floats, np.array([0.5, 1.0]))
    np.save(table, np.zeros((3, 2), dtype=int))
    text.write_text("0\n1\n")
    np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
    far = tmp_path / "far.npy"
    np.save(far, np.array([0, 10**12]))  # what would name every class up to there would fill the memory
    empty, none = tmp_path / "empty.npy", tmp_path / "none.npy"
    empty.write_bytes(b"")
    np.save(none, np.zeros(0, dtype=int))
    archive = tmp_path / "archive.npz"
    with zipfile.ZipFile(archive, "w"):
        pass
    cases = [
        (("dir:0", "--labels", labels), "partition: 'dir:0'"),
        (("parts:2", "--labels", labels), "partition: 'parts:2' is unknown; accepted: dir:BETA, classes:J, shards:S"),
        (("classes:6", "--labels", labels), "classes:6 asks for 6 of 5 classes"),
        (("iid",), "--labels, --dataset: "),
        (("iid", "--labels", labels, "--dataset", "digits"), "--labels, --dataset: "),
        (("iid", "--labels", labels, "--data-dir", tmp_path), "--data-dir: "),
        (("iid", "--labels", tmp_path / "no.npy"), "no.npy: No such file or directory"),
        (("iid", "--labels", tmp_path), "Is a directory"),
        (("iid", "--labels", floats), "floats.npy: labels: values of type float64"),
        (("iid", "--labels", far, "--clients", 2), "label 1000000000000 at position 1"),
        (("iid", "--labels", table), "table.npy: labels: an array of shape (3, 2)"),
        (("iid", "--labels", text), "text.npy: not an array of numbers"),
        (("iid", "--labels", objects), "objects.npy: not an array of numbers"),
        (("iid", "--labels", empty), "empty.npy: not an array of numbers"),
        (("iid", "--labels", none), "none.npy: no labels"),
        (("iid", "--labels", archive), "archive.npz: an archive of arrays"),
        (("iid", "--labels", labels, "--clients", 2000), "clients: 2000 clients for 1000 samples"),
        (("iid", "--dataset", "no-such-set"), "'no-such-set'"),
        (("iid", "--labels", labels, "--out", tmp_path / "no" / "c.csv"), "c.csv: No such file or directory"),
        (("iid", "--labels", labels, "--out", tmp_path / "c.xlsx"), "c.xlsx would hold CSV under another kind's name"),
        (("iid", "--labels", labels, "--out", tmp_path / "c.PARQUET"), "accepted: such as counts.csv"),
        (("iid", "--labels", labels, "--indices", tmp_path / "no" / "i.npz"), "i.npz: No such file or directory"),
    ]
    for words, message in cases:
        said = fedentopt("partition", *words)
        assert said.code == 2, words
        assert message in said.err, words
        assert said.out == "", words
    assert not list(tmp_path.glob("c.*"))


@pytest.mark.skipif(sys.platform == "win32", reason="pipes in the file system")
@pytest.mark.parametrize("option", ["--out", "--indices"])
def test_results_go_into_a_pipe(fedentopt: Command, labels: Path, tmp_path: Path, option: str) -> None:
    pipe, plain = tmp_path / "pipe", tmp_path / "plain"
    words = ("partition", "iid", "--labels", labels, "--clients", 4, option)
    assert fedentopt(*words, plain).code == 0
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert fedentopt(*words, pipe).code == 0
    reader.join(10)
    assert pipe.is_fifo()
    assert len(got) == 1
    if option == "--out":
        assert got[0] == plain.read_bytes()
    else:
        with np.load(io.BytesIO(got[0])) as sent, np.load(plain) as kept:
            assert all((sent[name] == kept[name]).all() for name in "0123")


def _npy(header: str) -> bytes:
    text = header.ljust(117).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 of which the rest is lost",
        _npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,)}"),
        _npy("{'descr': '<i8', 'fortran_order': False, 'shape': (100000000000000000000000,)}"),
        _npy("{'descr': '<i8', 'fortran_order': False, 'shape': ((((,)}"),
    ],
    ids=["archive", "beyond memory", "beyond integers", "no header"],
)
def test_damaged_label_files_are_refused(fedentopt: Command, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "damaged.npy"
    path.write_bytes(content)
    said = fedentopt("partition", "iid", "--labels", path)
    assert said.code == 2
    assert str(path) in said.err
    assert "accepted: an .npy file" in said.err


def test_one_file_for_both_results_is_refused(fedentopt: Command, labels: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "both")
    for other in ("both", "../" + tmp_path.name + "/both", "link"):
        said = fedentopt("partition", "iid", "--labels", labels, "--out", tmp_path / "both", "--indices",
                         tmp_path / other)  # fmt: skip
        assert said.code == 2
        assert "--out, --indices: both name" in said.err
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize("option", ["--out", "--indices"])
def test_what_is_split_is_not_written_over(fedentopt: Command, labels: Path, tmp_path: Path, option: str) -> None:
    before = labels.read_bytes()
    (tmp_path / "link").symlink_to(labels)
    for name in (labels, tmp_path / "link", tmp_path / ".." / tmp_path.name / labels.name):
        said = fedentopt("partition", "iid", "--labels", labels, "--clients", 2, option, name)
        assert (said.code, said.err) == (
            2, f"error: {option}: {name} holds what is to be split; accepted: another file\n",
        )  # fmt: skip
    assert labels.read_bytes() == before
