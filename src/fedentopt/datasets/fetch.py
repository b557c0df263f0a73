"""Downloading official files: the only place of the package that talks to the network.

A file is downloaded aside, compared with the published checksum before anything opens it, unpacked aside
with tarfile's "data" filter, checked by the data set's own reader, and only then moved to its place. A
failure at any step leaves the data folder as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import secrets
import shutil
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from fedentopt import __version__
from fedentopt.datasets.cache import STALE_SECONDS
from fedentopt.datasets.catalog import CACHE, ENTRIES, Download, remedy
from fedentopt.datasets.loading import source
from fedentopt.errors import InputError

MIRROR = "FEDENTOPT_MIRROR"  # base address to fetch the same file names from; the checksums stay the published ones
TIMEOUT = 60  # seconds without a byte
_BLOCK = 1 << 20
Progress = Callable[[int, int | None], None]  # bytes done, bytes in all where the server tells


def chosen(name: str, data_dir: Path, image_size: int | None = None) -> tuple[Download, ...]:
    """Which files `fetch` would get: of sets published in several sizes the smallest that needs no upscaling.

    Sets that cannot be fetched are refused; the message says what to put where.
    """
    if name not in ENTRIES:
        raise InputError(f"dataset: {name!r} is unknown; accepted: {', '.join(ENTRIES)}")
    entry = ENTRIES[name]
    if entry.embedded:
        raise InputError(f"{name}: nothing to fetch, it is built in")
    if not entry.downloads:
        raise InputError(f"{name}: {remedy(name, data_dir)}")
    size = entry.image_size if image_size is None else image_size
    if entry.downloads[0].image_size is None:
        return entry.downloads
    large_enough = [download for download in entry.downloads if (download.image_size or 0) >= size]
    return (large_enough[0] if large_enough else entry.downloads[-1],)


def complete(name: str, data_dir: Path, image_size: int | None = None) -> bool:
    """Whether the official files are there already, and in order."""
    entry, downloads = ENTRIES[name], chosen(name, data_dir, image_size)
    sized = downloads[0].image_size
    if sized is not None and not (data_dir / downloads[0].filename).is_file():
        return False
    try:
        labels = source(name, data_dir, sized or entry.image_size).open().labels[""]
    except InputError:
        return False
    return (len(labels.train), len(labels.test)) == (entry.train, entry.test)


def fetch(name: str, data_dir: Path, *, image_size: int | None = None, progress: Progress | None = None) -> None:
    """Get a data set's official files into `data_dir`, in the place of what may be there.

    Refused: sets that cannot be fetched, failing downloads, files that differ from the published ones.
    """
    downloads = chosen(name, data_dir, image_size)
    staging = data_dir / CACHE / f"fetch-{secrets.token_hex(4)}"
    try:
        staging.mkdir(parents=True)
        _sweep(staging.parent)
        root = staging / "whole"
        root.mkdir()
        for download in downloads:
            file = (root if download.into is None else staging) / download.filename
            file.parent.mkdir(exist_ok=True)
            _download(name, download, file, progress)
            if download.into is not None:
                _unpack(file, root / download.into)
                file.unlink()
        source(name, root, downloads[0].image_size or ENTRIES[name].image_size).open()
        for item in sorted(root.iterdir()):
            _move(item, data_dir / item.name, staging / "replaced")
    except OSError as error:
        where = error.filename or data_dir
        raise InputError(f"{name}: {where}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        _remove_if_empty(staging.parent, data_dir)


def _sweep(folder: Path) -> None:
    """Remove what a fetch that was killed a day ago or earlier left behind; files it had moved aside are kept."""
    for path in folder.glob("fetch-*"):
        with contextlib.suppress(FileNotFoundError):  # another process sweeps too
            last = max(found.lstat().st_mtime for found in (path, *path.rglob("*")))  # a large file takes its time
            if last < time.time() - STALE_SECONDS and not (path / "replaced").exists():
                shutil.rmtree(path, ignore_errors=True)


def _download(name: str, download: Download, target: Path, progress: Progress | None) -> None:
    mirror = os.environ.get(MIRROR)
    urls = (f"{mirror.rstrip('/')}/{download.filename}",) if mirror else download.urls
    failures = []
    for url in urls:
        if not url.startswith(("https://", "http://")):
            raise InputError(f"{MIRROR}: {mirror!r} is not an address; accepted: https://... or http://...")
        try:
            found = _stream(url, target, progress)
        except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, ValueError) as error:
            failures.append(f"{url} ({getattr(error, 'reason', None) or error})")
            continue
        if found != download.md5:
            raise InputError(
                f"{name}: {url} has MD5 {found}, published {download.md5}: damaged on the way, or not the published "
                "file. It was not opened, and removed"
            )
        return
    raise InputError(f"{name}: could not be downloaded from {', nor from '.join(failures)}")


def _stream(url: str, target: Path, progress: Progress | None) -> str:
    """Download to `target`; return the MD5 sum."""
    request = urllib.request.Request(url, headers={"User-Agent": f"fedentopt/{__version__}"})
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response, target.open("wb") as file:
        told = response.headers.get("Content-Length")
        total = int(told) if told else None
        done = 0
        while block := response.read(_BLOCK):
            file.write(block)
            digest.update(block)
            done += len(block)
            if progress is not None:
                progress(done, total)
    if total is not None and done != total:
        raise http.client.IncompleteRead(b"", total - done)
    return digest.hexdigest()


def _unpack(archive: Path, into: Path) -> None:
    if not hasattr(tarfile, "data_filter"):
        raise InputError(f"{archive.name}: this Python cannot unpack safely; accepted: Python 3.11.4 or newer")
    into.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(into, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise InputError(f"{archive.name}: cannot be unpacked ({error})") from error


def _move(item: Path, target: Path, aside: Path) -> None:
    """Put `item` in the place of `target`; renames within one file system, so never a mixture of both."""
    old = aside / target.name
    if target.exists():
        aside.mkdir(exist_ok=True)
        os.replace(target, old)
    try:
        os.replace(item, target)
    except OSError:
        if old.exists():
            os.replace(old, target)
        raise


def _remove_if_empty(*folders: Path) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
