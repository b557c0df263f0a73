"""Files that are there whole or not at all: written aside, then renamed."""

from __future__ import annotations

import os
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
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
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
        os.replace(name, path)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"{path}: {error.strerror or error}; accepted: a file that can be written") from error
        raise
