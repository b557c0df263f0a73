"""CIFAR from its binary files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from fedentopt.datasets import load
from fedentopt.datasets.cifar import CIFAR10, CIFAR100, Cifar, Layout
from fedentopt.errors import InputError
from tiny_data import CIFAR10_FILES, cifar10, cifar100


def test_images_and_labels_are_those_of_the_records(tmp_path: Path) -> None:
    made = cifar10(tmp_path)
    data = load("cifar10", tmp_path)
    train = np.concatenate([made[name] for name in CIFAR10_FILES[:5]])
    assert data.x_train.dtype == np.uint8
    np.testing.assert_array_equal(data.x_train, train[:, 1:].reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(data.y_train, train[:, 0])
    np.testing.assert_array_equal(data.x_test, made["test_batch.bin"][:, 1:].reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(data.y_test, made["test_batch.bin"][:, 0])
    assert data.y_train.dtype == np.int64
    assert data.class_names[3] == "cat"
    assert (data.num_classes, data.image_size) == (10, 32)
    pixels = train[:, 1:].reshape(-1, 3, 1024) / 255
    np.testing.assert_allclose(data.mean, pixels.mean((0, 2)))
    np.testing.assert_allclose(data.std, pixels.std((0, 2)))
    assert "120 images, not the official 60,000" in data.notes[0]


def test_cifar100_has_coarse_labels_by_default_and_fine_ones_on_request(tmp_path: Path) -> None:
    made = cifar100(tmp_path)
    coarse, fine = load("cifar100", tmp_path), load("cifar100", tmp_path, fine_labels=True)
    np.testing.assert_array_equal(coarse.y_train, made["train.bin"][:, 0])
    np.testing.assert_array_equal(fine.y_train, made["train.bin"][:, 1])
    np.testing.assert_array_equal(fine.x_test, made["test.bin"][:, 2:].reshape(-1, 3, 32, 32))
    assert (coarse.num_classes, fine.num_classes) == (20, 100)
    assert (coarse.class_names[17], fine.class_names[53]) == ("trees", "orange")


def test_official_files_must_have_the_published_sums(tmp_path: Path) -> None:
    made = cifar10(tmp_path)
    sums = {name: hashlib.md5(made[name].tobytes()).hexdigest() for name in CIFAR10_FILES}
    test = {"test_batch.bin": sums.pop("test_batch.bin")}
    layout = Layout(CIFAR10.folder, sums, test, dict.fromkeys(CIFAR10_FILES, 20), CIFAR10.labels)
    assert Cifar("cifar10", layout, tmp_path).open().notes == ()
    path = tmp_path / CIFAR10.folder / "data_batch_2.bin"
    changed = made["data_batch_2.bin"].copy()
    changed[7, 100] ^= 1
    path.write_bytes(changed.tobytes())
    with pytest.raises(InputError, match=r"data_batch_2\.bin: MD5 [0-9a-f]{32}, published .*changed"):
        Cifar("cifar10", layout, tmp_path).open()
    path.write_bytes(made["data_batch_2.bin"][:10].tobytes())  # whole records, but fewer than its full-size siblings
    with pytest.raises(InputError, match=r"data_batch_2\.bin: 10 records where 20 belong"):
        Cifar("cifar10", layout, tmp_path).open()


def test_the_layouts_are_the_published_ones() -> None:
    assert [len(CIFAR100.labels[variant]) for variant in ("", "fine")] == [20, 100]
    assert sorted(CIFAR100.labels["fine"]) == list(CIFAR100.labels["fine"])
    assert sum(CIFAR10.records.values()) == sum(CIFAR100.records.values()) == 60_000


@pytest.mark.parametrize("cut", [1, 3073 * 20, 1536])
def test_a_truncated_file_is_refused_and_nothing_is_cached(tmp_path: Path, cut: int) -> None:
    cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InputError, match=r"data_batch_4\.bin: .*not whole records of 3,073 bytes.*30,730,000"):
        load("cifar10", tmp_path)
    assert not (tmp_path / ".fedentopt").exists()


def test_a_file_cut_at_a_record_differs_from_its_siblings(tmp_path: Path) -> None:
    cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin"
    path.write_bytes(path.read_bytes()[: 3073 * 10])
    with pytest.raises(InputError, match=r"data_batch_4\.bin: 10 records where 20 belong"):
        load("cifar10", tmp_path)


def test_a_label_out_of_range_is_refused_by_its_record(tmp_path: Path) -> None:
    cifar100(tmp_path)
    path = tmp_path / "cifar-100-binary" / "test.bin"
    content = bytearray(path.read_bytes())
    content[3074 * 5] = 20
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"test\.bin: record 5 has label 20; accepted: 0 to 19"):
        load("cifar100", tmp_path)


def test_missing_files_are_told_with_the_way_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data_batch_1\.bin is not there\. `fedentopt data fetch cifar10 --data-dir"):
        load("cifar10", tmp_path)
    cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    with pytest.raises(InputError, match=r"test_batch\.bin is not there"):
        load("cifar10", tmp_path)


def test_another_image_size_is_a_bilinear_resize(tmp_path: Path) -> None:
    from PIL import Image

    made = cifar10(tmp_path)
    data = load("cifar10", tmp_path, image_size=48)
    first = made["data_batch_1.bin"][0, 1:].reshape(3, 32, 32).transpose(1, 2, 0)
    expected = np.asarray(Image.fromarray(first).resize((48, 48), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(data.x_train[0], expected.transpose(2, 0, 1))
    assert data.image_size == 48


def test_fine_labels_belong_to_cifar100_only(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fine_labels: cifar10"):
        load("cifar10", tmp_path, fine_labels=True)
