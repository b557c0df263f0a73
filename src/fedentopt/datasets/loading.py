"""From a name to a `Dataset`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedentopt.datasets.cache import Progress, in_memory
from fedentopt.datasets.catalog import ENTRIES, resolve_data_dir
from fedentopt.datasets.conversion import converted
from fedentopt.datasets.dataset import Dataset
from fedentopt.datasets.source import Source
from fedentopt.errors import InputError
from fedentopt.files import expand_home

SMALLEST, LARGEST = 8, 1024
BRAIN_CLASSES = ("glioma", "meningioma", "notumor", "pituitary")


def default_image_size(name: str) -> int:
    """Side of the square images unless one is asked for: 32, medical data sets 224."""
    return ENTRIES[name].image_size if name in ENTRIES else 32


def check_image_size(size: int) -> None:
    """Refuse a side that images are not converted to."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer):
        raise InputError(f"image_size: {size!r} has the wrong type; accepted: a whole number, {SMALLEST} to {LARGEST}")
    if not SMALLEST <= size <= LARGEST:
        raise InputError(f"image_size: {size} is out of range; accepted: {SMALLEST} to {LARGEST}")


def load(
    name: str,
    data_dir: Path | None = None,
    *,
    fine_labels: bool = False,
    image_size: int | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """A data set by name (see `catalog.ENTRIES`), or a user's own by path: an .npz file or class folders.

    `fine_labels`: CIFAR-100's 100 labels instead of its 20. `progress(done, all)` is called while images are
    converted, which happens once. Missing, truncated and changed files are refused by name.
    """
    size = default_image_size(name) if image_size is None else image_size
    check_image_size(size)
    if fine_labels and name != "cifar100":
        raise InputError(f"fine_labels: {name} has one kind of labels only; accepted with cifar100")
    if name == "digits":
        from fedentopt.datasets.digits import digits

        arrays = in_memory(digits(), size, progress)
    else:
        folder = resolve_data_dir(data_dir)
        try:
            arrays = converted(source(name, folder, size), folder, size, progress)
        except OSError as error:  # a file that may not be read, a disk that fails
            raise InputError(f"{name}: {error.filename or folder}: {error.strerror or error}") from error
    labels = arrays.labels["fine" if fine_labels else ""]
    return Dataset(
        name,
        arrays.x_train,
        labels.train,
        arrays.x_test,
        labels.test,
        labels.names,
        arrays.mean,
        arrays.std,
        arrays.notes,
        arrays.clients,
    )


def source(name: str, data_dir: Path, size: int) -> Source:
    """The reader for a data set; an unknown name is refused."""
    if name in ("cifar10", "cifar100"):
        from fedentopt.datasets.cifar import CIFAR10, CIFAR100, Cifar

        return Cifar(name, CIFAR10 if name == "cifar10" else CIFAR100, data_dir)
    if name in ("pathmnist", "tissuemnist"):
        from fedentopt.datasets.medmnist import MedMnist

        return MedMnist.choose(name, data_dir, size)
    if name in ("mnist", "fashion-mnist"):
        from fedentopt.datasets.idx import Idx

        return Idx(name, data_dir)
    from fedentopt.datasets.folders import Folders

    if name == "cinic10":
        from fedentopt.datasets.cifar import CIFAR10

        places = [data_dir / place for place in (name, "CINIC-10")]
        there = next((place for place in places if place.is_dir()), places[0])
        return Folders(name, there, CIFAR10.labels[""], data_dir, grey=False)
    if name == "brain-tumor-mri":
        # Slices of MRI are grey; some files of this set only store them as RGB.
        return Folders(name, data_dir / name, BRAIN_CLASSES, data_dir, grey=True)
    from fedentopt.datasets.class_labels import is_text

    if not is_text(name):
        raise InputError(f"dataset: {name!r} cannot be written to a table; accepted: a path in UTF-8")
    path = expand_home(name)
    if path.suffix.lower() == ".npz":
        from fedentopt.datasets.npz import Npz

        return Npz(path)
    if name.strip() and path.is_dir():
        return Folders(name, path)
    raise InputError(
        f"dataset: {name!r} is unknown; accepted: {', '.join(ENTRIES)}, an .npz file, or a folder of class folders"
    )
