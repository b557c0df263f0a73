"""Where and how runs execute. Nothing here changes what a run computes, so none of it is part of its settings."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedentopt.errors import InputError


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Field help texts are the command line's help texts; `say` is no option: it gets lines for people to read."""

    out: str = _setting("out/run", "folder for the results, one folder in it per run")
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N")
    trainer: str = _setting("auto", "auto, stacked, streams or loop")
    workers: int | None = _setting(None, "CPU workers of the loop trainer, one thread each (default: as many as cores)")
    checkpoint_every: int = _setting(10, "rounds between two checkpoints")
    data_dir: str | None = _setting(None, "folder of the data sets (default: FEDENTOPT_DATA, then the user cache)")
    resume: bool = _setting(True, "go on with unfinished runs and keep finished ones, or start all afresh")
    target: tuple[float, ...] = _setting((), "accuracy in per cent whose first round is reported; may be repeated")
    page: bool = _setting(True, "write the HTML page of all runs in the folder at the end")
    log: str | None = _setting(None, "tensorboard: also write the curves for TensorBoard, into each run's folder")
    say: Callable[[str], None] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise InputError(f"device: {self.device!r} is unknown; accepted: auto, cpu, cuda, cuda:N")
        if self.trainer not in ("auto", "stacked", "streams", "loop"):
            raise InputError(f"trainer: {self.trainer!r} is unknown; accepted: auto, stacked, streams, loop")
        if self.log not in (None, "tensorboard"):
            raise InputError(f"log: {self.log!r} is unknown; accepted: tensorboard")
        if self.workers is not None and self.workers < 1:
            raise InputError(f"workers: {self.workers} is out of range; accepted: at least 1")
        if self.checkpoint_every < 1:
            raise InputError(f"checkpoint_every: {self.checkpoint_every} is out of range; accepted: at least 1")
        for value in self.target:
            if not (math.isfinite(value) and 0 < value <= 100):
                raise InputError(f"target: {value:g} is out of range; accepted: per cent above 0, at most 100")
        if not self.out.strip():
            raise InputError("out: is empty; accepted: a folder for the results")

    @property
    def out_dir(self) -> Path:
        """The results' folder; `~` is the home folder also where no shell has replaced it."""
        return Path(self.out).expanduser()

    @property
    def data_path(self) -> Path | None:
        """The data sets' folder, if one was given."""
        return None if self.data_dir is None else Path(self.data_dir).expanduser()


def option_fields() -> dict[str, dataclasses.Field[Any]]:
    """The fields of `RunOptions` that a command line or a TOML file may give, by name."""
    return {one.name: one for one in dataclasses.fields(RunOptions) if "help" in one.metadata}


Execution = RunOptions  # the name that cli/settings.py still has for it
