"""A few images in the layouts in which the data sets are published."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

CIFAR10_FILES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
CINIC_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BRAIN_CLASSES = ("glioma", "meningioma", "notumor", "pituitary")


def cifar_records(records: int, classes: tuple[int, ...], seed: int) -> np.ndarray:
    """uint8 (records, label bytes + 3072), labels cycling through their classes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (records, 3072), dtype=np.uint8)
    labels = [(np.arange(records) % count).astype(np.uint8)[:, None] for count in classes]
    return np.concatenate([*labels, pixels], 1)


def cifar10(data_dir: Path, records: int = 20) -> dict[str, np.ndarray]:
    folder = data_dir / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    made = {name: cifar_records(records, (10,), seed) for seed, name in enumerate(CIFAR10_FILES)}
    for name, content in made.items():
        (folder / name).write_bytes(content.tobytes())
    return made


def cifar100(data_dir: Path, train: int = 200, test: int = 100) -> dict[str, np.ndarray]:
    folder = data_dir / "cifar-100-binary"
    folder.mkdir(parents=True)
    made = {"train.bin": cifar_records(train, (20, 100), 1), "test.bin": cifar_records(test, (20, 100), 2)}
    for name, content in made.items():
        (folder / name).write_bytes(content.tobytes())
    return made


def image(path: Path, value: int, *, mode: str = "RGB", side: int = 8) -> None:
    """One picture of a single value (of a grey or of all three channels)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (side, side) if mode == "L" else (side, side, len(mode))
    Image.fromarray(np.full(shape, value, np.uint8)).save(path)


def class_folders(root: Path, splits: Mapping[str, int], classes: tuple[str, ...], kind: str = "png") -> None:
    """`splits`: images per class by split folder; image i of class c has the value 20 c + i."""
    for split, count in splits.items():
        for c, name in enumerate(classes):
            for i in range(count):
                image(root / split / name / f"{i:03}.{kind}", 20 * c + i)


def medmnist(
    path: Path, *, side: int, grey: bool, classes: int, train: int = 18, test: int = 9
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(side)
    arrays = {}
    for split, count in (("train", train), ("val", 3), ("test", test)):
        shape = (count, side, side) if grey else (count, side, side, 3)
        arrays[f"{split}_images"] = rng.integers(0, 256, shape, dtype=np.uint8)
        arrays[f"{split}_labels"] = (np.arange(count) % classes).astype(np.uint8)[:, None]
    np.savez_compressed(path, **arrays)
    return arrays


def idx(values: np.ndarray) -> bytes:
    """A uint8 array in the IDX format, packed."""
    axes = b"".join(length.to_bytes(4, "big") for length in values.shape)
    return gzip.compress(bytes([0, 0, 8, values.ndim]) + axes + values.tobytes(), mtime=0)


def idx_files(folder: Path, name: str, *, train: int = 20, test: int = 10, side: int = 28) -> dict[str, bytes]:
    """The four files of MNIST or its kin in `folder / name`, by name; labels cycle through the classes."""
    rng = np.random.default_rng(7)
    made = {}
    for stem, count in (("train", train), ("t10k", test)):
        made[f"{stem}-images-idx3-ubyte.gz"] = idx(rng.integers(0, 256, (count, side, side), dtype=np.uint8))
        made[f"{stem}-labels-idx1-ubyte.gz"] = idx((np.arange(count) % 10).astype(np.uint8))
    (folder / name).mkdir(parents=True)
    for file, content in made.items():
        (folder / name / file).write_bytes(content)
    return made


def tar_gz(path: Path, members: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
