"""One `fedentopt select` at a time works on a state file.

A round is read, selected and written; two calls that do so at once would pick the same cohort, and one of their rounds
would be lost. The state file itself is replaced by every call, so what is locked is a file beside it. The system lets
go of a lock when its process ends, however it ends: a call that was killed leaves nothing to clean up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fedentopt.errors import InputError
from fedentopt.experiments.lock import is_still

PATIENCE = 5.0  # seconds to wait for another call: enough for a few rounds, too short to look like a hang
_PAUSE = 0.02
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextlib.contextmanager
def alone_with(state: Path | None) -> Iterator[None]:
    """Hold the lock of a state file, there already or not; nothing happens for None.

    Waits for another call to end; refused after `PATIENCE` seconds of it, and for anything but a regular file. On a
    file system without locks there is none.
    """
    if state is None:
        yield
        return
    if os.path.exists(state) and not os.path.isfile(state):
        raise InputError(f"{state}: not a regular file; accepted: a file written by --state, or a new one")
    place = Path(os.path.realpath(state))
    lock = place.with_name(f".{place.name}.lock")
    handle = _acquire(lock, state)
    try:
        yield
    finally:
        if sys.platform == "win32":  # a file that anybody has open stays, and that is fine
            os.close(handle)
            with contextlib.suppress(OSError):
                lock.unlink()
        else:
            # Unlinked while still locked: whoever opened the old file sees that it is gone and opens the new one.
            with contextlib.suppress(OSError):
                lock.unlink()
            os.close(handle)


def _acquire(lock: Path, state: Path) -> int:
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise InputError(
                f"{state}: {error.strerror or error}; accepted: a file in a folder that can be written to"
            ) from error
        if _try_lock(handle) and is_still(lock, handle):
            return handle
        os.close(handle)
        if time.monotonic() > give_up:
            raise InputError(
                f"{state}: in use by another fedentopt select; accepted: a state that no other call is working on, "
                f"so wait for that one to end, or give another --state"
            )
        time.sleep(_PAUSE)


def _try_lock(handle: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _NO_LOCKS_HERE
    return True
