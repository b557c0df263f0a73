"""Files that are there whole or not at all, folders that one process works on at a time, JSON and CSV in them.

A file is written aside and renamed over the old one, so that a reader, or a run that goes on after a kill, finds the
old content or the new one and never a part of it.
A lock belongs to the process, not to the file: the system lets go of it when the process ends, however it ends, so a
command killed with -9 leaves nothing to clean up, and a process number used again is not mistaken for the old holder.
Within a process the second to ask is refused as another process would be.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import functools
import hashlib
import io
import json
import math
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from fedentopt.errors import InputError

LOCK_NAME = ".lock"
STATE_PATIENCE = 5.0  # seconds to wait for another `select`: enough for a few rounds, too short to look like a hang
FOLDER_PATIENCE = 60.0  # seconds to wait for a folder that others write to for moments only: a page of many runs fits
_PAUSE = 0.02
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_held_here: dict[tuple[int, str], object] = {}
"""Holders of the locks of this process, by its number (a child made by a fork holds none) and the path. To the system a
second lock of one process on one file is the same lock, and closing that file ends it for both."""
_HELD = {errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK}


@contextmanager
def aside(path: Path, *, durable: bool = True, private: bool = False, unique: bool = True) -> Iterator[Path]:
    """The path of a file beside `path`, put in the place of `path` when the block ends well and removed otherwise.

    `durable` waits until the disk has it, so that a power cut cannot leave an empty file behind the new name.
    `private`: for its owner alone; otherwise an ordinary file, whatever mode its writer gave it. Not `unique`: always
    the same name, so that what a killed process left is used again; for folders that one process at a time writes to.
    """
    if unique:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
    else:
        name = str(path.with_name(path.name + ".part"))
        Path(name).touch()
    try:
        yield Path(name)
        if not private:
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
        if durable:
            _sync(Path(name))
        os.replace(name, path)
        if durable:
            _sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink(missing_ok=True)
        raise


def write_aside(path: Path, write: Callable[[Path], None], *, durable: bool = True) -> None:
    """Let `write` fill a file of a results' folder, whole or not at all.

    A disk that refuses (full, read-only, no permission) is an `InputError` naming the file; the old file is then
    untouched.
    """
    try:
        with aside(path, durable=durable, unique=False) as part:
            write(part)
    except OSError as error:
        raise InputError(f"out: cannot write {path}: {error.strerror or error}") from error


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    # Bytes keep "\n" on every system, so that the same run gives the same file everywhere.
    write_aside(path, lambda part: _fill(part, text.encode()), durable=durable)


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document for people and machines; NaN and infinity have no place in it."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that `write_json` wrote; anything else is an `InputError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error}); delete the run's folder to run it again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds no JSON object; delete the run's folder to run it again")
    return value


def read_csv(path: Path) -> list[list[str]]:
    """The rows of a CSV file, its header first; refused, naming the file: no CSV, rows longer or shorter than that."""
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = [row for row in csv.reader(stream) if row]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as CSV ({error})") from error
    for number, row in enumerate(rows, start=1):
        if len(row) != len(rows[0]):
            raise InputError(f"{path}: line {number} has {len(row)} cells, the header has {len(rows[0])}")
    return rows


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """The text of a CSV file with these rows; a cell that is None is empty."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def expand_home(path: Path | str) -> Path:
    """A path in which ~ is the user's home; that of a user who is not known here is an `InputError`."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise InputError(f"{path}: no home of that name is known; accepted: ~/..., or a path without ~") from error


def file_digest(path: str | None) -> str:
    """SHA-256 of a file of the user's, as of start weights; empty where none is named or there."""
    file = None if path is None else expand_home(path)
    if file is None or not file.is_file():
        return ""
    about = file.stat()
    return _file_digest(file.resolve(), about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@functools.lru_cache(maxsize=16)  # every run of a sweep asks again
def _file_digest(file: Path, *status: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def make_folder(path: Path) -> None:
    """Create a folder and its parents; a file in the way or a missing permission is an `InputError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out: cannot create the folder {path}: {error.strerror or error}") from error


@contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """A file for what a user asked to have written, put in the place of `path` when the block ends well.

    A link keeps pointing where it did: the file it names is the one that is written. What is there and is no regular
    file (a device, a pipe) cannot be renamed over without being lost, so it gets the bytes themselves, as does the file
    that standard output or standard error goes to. A folder that is missing or cannot be written to is refused.
    """
    try:
        there = os.stat(path)
    except FileNotFoundError:
        there = None
    except OSError as error:
        raise unwritable(path, error) from error
    stream = None if there is None else _standard_stream(there)
    if stream is not None or (there is not None and not stat.S_ISREG(there.st_mode)):
        content = io.BytesIO()  # a pipe cannot be taken back, so nothing goes into it before the block ended well
        yield content
        try:
            with open(path if stream is None else os.dup(stream), "wb") as file:
                file.write(content.getbuffer())
        except OSError as error:
            raise unwritable(path, error) from error
        return
    begun = False
    try:
        with aside(Path(os.path.realpath(path))) as part, part.open("wb") as file:
            begun = True
            yield file
    except OSError as error:
        if begun:
            raise unwritable(path, error) from error
        raise InputError(
            f"{path}: {error.strerror or error}; accepted: a file in a folder that can be written to"
        ) from error


@contextmanager
def locked_folder(folder: Path, *, patience: float = 0.0, option: str = "out") -> Iterator[None]:
    """Hold the lock of an existing results' folder, which `option` named; another process that still holds it after
    `patience` seconds is an `InputError` naming it."""

    def busy(holder: str) -> InputError:
        return InputError(
            f"{option}: {folder} is in use by another fedentopt (process {holder or 'unknown'}); "
            f"wait for it, stop it, or give another folder"
        )

    def unusable(error: OSError) -> InputError:
        return InputError(f"{option}: cannot write {path}: {error.strerror or error}")

    path = folder / LOCK_NAME
    with lock_file(path, busy, unusable, patience=patience):
        yield


@contextmanager
def locked_state(state: Path | None) -> Iterator[None]:
    """Hold the lock of a selector's state file, there already or not; nothing happens for None.

    A round is read, selected and written; two calls that do so at once would pick the same cohort, and one of their
    rounds would be lost. The state file itself is replaced by every call, so what is locked is a file beside it. Waits
    `STATE_PATIENCE` seconds for another call; refused after that, and for anything but a regular file.
    """
    if state is None:
        yield
        return
    if os.path.exists(state) and not os.path.isfile(state):
        raise InputError(f"{state}: not a regular file; accepted: a file written by --state, or a new one")

    def busy(holder: str) -> InputError:
        return InputError(
            f"{state}: in use by another fedentopt select; accepted: a state that no other call is working on, "
            f"so wait for that one to end, or give another --state"
        )

    def unusable(error: OSError) -> InputError:
        return InputError(f"{state}: {error.strerror or error}; accepted: a file in a folder that can be written to")

    place = Path(os.path.realpath(state))
    with lock_file(place.with_name(f".{place.name}.lock"), busy, unusable, patience=STATE_PATIENCE, inherited=True):
        yield


@contextmanager
def lock_file(
    path: Path,
    busy: Callable[[str], InputError],
    unusable: Callable[[OSError], InputError],
    *,
    patience: float = 0.0,
    inherited: bool = False,
    mode: int = 0o666,
    must: bool = False,
) -> Iterator[None]:
    """Hold the lock `path`, which is there only as long as somebody holds it.

    After `patience` seconds (`math.inf`: never) what `busy(holder's process number)` says is raised; what
    `unusable(error)` says where no lock file can be made or locked. `inherited`: children made by a fork hold the
    lock too; without it they do not, so an orphaned worker does not keep it. On a file system without locks there is
    none, or with `must` what `unusable(error)` says.
    """
    give_up = time.monotonic() + patience if patience < math.inf else math.inf
    with contextlib.nullcontext() if inherited else _alone_here(path, busy, give_up):
        handle = _acquire(path, busy, unusable, give_up, inherited, mode, must)
        holder = os.getpid()
        try:
            yield
        finally:
            if os.getpid() != holder:  # a child that was forked within the block and leaves it
                os.close(handle)
            elif sys.platform == "win32":  # a file that anybody has open stays, and that is fine
                os.close(handle)
                with contextlib.suppress(OSError):
                    path.unlink()
            else:
                # Unlinked while still locked: whoever opened the old file sees that it is gone and opens the new one.
                with contextlib.suppress(OSError):
                    path.unlink()
                os.close(handle)


@contextmanager
def _alone_here(path: Path, busy: Callable[[str], InputError], give_up: float) -> Iterator[None]:
    """Keep the rest of this process away from a lock, before it opens the file."""
    key, own = (os.getpid(), os.path.realpath(path)), object()
    try:  # around the first line too: Ctrl-C behind it would leave the lock held until the process ends
        while _held_here.setdefault(key, own) is not own:
            if time.monotonic() >= give_up:
                raise busy(f"{os.getpid()}, this one")
            time.sleep(_PAUSE)
        yield
    finally:
        if _held_here.get(key) is own:
            del _held_here[key]


def _acquire(
    path: Path,
    busy: Callable[[str], InputError],
    unusable: Callable[[OSError], InputError],
    give_up: float,
    inherited: bool,
    mode: int,
    must: bool,
) -> int:
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT, mode)
        except OSError as error:
            raise unusable(error) from error
        try:
            locked = _try_lock(handle, inherited)
        except OSError as error:
            if must or error.errno not in _NO_LOCKS_HERE:
                os.close(handle)
                raise unusable(error) from error
            locked = True
        if locked:
            if is_still(path, handle):
                with contextlib.suppress(OSError):  # no room even for that: the lock holds without its holder's number
                    os.ftruncate(handle, 0)
                    os.write(handle, f"{os.getpid()}\n".encode("ascii"))
                return handle
            os.close(handle)
            continue
        holder = os.read(handle, 32).decode("ascii", "replace").strip()
        os.close(handle)
        if time.monotonic() >= give_up:
            raise busy(holder)
        time.sleep(_PAUSE)


def is_still(path: Path, handle: int) -> bool:
    """Whether `path` is the file that was locked, and not one made after its last holder removed it."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _try_lock(handle: int, inherited: bool) -> bool:
    """Whether the lock was free; raises where there are no locks, or none can be had for another reason."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            lock = fcntl.flock if inherited else fcntl.lockf
            lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _HELD:  # waiting would not help
            raise
        return False
    return True


def _fill(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder for syncing
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


def unwritable(path: Path, error: OSError) -> InputError:
    """What is said of a file that the system does not let be looked at or written."""
    return InputError(f"{path}: {error.strerror or error}; accepted: a file that can be written")
