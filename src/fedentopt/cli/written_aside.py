"""Files that are there whole or not at all: written aside, then renamed.

A link keeps pointing where it did: the file it names is the one that is written. What is there and is no regular file
(a device, a pipe) cannot be renamed over without being lost, so it gets the bytes themselves, as does the file that
standard output or standard error goes to.
"""

from __future__ import annotations

import io
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from fedentopt.errors import InputError


@contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, put in the place of `path` when the block ends well and dropped otherwise.

    A folder that is missing or cannot be written to is refused.
    """
    try:
        there = os.stat(path)
    except FileNotFoundError:
        there = None
    except OSError as error:
        raise _refused(path, error) from error
    stream = None if there is None else _standard_stream(there)
    if stream is not None or (there is not None and not stat.S_ISREG(there.st_mode)):
        whole = io.BytesIO()  # a pipe cannot be taken back, so nothing goes into it before the block ended well
        yield whole
        try:
            with open(path if stream is None else os.dup(stream), "wb") as file:
                file.write(whole.getbuffer())
        except OSError as error:
            raise _refused(path, error) from error
        return
    with _replacing(path) as aside:
        yield aside


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file beside the regular file `path`, or the one that `path` links to, which takes its place at the end."""
    place = Path(os.path.realpath(path))
    try:
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", suffix=".part")
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror or error}; accepted: a file in a folder that can be written to"
        ) from error
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files for the owner alone; a result is an ordinary file.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, place)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _refused(path, error) from error
        raise


def _standard_stream(there: os.stat_result) -> int | None:
    """The number of the standard stream that is this very file: opened a second time, each would write over the other.

    What was printed so far is sent on, to keep the order.
    """
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if os.path.samestat(os.fstat(number), there):
                stream.flush()
                return number
        except OSError:  # closed
            continue
    return None


def _refused(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: {error.strerror or error}; accepted: a file that can be written")
