"""CIFAR-10 and CIFAR-100 from their official "binary version" (https://www.cs.toronto.edu/~kriz/cifar.html).

A record is one label byte (CIFAR-100: coarse, then fine) and 3,072 bytes of pixels: the red, green and blue
planes of a 32×32 image, row by row. Files of the official size must have the official MD5 sums. Smaller
files of whole records are read too, so that pipelines can be tried on a few images; a note says so.
A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedentopt.datasets.catalog import missing
from fedentopt.datasets.fingerprint import md5
from fedentopt.datasets.source import Content, Images, Labels
from fedentopt.errors import InputError

PIXELS = 3 * 32 * 32
PIECE = 10_000  # images per piece


@dataclass(frozen=True)
class Layout:
    """The files of one of the two sets. `labels` is in the order of the label bytes: variant -> class names."""

    folder: str
    train: Mapping[str, str]  # file name -> published MD5
    test: Mapping[str, str]
    records: Mapping[str, int]  # file name -> official number of records
    labels: Mapping[str, tuple[str, ...]]


CIFAR10 = Layout(
    folder="cifar-10-batches-bin",
    train={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    },
    test={"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d"},
    records={**{f"data_batch_{i}.bin": 10_000 for i in range(1, 6)}, "test_batch.bin": 10_000},
    labels={"": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")},
)
_COARSE = """aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes
large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees
vehicles_1 vehicles_2"""
_FINE = """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"""
CIFAR100 = Layout(
    folder="cifar-100-binary",
    train={"train.bin": "6172c7755cfe09b2fe270c85cebc1b15"},
    test={"test.bin": "4499cfba6c016c1be1438163640a0898"},
    records={"train.bin": 50_000, "test.bin": 10_000},
    labels={"": tuple(_COARSE.split()), "fine": tuple(_FINE.split())},
)


@dataclass(frozen=True)
class Cifar:
    """CIFAR-10 or CIFAR-100 under a data folder."""

    name: str
    layout: Layout
    data_dir: Path
    official: bool = True

    @property
    def key(self) -> str:
        return self.name

    @property
    def root(self) -> Path:
        return self.data_dir / self.layout.folder

    def files(self) -> list[Path]:
        found = [self.root / name for name in self.layout.records]
        for path in found:
            if not path.is_file():
                raise missing(self.name, path, self.data_dir)
        return found

    def open(self) -> Content:
        sizes = {path.name: self._records(path) for path in self.files()}
        notes = self._check_sizes(sizes)
        train, test = ([self.root / name for name in names] for names in (self.layout.train, self.layout.test))
        labels = {
            variant: Labels(names, self._labels(train, i, names), self._labels(test, i, names))
            for i, (variant, names) in enumerate(self.layout.labels.items())
        }
        return Content(3, labels, self._images(train), self._images(test), notes, verified=not notes)

    @property
    def _record(self) -> int:
        return len(self.layout.labels) + PIXELS

    def _records(self, path: Path) -> int:
        size = path.stat().st_size
        official = self.layout.records[path.name] * self._record
        if size == 0 or size % self._record:
            raise InputError(
                f"{path}: {size:,} bytes are not whole records of {self._record:,} bytes: the file is truncated or not "
                f"of the {self.name} binary version; accepted: {official:,} bytes"
            )
        return size // self._record

    def _check_sizes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """Official files: their MD5 sums. Else a small stand-in, whose training files must be of one size."""
        full = [name for name, records in sizes.items() if records == self.layout.records[name]]
        if len(full) == len(sizes):
            for name, sum_ in {**self.layout.train, **self.layout.test}.items():
                if (found := md5(self.root / name)) != sum_:
                    raise InputError(f"{self.root / name}: MD5 {found}, published {sum_}: the file was changed")
            return ()
        for name, records in sizes.items():
            expected = self.layout.records[name] if full else sizes[next(iter(self.layout.train))]
            if records != expected and (full or name in self.layout.train):
                raise InputError(
                    f"{self.root / name}: {records:,} records where {expected:,} belong: the file is truncated or "
                    "of another copy than the files beside it"
                )
        there, published = sum(sizes.values()), sum(self.layout.records.values())
        return (f"{self.name}: {self.root} holds {there:,} images, not the official {published:,}",)

    def _pieces(self, path: Path) -> Iterator[np.ndarray]:
        """Records, some at a time: read rather than mapped, since a mapped file that shrinks kills the process."""
        for start in range(0, self._records(path), PIECE):
            piece = np.fromfile(path, np.uint8, PIECE * self._record, offset=start * self._record)
            yield piece.reshape(-1, self._record)

    def _labels(self, paths: Sequence[Path], byte: int, names: tuple[str, ...]) -> np.ndarray:
        out = []
        for path in paths:
            labels = np.concatenate([piece[:, byte] for piece in self._pieces(path)])
            if labels.max() >= len(names):
                at = int(np.argmax(labels >= len(names)))
                raise InputError(
                    f"{path}: record {at} has label {labels[at]}; accepted: 0 to {len(names) - 1}. The file was changed"
                )
            out.append(labels.astype(np.int64))
        return np.concatenate(out)

    def _images(self, paths: Sequence[Path]) -> Images:
        def iterate(side: int) -> Iterator[np.ndarray]:
            from fedentopt.datasets.pixels import resized

            for path in paths:
                for piece in self._pieces(path):
                    pixels = np.ascontiguousarray(piece[:, len(self.layout.labels) :])
                    yield from resized(pixels.reshape(-1, 3, 32, 32), side)

        return iterate
