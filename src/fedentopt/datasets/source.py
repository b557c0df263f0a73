"""What every reader of a format offers to the conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from fedentopt.datasets.clients import ClientIds

Images = Callable[[int], Iterator[np.ndarray]]  # side -> pieces of uint8 (m, channels, side, side), in order


@dataclass(frozen=True)
class Labels:
    """One way to label the images of both splits: int64 (n,) each, values 0..len(names)-1."""

    names: tuple[str, ...]
    train: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Content:
    """A data set that has been looked at and found in order; its images are still on disk."""

    channels: int  # 1 or 3
    labels: Mapping[str, Labels]  # by variant; the variant "" unless there are several
    train: Images
    test: Images
    notes: tuple[str, ...] = ()
    verified: bool = False  # the files have the published checksums
    clients: ClientIds | None = None  # where the data says whose a training sample is


class Source(Protocol):
    """The files of one data set."""

    @property
    def name(self) -> str:
        """As the user calls it."""

    @property
    def key(self) -> str:
        """Folder name of its converted arrays, without the image size."""

    @property
    def official(self) -> bool:
        """Published files never change, so a change is an error; one's own files may."""

    @property
    def root(self) -> Path:
        """The folder under which all its files lie."""

    def files(self) -> list[Path]:
        """Every file that decides the arrays, in a fixed order; a missing one is refused."""

    def open(self) -> Content:
        """Check the files and give their content; truncated and tampered ones are refused."""
