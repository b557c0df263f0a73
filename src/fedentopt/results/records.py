"""What a run tells the world, round by round, and what it needs to go on after it was stopped.

The engine fills these; a `RunRecorder` keeps them: `folder.RunFolder` on disk, `memory.MemoryRecorder` in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class RoundRecord:
    """One round of one run. Accuracies are per cent and None in rounds without evaluation; in `class_accuracy` a class
    without test samples is NaN. `entropy` (bits) and `classes_covered` are of all true labels that the chosen clients
    hold, also where the selector has them use part of their data. `seconds` are the run's share of this machine's time:
    runs that train together divide a round's evenly. `simulated_seconds` are those of the cohort's slowest client.
    `asked` clients told their loss before; the selector took `selection_seconds`, which `rounds.csv` does not keep;
    validation figures are of what the clients hold out.

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
class ClientRecord:
    """What a run's server knows of one client, beside what is true; None for what nobody knows.

    `liar` says whether its report is made up, `chosen` how often it was selected, `observed` how often its last layer
    was looked at. `distance` is the total variation between its report and the estimate of its labels, less what noise
    explains, `agreement` the cosine between the two, `suspicion` how far the distance lies above the others', and
    `suspected` what the audit makes of it.
    `estimate_error` is the total variation between the estimate and its true labels."""

    client: int
    liar: bool | None
    chosen: int
    observed: int | None
    suspicion: float | None
    suspected: bool | None
    distance: float | None
    agreement: float | None
    estimate_error: float | None
    reported_size: float | None
    true_size: float | None


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
    weights_digest: str = ""  # of the file of start weights; empty where there is none
    client_names: tuple[str, ...] = ()  # where the data names its clients; else they are numbers


class ClientRow(NamedTuple):
    """What a run's method remembers of one client under one name: (width,), float32, on the CPU."""

    vector: str
    client: int
    values: torch.Tensor


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to continue after `round`, bit for bit: tensors, and JSON for the rest.

    `clients` follows from these and is there to be looked at, for runs whose server doubts reports.

    `rows` is what its method remembers of single clients, which may be most of it. A recorder is given those that
    changed since the run's last checkpoint, or since it began, and gives back all it has been given, in any order; a
    client without a row is as before round 1. To be gone through once, a row being valid until the next.
    """

    round: int
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any] = field(default_factory=dict)
    clients: tuple[ClientRecord, ...] | None = None
    rows: Iterable[ClientRow] = ()


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
    client_records: tuple[ClientRecord, ...] | None = None
    """Of every client, for runs whose server doubts reports."""


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
    """Keeps one run. The engine calls resume and start once, record in order of rounds, save now and then, finish last.

    `save` runs in a thread of its own, beside `record` for rounds after that of the checkpoint; never beside another
    `save` or `finish`.
    """

    def start(self, start: RunStart) -> None: ...

    def resume(self) -> tuple[Checkpoint, list[RoundRecord]] | None:
        """The last checkpoint and the records up to it, or None to start at round 1."""

    def record(self, record: RoundRecord) -> None: ...

    def save(self, checkpoint: Checkpoint) -> None: ...

    def finish(self, outcome: Outcome) -> None: ...
