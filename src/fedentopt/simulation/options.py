"""Where and how runs execute. Nothing here changes what a run computes, so none of it is part of its settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fedentopt.errors import InputError
from fedentopt.files import expand_home
from fedentopt.settings import setting, settings_of


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Field help texts are the command line's help texts; `say` is no option: it gets lines for people to read."""

    out: str = setting("out/run", "folder for the results, one folder in it per run")
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    trainer: str = setting("auto", "auto, stacked, streams or loop", choices=("auto", "stacked", "streams", "loop"))
    workers: int | None = setting(
        None, "CPU workers of the loop trainer, one thread each (default: as many as cores)", low=1
    )
    checkpoint_every: int = setting(10, "rounds between two checkpoints", low=1)
    data_dir: str | None = setting(None, "folder of the data sets (default: FEDENTOPT_DATA, then the user cache)")
    resume: bool = setting(True, "go on with unfinished runs and keep finished ones, or start all afresh")
    target: tuple[float, ...] = setting(
        (), "accuracy in per cent whose first round is reported; may be repeated", above=0, high=100
    )
    page: bool = setting(True, "write the HTML page of all runs in the folder at the end")
    log: str | None = setting(
        None, "tensorboard: also write the curves for TensorBoard, into each run's folder", choices=("tensorboard",)
    )
    say: Callable[[str], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, declared in settings_of(RunOptions).items():
            if declared.help:
                object.__setattr__(self, name, declared.check(getattr(self, name)))
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise InputError(f"device: {self.device!r} is unknown; accepted: auto, cpu, cuda, cuda:N")
        if not self.out.strip():
            raise InputError("out: is empty; accepted: a folder for the results")

    @property
    def out_dir(self) -> Path:
        """The results' folder; `~` is the home folder also where no shell has replaced it."""
        return expand_home(self.out)

    @property
    def data_path(self) -> Path | None:
        """The data sets' folder, if one was given."""
        return None if self.data_dir is None else expand_home(self.data_dir)
