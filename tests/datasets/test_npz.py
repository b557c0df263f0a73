"""A user's own .npz file, and MedMNIST's."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedentopt.datasets import load
from fedentopt.datasets.catalog import ENTRIES
from fedentopt.datasets.medmnist import CLASSES
from fedentopt.errors import InputError
from tiny_data import medmnist

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (6, 9, 10), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (6, 9, 10, 3), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


@pytest.fixture
def save(tmp_path: Path) -> Any:
    def write(x: np.ndarray, y: np.ndarray = LABELS, **others: np.ndarray) -> str:
        path = tmp_path / "own.npz"
        arrays = {"x_train": x, "y_train": y, "x_test": x, "y_test": y, **others}
        np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
        return str(path)

    return write


def loaded(path: str, size: int = 10) -> Any:
    return load(path, Path(path).parent / "data", image_size=size)


@pytest.mark.parametrize(
    ("x", "channels"),
    [
        (GREY, 1),
        (GREY[..., None], 1),
        (GREY[:, None], 1),
        (COLOUR, 3),
        (np.ascontiguousarray(COLOUR.transpose(0, 3, 1, 2)), 3),
    ],
)
def test_every_accepted_shape_gives_the_same_images(save: Any, x: np.ndarray, channels: int) -> None:
    data = loaded(save(x))
    reference = loaded(save(GREY if channels == 1 else COLOUR))
    assert data.x_train.shape == (6, channels, 10, 10)
    np.testing.assert_array_equal(data.x_train, reference.x_train)


def test_images_of_the_wanted_size_are_untouched(save: Any) -> None:
    x = RNG.integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    np.testing.assert_array_equal(loaded(save(x), 16).x_test, x.transpose(0, 3, 1, 2))


def test_floats_from_0_to_1_become_bytes(save: Any) -> None:
    x = np.full((6, 8, 8), 0.5)
    x[0], x[1], x[2] = 0, 1, 127.4 / 255
    np.testing.assert_array_equal(loaded(save(x), 8).x_train[:, 0, 0, 0], [0, 255, 127, 128, 128, 128])
    half = loaded(save(x.astype(np.float16)), 8)
    assert half.x_train[1, 0, 0, 0] == 255


@pytest.mark.parametrize("value", [0, 128, 255])
def test_a_constant_channel_has_the_deviation_one(save: Any, value: int) -> None:
    x = RNG.integers(0, 256, (6, 10, 10, 3), dtype=np.uint8)
    x[..., 2] = value
    data = loaded(save(x))
    assert data.mean[2] == pytest.approx(value / 255)
    assert data.std[2] == 1.0
    np.testing.assert_allclose(data.std[:2], (x / 255).std((0, 1, 2))[:2])
    assert loaded(save(np.full((6, 10, 10), value, np.uint8))).std == (1.0,) * 3


def test_labels_of_any_value_are_mapped_and_named(save: Any) -> None:
    data = loaded(save(GREY, np.array([-7, 40, 3, 3, 40, -7], np.int16)[:, None]))
    assert data.class_names == ("-7", "3", "40")
    assert data.y_train.tolist() == [0, 2, 1, 1, 2, 0]
    assert data.y_train.dtype == np.int64


def test_class_names_may_come_with_the_file(save: Any) -> None:
    data = loaded(save(GREY, LABELS, class_names=np.array(["cat", "dog", "cow", "bee"])))
    assert data.class_names == ("cat", "dog", "cow", "bee")
    assert "no training images of bee" in data.notes[0]
    with pytest.raises(InputError, match=r"y_train\[2\] is 2; accepted: 0 to 1"):
        loaded(save(GREY, LABELS, class_names=np.array(["cat", "dog"])))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x_train": GREY.astype(np.int64)}, r"x_train of shape \(6, 9, 10\) and type int64; accepted: uint8"),
        ({"x_test": GREY[:, :, :, None, None]}, r"x_test of shape \(6, 9, 10, 1, 1\).*accepted: \(n, H, W\)"),
        ({"x_train": COLOUR[..., :2]}, r"x_train of shape \(6, 9, 10, 2\)"),
        ({"x_train": COLOUR[:, :3]}, r"may be axis 1 or axis 3"),
        ({"x_train": GREY / 255 * 2}, r"x_train .*values from 0 to [12]\S*; accepted: floats from 0 to 1"),
        ({"x_test": np.full((6, 9, 10), np.nan)}, r"x_test .*values from nan"),
        ({"x_test": COLOUR}, r"x_train has 1 channels, x_test 3"),
        ({"x_train": GREY[:0], "y_train": LABELS[:0]}, r"x_train of shape \(0, 9, 10\).*at least one image"),
        ({"y_train": LABELS[:5]}, r"y_train of shape \(5,\).*accepted: 6 labels, as many as x_train has images"),
        ({"y_test": LABELS / 2}, r"y_test .* float64; accepted: whole numbers or text of shape \(n,\)"),
        ({"y_train": np.eye(6, dtype=np.int64)}, r"y_train holds one-hot rows, y_test whole numbers"),
        ({"y_train": np.eye(6) * 2}, r"y_train .*: row 0 is not one-hot"),
        ({"y_train": np.eye(6)[:, :5]}, r"y_train .*: row 5 is not one-hot"),
        ({"y_train": np.eye(6)[:, :, None]}, r"y_train of shape \(6, 6, 1\).*accepted: whole numbers or text"),
        ({"y_train": np.array(list("abcabc"))}, r"y_train holds text, y_test whole numbers"),
        ({"y_train": np.array([b"\xff"] * 6)}, r"y_train .*not text"),
        ({"x_train": GREY.astype(np.uint16)}, r"x_train .*: no value above 2\d\d, so these are no images of 16 bits"),
        ({"y_train": np.array(list("abcabc"), object)}, r"y_train holds Python objects, which are never loaded"),
        ({"x_test": None}, r"no array 'x_test'; it holds x_train, y_train, y_test"),
        ({"y_train": LABELS * 0, "y_test": LABELS * 0}, r"one class only \(0\); accepted: two or more"),
        ({"x_train": np.asfortranarray(GREY)}, r"x_train is stored column by column"),
        ({"y_test": np.array(3)}, r"y_test is a single value"),
    ],
)
def test_anything_else_is_refused_by_key_shape_and_type(save: Any, change: dict[str, Any], told: str) -> None:
    path = save(GREY, LABELS, **change)
    with pytest.raises(InputError, match=told) as refused:
        loaded(path)
    assert path in str(refused.value)
    assert not (Path(path).parent / "data" / ".fedentopt").exists() or not list(
        (Path(path).parent / "data" / ".fedentopt").iterdir()
    )


def test_a_truncated_or_foreign_file_is_refused(save: Any) -> None:
    path = Path(save(GREY))
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"not a zip file", b""):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"own\.npz: not a readable \.npz file"):
            loaded(str(path))


def test_damaged_pixels_are_noticed_by_their_checksum(save: Any) -> None:
    path = Path(save(GREY))
    content = bytearray(path.read_bytes())
    at = content.find(GREY.tobytes())
    content[at + 5] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match="x_train is damaged or truncated"):
        loaded(str(path))


def test_an_array_shorter_than_its_header_says_is_refused(save: Any, tmp_path: Path) -> None:
    path = Path(save(GREY))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["x_train.npy"] = members["x_train.npy"][:-90]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(InputError, match=r"x_train is damaged or truncated \(6 rows announced"):
        loaded(str(path))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.npz is not there"):
        load(str(tmp_path / "none.npz"), tmp_path)


@pytest.mark.parametrize(("name", "grey"), [("pathmnist", False), ("tissuemnist", True)])
def test_medmnist_uses_training_and_test_images(tmp_path: Path, name: str, grey: bool) -> None:
    made = medmnist(tmp_path / f"{name}.npz", side=28, grey=grey, classes=len(CLASSES[name]))
    data = load(name, tmp_path, image_size=28)
    images = made["train_images"][..., None] if grey else made["train_images"]
    np.testing.assert_array_equal(data.x_train, images.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(data.y_test, made["test_labels"][:, 0])
    assert data.class_names == CLASSES[name]
    assert len(CLASSES[name]) == ENTRIES[name].classes
    assert "not the official" in data.notes[0]


def test_medmnist_takes_the_smallest_file_that_needs_no_upscaling(tmp_path: Path) -> None:
    medmnist(tmp_path / "pathmnist.npz", side=28, grey=False, classes=9)
    upscaled = load("pathmnist", tmp_path, image_size=64)
    assert "upscaled from 28 to 64 pixels" in upscaled.notes[-1]
    made = medmnist(tmp_path / "pathmnist_64.npz", side=64, grey=False, classes=9)
    medmnist(tmp_path / "pathmnist_128.npz", side=128, grey=False, classes=9)
    data = load("pathmnist", tmp_path, image_size=64)
    np.testing.assert_array_equal(data.x_test, made["test_images"].transpose(0, 3, 1, 2))
    assert len(data.notes) == 1


def test_medmnist_files_are_checked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pathmnist_224\.npz is not there\. `fedentopt data fetch pathmnist"):
        load("pathmnist", tmp_path)
    medmnist(tmp_path / "pathmnist.npz", side=28, grey=False, classes=11)
    with pytest.raises(InputError, match=r"train_labels\[9\] is 9; accepted: 0 to 8"):
        load("pathmnist", tmp_path)
    medmnist(tmp_path / "pathmnist.npz", side=28, grey=True, classes=9)
    with pytest.raises(InputError, match=r"train_images of shape \(18, 28, 28\).*pathmnist's images"):
        load("pathmnist", tmp_path)


def test_medmnist_of_official_size_must_have_the_published_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    medmnist(tmp_path / "pathmnist.npz", side=28, grey=False, classes=9)
    monkeypatch.setitem(ENTRIES, "pathmnist", dataclasses.replace(ENTRIES["pathmnist"], train=18, test=9))
    with pytest.raises(InputError, match=r"pathmnist\.npz: MD5 [0-9a-f]{32}, published a8b06965200029087d5bd7309"):
        load("pathmnist", tmp_path)


def test_damage_is_refused_whatever_it_makes_the_reader_say(save: Any, tmp_path: Path) -> None:
    path = Path(save(GREY))
    with np.load(path) as arrays, zipfile.ZipFile(tmp_path / "xz.npz", "w", zipfile.ZIP_LZMA) as packed:
        for name in arrays.files:
            with packed.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, arrays[name])
    assert len(loaded(str(tmp_path / "xz.npz")).x_train) == 6
    content = bytearray((tmp_path / "xz.npz").read_bytes())
    for i in range(60, 400):
        content[i] ^= 0x55
    (tmp_path / "xz.npz").write_bytes(content)
    with pytest.raises(InputError, match=r"xz\.npz: x_train is damaged"):
        loaded(str(tmp_path / "xz.npz"))
    for shape in ("((((,)", "(6, 100000000000000000000000, 10)"):
        header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x_train.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
            for name, array in (("x_test", GREY), ("y_train", LABELS), ("y_test", LABELS)):
                with archive.open(f"{name}.npy", "w") as file:
                    np.lib.format.write_array(file, array)
        with pytest.raises(InputError, match=r"own\.npz: x_train is damaged"):
            loaded(str(path))


@pytest.mark.parametrize("code", [0, ord(" "), 0xDCE9, 0x7FFFFFFF])
def test_class_names_that_are_no_text_are_refused(save: Any, code: int) -> None:
    names = np.frombuffer(np.array([97, code, 99], "<u4").tobytes(), "<U1")
    with pytest.raises(InputError, match=r"own\.npz: .*accepted: (text in UTF-8|one text per class)"):
        loaded(save(GREY, class_names=names))


@pytest.mark.parametrize("kind", [np.uint8, bool, np.float32])
def test_one_hot_rows_are_labels_and_columns_without_images_stay_classes(save: Any, kind: type) -> None:
    rows = np.eye(4)[LABELS].astype(kind)
    data = loaded(save(GREY, rows))
    np.testing.assert_array_equal(data.y_train, LABELS)
    assert data.class_names == ("0", "1", "2", "3")
    assert any("no training images of 3" in note for note in data.notes)
    named = loaded(save(GREY, rows, class_names=np.array(["owl", "cat", "dog", "yak"])))
    assert named.class_names == ("owl", "cat", "dog", "yak")
    with pytest.raises(InputError, match="one-hot rows of 4 classes in y_train, of 4 in y_test, class_names names 2"):
        loaded(save(GREY, rows, class_names=np.array(["owl", "cat"])))
    with pytest.raises(InputError, match="one-hot rows of 4 classes in y_train, of 3 in y_test"):
        loaded(save(GREY, rows, y_test=np.eye(3)[LABELS]))


@pytest.mark.parametrize("kind", ["U", "S"])
def test_text_is_a_label(save: Any, kind: str) -> None:
    words = np.array(["owl", "cat", "dog", "owl", "cat", "dög"])
    words = words if kind == "U" else np.char.encode(words, "utf-8")
    data = loaded(save(GREY, words))
    assert data.class_names == ("cat", "dog", "dög", "owl")
    np.testing.assert_array_equal(data.y_train, [3, 0, 1, 3, 0, 2])
    named = loaded(save(GREY, words, class_names=np.array(["owl", "dög", "cat", "dog", "yak"])))
    np.testing.assert_array_equal(named.y_test, [0, 2, 3, 0, 2, 1])
    assert named.class_names == ("owl", "dög", "cat", "dog", "yak")
    with pytest.raises(InputError, match=r"y_train\[2\] is 'dog'; accepted: owl, cat, dög"):
        loaded(save(GREY, words, class_names=np.array(["owl", "cat", "dög"])))


def test_sixteen_bits_keep_their_upper_eight(save: Any) -> None:
    deep = GREY.astype(np.uint16) * 256 + 77
    np.testing.assert_array_equal(loaded(save(deep)).x_train, loaded(save(GREY)).x_train)


def test_a_fourth_channel_is_how_opaque_a_pixel_is(save: Any) -> None:
    opaque = np.concatenate([COLOUR, np.full((6, 9, 10, 1), 255, np.uint8)], 3)
    np.testing.assert_array_equal(loaded(save(opaque)).x_train, loaded(save(COLOUR)).x_train)
    image = np.zeros((6, 8, 8, 4), np.uint8)
    image[...] = (200, 100, 51, 128)
    data = loaded(save(image.transpose(0, 3, 1, 2).copy()), 8)
    assert data.x_train[0, :, 0, 0].tolist() == [100, 50, 26]  # 200 * 128 / 255 = 100.4, 50.2, 25.6
    floats = loaded(save(image / 255), 8)
    np.testing.assert_array_equal(floats.x_train, data.x_train)


def test_arrays_in_memory_take_the_same_forms() -> None:
    from fedentopt.datasets import from_arrays

    words = np.array(["owl", "cat", "dog", "owl", "cat", "dog"], object)  # as a pandas column gives them
    data = from_arrays(GREY / 255, words, GREY / 255, words, image_size=10)
    assert data.class_names == ("cat", "dog", "owl")
    rows = from_arrays(GREY, np.eye(3)[LABELS], GREY, np.eye(3)[LABELS], image_size=10)
    np.testing.assert_array_equal(rows.y_train, LABELS)
    with pytest.raises(InputError, match=r"y_train .*object; accepted: whole numbers or text"):
        from_arrays(GREY, np.array([1, "a"] * 3, object), GREY, words, image_size=10)


def test_names_of_classes_beside_arrays_are_plain_text_in_an_order() -> None:
    from fedentopt.datasets import from_arrays

    plain = from_arrays(GREY, LABELS, GREY, LABELS, class_names=["c", "b", "a"])
    for labels in (LABELS, np.eye(3)[LABELS]):
        assert from_arrays(GREY, labels, GREY, labels, class_names=np.array(["c", "b", "a"])).digest == plain.digest
    for names in ({"a", "b", "c"}, {0: "a", 1: "b", 2: "c"}, "abc", [0, 1, 2], ["a", 1, "c"], 3, []):
        with pytest.raises(InputError, match=r"^dataset: class_names is .*; accepted: one text per class, in a list"):
            from_arrays(GREY, LABELS, GREY, LABELS, class_names=names)  # type: ignore[arg-type]


def test_masked_entries_are_not_taken_for_values() -> None:
    from fedentopt.datasets import from_arrays

    hidden = np.ma.masked_array(LABELS, LABELS == 2)
    with pytest.raises(InputError, match="y_train is masked in part; accepted: an array without missing values"):
        from_arrays(GREY, hidden, GREY, LABELS)
    assert from_arrays(GREY, np.ma.masked_array(LABELS), GREY, LABELS).num_classes == 3
