"""What the change of a client's last layer says about its labels.

For logits z = W h + b, cross-entropy and softmax s, a sample of class y has dL/db_i = s_i - 1[i = y]. Over local
training that moves the bias by the sum of its step sizes T (`travel`), the change is

    db_i / T = S (D_i - E_i),

D the label distribution, E_i >= 0 (sum 1) how much probability samples of other classes gave to class i, and S <= 1 how
much probability was wrong altogether (after HiCS-FL, Chen and Vikalo, NeurIPS 2024, equation 6). Without a bias the row
means of dW take its place.

A class that a client lacks sits at -S E_i. How the level is shared among the classes (E) is a property of the model
they all start from, and is pooled over the clients of a round: medians, over the classes that went down, in turns with
each client's own S. From a model that was never trained E is so even that the lowest classes themselves tell the level.

Balanced clients have no class to tell it by: their changes are noise around 0, and taking their lowest class for absent
would turn noise into a distribution. But S cannot be small there: only who holds few classes learns them so fast that
little is left to be wrong about. So S is at least a level that grows with the evenness of the estimate itself, which
draws estimates of balanced clients to the uniform distribution and leaves skewed ones alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedentopt.errors import InputError

EVEN_LEVEL = {True: 1.0, False: 0.3}
"""S of a perfectly even client, at least: of a model that was never trained, and of one that was."""
EVENNESS_POWER = {True: 4, False: 6}
PRIOR = {True: 10.0, False: 2.0}
"""How many clients that lack a class the guess of even levels is worth."""
FEW = 0.3
"""A class with less than this share of an even client's may be absent."""
LEAST_SPREAD = {True: 0.08, False: 0.1}
MOST_TURNS, SETTLED = 60, 1e-5
"""Levels and evenness are found in turns, until no level moves further than this."""
_TINY = 1e-9


@dataclass(frozen=True)
class LabelEstimate:
    """A client's label distribution as its last layer shows it.

    `spread` is the total variation that the estimate may be off by, a rule of thumb and no bound: its constants were
    set on recorded rounds of LeNet-5, where four of five estimates or more were closer to the truth. `level` is the
    share of the model's probability that was wrong during training: 1 at first, less and less later.
    """

    shares: np.ndarray
    spread: float
    level: float


def head_change(before: Any, after: Any) -> np.ndarray:
    """How a last layer moved, one number per class: the bias, or the row means of the weight where there is none.

    Each is a bias (C,), a weight (C, F), or a pair (weight, bias or None).
    """
    (old_weight, old_bias), (weight, bias) = _layer("before", before), _layer("after", after)
    if (old_bias is None) != (bias is None):
        raise InputError("after: a last layer of another kind than before; accepted: both with a bias, or both without")
    old, new = (old_weight, weight) if bias is None else (old_bias, bias)
    assert old is not None
    assert new is not None
    if old.shape != new.shape:
        raise InputError(f"after: shape {new.shape}; accepted: {old.shape}, as before")
    change = new - old
    return np.asarray(change.mean(axis=1) if change.ndim == 2 else change)


def label_estimate(
    before: Any, after: Any, *, travel: float = 1.0, untrained: bool = False, others: Sequence[Any] = ()
) -> LabelEstimate:
    """The label distribution of a client whose last layer went from `before` to `after` (see `head_change`).

    `travel` is the sum of the step sizes of its training: learning rate times steps, and with momentum m and R steps
    lr / (1 - m) * (R - m (1 - m^R) / (1 - m)). `untrained`: the model had not been trained by anybody before. `others`
    are changes (from `head_change`, divided by their travel) of further clients that started from the same model.
    """
    if not 0 < travel < np.inf:
        raise InputError(f"travel: {travel!r} is out of range; accepted: finite, above 0")
    own = head_change(before, after) / travel
    for other in others:
        if np.shape(other) != own.shape:
            raise InputError(f"others: a change of shape {np.shape(other)}; accepted: {own.shape}, as this client's")
    changes = np.stack([own, *(np.asarray(other, dtype=float) for other in others)])
    return label_estimates(changes, untrained=untrained)[0]


def label_estimates(changes: np.ndarray, *, untrained: bool = False) -> list[LabelEstimate]:
    """Label distributions of clients that started from one model; `changes` (K, C) are per unit of travel."""
    changes = np.asarray(changes, dtype=np.float64)
    if changes.ndim != 2 or not changes.shape[1] or not np.isfinite(changes).all():
        raise InputError(f"changes: shape {changes.shape}; accepted: finite numbers, clients by classes")
    if changes.shape[1] == 1:
        return [LabelEstimate(np.ones(1), 0.0, 0.0)] * len(changes)
    own, pattern = _levels(changes, untrained)
    # From above, a client stays even unless its changes speak against it; a model that was never trained tells levels
    # so well that they are trusted first.
    level = own.copy() if untrained else np.maximum(own, EVEN_LEVEL[untrained])
    for _ in range(MOST_TURNS):
        even = _evenness(_shares(_raw(changes, own, pattern, level)))
        before, level = level, np.maximum(own, EVEN_LEVEL[untrained] * even ** EVENNESS_POWER[untrained])
        if np.abs(level - before).max(initial=0.0) < SETTLED:
            break
    raw = _raw(changes, own, pattern, level)
    shares = _shares(raw)
    impossible = -np.minimum(raw, 0.0).sum(axis=1)  # shares below 0: the least that is wrong
    wrong = np.maximum(impossible, np.median(impossible)) + (1.0 - np.minimum(own, 1.0)) / 8
    spread = np.minimum(1.0, LEAST_SPREAD[untrained] + (1.0 if untrained else 1.3) * wrong)
    return [LabelEstimate(shares[k], float(spread[k]), float(min(own[k], 1.0))) for k in range(len(changes))]


def travel_of(lr: float, momentum: float, steps: int) -> float:
    """Sum of the step sizes that a constant gradient is moved by in `steps` steps of SGD with momentum from rest."""
    if not 0 <= momentum < 1:
        raise InputError(f"momentum: {momentum!r} is out of range; accepted: from 0 to below 1")
    if momentum == 0:
        return lr * steps
    return lr / (1 - momentum) * (steps - momentum * (1 - momentum**steps) / (1 - momentum))


def _levels(changes: np.ndarray, untrained: bool) -> tuple[np.ndarray, np.ndarray]:
    """Each client's level S (K,), and how it is shared among the classes (C,)."""
    count, classes = changes.shape
    fell, prior = changes < 0, PRIOR[untrained]
    known = fell.sum(axis=0)
    of_clients, of_classes = _Medians(fell), _Medians(fell.T)
    pattern = np.full(classes, 1.0 / classes)
    level = np.full(count, _TINY)
    for _ in range(8):
        level = np.maximum(of_clients.of(-changes / pattern), _TINY)
        relative = of_classes.of((-changes / level[:, None]).T)
        usual = np.minimum(np.maximum(relative, 0.1 / classes), 10.0 / classes)
        pattern = (known * usual + prior / classes) / (known + prior)
        pattern /= pattern.sum()
    if untrained:
        depth = -changes / pattern
        level = np.maximum(depth.max(axis=1), _TINY)
        for _ in range(4):
            absent = changes / level[:, None] + pattern < FEW / classes
            level = np.maximum(np.where(absent.any(axis=1), _Medians(absent).of(depth), level), _TINY)
    return level, pattern


def _raw(changes: np.ndarray, own: np.ndarray, pattern: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Shares before those below 0 are cut. As far as the level exceeds a client's own it is even over the classes, and
    what all clients have in common is the model's and not theirs."""
    excess = (level - own)[:, None]
    common = changes.mean(axis=0) * excess / level[:, None]
    return np.asarray((changes - common + own[:, None] * pattern + excess / changes.shape[1]) / level[:, None])


def _shares(raw: np.ndarray) -> np.ndarray:
    cut = np.maximum(raw, 0.0)
    total = cut.sum(axis=1, keepdims=True)
    return np.asarray(np.where(total > 0, cut / np.where(total > 0, total, 1.0), 1.0 / raw.shape[1]))


def _evenness(shares: np.ndarray) -> np.ndarray:
    """Entropy as a share of the largest possible."""
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    return np.asarray(-(shares * logs).sum(axis=1) / np.log(shares.shape[1]))


class _Medians:
    """Median of each row over the places of `where`; 0 where there are none."""

    def __init__(self, where: np.ndarray) -> None:
        number = where.sum(axis=1)
        last = where.shape[1] - 1
        self._where, self._some, self._rows = where, number > 0, np.arange(len(where))
        self._low, self._high = np.minimum(np.maximum(number - 1, 0) // 2, last), np.minimum(number // 2, last)

    def of(self, values: np.ndarray) -> np.ndarray:
        """Of values of the same shape."""
        ordered = np.where(self._where, values, np.inf)
        ordered.sort(axis=1)
        middle = (ordered[self._rows, self._low] + ordered[self._rows, self._high]) / 2
        return np.where(self._some, middle, 0.0)


def _layer(name: str, given: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Weight and bias, either of which may be missing."""
    pair = given if isinstance(given, tuple) and len(given) == 2 else None
    weight = getattr(given, "weight", None) if pair is None else pair[0]
    bias = getattr(given, "bias", None) if pair is None else pair[1]
    if weight is None and bias is None:
        try:
            array = np.asarray(given)
        except ValueError:  # of rows or parts that do not fit together
            raise InputError(f"{name}: no array; accepted: a bias (C,), a weight (C, F), or both as a tuple") from None
        weight, bias = (array, None) if array.ndim == 2 else (None, array)
    layer = tuple(None if part is None else np.asarray(part, dtype=np.float64) for part in (weight, bias))
    for part, dimensions in zip(layer, (2, 1), strict=True):
        if part is not None and (part.ndim != dimensions or not np.isfinite(part).all()):
            raise InputError(
                f"{name}: shape {part.shape}; accepted: finite numbers, a bias (C,), a weight (C, F), or both, a tuple"
            )
    return layer[0], layer[1]
