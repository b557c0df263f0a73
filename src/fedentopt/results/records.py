"""What a run tells the world, round by round, and what it needs to go on after it was stopped.

The engine fills these; a `RunRecorder` keeps them: `folder.RunFolder` on disk, `memory.MemoryRecorder` in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RoundRecord:
    """One round of one run. Accuracies are per cent and None in rounds without evaluation; in `class_accuracy` a class
    without test samples is NaN. `seconds` are the run's share of this machine's time: runs that train together
    divide a round's evenly. `simulated_seconds` are those of the cohort's slowest client. `asked` clients told their
    loss before; the selector took `selection_seconds`, which `rounds.csv` does not keep; validation figures are of what
    the clients hold out.

    Of what the server knew when it chose, where it has reason to doubt reports: the entropy it believed the cohort to
    have, the mean error of its estimates of labels (total variation), how many clients it suspects and how many of them
    are honest, how well suspicion tells liars from others (area under the ROC curve; of all that was seen, of every
    client's first observation, of its first three), and how many liars are in the cohort."""

    round: int
    clients: tuple[int, ...]
    trained: tuple[int, ...]
    entropy: float
    classes_covered: int
    bytes_up: int
    bytes_down: int
    seconds: float
    accuracy: float | None = None
    loss: float | None = None
    class_accuracy: tuple[float, ...] | None = None
    simulated_seconds: float = 0.0
    asked: int = 0
    selection_seconds: float = field(default=0.0, compare=False)
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    believed_entropy: float | None = None
    estimate_error: float | None = None
    suspects: float | None = None
    suspicion_auc: float | None = None
    liars_chosen: float | None = None
    honest_suspects: float | None = None
    first_auc: float | None = None
    third_auc: float | None = None

    @property
    def worst_class_accuracy(self) -> float | None:
        """Accuracy of the class the model knows least, among those with test samples."""
        known = [value for value in self.class_accuracy or () if not math.isnan(value)]
        return min(known) if known else None


@dataclass(frozen=True)
class RunStart:
    """What is fixed before round 1."""

    label_counts: np.ndarray
    reported_counts: np.ndarray | None
    class_names: tuple[str, ...]
    train_samples: int
    test_samples: int
    trainer: str
    device: str
    data_digest: str = ""  # of the data set's content; empty where it is not known
    code_digest: str = ""  # of the user's own code behind the run; empty where there is none
    client_names: tuple[str, ...] = ()  # where the data names its clients; else they are numbers


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to continue after `round`, bit for bit: tensors, and JSON for the rest."""

    round: int
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """A finished run of `rounds` rounds. `diverged_round` is the first whose global model was not finite.

    FedConcat divides its budget among two stages: it has more rounds than were asked for, or, with few clients per
    round, fewer.
    """

    records: tuple[RoundRecord, ...]
    model: dict[str, torch.Tensor]
    diverged_round: int | None
    num_classes: int
    clients: int
    rounds: int
    client_accuracy: tuple[float, ...] | None = None
    """Of the final model per client, where asked for; NaN where it cannot be told."""
    client_accuracy_of: str = ""
    """What it was measured on: "validation" or "test"."""


class RunIdentity(Protocol):
    """What a recorder has to know of a run's settings; `RunConfig` is one."""

    @property
    def run_id(self) -> str: ...

    @property
    def method(self) -> str: ...

    @property
    def dataset(self) -> str: ...

    @property
    def model(self) -> str: ...

    def to_dict(self) -> dict[str, Any]:
        """All settings, JSON-serialisable."""


class RunRecorder(Protocol):
    """Keeps one run. The engine calls start once, record in order of rounds, save now and then, finish last."""

    def start(self, start: RunStart) -> None: ...

    def resume(self) -> tuple[Checkpoint, list[RoundRecord]] | None:
        """The last checkpoint and the records up to it, or None to start at round 1."""

    def record(self, record: RoundRecord) -> None: ...

    def save(self, checkpoint: Checkpoint) -> None: ...

    def finish(self, outcome: Outcome) -> None: ...
