"""Class folders: CINIC-10, Brain Tumor MRI, one's own."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedentopt.datasets import load
from fedentopt.errors import InputError
from tiny_data import BRAIN_CLASSES, CINIC_CLASSES, class_folders, image


def test_cinic_uses_train_and_test_and_leaves_valid_alone(tmp_path: Path) -> None:
    class_folders(tmp_path / "cinic10", {"train": 2, "valid": 3, "test": 1}, CINIC_CLASSES)
    (tmp_path / "cinic10" / "README").write_text("as in the archive")
    data = load("cinic10", tmp_path)
    assert data.x_train.shape == (20, 3, 32, 32)
    assert data.x_test.shape == (10, 3, 32, 32)
    assert data.class_names == CINIC_CLASSES
    assert data.y_train.tolist() == sorted(list(range(10)) * 2)
    assert data.x_train[:, 0, 5, 5].tolist() == [20 * c + i for c in range(10) for i in range(2)]


def test_a_missing_class_of_a_known_set_is_refused(tmp_path: Path) -> None:
    class_folders(tmp_path / "cinic10", {"train": 1, "test": 1}, CINIC_CLASSES)
    (tmp_path / "cinic10" / "test" / "dog" / "000.png").unlink()
    with pytest.raises(InputError, match="dog: no images in it"):
        load("cinic10", tmp_path)
    (tmp_path / "cinic10" / "test" / "dog").rmdir()
    with pytest.raises(InputError, match=r"test/dog is not there\. `fedentopt data fetch cinic10"):
        load("cinic10", tmp_path)


def test_brain_tumor_is_grey_224_and_told_how_to_get(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Kaggle.*unpack it so that .* holds brain-tumor-mri/Training"):
        load("brain-tumor-mri", tmp_path)
    class_folders(tmp_path / "brain-tumor-mri", {"Training": 2, "Testing": 1}, BRAIN_CLASSES, "jpg")
    data = load("brain-tumor-mri", tmp_path)
    assert data.x_train.shape == (8, 1, 224, 224)
    assert data.class_names == BRAIN_CLASSES
    image(tmp_path / "brain-tumor-mri" / "Testing" / "other" / "1.jpg", 1)
    with pytest.raises(InputError, match="other: no class of brain-tumor-mri; accepted: glioma"):
        load("brain-tumor-mri", tmp_path)


def test_own_folders_without_a_test_split_hold_out_a_fifth_and_say_so(tmp_path: Path) -> None:
    class_folders(tmp_path / "own", {"": 10}, ("b", "a"))
    data = load(str(tmp_path / "own"), tmp_path / "data")
    assert data.class_names == ("a", "b")
    assert np.bincount(data.y_train).tolist() == [8, 8]
    assert np.bincount(data.y_test).tolist() == [2, 2]
    values = np.concatenate([data.x_train, data.x_test])[:, 0, 0, 0]
    assert sorted(values) == [*range(10), *range(20, 30)]
    assert "no test split, so a fixed fifth" in data.notes[0]


def test_own_folders_with_splits(tmp_path: Path) -> None:
    class_folders(tmp_path / "own", {"Training": 3, "Testing": 2, "val": 1}, ("x", "y"))
    image(tmp_path / "own" / "Training" / "y" / "deeper" / "z.PNG", 77)
    (tmp_path / "own" / "Training" / "y" / ".DS_Store").write_text("litter")
    data = load(str(tmp_path / "own"), tmp_path / "data", image_size=8)
    assert (len(data.x_train), len(data.x_test)) == (7, 4)
    assert data.x_train[-1, 0, 0, 0] == 77
    assert any("val is not used" in told for told in data.notes)


def test_grey_only_if_all_are_grey(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i in range(3):
            image(tmp_path / "own" / name / f"{i}.png", 9, mode="L")
    assert load(str(tmp_path / "own"), tmp_path / "data").x_train.shape[1] == 1
    image(tmp_path / "own" / "b" / "colour.png", 9)
    assert load(str(tmp_path / "own"), tmp_path / "data").x_train.shape[1] == 3


def test_transparency_sixteen_bits_palettes_and_orientation(tmp_path: Path) -> None:
    folder = tmp_path / "own" / "train" / "a"
    folder.mkdir(parents=True)
    Image.fromarray(np.full((8, 8, 4), (200, 100, 50, 51), np.uint8)).save(folder / "0.png")  # a fifth opaque
    Image.fromarray(np.full((8, 8), 0x8000, np.uint16)).save(folder / "1.png")
    Image.fromarray(np.full((8, 8, 3), (1, 2, 3), np.uint8)).quantize(4).save(folder / "2.gif")
    half = np.zeros((8, 8, 3), np.uint8)
    half[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # stored turned by a quarter
    Image.fromarray(half).save(folder / "3.png", exif=exif)
    image(tmp_path / "own" / "train" / "b" / "0.png", 1)
    for name in ("a", "b"):
        image(tmp_path / "own" / "test" / name / "0.png", 1)
    x = np.asarray(load(str(tmp_path / "own"), tmp_path / "data", image_size=8).x_train)
    assert x[0, :, 0, 0].tolist() == [40, 20, 10]
    assert x[1, :, 0, 0].tolist() == [128, 128, 128]
    assert x[2, :, 0, 0].tolist() == [1, 2, 3]
    assert x[3, 0, 0].tolist() == [0] * 4 + [255] * 4
    assert x[3, 0, 7].tolist() == [0] * 4 + [255] * 4


def test_floats_from_0_to_1_in_a_tiff_are_read_and_others_refused(tmp_path: Path) -> None:
    class_folders(tmp_path / "own", {"train": 1, "test": 1}, ("a", "b"))
    path = tmp_path / "own" / "train" / "a" / "float.tif"
    Image.fromarray(np.full((8, 8), 0.2, np.float32)).save(path)
    x = np.asarray(load(str(tmp_path / "own"), tmp_path / "data", image_size=8).x_train)
    assert x[1, :, 0, 0].tolist() == [51] * 3
    Image.fromarray(np.full((8, 8), 1.5, np.float32)).save(path)
    with pytest.raises(InputError, match=r"float\.tif: pixels of mode F have no known range; .* floats from 0 to 1"):
        load(str(tmp_path / "own"), tmp_path / "data", image_size=8)


@pytest.mark.parametrize("damage", ["truncated", "foreign"])
def test_a_damaged_image_is_refused_by_name_and_nothing_is_cached(tmp_path: Path, damage: str) -> None:
    class_folders(tmp_path / "own", {"train": 3, "test": 1}, ("a", "b"))
    path = tmp_path / "own" / "train" / "b" / "001.png"
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8))
    noise.save(path)
    path.write_bytes(path.read_bytes()[:1500] if damage == "truncated" else b"%!PS-Adobe not a picture")
    with pytest.raises(InputError, match=r"train/b/001\.png: "):
        load(str(tmp_path / "own"), tmp_path / "data")
    assert not list((tmp_path / "data").rglob("*.npy"))


def test_what_is_no_image_is_not_skipped_silently(tmp_path: Path) -> None:
    class_folders(tmp_path / "own", {"train": 2, "test": 1}, ("a", "b"))
    (tmp_path / "own" / "train" / "a" / "scan.dcm").write_bytes(b"x")
    with pytest.raises(InputError, match=r"scan\.dcm: not an image; accepted: \.bmp, \.gif"):
        load(str(tmp_path / "own"), tmp_path / "data")


def test_unusable_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="class folders found: none; accepted: two or more"):
        load(str(tmp_path / "empty"), tmp_path / "data")
    class_folders(tmp_path / "half", {"train": 2}, ("a", "b"))
    with pytest.raises(InputError, match="half/test is not there"):
        load(str(tmp_path / "half"), tmp_path / "data")
    class_folders(tmp_path / "more", {"train": 2, "test": 1}, ("a", "b"))
    image(tmp_path / "more" / "test" / "c" / "0.png", 1)
    with pytest.raises(InputError, match="more/train/c is not there"):
        load(str(tmp_path / "more"), tmp_path / "data")


def _tiff(path: Path, values: list[int], bits: int, photometric: int) -> None:
    """One row of grey pixels, uncompressed, as scanners for medicine write them."""
    packed = "".join(f"{value:0{bits}b}" for value in values)
    data = bytes(int(packed[i : i + 8], 2) for i in range(0, len(packed), 8))
    if bits == 16:
        data = np.frombuffer(data, ">u2").astype("<u2").tobytes()
    tags = [(256, len(values)), (257, 1), (258, bits), (259, 1), (262, photometric), (273, 8 + 2 + 9 * 12 + 4),
            (277, 1), (278, 1), (279, len(data))]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    path.write_bytes(b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data)


def test_deep_grey_is_scaled_by_its_own_range(tmp_path: Path) -> None:
    folder = tmp_path / "own" / "train" / "a"
    folder.mkdir(parents=True)
    _tiff(folder / "0.tif", [0xFFF, 0x800] * 4, 12, 1)
    _tiff(folder / "1.tif", [0xFFFF, 0x7FFF] * 4, 16, 0)  # 0 is white
    (folder / "2.pgm").write_bytes(b"P5 2 1 65535\n\xff\xff\x80\x00")
    (folder / "3.pgm").write_bytes(b"P2 2 1 1023\n1023 512\n")
    for place in ("train/b", "test/a", "test/b"):
        image(tmp_path / "own" / place / "0.png", 1, mode="L")
    x = np.asarray(load(str(tmp_path / "own"), tmp_path / "data", image_size=8).x_train)
    assert x.shape == (5, 1, 8, 8)
    assert x[0, 0, 0].tolist() == [255, 128] * 4
    assert x[1, 0, 0].tolist() == [0, 128] * 4
    for i in (2, 3):
        assert (x[i, 0, 0, 0], x[i, 0, 0, 7]) == (255, 128)


def test_nothing_of_a_class_is_left_out_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    class_folders(own, {"train": 2, "test": 1}, ("a", "b"))
    (own / "train" / "c").symlink_to(tmp_path / "not mounted")
    with pytest.raises(InputError, match=r"train/c: a link to .*not mounted, which is not there"):
        load(str(own), tmp_path / "data")
    (own / "train" / "c").unlink()
    image(own / "train" / "stray.PNG", 1)
    assert f"{own / 'train'}: 1 images beside the class folders are not used" in load(str(own), tmp_path / "data").notes
    closed = own / "train" / "a" / "closed"
    closed.mkdir()
    scandir = os.scandir

    def refusing(path: str) -> object:
        if Path(path) == closed:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(InputError, match=r"train/a/closed: Permission denied"):
        load(str(own), tmp_path / "data")


def test_names_that_no_table_can_hold_are_refused(tmp_path: Path) -> None:
    class_folders(tmp_path / "own", {"": 2}, ("a", "b"))
    stray = os.fsdecode(b"caf\xe9")
    (tmp_path / "own" / "b").rename(tmp_path / "own" / stray)
    with pytest.raises(InputError, match=r"own: the class name 'caf\\udce9' cannot be written"):
        load(str(tmp_path / "own"), tmp_path / "data")
    (tmp_path / "own" / stray).rename(tmp_path / "own" / "b")
    (tmp_path / "own").rename(tmp_path / stray)
    with pytest.raises(InputError, match=r"dataset: .*caf\\udce9' cannot be written"):
        load(str(tmp_path / stray), tmp_path / "data")


def test_data_below_a_folder_of_any_name_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / os.fsdecode(b"caf\xe9")
    class_folders(here / "own", {"": 2}, ("a", "b"))
    monkeypatch.chdir(here)
    assert load("own", tmp_path / "data").class_names == ("a", "b")
    with pytest.raises(InputError, match="dataset: '' is unknown"):
        load("", tmp_path / "data")  # and not the folder one happens to be in
