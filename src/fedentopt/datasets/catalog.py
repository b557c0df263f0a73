"""The data sets known by name: what they are, where they come from, which checksums their publishers give, where their
files and converted arrays lie, and what to say when the files are not there.

Sources of the checksums: CIFAR-10/-100 https://www.cs.toronto.edu/~kriz/cifar.html; CINIC-10 the archive of
https://doi.org/10.7488/ds/2448 as checked by its common loaders; MedMNIST `medmnist/info.py`, version 3.0.2
(https://github.com/MedMNIST/MedMNIST), record https://zenodo.org/records/10519652; MNIST and Fashion-MNIST
torchvision's loaders of both (https://github.com/pytorch/vision, `torchvision/datasets/mnist.py`).
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from fedentopt.errors import InputError
from fedentopt.files import expand_home


def missing(name: str, path: Path, data_dir: Path) -> InputError:
    """The refusal for a missing file: which one, and how to get it."""
    return InputError(f"{name}: {path} is not there. {remedy(name, data_dir)}")


def remedy(name: str, data_dir: Path) -> str:
    """How to get a data set's files, and where they have to lie."""
    entry = ENTRIES[name]
    if entry.by_hand:
        return f"{entry.by_hand} {data_dir} holds {entry.place}"
    return f"`fedentopt data fetch {name} --data-dir {shlex.quote(str(data_dir))}` gets it; or put there: {entry.place}"


CACHE = ".fedentopt"  # inside the data folder: the converted arrays


def resolve_data_dir(data_dir: Path | str | None) -> Path:
    """The data folder: the given one, else FEDENTOPT_DATA, else the user's cache folder. It need not exist."""
    if data_dir is not None:
        return expand_home(data_dir)
    if chosen := os.environ.get("FEDENTOPT_DATA"):
        return expand_home(chosen)
    from platformdirs import user_cache_path

    return user_cache_path("fedentopt", appauthor=False)


_CIFAR = "https://www.cs.toronto.edu/~kriz"
_CINIC = "https://datashare.ed.ac.uk"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"  # its publisher's own address does not answer any more
_FASHION = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion"
_IDX_FILES = "train- and t10k-images-idx3-ubyte.gz, train- and t10k-labels-idx1-ubyte.gz"
_MEDMNIST = "https://zenodo.org/records/10519652/files"


@dataclass(frozen=True)
class Download:
    """A published file. `into`: the folder it is unpacked into; None if it is used as it is.

    Several without an `image_size` are the parts of one set, and are fetched together.
    """

    filename: str  # below the data folder
    urls: tuple[str, ...]  # tried in this order
    md5: str
    megabytes: int | None  # None where its publisher's page has not been read
    into: str | None = None
    image_size: int | None = None  # where one set is published in several sizes


@dataclass(frozen=True)
class Entry:
    """One data set. `place` is what must lie in the data folder, as people would write it."""

    name: str
    title: str
    classes: int
    train: int
    test: int
    image_size: int
    place: str
    downloads: tuple[Download, ...] = ()
    by_hand: str = ""  # what to do where nothing can be fetched
    embedded: bool = False


def may_differ(name: str) -> bool:
    """Whether other images can stand behind a name at another time: behind a user's own file or folder, and behind a
    set that is published in several sizes, of which one that is too small is scaled up."""
    return name not in ENTRIES or any(file.image_size is not None for file in ENTRIES[name].downloads)


def _medmnist(name: str, files: dict[int, tuple[str, int | None]]) -> tuple[Download, ...]:
    downloads = []
    for size, (md5, megabytes) in files.items():
        filename = f"{name}.npz" if size == 28 else f"{name}_{size}.npz"
        downloads.append(Download(filename, (f"{_MEDMNIST}/{filename}?download=1",), md5, megabytes, None, size))
    return tuple(downloads)


def _idx(name: str, address: str, files: dict[str, tuple[str, int]]) -> tuple[Download, ...]:
    return tuple(
        Download(f"{name}/{file}.gz", (f"{address}/{file}.gz",), md5, megabytes)
        for file, (md5, megabytes) in files.items()
    )


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry("digits", "scikit-learn's digits", 10, 1_438, 359, 32, "nothing: built in", embedded=True),
        Entry(
            "mnist",
            "MNIST, handwritten digits",
            10,
            60_000,
            10_000,
            32,
            f"mnist/ with {_IDX_FILES}",
            _idx(
                "mnist",
                _MNIST,
                {
                    "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 10),
                    "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", 0),
                    "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", 2),
                    "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", 0),
                },
            ),
        ),
        Entry(
            "fashion-mnist",
            "Fashion-MNIST, clothes",
            10,
            60_000,
            10_000,
            32,
            f"fashion-mnist/ with {_IDX_FILES}",
            _idx(
                "fashion-mnist",
                _FASHION,
                {
                    "train-images-idx3-ubyte": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26),
                    "train-labels-idx1-ubyte": ("25c81989df183df01b3e8a0aad5dffbe", 0),
                    "t10k-images-idx3-ubyte": ("bef4ecab320f06d8554ea6380940ec79", 4),
                    "t10k-labels-idx1-ubyte": ("bb300cfdad3c16e7a12a480ee83cd310", 0),
                },
            ),
        ),
        Entry(
            "cifar10",
            "CIFAR-10",
            10,
            50_000,
            10_000,
            32,
            "cifar-10-batches-bin/data_batch_1.bin … data_batch_5.bin, test_batch.bin",
            (
                Download(
                    "cifar-10-binary.tar.gz",
                    (f"{_CIFAR}/cifar-10-binary.tar.gz",),
                    "c32a1d4ab5d03f1284b67883e8d87530",
                    162,
                    "",
                ),
            ),
        ),
        Entry(
            "cifar100",
            "CIFAR-100, coarse labels",
            20,
            50_000,
            10_000,
            32,
            "cifar-100-binary/train.bin, test.bin",
            (
                Download(
                    "cifar-100-binary.tar.gz",
                    (f"{_CIFAR}/cifar-100-binary.tar.gz",),
                    "03b5dce01913d631647c71ecec9e9cb8",
                    161,
                    "",
                ),
            ),
        ),
        Entry(
            "cinic10",
            "CINIC-10",
            10,
            90_000,
            90_000,
            32,
            "cinic10/train/<class>/*.png, cinic10/test/<class>/*.png",
            (
                Download(
                    "CINIC-10.tar.gz",
                    # The repository moved its files; the first is where they are now.
                    (
                        f"{_CINIC}/server/api/core/bitstreams/e8e186cc-2688-48f1-aa5a-3fda1a43f8b6/content",
                        f"{_CINIC}/bitstream/handle/10283/3192/CINIC-10.tar.gz",
                    ),
                    "6ee4d0c996905fe93221de577967a372",
                    688,
                    "cinic10",
                ),
            ),
        ),
        Entry(
            "pathmnist",
            "PathMNIST, colon tissue",
            9,
            89_996,
            7_180,
            224,
            "pathmnist_224.npz, or a smaller one such as pathmnist.npz (28 pixels)",
            _medmnist(
                "pathmnist",
                {
                    28: ("a8b06965200029087d5bd730944a56c1", 206),
                    64: ("55aa9c1e0525abe5a6b9d8343a507616", None),
                    128: ("ac42d08fb904d92c244187169d1fd1d9", None),
                    224: ("2c51a510bcdc9cf8ddb2af93af1eadec", 12_600),
                },
            ),
        ),
        Entry(
            "tissuemnist",
            "TissueMNIST, kidney",
            8,
            165_466,
            47_280,
            224,
            "tissuemnist_224.npz, or a smaller one such as tissuemnist.npz (28 pixels)",
            _medmnist(
                "tissuemnist",
                {
                    28: ("ebe78ee8b05294063de985d821c1c34b", 125),
                    64: ("123ece2eba09d0aa5d698fda57103344", None),
                    128: ("61b955355d7425a89687b06cca3ce0c2", None),
                    224: ("b077128c4a949f0a4eb01517f9037b9c", None),
                },
            ),
        ),
        Entry(
            "brain-tumor-mri",
            "Brain Tumor MRI",
            4,
            5_712,
            1_311,
            224,
            "brain-tumor-mri/Training/<class>/*, brain-tumor-mri/Testing/<class>/* "
            "with the classes glioma, meningioma, notumor, pituitary",
            by_hand="Kaggle gives it to account holders only: download "
            "https://www.kaggle.com/datasets/masoudnickparvar/brain-tumor-mri-dataset and unpack it so that",
        ),
    )
}
