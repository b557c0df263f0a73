"""What a client told of its labels, and of why it did not, as the server keeps it; how it travels is each framework's
own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection import ClientId

LONGEST_REASON = 300  # characters of what a client says that reach the log


@dataclass(frozen=True)
class Report:
    """A client's label counts as it reports them. `epsilon` is None for true counts, else what noise was drawn with."""

    client: ClientId
    counts: np.ndarray
    epsilon: float | None

    @property
    def noisy(self) -> bool:
        """Whether noise was added."""
        return self.epsilon is not None


def check_epsilon(who: str, epsilon: object) -> float | None:
    """The epsilon of a report, None where it has none; anything but a number above 0 is refused, naming the client."""
    if epsilon is None:
        return None
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < float("inf"):
        raise InputError(f"{who}: epsilon {epsilon!r} is not a number above 0")
    return float(epsilon)


def printable(text: object) -> str:
    """Text from a client as a log may hold it: one line, not too long, nothing that steers a terminal."""
    line = "".join(mark if mark.isprintable() else " " for mark in str(text)[: LONGEST_REASON + 1])
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 3] + "..."
