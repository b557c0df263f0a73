"""What a selector may ask of clients and be told of them beside label counts: the words between it and whoever trains.

The simulator and the adapters of frameworks speak them on one side, selectors on the other; none of them knows more of
the other than what stands here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedentopt.selection.cohort import ClientId

NEEDS = frozenset({"candidate_loss", "loss", "head", "update", "seconds", "kept"})
"""What a selector may need beside label counts.

candidate_loss  the loss of the current global model on the data of those whom `candidates` names
loss            from those that trained: mean training loss, and root mean square of the samples' losses
head            the change of the last layer's weight and bias
update          the change of all parameters
seconds         how long training took
kept            whether the server kept the client's model (always, unless the algorithm judges models)
"""

LEAVES = {
    "candidate_loss": "the loss of the global model before training, from those asked",
    "loss": "the loss of its training",
    "head": "its change of the last layer",
    "update": "its change of the model",
    "seconds": "how long it trained",
    "kept": "",
}
"""What a server has to see of a single client for each need, in words."""


@dataclass(frozen=True)
class Candidates:
    """Whom to ask for the loss of the current global model: on all their data, or on `samples` of it drawn anew."""

    ids: tuple[ClientId, ...]
    samples: int | None = None


@dataclass(frozen=True)
class Census:
    """A round before the first one, in which every client trains from the start model and nothing is averaged: for so
    many epochs, on all its samples or on `samples` of them. `Observation.samples` is how many it has all the same."""

    epochs: int = 1
    samples: int | None = None


@dataclass(frozen=True)
class Head:
    """The change of a client's last layer, after minus before: weight (C, F), bias (C,) or None without one."""

    weight: np.ndarray
    bias: np.ndarray | None


@dataclass(frozen=True)
class Observation:
    """What is known of a client that trained. Only what the selector `needs` is filled in.

    `loss` is plain cross-entropy (no shift, scale or proximal term) averaged over the samples of all local steps,
    `loss_rms` the root mean square of the samples' losses. `update` is float32, all parameters in the model's order.
    `cosines` come in its place from a server that keeps updates itself, where `cosines_suffice`: between this update
    and the last one of every client, (K,) by client number, those of this round included; 1 where one of the two is 0
    or there is none.
    With the `head` come `travel`, the sum of the step sizes it was moved by, `drift`, the part of its change due to a
    term of the algorithm which the server knows (a control variate), and whether it started `untrained`, from a model
    that nobody had trained before.
    """

    samples: int
    loss: float | None = None
    loss_rms: float | None = None
    head: Head | None = None
    update: np.ndarray | None = None
    seconds: float | None = None
    kept: bool | None = None
    travel: float | None = None
    drift: Head | None = None
    untrained: bool | None = None
    cosines: np.ndarray | None = None
