"""Which of the paper's data sets are at hand."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fedentopt.errors import InputError


@cache
def has_data(dataset: str, data_dir: Path | None) -> bool:
    """Whether a data set's files are there. They are not opened: a damaged one is refused when it is used."""
    from fedentopt.datasets import default_image_size, resolve_data_dir
    from fedentopt.datasets.catalog import ENTRIES
    from fedentopt.datasets.loading import source

    if dataset in ENTRIES and ENTRIES[dataset].embedded:
        return True
    try:
        source(dataset, resolve_data_dir(data_dir), default_image_size(dataset)).files()
    except (InputError, OSError, ImportError):  # ImportError: no platformdirs to say where the files would be
        return False
    return True


def train_size(dataset: str, data_dir: Path | None) -> int | None:
    """Training samples of a data set: as published, or counted for a user's own; None where it is not there."""
    from fedentopt.datasets import load
    from fedentopt.datasets.catalog import ENTRIES

    if dataset in ENTRIES:
        return ENTRIES[dataset].train
    return len(load(dataset, data_dir).y_train) if has_data(dataset, data_dir) else None
