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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

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
FURTHEST = 1e100
"""A change per unit of travel that is further than this is refused: products of two such would be infinite. That of a
bias is 1 at most."""
MOST_TURNS, SETTLED = 60, 1e-5
"""Levels and evenness are found in turns, until no level moves further than this."""
_TINY = 1e-9
_ZERO, _LEAST = np.zeros(()), np.array(np.finfo(np.float64).tiny)


Estimates: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of the clients of a round: shares (K, C), spread (K,) and level (K,), as in `LabelEstimate`."""


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
    shares, spread, level = estimate_tables(changes, untrained=untrained)
    return [LabelEstimate(*own) for own in zip(shares, spread.tolist(), level.tolist(), strict=True)]


def estimate_tables(changes: np.ndarray, *, untrained: bool = False) -> Estimates:
    """The same as tables: shares (K, C), spread (K,) and level (K,) of all clients."""
    changes = np.asarray(changes, dtype=np.float64)
    if changes.ndim != 2 or not changes.shape[1] or not can_be_read(changes).all():
        raise InputError(
            f"changes: shape {changes.shape}; accepted: finite numbers up to {FURTHEST:g}, clients by classes"
        )
    shares, spread, level = _estimates(changes[None], untrained)
    return shares[0], spread[0], level[0]


def can_be_read(changes: np.ndarray) -> np.ndarray:
    """Whether every class of each change is finite and no further than `FURTHEST`, over the last axis."""
    return np.asarray((np.abs(changes) <= FURTHEST).all(axis=-1))


def estimates_together(rounds: Sequence[tuple[np.ndarray, bool]]) -> list[Estimates]:
    """`estimate_tables` of many rounds that have nothing to do with each other, each with whether its model was
    untrained. To the bit what it gives of each alone; rounds of one shape cost little more than one of them."""
    alike: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for i, (changes, untrained) in enumerate(rounds):
        alike.setdefault((np.shape(changes), untrained), []).append(i)
    found: dict[int, Estimates] = {}
    for (_, untrained), places in alike.items():
        tables = _estimates(np.array([rounds[i][0] for i in places], dtype=np.float64), untrained)
        found.update(zip(places, zip(*tables, strict=True), strict=True))
    return [found[i] for i in range(len(rounds))]


def _estimates(changes: np.ndarray, untrained: bool) -> Estimates:
    """Shares (R, K, C), spread and level (R, K) of the clients of R rounds (R, K, C)."""
    count, classes = changes.shape[1:]
    if classes == 1 or not count:
        return np.ones(changes.shape), np.zeros(changes.shape[:2]), np.zeros(changes.shape[:2])
    changes = np.ascontiguousarray(changes)
    own, pattern = _levels(changes, untrained)
    level = _Turns(changes, own, pattern).settle(
        EVEN_LEVEL[untrained], EVENNESS_POWER[untrained], from_above=not untrained
    )
    raw = _Turns(changes, own, pattern).raw(level)
    shares = _shares(raw)
    impossible = -np.add.reduce(np.minimum(raw, 0.0), axis=-1)  # shares below 0: the least that is wrong
    level = np.minimum(own, 1.0)
    wrong = np.maximum(impossible, medians(impossible)[:, None]) + (1.0 - level) / 8
    spread = np.minimum(1.0, LEAST_SPREAD[untrained] + (1.0 if untrained else 1.3) * wrong)
    return shares, spread, level


def medians(values: np.ndarray) -> np.ndarray:
    """The median of every row as NumPy has it, many times faster for the few clients of a round."""
    ordered = np.sort(values, axis=1)
    half = ordered.shape[1] // 2
    middle = ordered[:, half] if ordered.shape[1] % 2 else (ordered[:, half - 1] + ordered[:, half]) / 2
    return np.where(np.isnan(ordered[:, -1]), np.nan, middle)


def travel_of(lr: float, momentum: float, steps: int) -> float:
    """Sum of the step sizes that a constant gradient is moved by in `steps` steps of SGD with momentum from rest."""
    if not 0 <= momentum < 1:
        raise InputError(f"momentum: {momentum!r} is out of range; accepted: from 0 to below 1")
    if momentum == 0:
        return lr * steps
    return lr / (1 - momentum) * (steps - momentum * (1 - momentum**steps) / (1 - momentum))


def _levels(changes: np.ndarray, untrained: bool) -> tuple[np.ndarray, np.ndarray]:
    """Each client's level S (R, K), and how it is shared among the classes (R, C)."""
    classes = changes.shape[-1]
    fell, prior = changes < 0, PRIOR[untrained]
    known = fell.sum(axis=1)
    # Infinitely far down where a class went up: beyond every median, whatever it is divided by.
    by_client = np.where(fell, -changes, np.inf)
    by_class = by_client.transpose(0, 2, 1).copy()
    of_clients, of_classes = _Medians(fell), _Medians(fell.transpose(0, 2, 1))
    guess, worth = prior / classes, known + prior
    pattern = np.full(known.shape, 1.0 / classes)
    for _ in range(8):
        level = of_clients.of_sorted(by_client / pattern[:, None])
        np.maximum(level, _TINY, out=level)
        pattern = of_classes.of_sorted(by_class / level[:, None])
        np.maximum(pattern, 0.1 / classes, out=pattern)
        np.minimum(pattern, 10.0 / classes, out=pattern)
        pattern *= known
        pattern += guess
        pattern /= worth
        pattern /= np.add.reduce(pattern, axis=1, keepdims=True)
    if untrained:
        shared = pattern[:, None]
        depth = -changes / shared
        level = np.maximum(depth.max(axis=-1), _TINY)
        for _ in range(4):
            absent = changes / level[:, :, None] + shared < FEW / classes
            level = np.maximum(np.where(absent.any(axis=-1), _Medians(absent).of(depth), level), _TINY)
    return level, pattern


class _Turns:
    """Levels and evenness in turns. A round has few clients and classes, so that what counts is the number of passes:
    all arrays are (R, K, C), levels repeated over the classes, and are written over turn by turn."""

    def __init__(self, changes: np.ndarray, own: np.ndarray, pattern: np.ndarray) -> None:
        self._changes, self._own = changes, own[:, :, None]
        self._own_level, self._common = np.empty(changes.shape), np.empty(changes.shape)
        self._own_level[:], self._common[:] = self._own, changes.mean(axis=1)[:, None]
        self._absent = self._own_level * pattern[:, None]
        self._level, self._excess = np.empty(changes.shape), np.empty(changes.shape)

    def settle(self, highest: float, power: int, *, from_above: bool) -> np.ndarray:
        """Levels (R, K, 1): at least `highest` times evenness to that power. A round that has settled is left alone.

        From above, a client stays even unless its changes speak against it; a model that was never trained tells levels
        so well that they are trusted first.
        """
        found = np.empty(self._own.shape)
        rounds = np.arange(len(found))
        level = np.maximum(self._own, highest) if from_above else self._own
        for _ in range(MOST_TURNS):
            before, level = level, _evenness(_shares(self.raw(level)))
            level **= power
            level *= highest
            np.maximum(level, self._own, out=level)
            moved = np.subtract(level, before)
            going = ~(np.maximum.reduce(np.absolute(moved, out=moved), axis=(1, 2)) < SETTLED)
            if not going.all():
                found[rounds[~going]] = level[~going]
                rounds, level = rounds[going], level[going]
                if not rounds.size:
                    return found
                self._keep(going)
        found[rounds] = level
        return found

    def _keep(self, rounds: np.ndarray) -> None:
        self._changes, self._own, self._own_level = self._changes[rounds], self._own[rounds], self._own_level[rounds]
        self._common, self._absent = self._common[rounds], self._absent[rounds]
        self._level, self._excess = self._level[: len(self._own)], self._excess[: len(self._own)]

    def raw(self, level: np.ndarray) -> np.ndarray:
        """Shares before those below 0 are cut. As far as the level exceeds a client's own it is even over the classes,
        and what all clients have in common is the model's and not theirs."""
        everywhere, excess = self._level, self._excess
        everywhere[:] = level
        np.subtract(everywhere, self._own_level, out=excess)
        raw = self._common * excess
        raw /= everywhere
        np.subtract(self._changes, raw, out=raw)
        raw += self._absent
        excess /= raw.shape[-1]
        raw += excess
        raw /= everywhere
        return np.asarray(raw)


def _shares(raw: np.ndarray) -> np.ndarray:
    """Shares below 0 cut, the others adding up to 1."""
    cut = np.maximum(raw, _ZERO)
    total = np.add.reduce(cut, axis=-1, keepdims=True)
    if np.minimum.reduce(total, axis=None) > 0:
        cut /= total
        return np.asarray(cut)
    return np.asarray(np.where(total > 0, cut / np.where(total > 0, total, 1.0), 1.0 / raw.shape[-1]))


def _evenness(shares: np.ndarray) -> np.ndarray:
    """Entropy as a share of the largest possible, (R, K, 1)."""
    terms = np.maximum(shares, _LEAST)  # a share of 0 contributes 0 all the same
    np.log(terms, out=terms)
    terms *= shares
    found = np.add.reduce(terms, axis=-1, keepdims=True)
    found /= -math.log(shares.shape[-1])
    return np.asarray(found)


class _Medians:
    """Median over the last axis of the places of `where`; 0 where there are none."""

    def __init__(self, where: np.ndarray) -> None:
        number = where.sum(axis=-1)
        last = where.shape[-1] - 1
        rows = where.shape[-1] * np.arange(number.size).reshape(number.shape)
        self._where, self._none = where, number == 0
        self._any_without = bool(self._none.any())
        self._low = rows + np.minimum(np.maximum(number - 1, 0) // 2, last)
        self._high = rows + np.minimum(number // 2, last)

    def of(self, values: np.ndarray) -> np.ndarray:
        """Of values of the same shape."""
        return self.of_sorted(np.where(self._where, values, np.inf))

    def of_sorted(self, values: np.ndarray) -> np.ndarray:
        """Of values that are infinite elsewhere, without gaps in memory; they are sorted in place."""
        values.sort(axis=-1)
        middle = values.take(self._low)
        middle += values.take(self._high)
        middle /= 2
        if self._any_without:
            middle[self._none] = 0.0
        return np.asarray(middle)


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
