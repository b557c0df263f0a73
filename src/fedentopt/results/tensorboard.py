"""Curves for TensorBoard, written beside a run's own files while it runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fedentopt.errors import InputError
from fedentopt.results.records import Checkpoint, Outcome, RoundRecord, RunStart

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from fedentopt.results.folder import RunFolder
    from fedentopt.results.reading import RunResult

FOLDER = "tensorboard"


def need_tensorboard() -> None:
    """Refuse, with what to install, where TensorBoard is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError(
            "log: 'tensorboard' needs the package tensorboard; pip install 'fedentopt[tensorboard]' brings it"
        )


class CurveRecorder:
    """A run's folder that also writes every round for TensorBoard, into `tensorboard/` in it."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._next_round = 1
        self._writer: SummaryWriter | None = None

    def resume(self) -> tuple[Checkpoint, list[RoundRecord]] | None:
        state = self._folder.resume()
        if state is not None:
            self._next_round = state[0].round + 1
        return state

    def start(self, start: RunStart) -> None:
        self._folder.start(start)
        self._writer = _writer(self._folder.path, self._next_round)

    def record(self, record: RoundRecord) -> None:
        self._folder.record(record)
        if self._writer is not None:
            _add(self._writer, [record])

    def save(self, checkpoint: Checkpoint) -> None:
        self._folder.save(checkpoint)
        if self._writer is not None:
            self._writer.flush()

    def finish(self, outcome: Outcome) -> None:
        self._folder.finish(outcome)
        if self._writer is not None:
            self._writer.close()


def write_missing_curves(run: RunResult) -> None:
    """Write the curves of a finished run that was recorded without them."""
    if run.path is not None and not (run.path / FOLDER).exists():
        writer = _writer(run.path, 1)
        _add(writer, run.records)
        writer.close()


def _writer(run: Path, first_round: int) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides what an earlier part of the run, or an earlier run, wrote from this round on.
    return SummaryWriter(str(run / FOLDER), purge_step=first_round)


def _add(writer: SummaryWriter, records: Iterable[RoundRecord]) -> None:
    for record in records:
        curves = {
            "accuracy": record.accuracy,
            "loss": record.loss,
            "worst_class_accuracy": record.worst_class_accuracy,
            "cohort/entropy": record.entropy,
            "cohort/classes_covered": record.classes_covered,
            "cohort/trained": len(record.trained),
            "bytes/up": record.bytes_up,
            "bytes/down": record.bytes_down,
            "simulated_seconds": record.simulated_seconds or None,
            "validation/accuracy": record.validation_accuracy,
            "validation/loss": record.validation_loss,
        }
        for name, value in curves.items():
            if value is not None:
                writer.add_scalar(name, value, record.round)
