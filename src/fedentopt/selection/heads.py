"""What an observed last layer says about labels, in the form that the audit takes."""

from __future__ import annotations

import numpy as np

from fedentopt.audit import Change
from fedentopt.errors import InputError
from fedentopt.selection.feedback import Head, Observation


def change_of(seen: Observation) -> Change:
    """What an observation says about labels; refused without the change of a last layer."""
    if seen.head is None:
        raise InputError("observe: no change of the last layer; accepted: observations with a head")
    change = _of_head(seen.head)
    if seen.drift is not None:
        change = change - _of_head(seen.drift)
    return Change(change / (seen.travel or 1.0), seen.samples)


def _of_head(head: Head) -> np.ndarray:
    """One number per class, as `head_change` has it."""
    part = np.asarray(head.weight if head.bias is None else head.bias, dtype=np.float64)
    return np.asarray(part.mean(axis=1)) if part.ndim == 2 else part
