"""Downloading: checked before it is opened, unpacked safely, and all or nothing. The network is the loopback."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import tarfile
import time
from pathlib import Path

import pytest

from fedentopt.datasets import load
from fedentopt.datasets.catalog import ENTRIES
from fedentopt.datasets.fetch import chosen, complete, fetch
from fedentopt.errors import InputError
from file_server import serving
from tiny_data import CIFAR10_FILES, cifar10, class_folders, idx_files, medmnist, tar_gz


def published(monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, *, index: int = 0) -> None:
    """Let the catalogue hold the checksum of `content`, as if it were the official file."""
    entry = ENTRIES[name]
    downloads = list(entry.downloads)
    downloads[index] = dataclasses.replace(downloads[index], md5=hashlib.md5(content).hexdigest())
    monkeypatch.setitem(ENTRIES, name, dataclasses.replace(entry, downloads=tuple(downloads)))


def archive(folder: Path, root: Path) -> bytes:
    """A .tar.gz of everything under `folder`, with names relative to `root`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            tar.add(path, path.relative_to(root).as_posix(), recursive=False)
    return buffer.getvalue()


@pytest.fixture
def cifar_archive(tmp_path: Path) -> bytes:
    cifar10(tmp_path / "made")
    return archive(tmp_path / "made" / "cifar-10-batches-bin", tmp_path / "made")


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_cifar_is_fetched_checked_and_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cifar_archive: bytes
) -> None:
    published(monkeypatch, "cifar10", cifar_archive)
    seen: list[tuple[int, int | None]] = []
    with serving({"cifar-10-binary.tar.gz": cifar_archive}) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        fetch("cifar10", tmp_path / "data", progress=lambda *told: seen.append(told))
    assert seen[-1] == (len(cifar_archive), len(cifar_archive))
    assert sorted(everything(tmp_path / "data")) == [f"cifar-10-batches-bin/{name}" for name in sorted(CIFAR10_FILES)]
    assert len(load("cifar10", tmp_path / "data").x_train) == 100
    assert not complete("cifar10", tmp_path / "data"), "100 images are not the official set"


def test_cinic_unpacks_into_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiny_data import CINIC_CLASSES

    class_folders(tmp_path / "made", {"train": 1, "valid": 1, "test": 1}, CINIC_CLASSES)
    content = archive(tmp_path / "made", tmp_path / "made")
    published(monkeypatch, "cinic10", content)
    with serving({"CINIC-10.tar.gz": content}) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        fetch("cinic10", tmp_path / "data")
    assert len(load("cinic10", tmp_path / "data").x_test) == 10


def test_medmnist_is_used_as_it_is_in_the_size_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [chosen("pathmnist", tmp_path, size)[0].filename for size in (28, 32, None, 512)] == [
        "pathmnist.npz",
        "pathmnist_64.npz",
        "pathmnist_224.npz",
        "pathmnist_224.npz",
    ]
    medmnist(tmp_path / "made.npz", side=28, grey=False, classes=9)
    content = (tmp_path / "made.npz").read_bytes()
    published(monkeypatch, "pathmnist", content)
    with serving({"pathmnist.npz": content}) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        fetch("pathmnist", tmp_path / "data", image_size=28)
    assert everything(tmp_path / "data") == {"pathmnist.npz": content}


def test_all_parts_of_a_set_are_fetched_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = idx_files(tmp_path / "made", "fashion-mnist", train=20, test=10)
    names = [download.filename for download in ENTRIES["fashion-mnist"].downloads]
    contents = {name: files[Path(name).name] for name in names}
    assert [download.filename for download in chosen("fashion-mnist", tmp_path)] == names
    for index, name in enumerate(names):
        published(monkeypatch, "fashion-mnist", contents[name], index=index)
    with serving({name: content for name, content in contents.items() if name != names[-1]}) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        with pytest.raises(InputError, match=r"fashion-mnist: could not be downloaded from \S+/t10k-labels"):
            fetch("fashion-mnist", tmp_path / "data")
    assert not (tmp_path / "data").exists()
    with serving(contents) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        fetch("fashion-mnist", tmp_path / "data")
    assert everything(tmp_path / "data") == contents
    assert load("fashion-mnist", tmp_path / "data").x_train.shape == (20, 1, 32, 32)


def test_a_file_that_is_not_the_published_one_is_never_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cifar_archive: bytes
) -> None:
    cifar10(tmp_path / "data")
    before = everything(tmp_path / "data")
    opened: list[object] = []
    monkeypatch.setattr(tarfile, "open", lambda *a, **k: opened.append(a))
    with serving({"cifar-10-binary.tar.gz": cifar_archive}) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        with pytest.raises(InputError, match=r"has MD5 [0-9a-f]{32}, published c32a1d4ab5d03f1284b67883e8d87530"):
            fetch("cifar10", tmp_path / "data")
    assert not opened
    assert everything(tmp_path / "data") == before
    assert not (tmp_path / "data" / ".fedentopt").exists()


def test_a_broken_download_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cifar_archive: bytes
) -> None:
    published(monkeypatch, "cifar10", cifar_archive)
    with serving({"cifar-10-binary.tar.gz": cifar_archive}, cut=100) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        with pytest.raises(InputError, match=r"cifar10: could not be downloaded from http://127.*IncompleteRead"):
            fetch("cifar10", tmp_path / "data")
    with serving({}) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        with pytest.raises(InputError, match=r"could not be downloaded from .*no such file"):
            fetch("cifar10", tmp_path / "data")
    monkeypatch.setenv("FEDENTOPT_MIRROR", "file:///etc")
    with pytest.raises(InputError, match="FEDENTOPT_MIRROR: 'file:///etc' is not an address"):
        fetch("cifar10", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_the_second_address_is_tried_where_the_first_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cifar_archive: bytes
) -> None:
    monkeypatch.delenv("FEDENTOPT_MIRROR", raising=False)
    published(monkeypatch, "cifar10", cifar_archive)
    with serving({"here.tar.gz": cifar_archive}) as address:
        entry = ENTRIES["cifar10"]
        urls = (f"{address}/gone.tar.gz", f"{address}/here.tar.gz")
        download = dataclasses.replace(entry.downloads[0], urls=urls)
        monkeypatch.setitem(ENTRIES, "cifar10", dataclasses.replace(entry, downloads=(download,)))
        fetch("cifar10", tmp_path / "data")
    assert len(load("cifar10", tmp_path / "data").x_train) == 100


@pytest.mark.parametrize("name", ["../outside.bin", "/tmp/fedentopt-outside.bin", "cifar-10-batches-bin/../../x"])
def test_an_archive_cannot_write_outside_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    tar_gz(tmp_path / "evil.tar.gz", {name: b"evil"})
    content = (tmp_path / "evil.tar.gz").read_bytes()
    published(monkeypatch, "cifar10", content)
    with serving({"cifar-10-binary.tar.gz": content}) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        with pytest.raises(InputError, match=r"cannot be unpacked|is not there"):
            fetch("cifar10", tmp_path / "data")
    assert not (tmp_path / "data").exists()
    assert not Path("/tmp/fedentopt-outside.bin").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.tar.gz"]


def test_an_archive_with_damaged_content_is_not_put_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cifar_archive: bytes
) -> None:
    cifar10(tmp_path / "data")
    before = everything(tmp_path / "data")
    (tmp_path / "made" / "cifar-10-batches-bin" / "data_batch_5.bin").write_bytes(b"short")
    content = archive(tmp_path / "made" / "cifar-10-batches-bin", tmp_path / "made")
    published(monkeypatch, "cifar10", content)
    with serving({"cifar-10-binary.tar.gz": content}) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        with pytest.raises(InputError, match=r"data_batch_5\.bin: 5 bytes are not whole records"):
            fetch("cifar10", tmp_path / "data")
    assert everything(tmp_path / "data") == before


def test_sets_that_cannot_be_fetched_say_why(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"brain-tumor-mri: Kaggle .* holds brain-tumor-mri/Training"):
        fetch("brain-tumor-mri", tmp_path)
    with pytest.raises(InputError, match="digits: nothing to fetch, it is built in"):
        fetch("digits", tmp_path)
    with pytest.raises(InputError, match="'cifar' is unknown; accepted: digits, mnist, fashion-mnist, cifar10"):
        fetch("cifar", tmp_path)


def test_published_checksums() -> None:
    sums = {d.filename: d.md5 for entry in ENTRIES.values() for d in entry.downloads}
    assert sums["cifar-10-binary.tar.gz"] == "c32a1d4ab5d03f1284b67883e8d87530"
    assert sums["cifar-100-binary.tar.gz"] == "03b5dce01913d631647c71ecec9e9cb8"
    assert sums["mnist/train-images-idx3-ubyte.gz"] == "f68b3c2dcbeaaa9fbdd348bbdeb94873"
    assert sums["fashion-mnist/t10k-labels-idx1-ubyte.gz"] == "bb300cfdad3c16e7a12a480ee83cd310"
    assert sums["CINIC-10.tar.gz"] == "6ee4d0c996905fe93221de577967a372"
    assert all(len(md5) == 32 for md5 in sums.values())
    assert len(set(sums.values())) == len(sums) == 19
    assert all(url.startswith("https://") for e in ENTRIES.values() for d in e.downloads for url in d.urls)


def test_what_a_killed_fetch_left_is_swept_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cifar_archive: bytes
) -> None:
    published(monkeypatch, "cifar10", cifar_archive)
    left = tmp_path / "data" / ".fedentopt"
    old = time.time() - 2 * 24 * 3600
    for name, in_it in (("fetch-old", "half"), ("fetch-slow", "half"), ("fetch-moved", "replaced/only-copy")):
        (left / name / in_it).parent.mkdir(parents=True)
        (left / name / in_it).write_bytes(b"x")
        for path in (left / name / in_it, (left / name / in_it).parent, left / name):
            os.utime(path, (old, old))
    os.utime(left / "fetch-slow" / "half")  # still growing in another process
    with serving({"cifar-10-binary.tar.gz": cifar_archive}) as address:
        monkeypatch.setenv("FEDENTOPT_MIRROR", address)
        fetch("cifar10", tmp_path / "data")
    assert sorted(path.name for path in left.iterdir()) == ["fetch-moved", "fetch-slow"]
