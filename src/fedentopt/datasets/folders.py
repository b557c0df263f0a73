"""Class folders: a folder a split, in it a folder per class, in it image files; CINIC-10, Brain Tumor MRI, one's own.

`train/<class>/*` and `test/<class>/*` (also Training and Testing), or `<class>/*` alone, of which a fixed
stratified fifth becomes the test split (`dataset.held_out`). Where `test` holds classes and the folders of `train` hold
these one level further down, `train/<client>/<class>/*`, the folders of `train` are clients. Classes and clients are
ordered by name. Images of any common format; all are read as grey if all are grey, else as RGB.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedentopt.datasets.catalog import missing
from fedentopt.datasets.class_labels import absent, check_names
from fedentopt.datasets.clients import client_ids
from fedentopt.datasets.dataset import held_out
from fedentopt.datasets.npz import own_key
from fedentopt.datasets.source import Content, Images, Labels
from fedentopt.errors import InputError

KINDS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff", ".webp"})
_LITTER = frozenset({"thumbs.db", "desktop.ini"})
_TRAIN, _TEST, _UNUSED = ("train", "training"), ("test", "testing"), ("valid", "val", "validation")


class _Scan(NamedTuple):
    """What lies in a folder: class names; split -> class -> files ("all" alone where there are no splits); notes; and
    the folder of the training images where its folders are clients."""

    names: tuple[str, ...]
    splits: dict[str, dict[str, list[Path]]]
    notes: tuple[str, ...]
    clients: Path | None = None


@dataclass(frozen=True)
class Folders:
    """A folder of class folders. `classes` and `data_dir` are given for the sets known by name."""

    name: str
    path: Path
    classes: tuple[str, ...] | None = None
    data_dir: Path | None = None
    grey: bool | None = None  # None: as the files are

    @property
    def official(self) -> bool:
        return self.classes is not None

    @property
    def key(self) -> str:
        return self.name if self.official else own_key(self.path)

    @property
    def root(self) -> Path:
        return self.path

    def files(self) -> list[Path]:
        return [path for members in self._scan().splits.values() for found in members.values() for path in found]

    def open(self) -> Content:
        names, splits, notes, top = self._scan()
        paths: dict[str, list[Path]] = {}
        labels: dict[str, np.ndarray] = {}
        for split, members in splits.items():
            paths[split] = [path for found in members.values() for path in found]
            labels[split] = np.repeat(np.arange(len(names)), [len(found) for found in members.values()])
        if "test" not in paths:
            train, test = held_out(labels["all"])
            notes = (*notes, f"{self.name}: no test split, so a fixed fifth of every class is the test")
            paths = {split: [paths["all"][i] for i in chosen] for split, chosen in (("train", train), ("test", test))}
            labels = {"train": labels["all"][train], "test": labels["all"][test]}
            if not len(test):
                raise InputError(f"{self.path}: one image a class leaves none for a test split; accepted: two or more")
        clients = None
        if top is not None:
            ids = np.array([path.relative_to(top).parts[0] for path in paths["train"]])
            clients = client_ids(f"{top}: the folders in it", ids, len(ids))
        channels = 1 if (self._all_grey(paths) if self.grey is None else self.grey) else 3
        return Content(
            channels,
            {"": Labels(names, labels["train"], labels["test"])},
            _images(paths["train"], channels),
            _images(paths["test"], channels),
            (*notes, *absent(self.name, names, labels["train"], labels["test"])),
            clients=clients,
        )

    def _scan(self) -> _Scan:
        if not self.path.is_dir():
            raise self._gone(self.path)
        folders = _folders(self.path)
        train, test = (_one_of(self.path, folders, accepted) for accepted in (_TRAIN, _TEST))
        if train is None and test is None and not self.official:
            names = tuple(sorted(folders))
            all_ = {name: self._members(folders[name]) for name in self._checked(names)}
            return _Scan(names, {"all": all_}, (*_beside(self.path), *_deeper(self.path, [folders])))
        if train is None or test is None:
            raise self._gone(self.path / ("train" if train is None else "test"))
        inside = {"train": _folders(train), "test": _folders(test)}
        if not self.official and _holds_clients(inside["train"], inside["test"]):
            return self._scan_clients(train, inside["train"], test, inside["test"])
        names = self.classes or tuple(sorted({*inside["train"], *inside["test"]}))
        for split, found in inside.items():
            for name in names:
                if name not in found and (self.official or split == "train"):
                    raise self._gone((train if split == "train" else test) / name)
            for name in sorted(set(found) - set(names)):
                raise InputError(f"{found[name]}: no class of {self.name}; accepted: {', '.join(names)}")
        splits = {
            split: {name: self._members(found[name]) if name in found else [] for name in names}
            for split, found in inside.items()
        }
        if not any(splits["test"].values()):
            raise InputError(f"{test}: no class folders with images; accepted: one folder per class, as in {train}")
        notes = (*self._unused(folders), *_beside(self.path, train, test))
        if not self.official:
            notes += _deeper(self.path, list(inside.values()))
        return _Scan(self._checked(names), splits, notes)

    def _scan_clients(self, train: Path, clients: dict[str, Path], test: Path, tested: dict[str, Path]) -> _Scan:
        """The same where the folders in `train` are clients."""
        held = {client: _folders(folder) for client, folder in clients.items()}
        names = tuple(sorted({*tested, *(name for own in held.values() for name in own)}))
        for name in names:
            if not any(name in own for own in held.values()):
                raise InputError(f"{test / name}: no client in {train} has a folder {name}; accepted: at least one")
        for client, own in held.items():
            if not own:
                raise InputError(f"{train / client}: a client without samples; accepted: class folders with images")
        splits = {
            "train": {
                name: [
                    path
                    for client in sorted(held)
                    if name in held[client]
                    for path in self._members(held[client][name])
                ]
                for name in names
            },
            "test": {name: self._members(tested[name]) if name in tested else [] for name in names},
        }
        beside = _beside(self.path, train, test, *(clients[client] for client in sorted(clients)))
        return _Scan(self._checked(names), splits, (*self._unused(_folders(self.path)), *beside), train)

    def _unused(self, folders: dict[str, Path]) -> tuple[str, ...]:
        unused = [] if self.official else [name for name in folders if name.lower() in _UNUSED]
        return tuple(f"{self.path / name} is not used" for name in unused)

    def _checked(self, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(names) < 2:
            there = ", ".join(names) or "none"
            raise InputError(f"{self.path}: class folders found: {there}; accepted: two or more, each with images")
        check_names(str(self.path), names)
        return names

    def _members(self, folder: Path) -> list[Path]:
        """The image files of a class, in a fixed order. Anything else is refused, lest samples go missing silently."""
        found = []
        for place, folders, files in os.walk(folder, onerror=_raise, followlinks=True):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if name.startswith(".") or name.lower() in _LITTER:
                    continue
                if Path(name).suffix.lower() not in KINDS:
                    raise InputError(f"{Path(place) / name}: not an image; accepted: {', '.join(sorted(KINDS))}")
                found.append(Path(place) / name)
        if not found:
            raise InputError(f"{folder}: no images in it; accepted: at least one of {', '.join(sorted(KINDS))}")
        return found

    def _gone(self, path: Path) -> InputError:
        if self.data_dir is not None:
            return missing(self.name, path, self.data_dir)
        return InputError(f"dataset: {path} is not there; accepted: train/<class>/* and test/<class>/*, or <class>/*")

    def _all_grey(self, paths: dict[str, list[Path]]) -> bool:
        from fedentopt.datasets.pixels import GREY_MODES, mode

        return all(mode(path) in GREY_MODES for split in paths.values() for path in split)


def _holds_clients(train: dict[str, Path], test: dict[str, Path]) -> bool:
    """Whether the folders in `train` are clients: classes of `test` are missing among them and lie inside them."""
    missing_there = set(test) - set(train)
    return bool(missing_there) and any(missing_there & set(_folders(folder)) for folder in train.values())


def _folders(path: Path) -> dict[str, Path]:
    """The folders in `path` by name; a link to nowhere may have been one, and is refused."""
    seen = [found for found in path.iterdir() if not found.name.startswith(".")]
    for found in seen:
        if found.is_symlink() and not found.exists():
            raise InputError(f"{found}: a link to {os.readlink(found)}, which is not there; accepted: a class folder")
    return {found.name: found for found in seen if found.is_dir()}


def _beside(*folders: Path) -> tuple[str, ...]:
    """Notes on images that lie beside the class folders, and so belong to no class."""
    notes = []
    for folder in folders:
        seen = (path for path in folder.iterdir() if not path.name.startswith("."))
        count = sum(path.suffix.lower() in KINDS and path.is_file() for path in seen)
        if count:
            notes.append(f"{folder}: {count:,} images beside the class folders are not used")
    return tuple(notes)


def _deeper(path: Path, splits: Sequence[dict[str, Path]]) -> tuple[str, ...]:
    """A note where the images of all class folders lie in folders of their own, some of which several classes have:
    perhaps these are the classes, and what was taken for classes are clients."""
    holders: dict[str, set[str]] = {}
    for name, folder in (item for folders in splits for item in folders.items()):
        if any(found.suffix.lower() in KINDS and found.is_file() for found in folder.iterdir()):
            return ()
        for inner in _folders(folder):
            holders.setdefault(inner, set()).add(name)
    shared = sorted(inner for inner, names in holders.items() if len(names) > 1)
    if len(shared) < 2:
        return ()
    classes = sorted(set().union(*splits))
    return (
        f"{path}: the classes are {', '.join(classes)}, and the folders inside them ({', '.join(shared)}) are not told "
        f"apart; clients above classes are read as train/<client>/<class>/* beside test/<class>/*",
    )


def _raise(error: OSError) -> None:
    raise error  # os.walk would leave the folder out


def _one_of(path: Path, folders: dict[str, Path], accepted: Sequence[str]) -> Path | None:
    found = [folder for name, folder in folders.items() if name.lower() in accepted]
    if len(found) > 1:
        raise InputError(f"{path}: both {found[0].name} and {found[1].name} are there; accepted: one of them")
    return found[0] if found else None


def _images(paths: Sequence[Path], channels: int) -> Images:
    def iterate(side: int) -> Iterator[np.ndarray]:
        from fedentopt.datasets.pixels import decode, piece_length

        step = piece_length(channels, side)
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow lets go of the interpreter while it decodes
            for start in range(0, len(paths), step):
                piece = paths[start : start + step]
                yield np.stack(list(pool.map(lambda path: decode(path, side, channels), piece)))

    return iterate
