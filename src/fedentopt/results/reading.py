"""Runs, read back: the one reader of result folders, for comparisons, the page and the paper's tables.

Only files are read, with the standard library and NumPy, so results can be looked at on a machine without torch. What
is there but cannot be used is an `InputError` with the file, the place in it and what was expected.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.files import read_json
from fedentopt.results.checked_files import read_about, read_summary
from fedentopt.results.clients import CLIENTS, read_clients
from fedentopt.results.label_counts import LabelTable, read_labels
from fedentopt.results.records import ClientRecord, RoundRecord
from fedentopt.results.rounds import Integers, RoundTable, read_rounds
from fedentopt.results.summary import with_chance

if TYPE_CHECKING:
    import torch

RUN, ROUNDS, SUMMARY, MODEL = "run.json", "rounds.csv", "summary.json", "model.safetensors"


class RunResult:
    """One run, finished or not: on disk at `path`, where its tables are read when first asked for, or in memory.

    `about` is the content of `run.json`; `summary` that of `summary.json`, empty while the run is unfinished.
    """

    def __init__(
        self,
        about: dict[str, Any],
        summary: dict[str, Any],
        *,
        path: Path | None = None,
        labels: LabelTable | None = None,
        rounds: RoundTable | None = None,
        clients: tuple[ClientRecord, ...] | None = None,
        model: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self.about, self.summary, self.path = about, summary, path
        self._model = model
        # What is in memory is not looked for on disk.
        if labels is not None:
            self.labels = labels
        if rounds is not None:
            self.rounds = rounds
        if clients is not None or path is None:
            self.clients = clients

    def __repr__(self) -> str:
        state = f"{self.summary.get('accuracy')} %" if self.finished else "unfinished"
        return f"<RunResult {self.run_id}: {state}>"

    @property
    def config(self) -> dict[str, Any]:
        """Its settings, as `run.json` has them."""
        config: dict[str, Any] = self.about["config"]
        return config

    @property
    def run_id(self) -> str:
        """The name of its folder."""
        return str(self.about.get("run_id", self._name))

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.about.get("method", self.config.get("algorithm", self._name)))

    @property
    def seed(self) -> int:
        """Its seed, 0 where the settings name none."""
        return int(self.config.get("seed", 0))

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, hardware, data set, command."""
        return {key: value for key, value in self.about.items() if key not in {"config", "method", "run_id"}}

    @property
    def finished(self) -> bool:
        """Whether it has a summary."""
        return bool(self.summary)

    @cached_property
    def labels(self) -> LabelTable:
        """Its clients and classes, with the label counts."""
        return read_labels(self._folder, self.about)

    @cached_property
    def rounds(self) -> RoundTable:
        """Its rounds as columns; clients are rows of `labels`."""
        file = self._folder / ROUNDS
        if not (self.finished or file.is_file()):  # stopped before its first checkpoint
            return RoundTable.of([], 0)
        return read_rounds(file, self.labels.clients, len(self.labels.classes))

    @cached_property
    def records(self) -> list[RoundRecord]:
        """Its rounds one by one."""
        return self.rounds.records()

    @cached_property
    def clients(self) -> tuple[ClientRecord, ...] | None:
        """What its server knows of each client, in the order of `labels`; None where it has no reason to doubt reports,
        and for runs of versions that did not keep it."""
        file = self._folder / CLIENTS
        return read_clients(file, self.labels.clients) if file.is_file() else None

    @cached_property
    def curve(self) -> dict[int, float]:
        """Accuracy by evaluated round of a finished run, chance from where it diverged."""
        evaluated = np.isfinite(self.rounds.accuracy)
        numbers, accuracies = self.rounds.number[evaluated].tolist(), self.rounds.accuracy[evaluated].tolist()
        return with_chance(
            dict(zip(numbers, accuracies, strict=True)),
            rounds=self.summary["rounds"],
            num_classes=len(self.labels.classes),
            diverged_round=self.summary["diverged_round"],
        )

    @property
    def times_selected(self) -> Integers:
        """How often each client was chosen, in the order of the label table."""
        return self.rounds.clients.times(len(self.labels.clients))

    @property
    def model(self) -> dict[str, torch.Tensor] | None:
        """The final model by parameter name, on the CPU (needs torch); None where there is none."""
        if self._model is not None or self.path is None or not (self.path / MODEL).exists():
            return self._model
        from fedentopt.results.checkpoint import load_tensors

        return load_tensors(self.path / MODEL)[0]

    @property
    def _folder(self) -> Path:
        assert self.path is not None, "a run in memory has all its tables"
        return self.path

    @property
    def _name(self) -> str:
        return "run" if self.path is None else self.path.name


@dataclass(frozen=True)
class ResultFolder:
    """The runs of a folder, each once; `skipped` are the folders of those that have not finished a round yet,
    `doubles` those whose settings a run of `runs` has too."""

    path: Path
    runs: tuple[RunResult, ...]
    skipped: tuple[str, ...]
    doubles: tuple[str, ...] = ()


def read_run(path: Path) -> RunResult:
    """Read the folder of a run, finished or not; its tables are read when first asked for."""
    about = read_about(path / RUN)
    return RunResult(about, read_summary(path / SUMMARY) if (path / SUMMARY).exists() else {}, path=path)


def is_same_data(one: str, other: str) -> bool:
    """Whether two digests are of one data set. Their first half does not depend on the processor; those of versions
    before lack it, and are compared by the other."""
    return one[:16] == other[:16] if len(one) == len(other) else one[-16:] == other[-16:]


def find_runs(out_dir: Path) -> list[RunResult]:
    """All finished runs below `out_dir`, by folder name, each once."""
    runs = (read_run(path.parent) for path in sorted(Path(out_dir).glob(f"*/{SUMMARY}")) if _in_place(path.parent))
    return _each_once(run for run in runs if run.finished)


def read_folder(directory: Path) -> ResultFolder:
    """Read every run of `directory`, or the one run that `directory` itself is, with all tables, finished or not.

    A run that is there twice, under an older spelling of its partition or as a copy, is taken once.

    Refused: a path that is no folder, a folder without a run that has finished a round, a malformed file.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: not a folder; accepted: a folder with results of `fedentopt run` or `compare`")
    if (directory / RUN).is_file():
        folders = [directory]
    else:
        folders = sorted(path.parent for path in directory.glob(f"*/{RUN}") if _in_place(path.parent))
    if not folders:
        raise InputError(f"{directory}: no results in it; expected <run>/run.json as `fedentopt run --out` writes them")
    found = [read_run(folder) for folder in folders]
    begun = [run for run in found if len(run.rounds)]
    if not begun:
        raise InputError(f"{directory}: {len(folders)} run(s) in it, none has finished a round yet")
    runs = _each_once(begun)
    taken, shown = {run._folder for run in runs}, {run._folder for run in begun}
    return ResultFolder(
        directory,
        tuple(runs),
        skipped=tuple(folder.name for folder in folders if folder not in shown),
        doubles=tuple(folder.name for folder in folders if folder in shown - taken),
    )


def _each_once(runs: Iterable[RunResult]) -> list[RunResult]:
    """Without those whose settings, in the spelling of now, another one has too: its seed would count twice in means.

    A finished run stays rather than an unfinished one, then the one that `RunFolder` finds: whose settings and folder
    are spelt as they would be now.
    """
    alike: dict[str, list[RunResult]] = {}
    for run in (runs := list(runs)):
        alike.setdefault(json.dumps(run.config, sort_keys=True), []).append(run)

    def rank(run: RunResult) -> tuple[bool, bool, bool]:
        spelt = read_json(run._folder / RUN)["config"]
        return run.finished, spelt == run.config, run._folder.name == run.run_id

    kept = {id(same[0] if len(same) == 1 else max(same, key=rank)) for same in alike.values()}
    return [run for run in runs if id(run) in kept]


def _in_place(folder: Path) -> bool:
    """A name with a dot in front is a folder that is being put in place, or never was: its run is not there yet."""
    return not folder.name.startswith(".")
