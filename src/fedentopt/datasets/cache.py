"""The converted form of a data set: uint8 arrays that are memory-mapped, with the fingerprints of their sources.

A folder `DATA_DIR/.fedentopt/<key>-<size>/` holds `meta.json` and the files it names. New files are written
under names of their own; replacing `meta.json` is the one step that makes them the cache, so a failure at any
point leaves the old cache as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedentopt.datasets.catalog import CACHE
from fedentopt.datasets.clients import ClientIds
from fedentopt.datasets.fingerprint import Fingerprint, sha256
from fedentopt.datasets.source import Content, Images, Labels
from fedentopt.errors import InputError
from fedentopt.files import aside

FORMAT = 2  # 1 read grey TIFFs of 12 bits, and those in which 0 is white, as if they were ordinary ones
META, CLIENTS = "meta.json", "clients.npy"
OWN = "own-"  # how the folders of a user's own data begin
SMALL_BYTES = 4 << 20  # files up to here are read whole, to be sure, before a cache is used
STALE_SECONDS = 24 * 3600
Progress = Callable[[int, int], None]  # images done, images in all


@dataclass(frozen=True)
class Arrays:
    """A converted data set, in memory or memory-mapped."""

    x_train: np.ndarray
    x_test: np.ndarray
    labels: Mapping[str, Labels]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: tuple[str, ...]
    clients: ClientIds | None = None


@dataclass
class Colours:
    """Exact mean and standard deviation per channel, from counts of the 256 values."""

    counts: list[np.ndarray] = field(default_factory=list)

    def add(self, images: np.ndarray) -> None:
        new = [np.bincount(images[:, c].reshape(-1), minlength=256) for c in range(images.shape[1])]
        self.counts = [old + more for old, more in zip(self.counts, new, strict=True)] if self.counts else new

    def mean_std(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Three values each; those of a grey set are repeated. A channel with one value only has the deviation 1:
        images are divided by it, and such a channel stays 0."""
        values = np.arange(256) / 255
        means = [float(values @ count / count.sum()) for count in self.counts]
        spreads = [
            # Asked of the counts: the rounded mean of a constant can leave a deviation just above 0.
            float(np.sqrt(((values - mean) ** 2) @ count / count.sum())) if np.count_nonzero(count) > 1 else 1.0
            for mean, count in zip(means, self.counts, strict=True)
        ]
        repeat = 3 // len(means)
        return tuple(means * repeat), tuple(spreads * repeat)


def folder(data_dir: Path, key: str, size: int) -> Path:
    """Where the arrays of a data set lie."""
    return data_dir / CACHE / f"{key}-{size}"


def in_memory(content: Content, size: int, progress: Progress | None) -> Arrays:
    """Convert without writing anything: for the built-in set and for data folders that cannot be written."""
    colours = Colours()
    count = _Counter(content, progress)
    arrays = []
    for split, images in (("train", content.train), ("test", content.test)):
        total = count.images[split]
        out = np.empty((total, content.channels, size, size), np.uint8)
        start = 0
        for piece in images(size):
            out[start : start + len(piece)] = piece
            start += len(piece)
            count.step(len(piece))
            if split == "train":
                colours.add(piece)
        arrays.append(out)
    return Arrays(arrays[0], arrays[1], content.labels, *colours.mean_std(), content.notes, content.clients)


def write(
    target: Path,
    content: Content,
    size: int,
    sources: list[Fingerprint],
    confirm: Callable[[], None],
    progress: Progress | None,
) -> None:
    """Convert into `target`; on any failure what was there before is still there, and nothing else.

    `confirm` is called last before the new arrays count: it raises if the sources changed meanwhile.
    """
    _sweep(target)
    token = secrets.token_hex(4)
    made: list[Path] = []

    def new(name: str) -> Path:
        made.append(_file(target, name, token))
        return made[-1]

    colours = Colours()
    count = _Counter(content, progress)
    try:
        for split, images in (("train", content.train), ("test", content.test)):
            shape = (count.images[split], content.channels, size, size)
            _write_images(new(f"x_{split}.npy"), images, size, shape, colours if split == "train" else None, count)
        for variant, labels in content.labels.items():
            for split, values in (("train", labels.train), ("test", labels.test)):
                with new(f"y_{split}{variant}.npy").open("wb") as file:
                    np.save(file, values, allow_pickle=False)
        if content.clients is not None:
            with new(CLIENTS).open("wb") as file:
                np.save(file, content.clients.numbers, allow_pickle=False)
        _write_sources(new("sources.json"), sources)
        mean, std = colours.mean_std()
        meta = {
            "format": FORMAT,
            "token": token,
            "size": size,
            "channels": content.channels,
            "classes": {variant: labels.names for variant, labels in content.labels.items()},
            "images": count.images,
            "mean": mean,
            "std": std,
            "notes": content.notes,
            "clients": None if content.clients is None else content.clients.names,
            "sources": made[-1].name,
            "files": {path.name: _told(path) for path in made},
        }
        for path in made:
            _sync(path)  # else a power cut could leave the right sizes, and zeros
        confirm()
        _commit(target, meta)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            target.rmdir()  # only if it is empty
        raise


def read_meta(target: Path) -> dict[str, Any] | None:
    """The description of a cache; None if there is none, or none that is whole."""
    try:
        meta: dict[str, Any] = json.loads((target / META).read_text())
        whole = meta["format"] == FORMAT and all(
            (target / name).stat().st_size == told["size"] for name, told in meta["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if target.name.startswith(OWN) and "clients" not in meta:  # of a version that did not look for client ids
        return None
    return meta if whole else None


def intact(target: Path, meta: Mapping[str, Any]) -> bool:
    """Whether the small files of a cache, labels and fingerprints, are as they were written."""
    try:
        small = {name: told["sha256"] for name, told in meta["files"].items() if told["size"] <= SMALL_BYTES}
        return all(sha256(target / name) == sum_ for name, sum_ in small.items())
    except OSError:
        return False


def read_sources(target: Path, meta: Mapping[str, Any]) -> list[Fingerprint]:
    """The fingerprints that the sources had when they were converted."""
    return [Fingerprint(**source) for source in json.loads((target / meta["sources"]).read_text())]


def refresh(target: Path, meta: Mapping[str, Any], sources: list[Fingerprint]) -> None:
    """Remember new file times of sources whose content is the same; a folder that cannot be written stays."""
    path = _file(target, "sources.json", secrets.token_hex(4))
    others = {name: told for name, told in meta["files"].items() if name != meta["sources"]}
    try:
        _write_sources(path, sources)
        _sync(path)
        _commit(target, {**meta, "sources": path.name, "files": {**others, path.name: _told(path)}})
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def open_arrays(target: Path, meta: Mapping[str, Any]) -> Arrays:
    """Map the arrays of a cache that `read_meta` has described."""
    with contextlib.suppress(OSError):  # a folder that cannot be written keeps what lies in it
        _sweep(target)
    token = meta["token"]

    def array(name: str, mmap_mode: Literal["r"] | None = None) -> np.ndarray:
        path = _file(target, f"{name}.npy", token)
        try:
            found: np.ndarray = np.load(path, mmap_mode=mmap_mode, allow_pickle=False)
        except ValueError as error:
            raise InputError(f"{path}: was changed or damaged; remove {target} to convert anew") from error
        return found

    labels = {
        variant: Labels(tuple(names), array(f"y_train{variant}"), array(f"y_test{variant}"))
        for variant, names in meta["classes"].items()
    }
    mean, std, notes = (tuple(meta[name]) for name in ("mean", "std", "notes"))
    named = meta.get("clients")
    clients = None if named is None else ClientIds(tuple(named), array(CLIENTS.removesuffix(".npy")))
    return Arrays(array("x_train", "r"), array("x_test", "r"), labels, mean, std, notes, clients)


def _file(target: Path, name: str, token: str) -> Path:
    stem, dot, kind = name.partition(".")
    return target / f"{stem}-{token}{dot}{kind}"


class _Counter:
    def __init__(self, content: Content, progress: Progress | None) -> None:
        labels = next(iter(content.labels.values()))
        self.images = {"train": len(labels.train), "test": len(labels.test)}
        self.done, self.progress = 0, progress

    def step(self, images: int) -> None:
        self.done += images
        if self.progress is not None:
            self.progress(self.done, sum(self.images.values()))


def _write_images(
    path: Path, images: Images, size: int, shape: tuple[int, ...], colours: Colours | None, count: _Counter
) -> None:
    """Plain writes instead of a writable map: a full disk is then an error message, not a killed process."""
    with path.open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        written = 0
        for piece in images(size):
            file.write(np.ascontiguousarray(piece).data)
            written += len(piece)
            count.step(len(piece))
            if colours is not None:
                colours.add(piece)
        if written != shape[0]:
            raise InputError(f"{path}: {written} images came where {shape[0]} were announced")


def _write_sources(path: Path, sources: list[Fingerprint]) -> None:
    path.write_text(json.dumps([asdict(source) for source in sources]))


def _sync(path: Path) -> None:
    """Wait until the disk has a file."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _told(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256(path)}


def _commit(target: Path, meta: Mapping[str, Any]) -> None:
    old = read_meta(target)
    with aside(target / META) as part:
        part.write_text(json.dumps(meta, indent=1))
    for name in set(old["files"] if old else ()) - set(meta["files"]):
        # A process that has the old arrays mapped keeps them until it ends.
        (target / name).unlink(missing_ok=True)


def _sweep(target: Path) -> None:
    """Remove what a killed conversion, or one that another overtook, left behind a day ago or earlier."""
    meta = read_meta(target)
    keep = {META, *(meta["files"] if meta else ())}
    for path in target.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process sweeps too
            if path.name not in keep and path.stat().st_mtime < time.time() - STALE_SECONDS:
                path.unlink()
