"""How clients train, as far as the server knows, and so their travel: what their step sizes add up to.

Whoever takes the change of last layers for labels (`fedentopt.audit`) must know the travel, or even clients could not
be told from noise; selectors that compare clients by those changes (HiCS-FL, DivFL) divide by it. It comes from the
first of these that there is:

1. what the server knows (`LocalTraining`): learning rate, and steps, or epochs and batch size with the client's number
   of samples; in Flower, keys of the training message's config that clients read too (`lr`, `local-epochs`,
   `batch-size`, `momentum`) go before the settings;
2. in Flower, the metric `train_travel` of the reply (`fedentopt.audit.travel_of` gives it), which is the client's word:
   of a round it counts for at most ten times the median.

There is no third: a travel that is guessed from the changes themselves would be right for skewed clients, and would
turn the noise of balanced ones into distributions that they are then accused of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from fedentopt.audit import travel_of
from fedentopt.errors import InputError

CENSUS, EPOCHS, SAMPLES = "census", "local-epochs", "samples"
"""Keys of a training message's config: a census, its epochs, and where not all are wanted its number of samples."""


@dataclass(frozen=True)
class LocalTraining:
    """Local training by SGD.

    lr, lr_decay         learning rate of round 1, and what it is multiplied by after each round
    momentum             of SGD
    epochs, batch_size   passes over a client's samples, the last batch of each kept
    steps                the same number of steps for every client, instead of these two
    """

    lr: float | None = None
    epochs: int = 1
    batch_size: int | None = None
    steps: int | None = None
    momentum: float = 0.0
    lr_decay: float = 1.0

    def __post_init__(self) -> None:
        for name, optional in (("lr", True), ("lr_decay", False)):
            value = getattr(self, name)
            if not (value is None and optional) and not is_positive(value):
                raise InputError(f"local: {name} {value!r} is out of range; accepted: numbers above 0")
        for name in ("epochs", "batch_size", "steps"):
            value = getattr(self, name)
            if not (value is None and name != "epochs") and not (is_positive(value) and isinstance(value, int)):
                raise InputError(f"local: {name} {value!r} is out of range; accepted: whole numbers from 1")
        if not is_momentum(self.momentum):
            raise InputError(f"local: momentum {self.momentum!r} is out of range; accepted: from 0 to below 1")
        if self.steps is not None and self.batch_size is not None:
            raise InputError("local: give either steps, or epochs and batch_size")

    @classmethod
    def read(cls, given: LocalTraining | Mapping[str, Any] | None) -> LocalTraining:
        """From what a server was given: one of these, or its fields by name."""
        if given is None or isinstance(given, LocalTraining):
            return given or cls()
        names = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(given, Mapping):
            raise InputError(f"local: {given!r} is not accepted; accepted: a mapping of {', '.join(names)}")
        for name in given:
            if name not in names:
                raise InputError(f"local: {name!r} is unknown; accepted: {', '.join(names)}")
        return cls(**given)

    @property
    def complete(self) -> bool:
        """Whether the server knows of itself what all clients' steps add up to."""
        return self.lr is not None and (self.steps is not None or self.batch_size is not None)

    def travel(self, samples: float, told: Mapping[str, Any], followed: bool = False) -> float | None:
        """What the steps of a client with so many samples add up to; None where that is not known.

        `told` is the config of its message; `followed`: it did the census that this asks for, and not as always.
        """
        sent, momentum = told.get("lr"), told.get("momentum")
        number = told.get("server-round", 1)
        since = max(number - 1, 0) if isinstance(number, int) else 0
        lr = sent if is_positive(sent) else None if self.lr is None else self.lr * self.lr_decay**since
        steps = self._steps(samples, told, followed)
        if lr is None or steps is None:
            return None
        return travel_of(float(lr), float(momentum if is_momentum(momentum) else self.momentum), steps)

    def _steps(self, samples: float, told: Mapping[str, Any], followed: bool) -> int | None:
        census = CENSUS in told
        size, asked, limit = told.get("batch-size"), told.get(EPOCHS), told.get(SAMPLES)
        batch = size if is_positive(size) else self.batch_size
        if batch is None:
            # A census is told in epochs: how many steps these are, only the client knows.
            return None if census and followed else self.steps
        epochs = asked if is_positive(asked) and (followed or not census) else self.epochs
        if census and followed and is_positive(limit):
            samples = min(samples, limit)
        return int(epochs) * max(1, math.ceil(samples / batch))


def is_positive(value: object) -> TypeGuard[int | float]:
    """A finite number above 0, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def is_momentum(value: object) -> TypeGuard[int | float]:
    """A momentum that SGD can have."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1
