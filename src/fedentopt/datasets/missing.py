"""What to say when official files are not there."""

from __future__ import annotations

import shlex
from pathlib import Path

from fedentopt.datasets.catalog import ENTRIES
from fedentopt.errors import InputError


def missing(name: str, path: Path, data_dir: Path) -> InputError:
    """The refusal for a missing file: which one, and how to get it."""
    return InputError(f"{name}: {path} is not there. {remedy(name, data_dir)}")


def remedy(name: str, data_dir: Path) -> str:
    """How to get a data set's files, and where they have to lie."""
    entry = ENTRIES[name]
    if entry.by_hand:
        return f"{entry.by_hand} {data_dir} holds {entry.place}"
    return f"`fedentopt data fetch {name} --data-dir {shlex.quote(str(data_dir))}` gets it; or put there: {entry.place}"
