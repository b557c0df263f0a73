"""Files that are there whole or not at all: written aside, then renamed over the old one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError


def write_aside(path: Path, write: Callable[[Path], None], *, durable: bool = True) -> None:
    """Let `write` fill a file beside `path`, then put it in the place of `path` in one step.

    `durable` also waits until the disk has it, so that a power cut cannot leave an empty file behind the new
    name. A disk that refuses (full, read-only, no permission) is an `InputError` naming the file; the old
    file is then untouched.
    """
    aside = path.with_name(path.name + ".part")
    try:
        aside.touch()
        mode = aside.stat().st_mode
        write(aside)
        os.chmod(aside, mode)  # some writers (safetensors) would keep a result to its owner
        if durable:
            _sync(aside)
        os.replace(aside, path)
        if durable:
            _sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise InputError(f"out: cannot write {path}: {error.strerror or error}") from error
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    write_aside(path, lambda aside: _fill(aside, text), durable=durable)


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


def make_folder(path: Path) -> None:
    """Create a folder and its parents; a file in the way or a missing permission is an `InputError`."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"out: cannot create the folder {path}: {error.strerror or error}") from error


def _fill(path: Path, text: str) -> None:
    # newline="" keeps "\n" on every system, so that the same run gives the same bytes everywhere.
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(text)


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open a folder for syncing
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
