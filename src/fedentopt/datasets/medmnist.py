"""PathMNIST and TissueMNIST from MedMNIST's .npz files, published in 28, 64, 128 and 224 pixels.

J. Yang et al., "MedMNIST v2: a large-scale lightweight benchmark for 2D and 3D biomedical image
classification", Scientific Data 10:41, 2023. The training split goes to the clients, the test split is the
test; the validation split is not used. TissueMNIST is grey.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedentopt.datasets.catalog import ENTRIES, Download, missing
from fedentopt.datasets.class_labels import check_range, read_labels
from fedentopt.datasets.fingerprint import md5
from fedentopt.datasets.npz import array, check_images, image_pieces
from fedentopt.datasets.source import Content, Labels
from fedentopt.errors import InputError

CLASSES = {
    "pathmnist": (
        "adipose",
        "background",
        "debris",
        "lymphocytes",
        "mucus",
        "smooth muscle",
        "normal colon mucosa",
        "cancer-associated stroma",
        "colorectal adenocarcinoma epithelium",
    ),
    "tissuemnist": (
        "Collecting Duct, Connecting Tubule",
        "Distal Convoluted Tubule",
        "Glomerular endothelial cells",
        "Interstitial endothelial cells",
        "Leukocytes",
        "Podocytes",
        "Proximal Tubule Segments",
        "Thick Ascending Limb",
    ),
}


@dataclass(frozen=True)
class MedMnist:
    """One of the published files of PathMNIST or TissueMNIST."""

    name: str
    data_dir: Path
    download: Download
    image_size: int  # asked for
    official: bool = True

    @classmethod
    def choose(cls, name: str, data_dir: Path, image_size: int) -> MedMnist:
        """The smallest file that needs no upscaling, else the largest of those that are there."""
        downloads = ENTRIES[name].downloads
        there = [d for d in downloads if (data_dir / d.filename).is_file()]
        if not there:
            return cls(name, data_dir, downloads[-1], image_size)
        enough = [d for d in there if (d.image_size or 0) >= image_size]
        return cls(name, data_dir, enough[0] if enough else there[-1], image_size)

    @property
    def key(self) -> str:
        return self.download.filename.removesuffix(".npz")

    @property
    def root(self) -> Path:
        return self.data_dir

    @property
    def path(self) -> Path:
        return self.data_dir / self.download.filename

    def files(self) -> list[Path]:
        if not self.path.is_file():
            raise missing(self.name, self.path, self.data_dir)
        return [self.path]

    def open(self) -> Content:
        entry, (path,) = ENTRIES[self.name], self.files()
        names = CLASSES[self.name]
        images, labels = {}, {}
        for split in ("train", "test"):
            images[split] = array(path, f"{split}_images")
            given = array(path, f"{split}_labels")
            labels[split] = read_labels(given, images[split])
            if labels[split].dtype != np.int64:
                raise InputError(f"{given}; accepted: whole numbers, one per image")
            check_range(path, f"{split}_labels", labels[split], len(names))
        channels = {check_images(found) for found in images.values()}
        if channels != {1 if self.name == "tissuemnist" else 3} or any(a.dtype != np.uint8 for a in images.values()):
            raise InputError(f"{images['train']}; accepted: {self.name}'s images in uint8")
        notes = []
        official = (len(labels["train"]), len(labels["test"])) == (entry.train, entry.test)
        if official:
            if (found := md5(path)) != self.download.md5:
                raise InputError(f"{path}: MD5 {found}, published {self.download.md5}: the file was changed")
        else:
            there = f"{len(labels['train']):,} + {len(labels['test']):,}"
            notes.append(f"{self.name}: {path} holds {there} images, not the official {entry.train:,} + {entry.test:,}")
        side = images["train"].shape[1]
        if side < self.image_size:
            notes.append(f"{self.name}: images of {path.name} are upscaled from {side} to {self.image_size} pixels")
        return Content(
            channels.pop(),
            {"": Labels(names, labels["train"], labels["test"])},
            image_pieces(images["train"]),
            image_pieces(images["test"]),
            tuple(notes),
            verified=official,
        )
