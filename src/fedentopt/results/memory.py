"""A run that is kept in memory alone, for comparisons inside a notebook or a script."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from fedentopt.results.folder import about_run
from fedentopt.results.label_counts import LabelTable
from fedentopt.results.reading import RunResult
from fedentopt.results.records import Checkpoint, Outcome, RoundRecord, RunIdentity, RunStart
from fedentopt.results.rounds import RoundTable
from fedentopt.results.summary import summarise_outcome


class MemoryRecorder:
    """Recorder of one run without a disk; a run that is stopped starts again at round 1."""

    def __init__(self, config: RunIdentity, *, targets: Iterable[float] = (), command: str = "") -> None:
        self._config, self._targets, self._command = config, tuple(targets), command
        self._start: RunStart | None = None
        self._records: list[RoundRecord] = []
        self._outcome: Outcome | None = None
        self._about: dict[str, Any] = {}

    def start(self, start: RunStart) -> None:
        """Keep what is fixed before round 1."""
        self._start = start
        self._about = _as_read_back(about_run(self._config, start, self._command))

    def resume(self) -> None:
        """There is never anything to continue from."""

    def record(self, record: RoundRecord) -> None:
        """Keep one round."""
        self._records.append(record)

    def save(self, checkpoint: Checkpoint) -> None:
        """Keep nothing: nobody could continue from memory that is gone."""

    def finish(self, outcome: Outcome) -> None:
        """Keep the final model and all rounds."""
        self._outcome, self._records = outcome, list(outcome.records)

    def result(self) -> RunResult:
        """The run as its folder would be read, with the final model once it is finished."""
        start, outcome = self._start, self._outcome
        if start is None:
            raise RuntimeError(f"{self._config.run_id} has not been started")
        summary = {} if outcome is None else summarise_outcome(outcome, self._targets)
        return RunResult(
            self._about,
            _as_read_back(summary),
            labels=LabelTable.of(start.label_counts, start.class_names, start.client_names),
            rounds=RoundTable.of(self._records, len(start.class_names)),
            clients=None if outcome is None else outcome.client_records,
            model=None if outcome is None else outcome.model,
        )


def _as_read_back(content: dict[str, Any]) -> dict[str, Any]:
    """What JSON makes of it: lists for tuples."""
    read: dict[str, Any] = json.loads(json.dumps(content, allow_nan=False))
    return read
