"""Converted once, mapped afterwards, checked against the sources, and never half-written."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedentopt.datasets import cache, conversion, load
from fedentopt.datasets.cifar import CIFAR10, Cifar, Layout
from fedentopt.datasets.loading import source
from fedentopt.datasets.verify import verify
from fedentopt.errors import InputError
from tiny_data import CIFAR10_FILES, cifar10, class_folders

BATCH = Path("cifar-10-batches-bin") / "data_batch_3.bin"
CACHE = Path(".fedentopt") / "cifar10-32"


def listing(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_second_load_maps_what_the_first_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar10(tmp_path)
    first = load("cifar10", tmp_path)
    before = listing(tmp_path / CACHE)

    def never(*_: object) -> None:
        raise AssertionError("converted twice")

    monkeypatch.setattr(cache, "write", never)
    second = load("cifar10", tmp_path)
    assert isinstance(second.x_train, np.memmap)
    assert not second.x_train.flags.writeable
    np.testing.assert_array_equal(first.x_train, second.x_train)
    assert (first.mean, first.std, first.notes, first.class_names) == (
        second.mean,
        second.std,
        second.notes,
        second.class_names,
    )
    assert listing(tmp_path / CACHE) == before


@pytest.mark.parametrize("restore_time", [False, True])
def test_a_changed_official_file_is_refused_and_the_cache_stays(tmp_path: Path, restore_time: bool) -> None:
    cifar10(tmp_path)
    load("cifar10", tmp_path)
    before = listing(tmp_path / CACHE)
    whole, times = (tmp_path / BATCH).read_bytes(), (tmp_path / BATCH).stat()
    content = bytearray(whole)
    content[2000] ^= 1  # a pixel: sizes and labels are still right
    (tmp_path / BATCH).write_bytes(content)
    if restore_time:
        os.utime(tmp_path / BATCH, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(InputError, match=r"data_batch_3\.bin: the file is not as it was .*cifar10-32"):
        load("cifar10", tmp_path)
    assert listing(tmp_path / CACHE) == before
    (tmp_path / BATCH).write_bytes(whole)
    assert len(load("cifar10", tmp_path).x_train) == 100


def test_truncated_and_missing_files_are_refused_though_a_cache_is_there(tmp_path: Path) -> None:
    cifar10(tmp_path)
    load("cifar10", tmp_path)
    before = listing(tmp_path / CACHE)
    whole = (tmp_path / BATCH).read_bytes()
    (tmp_path / BATCH).write_bytes(whole[:-5])
    with pytest.raises(InputError, match=r"data_batch_3\.bin: .* not whole records"):
        load("cifar10", tmp_path)
    (tmp_path / BATCH).unlink()
    with pytest.raises(InputError, match=r"data_batch_3\.bin is not there"):
        load("cifar10", tmp_path)
    assert listing(tmp_path / CACHE) == before


def test_the_same_content_with_new_times_is_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar10(tmp_path)
    load("cifar10", tmp_path)
    os.utime(tmp_path / BATCH, (1, 1))
    load("cifar10", tmp_path)
    hashed: list[object] = []
    monkeypatch.setattr(conversion, "changed", lambda *a, **k: hashed.append(a))
    load("cifar10", tmp_path)
    assert not hashed, "the new times were not remembered"


def test_ones_own_data_may_change(tmp_path: Path) -> None:
    class_folders(tmp_path / "own", {"train": 2, "test": 1}, ("a", "b"))
    assert len(load(str(tmp_path / "own"), tmp_path / "data").x_train) == 4
    class_folders(tmp_path / "own", {"train": 3}, ("a", "b"))
    assert len(load(str(tmp_path / "own"), tmp_path / "data").x_train) == 6
    (folder,) = (tmp_path / "data" / ".fedentopt").iterdir()
    assert len(list(folder.glob("x_train-*.npy"))) == 1, "the old arrays were left behind"


def test_a_failing_conversion_leaves_the_old_cache_and_nothing_else(tmp_path: Path) -> None:
    class_folders(tmp_path / "own", {"train": 2, "test": 1}, ("a", "b"))
    load(str(tmp_path / "own"), tmp_path / "data")
    (folder,) = (tmp_path / "data" / ".fedentopt").iterdir()
    before = listing(folder)
    (tmp_path / "own" / "test" / "b" / "000.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"test/b/000\.png"):
        load(str(tmp_path / "own"), tmp_path / "data")
    assert listing(folder) == before


def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    cifar10(tmp_path)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load("cifar10", tmp_path, progress=interrupt)
    assert not list((tmp_path / ".fedentopt").rglob("*.*"))
    assert len(load("cifar10", tmp_path).x_train) == 100


def test_files_that_change_while_they_are_converted_are_refused(tmp_path: Path) -> None:
    cifar10(tmp_path)

    def change(done: int, total: int) -> None:
        (tmp_path / BATCH).touch()

    with pytest.raises(InputError, match="changed while they were converted"):
        load("cifar10", tmp_path, progress=change)
    assert not (tmp_path / CACHE / "meta.json").exists()


@pytest.mark.parametrize("damage", ["truncate", "remove", "garble"])
def test_a_damaged_cache_is_made_anew(tmp_path: Path, damage: str) -> None:
    made = cifar10(tmp_path)
    load("cifar10", tmp_path)
    (images,) = (tmp_path / CACHE).glob("x_test-*.npy")
    if damage == "truncate":
        os.truncate(images, images.stat().st_size - 1)
    elif damage == "remove":
        images.unlink()
    else:
        (tmp_path / CACHE / "meta.json").write_text("{}")
    data = load("cifar10", tmp_path)
    np.testing.assert_array_equal(data.x_test, made["test_batch.bin"][:, 1:].reshape(-1, 3, 32, 32))


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    cifar10(tmp_path)
    cached = load("cifar10", tmp_path)
    other = tmp_path / "readonly"
    cifar10(other)
    (other / ".fedentopt").write_text("a file where the folder would be")
    data = load("cifar10", other)
    np.testing.assert_array_equal(data.x_train, cached.x_train)
    assert data.mean == cached.mean
    assert "converted in memory" in data.notes[-1]


def test_progress_counts_every_image(tmp_path: Path) -> None:
    cifar10(tmp_path)
    seen: list[tuple[int, int]] = []
    load("cifar10", tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (120, 120)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_verify_reads_everything_again(tmp_path: Path) -> None:
    cifar10(tmp_path)
    load("cifar10", tmp_path)
    assert [finding.ok for finding in verify("cifar10", tmp_path)] == [True, True]
    (images,) = (tmp_path / CACHE).glob("x_train-*.npy")
    content = bytearray(images.read_bytes())
    content[-1] ^= 1
    images.write_bytes(content)
    files, arrays = verify("cifar10", tmp_path)
    assert files.ok
    assert not arrays.ok
    assert f"{images.name} was changed" in arrays.detail
    content[-1] ^= 1
    images.write_bytes(content)
    # A change behind the back of every file time: only reading the contents can tell.
    with (tmp_path / BATCH).open("r+b") as file:
        file.seek(500)
        old = file.read(1)
        file.seek(500)
        file.write(bytes([old[0] ^ 1]))
    files, arrays = verify("cifar10", tmp_path)
    assert files.ok, "sizes and labels are in order"
    assert not arrays.ok
    assert "data_batch_3.bin is not as it was" in arrays.detail


def test_a_copy_that_another_conversion_overtook_is_swept_by_a_later_load(tmp_path: Path) -> None:
    cifar10(tmp_path)
    load("cifar10", tmp_path)
    before = listing(tmp_path / CACHE)
    for name, age in (("x_train-00000000.npy", (1, 1)), ("x_train-11111111.npy", None)):
        (tmp_path / CACHE / name).write_bytes(b"a whole copy")
        os.utime(tmp_path / CACHE / name, age)
    load("cifar10", tmp_path)
    assert set(listing(tmp_path / CACHE)) == {*before, "x_train-11111111.npy"}  # the other may be in the making


def test_leftovers_of_a_killed_conversion_are_swept_after_a_day(tmp_path: Path) -> None:
    cifar10(tmp_path)
    (tmp_path / CACHE).mkdir(parents=True)
    old, recent = tmp_path / CACHE / "x_train-old.npy", tmp_path / CACHE / "x_train-recent.npy"
    old.touch()
    recent.touch()
    os.utime(old, (1, 1))
    load("cifar10", tmp_path)
    assert not old.exists()
    assert recent.exists(), "it may belong to a conversion that is running"


def test_the_cache_key_of_a_source_tells_files_and_sizes_apart(tmp_path: Path) -> None:
    one, other = (source(str(tmp_path / folder / "x.npz"), tmp_path, 32) for folder in "ab")
    assert one.key != other.key
    cifar10(tmp_path)
    small, large = load("cifar10", tmp_path, image_size=16), load("cifar10", tmp_path, image_size=24)
    assert (small.image_size, large.image_size) == (16, 24)
    assert load("cifar10", tmp_path, image_size=16).image_size == 16


def test_files_with_the_published_sums_replace_a_stand_in(tmp_path: Path) -> None:
    made = cifar10(tmp_path / "real")
    cifar10(tmp_path / "data", records=10)
    sums = {name: hashlib.md5(made[name].tobytes()).hexdigest() for name in CIFAR10_FILES}
    test = {"test_batch.bin": sums.pop("test_batch.bin")}
    layout = Layout(CIFAR10.folder, sums, test, dict.fromkeys(CIFAR10_FILES, 20), CIFAR10.labels)
    reader = Cifar("cifar10", layout, tmp_path / "data")
    assert len(conversion.converted(reader, tmp_path / "data", 32).x_train) == 50
    for name in CIFAR10_FILES:
        (reader.root / name).write_bytes(made[name].tobytes())
    assert len(conversion.converted(reader, tmp_path / "data", 32).x_train) == 100


def test_conversion_in_many_pieces_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedentopt.datasets import cifar, npz, pixels

    made = cifar10(tmp_path)
    x = np.concatenate([made[name][:, 1:] for name in CIFAR10_FILES[:5]]).reshape(-1, 3, 32, 32)
    y = np.arange(100) % 10
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y, x_test=x[:10], y_test=y[:10])
    whole = load("cifar10", tmp_path, image_size=20)
    monkeypatch.setattr(pixels, "PIECE_BYTES", 7 * 3 * 20 * 20)
    monkeypatch.setattr(cifar, "PIECE", 11)
    monkeypatch.setattr(npz, "PIECE_BYTES", 13 * 3072)
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / CIFAR10.folder).rename(other / CIFAR10.folder)
    for data in (load("cifar10", other, image_size=20), load(str(tmp_path / "own.npz"), other, image_size=20)):
        np.testing.assert_array_equal(data.x_train, whole.x_train)
        assert data.mean == whole.mean
        assert data.std == whole.std


def test_processes_that_convert_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    cifar10(tmp_path)
    program = (
        "import sys; from pathlib import Path; from fedentopt.datasets import load; "
        "d = load('cifar10', Path(sys.argv[1])); print(int(d.x_train.sum()), len(d.notes))"
    )
    words = (sys.executable, "-c", program, str(tmp_path))
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {process.communicate()[0] for process in started}
    data = load("cifar10", tmp_path)
    assert said == {f"{int(data.x_train.sum())} 1\n"}
    assert [finding.ok for finding in verify("cifar10", tmp_path)] == [True, True]


@pytest.mark.parametrize("name", ["sources-*.json", "y_train-*.npy", "x_test-*.npy"])
@pytest.mark.parametrize("content", ["zeros", "one bit"])
def test_a_cache_of_the_right_sizes_and_other_content_is_made_anew(tmp_path: Path, name: str, content: str) -> None:
    cifar10(tmp_path)
    first = load("cifar10", tmp_path)
    (path,) = (tmp_path / CACHE).glob(name)
    whole = bytearray(path.read_bytes())
    whole[-8] ^= 1
    path.unlink()  # the first load has it mapped
    path.write_bytes(bytes(len(whole)) if content == "zeros" else whole)
    second = load("cifar10", tmp_path)
    np.testing.assert_array_equal(first.y_train, second.y_train)
    np.testing.assert_array_equal(first.x_test, second.x_test)
    assert all(finding.ok for finding in verify("cifar10", tmp_path))


def test_large_arrays_that_are_none_any_more_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SMALL_BYTES", 1000)
    cifar10(tmp_path)
    load("cifar10", tmp_path)
    (path,) = (tmp_path / CACHE).glob("x_test-*.npy")
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(InputError, match=rf"{path.name}: was changed or damaged; remove .*cifar10-32 to convert"):
        load("cifar10", tmp_path)


def test_a_cache_counts_only_when_the_disk_has_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cifar10(tmp_path)
    on_disk: set[tuple[int, int]] = set()
    fsync, replace = os.fsync, os.replace

    def note(handle: int) -> None:
        fsync(handle)
        on_disk.add((os.fstat(handle).st_ino, os.fstat(handle).st_size))

    def check(source: Path, target: Path) -> None:
        for path in (tmp_path / CACHE).iterdir():
            assert (path.stat().st_ino, path.stat().st_size) in on_disk, path.name
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)
    load("cifar10", tmp_path)
    assert len(on_disk) == 7  # images and labels of both splits, fingerprints, description, the folder itself
