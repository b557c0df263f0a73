"""What the owner of a client decides about its label counts. Nothing a server sends is read here.

Settings, by the names under which a framework's node configuration holds them:
    label-epsilon         a number above 0, or "none" for true counts; without it the client refuses
    label-epsilon-total   the most that all releases may spend together; without it one release's label-epsilon
    label-report-release  the number of the release, 1 without it; a new number has a new answer drawn, one per number
    label-report-file     absolute path of the file that keeps the answers; needed with noise, or runs would draw anew
    label-ledger          absolute path of a folder for a second copy of what was drawn and spent; without it
                          fedentopt/label-ledger in the user's state folder ($XDG_STATE_HOME, ~/.local/state,
                          %LOCALAPPDATA%), if that can be written to
    num-examples          what stands for the number of samples in training replies: "noisy" (the total of the noisy
                          counts; the default with noise), "uniform" (1) or "exact" (the default without noise)
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedentopt.errors import InputError
from fedentopt.privacy import check_epsilon

if TYPE_CHECKING:
    from fedentopt.release.draws import Draw

EPSILON, TOTAL, RELEASE = "label-epsilon", "label-epsilon-total", "label-report-release"
FILE, LEDGER, EXAMPLES = "label-report-file", "label-ledger", "num-examples"
NONE = "none"
WEIGHTS = ("noisy", "uniform", "exact")


@dataclass(frozen=True)
class OwnerSettings:
    """The owner's word. `epsilon` None: true counts may leave. `total` None: one release. `weight` None: by epsilon.

    `ledger` None: the default folder. `file` may be None without noise, and for simulated clients, which keep their
    answer elsewhere.
    """

    epsilon: float | None
    file: Path | None = None
    release: int = 1
    total: float | None = None
    ledger: Path | None = None
    weight: str | None = None

    def __post_init__(self) -> None:
        # As plain numbers, since NumPy's could be drawn with but not be kept.
        if self.epsilon is not None:
            object.__setattr__(self, "epsilon", float(check_epsilon(self.epsilon)))
        if self.total is not None:
            object.__setattr__(self, "total", _total(self.total))
        whole = isinstance(self.release, int | np.integer) and not isinstance(self.release, bool)
        if not whole or self.release < 1:
            raise InputError(f"{RELEASE}: {self.release!r} is not accepted; accepted: a whole number from 1")
        object.__setattr__(self, "release", int(self.release))
        if self.weight is not None and self.weight not in WEIGHTS:
            raise InputError(f"{EXAMPLES}: {self.weight!r} is not accepted; accepted: {', '.join(WEIGHTS)}")
        if self.weight == "noisy" and self.epsilon is None:
            raise InputError(f'{EXAMPLES}: "noisy" needs noise; accepted with {EPSILON}="{NONE}": uniform, exact')
        for name, path in ((FILE, self.file), (LEDGER, self.ledger)):
            if path is not None and not isinstance(path, Path):
                raise InputError(f"{name}: {path!r} is {type(path).__name__}; accepted: a pathlib.Path, absolute")
            if path is not None and not path.is_absolute():
                raise InputError(f"{name}: {str(path)!r} is not an absolute path")

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> OwnerSettings:
        """The settings in a node's configuration; keys of other purposes are left alone, a bad value is refused."""
        epsilon = read_epsilon(config.get(EPSILON))
        if epsilon is None:
            raise InputError(
                f'{EPSILON}: not set by the owner of this client; accepted: a number above 0 (noise) or "{NONE}" '
                "(true counts), in the node's own configuration"
            )
        total = config.get(TOTAL)
        release = config.get(RELEASE, 1)
        if isinstance(release, str) and release.strip().isdecimal():
            release = int(release)
        return cls(
            epsilon=None if isinstance(epsilon, str) else epsilon,
            file=_path(config, FILE),
            release=release,
            total=None if total is None else _total(total),
            ledger=_path(config, LEDGER),
            weight=config.get(EXAMPLES),
        )


def _total(value: Any) -> float:
    """A `label-epsilon-total`, as a number or as it was written."""
    number = _above_zero(value)
    if number is None:
        raise InputError(f"{TOTAL}: {value!r} is not accepted; accepted: a number above 0")
    return number


def _above_zero(value: Any) -> float | None:
    """A finite number above 0, or None for anything else."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) and number > 0 else None


def read_epsilon(value: Any, where: str = "node config") -> float | str | None:
    """A `label-epsilon` as it was written: a number, "none", or None where it is not set; refused otherwise."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, str) and value.strip().lower() == NONE:
        return NONE
    number = _above_zero(value)
    if number is None:
        raise InputError(f'{EPSILON} ({where}): {value!r} is not accepted; accepted: a number above 0, or "{NONE}"')
    return number


def example_weight(owner: OwnerSettings, samples: int, draw: Draw | None) -> int:
    """What may stand for the number of samples in a reply.

    The noisy total, at least 1, is a function of a report that has left already, so it gives nothing further away.
    """
    weight = owner.weight or ("exact" if owner.epsilon is None else "noisy")
    if weight == "uniform":
        return 1
    if weight == "exact":
        return int(samples)
    if draw is None:
        raise InputError(f'{EXAMPLES}: "noisy" needs the noisy counts of this client, and there are none')
    return max(1, round(math.fsum(draw.counts)))


def default_ledger() -> Path | None:
    """The folder of the second copies where the owner names none; None where the user has no home."""
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA", "")
    else:
        base = os.environ.get("XDG_STATE_HOME", "") or os.path.expanduser("~/.local/state")
    return Path(base) / "fedentopt" / "label-ledger" if os.path.isabs(base) else None


def _path(config: Mapping[str, Any], name: str) -> Path | None:
    value = config.get(name)
    return None if value is None or value == "" else Path(str(value)).expanduser()
