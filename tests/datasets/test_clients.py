"""Data that names its clients: ids in an .npz file, folders above the classes, arrays; what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedentopt.datasets import from_arrays, load
from fedentopt.errors import InputError
from tiny_data import image

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 9, 9), dtype=np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


def npz(folder: Path, ids: Any) -> str:
    path = folder / "own.npz"
    more = {} if ids is None else {"client_train": np.asarray(ids)}
    np.savez(path, x_train=IMAGES, y_train=LABELS, x_test=IMAGES, y_test=LABELS, **more)
    return str(path)


@pytest.mark.parametrize(
    ("ids", "names", "numbers"),
    [
        ([7, -3, 7, 10, 10, 7], ("-3", "7", "10"), [1, 0, 1, 2, 2, 1]),  # by number, not by text
        (["b", "a", "b", "a", "b", "ä"], ("a", "b", "ä"), [1, 0, 1, 0, 1, 2]),
        (np.array([1, 0, 0, 0, 0, 2**63], dtype=np.uint64), ("0", "1", str(2**63)), [1, 0, 0, 0, 0, 2]),
    ],
)
def test_ids_in_an_npz_file(tmp_path: Path, ids: Any, names: tuple[str, ...], numbers: list[int]) -> None:
    path = npz(tmp_path, ids)
    fresh, cached = (load(path, tmp_path / "data", image_size=9) for _ in range(2))
    for data in (fresh, cached):
        assert data.clients is not None
        assert data.clients.names == names
        assert data.clients.numbers.tolist() == numbers
    assert fresh.digest == cached.digest


def test_ids_are_part_of_what_the_data_is(tmp_path: Path) -> None:
    """The digest without ids is what it always was; with them it tells who holds what."""
    without = load(npz(tmp_path, None), tmp_path / "data", image_size=9)
    assert without.clients is None
    some = load(npz(tmp_path, [0, 0, 0, 1, 1, 1]), tmp_path / "data", image_size=9)
    others = load(npz(tmp_path, [0, 0, 1, 0, 1, 1]), tmp_path / "data", image_size=9)
    assert len({without.digest, some.digest, others.digest}) == 3


def test_a_cache_of_a_version_that_knew_no_clients_is_made_anew(tmp_path: Path) -> None:
    path = npz(tmp_path, ["a", "b", "a", "b", "a", "b"])
    load(path, tmp_path / "data", image_size=9)
    (meta,) = (tmp_path / "data").rglob("meta.json")
    meta.write_text(re.sub(r' "clients": \[[^]]*\],\n', "", meta.read_text()))
    assert '"clients": [' not in meta.read_text()
    again = load(path, tmp_path / "data", image_size=9).clients
    assert again is not None
    assert again.names == ("a", "b")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 1, 2], "3 client ids for 6 training samples; accepted: one for each"),
        ([[0], [1], [0], [1], [0], [1]], "of shape (6, 1) and type int64; accepted: whole numbers or text"),
        ([0.0, 1, 0, 1, 0, 1], "type float64; accepted: whole numbers or text of shape (n,)"),
        ([True, False] * 3, "type bool; accepted: whole numbers or text"),
        ([b"a", b"b"] * 3, "accepted: whole numbers or text"),
        ([4] * 6, "one client only (4); accepted: two or more"),
        (["a", "a", " ", "b", "b", "b"], "client_train[2]: the client id ' ' is blank"),
        (["a", "a", "b", "x\0y", "b", "b"], "client_train[3]: the client id 'x\\x00y' has a null character"),
    ],
)
def test_ids_that_are_refused(tmp_path: Path, ids: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load(npz(tmp_path, ids), tmp_path / "data")


def test_ids_of_python_objects_are_never_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="client_train holds Python objects, which are never loaded"):
        load(npz(tmp_path, np.array(["a", "b", None, "a", "b", "a"], dtype=object)), tmp_path / "data")


def test_arrays_take_ids_by_the_same_rules() -> None:
    data = from_arrays(IMAGES, LABELS, IMAGES, LABELS, client_train=["x", "y", "x", "y", "x", "y"])
    assert data.clients is not None
    assert data.clients.names == ("x", "y")
    with pytest.raises(InputError, match="dataset: client_train: 2 client ids for 6"):
        from_arrays(IMAGES, LABELS, IMAGES, LABELS, client_train=["x", "y"])


ANY_LENGTH = getattr(np.dtypes, "StringDType", None)  # from NumPy 2


@pytest.mark.parametrize("kind", [object, *([ANY_LENGTH()] if ANY_LENGTH else [])])
def test_arrays_take_ids_and_labels_as_pandas_gives_them(kind: Any) -> None:
    ids, words = (np.array(text * 3, dtype=kind) for text in (["x", "y"], ["cat", "dog"]))
    data = from_arrays(IMAGES, words, IMAGES, words, client_train=ids)
    assert data.clients is not None
    assert data.clients.names == ("x", "y")
    assert data.class_names == ("cat", "dog")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([["x"], ["x", "y"]], "client_train cannot be read as an array"),
        (["x", "y", "x", "y", "x", float("nan")], "client_train[5] is nan, beside text; accepted: text alone"),
        (["x", "y", "x", "y", "x", 7], "client_train[5] is 7, beside text; accepted: text alone"),
        (["x", "y", "x", "y", "x", None], "type object; accepted: whole numbers or text"),
        ([1.0, 2.0, 1.0, 2.0, 1.0, float("nan")], "type float64; accepted: whole numbers or text"),
    ],
)
def test_arrays_of_ids_that_are_refused(ids: Any, message: str) -> None:
    """What NumPy would make names of, such as "nan" of a missing value, is no id."""
    with pytest.raises(InputError, match=re.escape(message)):
        from_arrays(IMAGES, LABELS, IMAGES, LABELS, client_train=ids)
    if None in ids and ANY_LENGTH:
        with pytest.raises(InputError, match=re.escape(message)):
            from_arrays(IMAGES, LABELS, IMAGES, LABELS, client_train=np.array(ids, ANY_LENGTH(na_object=None)))


def folders(root: Path, train: dict[str, dict[str, int]], test: dict[str, int]) -> str:
    """Images below train/<client>/<class> and test/<class>, each of one grey."""
    value = 0
    for client, classes in train.items():
        (root / "train" / client).mkdir(parents=True)
        for name, number in classes.items():
            for i in range(number):
                value += 1
                image(root / "train" / client / name / f"{i}.png", value)
    for name, number in test.items():
        for i in range(number):
            image(root / "test" / name / f"{i}.png", 200 + i)
    return str(root)


def test_folders_above_the_classes_are_clients(tmp_path: Path) -> None:
    root = folders(tmp_path / "own", {"north": {"cat": 2, "dog": 1}, "east": {"dog": 3}}, {"cat": 1, "dog": 1})
    for _ in range(2):  # converted, then from the cache
        data = load(root, tmp_path / "data")
        assert data.class_names == ("cat", "dog")
        assert data.y_train.tolist() == [0, 0, 1, 1, 1, 1]
        assert data.clients is not None
        assert data.clients.names == ("east", "north")
        assert data.clients.numbers.tolist() == [1, 1, 0, 0, 0, 1]
        assert data.x_train[:, 0, 0, 0].tolist() == [1, 2, 4, 5, 6, 3]
        assert data.y_test.tolist() == [0, 1]


def test_folders_inside_classes_stay_what_they_were(tmp_path: Path) -> None:
    root = tmp_path / "own"
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            image(root / split / name / "batch1" / "1.png", 5)
    data = load(str(root), tmp_path / "data")
    assert data.class_names == ("cat", "dog")
    assert data.clients is None
    assert data.notes == ()


def test_clients_in_places_where_they_are_not_read_are_told_of(tmp_path: Path) -> None:
    """Clients in both splits, or without any: read as classes, as ever, but not without a word."""
    for root, splits in ((tmp_path / "both", ("train/", "test/")), (tmp_path / "neither", ("",))):
        for split in splits:
            for place in ("north/cat", "north/dog", "east/cat", "east/dog"):
                for i in range(2):
                    image(root / f"{split}{place}" / f"{i}.png", i)
        data = load(str(root), tmp_path / "data")
        assert data.class_names == ("east", "north")
        (said,) = (note for note in data.notes if "not told apart" in note)
        assert "the classes are east, north, and the folders inside them (cat, dog)" in said
        assert "train/<client>/<class>/* beside test/<class>/*" in said
    image(tmp_path / "both" / "train" / "north" / "9.png", 9)  # a class folder with images, so not a client's
    assert load(str(tmp_path / "both"), tmp_path / "data").notes == ()


def test_hidden_images_are_not_told_of(tmp_path: Path) -> None:
    root = folders(tmp_path / "own", {"north": {"cat": 1, "dog": 1}, "east": {"dog": 1}}, {"cat": 1, "dog": 1})
    image(tmp_path / "own" / "train" / "north" / "._1.png", 1)
    assert load(root, tmp_path / "data").notes == ()


def test_client_folders_that_are_refused(tmp_path: Path) -> None:
    empty = folders(tmp_path / "a", {"north": {"cat": 1, "dog": 1}, "east": {}}, {"cat": 1, "dog": 1})
    with pytest.raises(InputError, match="train/east: a client without samples; accepted: class folders with images"):
        load(empty, tmp_path / "data")
    alone = folders(tmp_path / "b", {"north": {"cat": 1, "dog": 1}}, {"cat": 1, "dog": 1})
    with pytest.raises(InputError, match=r"one client only \(north\); accepted: two or more"):
        load(alone, tmp_path / "data")
    unheld = folders(tmp_path / "c", {"north": {"cat": 1}, "east": {"cat": 1}}, {"cat": 1, "dog": 1})
    with pytest.raises(InputError, match=r"test/dog: no client in .*train has a folder dog"):
        load(unheld, tmp_path / "data")
