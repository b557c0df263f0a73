"""The converted arrays of a data set: from the cache where its sources are as they were, else made now."""

from __future__ import annotations

import dataclasses
import secrets
from pathlib import Path

from fedentopt.datasets import cache
from fedentopt.datasets.fingerprint import changed, status, take, unmoved
from fedentopt.datasets.source import Source
from fedentopt.errors import InputError


def converted(
    source: Source, data_dir: Path, size: int, progress: cache.Progress | None = None, *, replaced: bool = False
) -> cache.Arrays:
    """Arrays of images with side `size`.

    Official files that changed since they were converted are refused, unless they have the published checksums
    or it is known that they were `replaced`; a user's own files may change and are converted anew. A data
    folder that cannot be written is no obstacle: the arrays are then made in memory.
    """
    try:
        return _converted(source, data_dir, size, progress, replaced)
    except FileNotFoundError:  # another process may have put new arrays in the place of those just found
        return _converted(source, data_dir, size, progress, replaced)


def _converted(
    source: Source, data_dir: Path, size: int, progress: cache.Progress | None, replaced: bool
) -> cache.Arrays:
    files = source.files()
    target = cache.folder(data_dir, source.key, size)
    meta = cache.read_meta(target)
    if meta is not None and cache.intact(target, meta):
        known = cache.read_sources(target, meta)
        if unmoved(source.root, files, known):
            return cache.open_arrays(target, meta)
        differs = changed(source.root, files, known)
        if differs is None:
            cache.refresh(target, meta, take(source.root, files))
            return cache.open_arrays(target, meta)
        # Opening says more precisely what is wrong, where it can; and published checksums are proof enough.
        if source.official and not replaced and not source.open().verified:
            raise InputError(
                f"{differs}: the file is not as it was when it was converted; put the published file back, or "
                f"remove {target} to convert what is there now"
            )
    before = [status(path) for path in files]
    content = source.open()
    if (reason := _not_writable(target)) is not None:
        arrays = cache.in_memory(content, size, progress)
        note = f"{source.name}: converted in memory, since {target} cannot be written ({reason})"
        return dataclasses.replace(arrays, notes=(*arrays.notes, note))
    sources = take(source.root, files)

    def confirm() -> None:
        if [found.status() for found in sources] != before or not unmoved(source.root, source.files(), sources):
            raise InputError(f"{source.name}: the files under {source.root} changed while they were converted")

    cache.write(target, content, size, sources, confirm, progress)
    fresh = cache.read_meta(target)
    if fresh is None:
        raise InputError(f"{target}: the converted images were removed while they were opened")
    return cache.open_arrays(target, fresh)


def _not_writable(target: Path) -> str | None:
    """Why nothing can be written there, None if something can."""
    probe = target / f".writable-{secrets.token_hex(4)}"  # another process may be trying the same
    try:
        target.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None
