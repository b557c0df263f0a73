"""One process at a time works on a run's folder.

The lock belongs to the process, not to the file: the system lets go of it when the process ends, however it
ends, so a run killed with -9 leaves nothing to clean up, and a process number used again cannot be mistaken for
the old holder. Record locks are not inherited by worker processes, so an orphaned worker does not keep it either.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fedentopt.errors import InputError

NAME = ".lock"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an existing `folder`; another process that holds it is an `InputError` naming it."""
    path = folder / NAME
    handle = _acquire(path)
    try:
        yield
    finally:
        # Unlinked while still locked: whoever opened the old file sees that it is gone and opens the new one.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(handle)


def _acquire(path: Path) -> int:
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise InputError(f"out: cannot write {path}: {error.strerror or error}") from error
        if not _try_lock(handle):
            holder = os.read(handle, 32).decode("ascii", "replace").strip()
            os.close(handle)
            raise InputError(
                f"out: {path.parent} is in use by another fedentopt (process {holder or 'unknown'}); "
                f"wait for it, stop it, or give another --out"
            )
        if is_still(path, handle):
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode("ascii"))
            return handle
        os.close(handle)


def is_still(path: Path, handle: int) -> bool:
    """Whether `path` is the file that was locked, and not one made after its last holder removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _try_lock(handle: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
