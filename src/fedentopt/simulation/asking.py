"""Asking candidates for the loss of the current model: those of many runs together, and where possible ahead.

Where nothing that a selector is told of a round can change whom it asks for the next (`RunPlanner.asks_ahead`), its
questions follow the training of the round on the device's queue. In a stack of two parts the device then answers one
part and goes on with the training of the other, and the answers are there when the first part is planned. All others
are asked when they are planned, after they have been told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedentopt.simulation.planning import Question
from fedentopt.simulation.run_state import RunState
from fedentopt.simulation.trainers import MeanLosses, Trainer


@dataclass(frozen=True)
class _Asked:
    """What a run has asked for one round; `losses` are those of several runs, its own from `first` on."""

    questions: Sequence[Question]
    losses: MeanLosses
    first: int

    def read(self) -> dict[int, float]:
        own = self.losses.read()[self.first : self.first + len(self.questions)]
        return dict(zip((question.client for question in self.questions), own.tolist(), strict=True))


class Questions:
    """The questions of a stack's runs, each for its next round. No state of a run knows of those asked ahead: after a
    checkpoint they are asked again."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._ahead: dict[int, _Asked] = {}

    def ask_ahead(self, runs: Sequence[RunState]) -> None:
        """Queue the questions of those runs that can ask before they are planned; nothing is waited for."""
        able = [run for run in runs if run.planner.asks_ahead and not run.finished and run.diverged_round is None]
        self._ahead |= self._queue(able)

    def answers(self, runs: Sequence[RunState]) -> list[dict[int, float] | None]:
        """What the candidates for each run's next round answer; None where nobody is asked, as after divergence."""
        asked = {id(run): self._ahead.pop(id(run)) for run in runs if id(run) in self._ahead}
        sound = [run for run in runs if run.diverged_round is None]
        asked |= self._queue([run for run in sound if id(run) not in asked])
        found = {id(run): asked[id(run)].read() for run in sound if id(run) in asked}
        return [found.get(id(run)) for run in runs]

    def _queue(self, runs: Sequence[RunState]) -> dict[int, _Asked]:
        questions = {id(run): run.planner.questions(run.round + 1) for run in runs}
        asking = [run for run in runs if questions[id(run)]]
        if not asking:
            return {}
        first_rows = np.cumsum([0, *(len(run.models) for run in asking)]).tolist()
        rows: list[int] = []
        samples: list[np.ndarray] = []
        firsts = []
        for run, first in zip(asking, first_rows, strict=False):
            firsts.append(len(rows))
            rows += [first + run.start_row(question.client) for question in questions[id(run)]]
            samples += [question.samples for question in questions[id(run)]]
        losses = self._trainer.mean_losses(torch.cat([run.models for run in asking]), rows, samples)
        return {id(run): _Asked(questions[id(run)], losses, first) for run, first in zip(asking, firsts, strict=True)}
