"""Re-checking a data set: its official files, and the arrays converted from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fedentopt.datasets import cache
from fedentopt.datasets.catalog import CACHE, ENTRIES
from fedentopt.datasets.fingerprint import changed, sha256
from fedentopt.datasets.loading import source
from fedentopt.datasets.source import Source
from fedentopt.errors import InputError


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    what: str
    ok: bool
    detail: str


def sources(name: str, data_dir: Path) -> list[Source]:
    """The readers of a data set: one, or one for every published size that is there."""
    entry = ENTRIES.get(name)
    if entry is None or not entry.downloads or entry.downloads[0].image_size is None:
        return [source(name, data_dir, 32)]
    sizes = [d.image_size or 0 for d in entry.downloads if (data_dir / d.filename).is_file()]
    return [source(name, data_dir, size) for size in sizes or [entry.image_size]]


def there(name: str, data_dir: Path) -> bool:
    """Whether all files of a data set are there; nothing is said about their content."""
    try:
        return name == "digits" or all(found.files() for found in sources(name, data_dir))
    except InputError:
        return False


def begun(name: str, data_dir: Path) -> bool:
    """Whether anything of a data set is there: a part of its files, or what was converted from them."""
    if there(name, data_dir):
        return True
    return any(
        caches(found, data_dir) or (found.root != data_dir and found.root.exists()) for found in sources(name, data_dir)
    )


def caches(found: Source, data_dir: Path) -> list[Path]:
    """The folders of arrays converted from a source, one per image size."""
    pattern = re.compile(re.escape(found.key) + r"-(\d+)")
    folder = data_dir / CACHE
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name)) if folder.is_dir() else []


def verify(name: str, data_dir: Path) -> list[Finding]:
    """Check sizes, labels, published checksums, every image, and what was converted."""
    if name == "digits":
        from fedentopt.datasets.digits import digits

        labels = digits().labels[""]
        return [Finding("digits", True, f"built in: {len(labels.train):,} + {len(labels.test):,} images")]
    findings = []
    for found in sources(name, data_dir):
        findings.append(_check_source(found))
        if findings[-1].ok:
            findings += [_check_cache(found, path) for path in caches(found, data_dir)]
    return findings


def _check_source(found: Source) -> Finding:
    try:
        files = found.files()
        content = found.open()
        labels = next(iter(content.labels.values()))
        for split, images in ((labels.train, content.train), (labels.test, content.test)):
            if sum(len(piece) for piece in images(32)) != len(split):
                return Finding(str(found.root), False, "images and labels differ in number")
    except (InputError, OSError) as error:
        return Finding(str(found.root), False, str(error))
    entry = ENTRIES.get(found.name)
    size = f"{len(files):,} files, {len(labels.train):,} + {len(labels.test):,} images"
    official = entry is not None and (len(labels.train), len(labels.test)) == (entry.train, entry.test)
    return Finding(str(found.root), True, size if official or entry is None else f"{size}, not the official number")


def _check_cache(found: Source, target: Path) -> Finding:
    meta = cache.read_meta(target)
    if meta is None:
        return Finding(str(target), False, "not whole; it is made anew when the data set is loaded")
    for name, told in meta["files"].items():
        if sha256(target / name) != told["sha256"]:
            return Finding(str(target), False, f"{name} was changed; remove {target} to convert anew")
    differs = changed(found.root, found.files(), cache.read_sources(target, meta), sure=True)
    if differs is not None:
        return Finding(str(target), False, f"{differs} is not as it was when it was converted; remove {target}")
    return Finding(str(target), True, f"as converted, {meta['size']} pixels")
