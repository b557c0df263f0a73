"""Fingerprints of source files: quick ones by file status, sure ones by content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedentopt.errors import InputError


@dataclass(frozen=True)
class Fingerprint:
    """One file: its path relative to the common root, size, times (ns), and SHA-256."""

    path: str
    size: int
    modified: int
    changed: int  # the inode's change time, which no program can set back
    sha256: str

    def status(self) -> tuple[int, int, int]:
        return self.size, self.modified, self.changed


def status(path: Path) -> tuple[int, int, int]:
    """Size, modification and change time of a file."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def take(root: Path, files: Sequence[Path]) -> list[Fingerprint]:
    """Fingerprints of `files`, all under `root`; a file that changes meanwhile is refused."""
    out = []
    for path in files:
        before = status(path)
        sha256 = _hash(path, "sha256")
        if status(path) != before:
            raise InputError(f"{path}: the file changed while it was read")
        out.append(Fingerprint(path.relative_to(root).as_posix(), *before, sha256))
    return out


def changed(root: Path, files: Sequence[Path], known: Sequence[Fingerprint], *, sure: bool = False) -> Path | None:
    """The first file that is not as it was when `known` was taken, None if all are.

    Contents are read only where the status differs, or everywhere if `sure`.
    """
    by_path = {fingerprint.path: fingerprint for fingerprint in known}
    for path in files:
        fingerprint = by_path.pop(path.relative_to(root).as_posix(), None)
        if fingerprint is None or path.stat().st_size != fingerprint.size:
            return path
        if (sure or status(path) != fingerprint.status()) and _hash(path, "sha256") != fingerprint.sha256:
            return path
    for gone in by_path:
        return root / gone
    return None


def unmoved(root: Path, files: Sequence[Path], known: Sequence[Fingerprint]) -> bool:
    """Whether every status is as it was."""
    return [(path.relative_to(root).as_posix(), *status(path)) for path in files] == [
        (fingerprint.path, *fingerprint.status()) for fingerprint in known
    ]


def md5(path: Path) -> str:
    """MD5 in hexadecimal: what publishers of data sets give, good against damage, not against malice."""
    return _hash(path, "md5")


def sha256(path: Path) -> str:
    """SHA-256 in hexadecimal."""
    return _hash(path, "sha256")


def _hash(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()
