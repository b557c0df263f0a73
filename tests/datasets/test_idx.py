"""MNIST and Fashion-MNIST from tiny files in their format."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedentopt.datasets import load
from fedentopt.datasets.verify import verify
from fedentopt.errors import InputError
from tiny_data import idx, idx_files

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_images_and_labels_are_read_as_they_are_written(tmp_path: Path, name: str) -> None:
    files = idx_files(tmp_path, name)
    data = load(name, tmp_path, image_size=28)
    pixels = np.frombuffer(gzip.decompress(files[IMAGES]), np.uint8, offset=16).reshape(20, 1, 28, 28)
    np.testing.assert_array_equal(data.x_train, pixels)
    np.testing.assert_array_equal(data.y_train, np.arange(20) % 10)
    assert data.x_test.shape == (10, 1, 28, 28)
    assert data.class_names[9] == ("9" if name == "mnist" else "Ankle boot")
    assert data.notes == (f"{name}: {tmp_path / name} holds 30 images, not the official 70,000",)
    assert load(name, tmp_path).image_size == 32
    assert all(finding.ok for finding in verify(name, tmp_path))


def test_unpacked_files_and_torchvisions_folders_will_do(tmp_path: Path) -> None:
    files = idx_files(tmp_path / "a", "mnist")
    folder = tmp_path / "b" / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name.removesuffix(".gz")).write_bytes(gzip.decompress(content))
    packed, plain = load("mnist", tmp_path / "a", image_size=28), load("mnist", tmp_path / "b", image_size=28)
    np.testing.assert_array_equal(packed.x_train, plain.x_train)
    assert packed.digest == plain.digest


def test_files_of_official_number_must_have_the_published_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from fedentopt.datasets.catalog import ENTRIES

    idx_files(tmp_path, "mnist")
    monkeypatch.setitem(ENTRIES, "mnist", dataclasses.replace(ENTRIES["mnist"], train=20, test=10))
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte\.gz: MD5 [0-9a-f]{32}, published f68b3c2dcbe"):
        load("mnist", tmp_path)


def test_a_missing_file_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"mnist/train-images-idx3-ubyte.gz is not there. `fedentopt data fetch mnist"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        (IMAGES, lambda c: c[: len(c) // 2], "damaged or truncated"),
        (IMAGES, lambda c: b"no gzip at all", "damaged or truncated"),
        (IMAGES, lambda c: gzip.compress(gzip.decompress(c)[:-5]), "20 rows announced, the data end before"),
        (IMAGES, lambda c: gzip.compress(gzip.decompress(c) + b"x"), "more data than its header announces"),
        (IMAGES, lambda c: gzip.compress(gzip.decompress(c)[:9]), "ends within its header"),
        (IMAGES, lambda c: gzip.compress(b"\0\0\x0d\3" + gzip.decompress(c)[4:]), "not an IDX file of bytes"),
        (IMAGES, lambda c: idx(np.arange(20, dtype=np.uint8)), r"axes of \(20,\); accepted: images \(n, H, W\)"),
        (IMAGES, lambda c: idx(np.zeros((20, 0, 28), np.uint8)), "at least one pixel"),
        (LABELS, lambda c: idx(np.arange(19, dtype=np.uint8) % 10), "19 labels for 20 images"),
        (LABELS, lambda c: idx(np.arange(20, dtype=np.uint8)), "label 10 is 10; accepted: 0 to 9"),
    ],
)
def test_damaged_and_foreign_files_are_refused(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes], told: str
) -> None:
    files = idx_files(tmp_path, "mnist")
    (tmp_path / "mnist" / name).write_bytes(change(files[name]))
    with pytest.raises(InputError, match=told) as refused:
        load("mnist", tmp_path)
    assert name in str(refused.value)
