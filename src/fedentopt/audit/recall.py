"""A second look at reports, with a few images of the server's own: who lacks a class does not raise its recall.

A client can move the last layer it sends until an estimate of its labels fits its claim. What the rest of its model has
learnt and forgotten it cannot move back without the images it claims to have.

The recall of a class is taken at every depth: the share of its images with the right class among the k likeliest,
averaged over k = 1 .. C - 1. It is 1 less the mean share of classes put above the right one, whatever the scale of the
logits, and 0.5 on average over the classes for a model that has learnt nothing, even for one that always gives the same
answer. (At k = 1 alone, weak models say little, and honest clients of a weak model look like liars.)

With a_c the recall of a client's model, b_c that of the model it started from, q_c the mean of the two best of its
round, and p_c the shares it claims:

    shortfall   F = sum_c p_c (q_c - a_c)     what others of the round make of the classes it claims, and it does not
    gain        G = sum_c p_c (a_c - b_c)     what its own training did for them

Honest clients with few classes have F near 0; balanced ones have F > 0 beside those who know one class only, but then
also G > 0; and where all are balanced and nobody gains any more, F is the same for all. Only who claims what it lacks
falls short of the others *and* gains nothing. A client is suspected when F lies above the median of all, by more than
most lie below it, and F - G is high, on average and, if less so, in its best round too: training that fails now and
then is no lie.

Rounds are averaged with the skill of their start model, 2 mean(b) - 1, for weight. Those that start almost without
skill are left out: a balanced client then gains as little as a liar.

To judge updates by data of the server's is an old idea (Xie, Koyejo, Gupta: Zeno, ICML 2019); to hold a label report
against them is not known from elsewhere. The constants were set on recorded rounds of LeNet-5, and tried on others
(`docs/lying-clients.md`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fedentopt.errors import InputError

ClientId: TypeAlias = str | int
LEAST_SKILL = 0.15
"""Skill of a start model below which a round is left out."""
BEST = 2
"""How many clients of a round say what can be made of a class."""
LEAST_SHORTFALL = 0.11
"""How far a shortfall must lie above the median."""
LEAST_BALANCE = 0.15
"""What shortfall less gain must exceed on average."""
LEAST_EVER = 0.05
"""What it must exceed in every round."""
LEAST_TIMES = 3
"""Observations before which a client is not suspected: local training that fails looks like a lie, once or twice."""
LEAST_DEVIATION = 0.02
FEWEST = 5
"""Observed clients below which nobody is suspected: there is no median to speak of."""
ROUNDING = 1e-3
"""What a share may lie outside of 0 to 1 by."""
HELD = 0.2
"""A class in which a client falls so much shorter than in its best one counts as absent."""


@dataclass(frozen=True)
class Recall:
    """Recall of every class (C,), at every depth: of the model that a client started from, and of the one it sent."""

    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class RecallSuspicion:
    """What a client's recalls say about its claim."""

    score: float
    shortfall: float
    usual: float
    gain: float
    least: float
    worst: int
    claimed: float

    def __str__(self) -> str:
        return (
            f"on the server's images its model falls {self.shortfall:.2f} short in the recall of classes it reports, "
            f"others {self.usual:.2f}, and its training changed that by {self.gain:+.2f}; "
            f"worst in class {self.worst}: {self.claimed:.0%} reported"
        )


@dataclass
class _Seen:
    """Sums over the observations of a client, weighted by the skill of the model it started from, and `best`, shortfall
    less gain of the round that spoke best for its report."""

    weight: float
    short: np.ndarray
    gain: np.ndarray
    best: np.ndarray
    times: int


class Recalls:
    """What is known of clients' recalls."""

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self._seen: dict[ClientId, _Seen] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def observe(self, recalls: Mapping[ClientId, Recall], reports: Mapping[ClientId, np.ndarray]) -> None:
        """Learn from clients that trained in one round; those whose recalls are not finite are left out."""
        for client, recall in recalls.items():
            for name, values in (("before", recall.before), ("after", recall.after)):
                if np.shape(values) != (self.num_classes,):
                    raise InputError(
                        f"recall: {name} of client {client!r} has shape {np.shape(values)}; "
                        f"accepted: ({self.num_classes},), one number per class"
                    )
                if np.isfinite(values).all() and not (np.abs(np.asarray(values) - 0.5) <= 0.5 + ROUNDING).all():
                    raise InputError(f"recall: {name} of client {client!r} is no share; accepted: numbers from 0 to 1")
        known = {k: r for k, r in recalls.items() if np.isfinite(r.before).all() and np.isfinite(r.after).all()}
        if not known:
            return
        after = np.stack([np.asarray(recall.after, dtype=np.float64) for recall in known.values()])
        peak = np.sort(after, axis=0)[-BEST:].mean(axis=0)
        for (client, recall), own in zip(known.items(), after, strict=True):
            before = np.asarray(recall.before, dtype=np.float64)
            skill = 2.0 * float(before.mean()) - 1.0
            if skill < LEAST_SKILL:
                continue
            short, gain = peak - own, own - before
            balance = short - gain
            seen = self._seen.get(client)
            if seen is None:
                zero = np.zeros(self.num_classes)
                seen = self._seen[client] = _Seen(0.0, zero, zero, balance, 0)
            claim = claimed_shares(reports.get(client, np.ones(self.num_classes))[None], None)[0][0]
            if float(claim @ balance) < float(claim @ seen.best):
                seen.best = balance
            seen.weight += skill
            seen.short = seen.short + skill * short
            seen.gain = seen.gain + skill * gain
            seen.times += 1

    def forget(self, clients: Iterable[ClientId]) -> None:
        """Forget clients that have left."""
        for client in clients:
            self._seen.pop(client, None)

    def shares(self, client: ClientId) -> np.ndarray | None:
        """The label distribution that a client's recalls speak for: even over what it is as good at as at its best
        class, falling to 0. Rough, but no bias can be moved to change it. None before the first observation."""
        seen = self._seen.get(client)
        if seen is None:
            return None
        short = seen.short / seen.weight
        held = np.clip(1.0 - (short - short.min()) / HELD, 0.0, 1.0)
        return np.asarray(held / held.sum())

    def judge(self, reports: Mapping[ClientId, np.ndarray], epsilon: float | None) -> dict[ClientId, RecallSuspicion]:
        """What recalls say about these reports, for clients that have been observed."""
        clients = [client for client in self._seen if client in reports]
        if not clients:
            return {}
        claims, noise = claimed_shares(np.stack([reports[client] for client in clients]), epsilon)
        weights = np.array([self._seen[client].weight for client in clients])[:, None]
        short = np.stack([self._seen[client].short for client in clients]) / weights
        gains = np.stack([self._seen[client].gain for client in clients]) / weights
        # A report that noise has moved by so much speaks for other classes: at worst the best and the worst exchanged.
        shortfall = (claims * short).sum(axis=1) - noise * np.ptp(short, axis=1)
        gain = (claims * gains).sum(axis=1) + noise * np.ptp(gains, axis=1)
        usual = float(np.median(shortfall))
        balance = shortfall - gain
        middle = float(np.median(balance))
        scores = (balance - middle) / _deviation(balance, middle)
        bests = np.stack([self._seen[client].best for client in clients])
        least = (claims * bests).sum(axis=1) - noise * np.ptp(bests, axis=1)
        worst = (claims * short).argmax(axis=1)
        return {
            client: RecallSuspicion(
                float(scores[i]),
                float(shortfall[i]),
                usual,
                float(gain[i]),
                float(least[i]),
                int(worst[i]),
                float(claims[i, worst[i]]),
            )
            for i, client in enumerate(clients)
        }

    def suspects(
        self, reports: Mapping[ClientId, np.ndarray], epsilon: float | None
    ) -> dict[ClientId, RecallSuspicion]:
        """The clients whose reports their recalls belie, and why."""
        judged = self.judge(reports, epsilon)
        if len(judged) < FEWEST:
            return {}
        usual = next(iter(judged.values())).usual
        deviation = _deviation(np.array([entry.shortfall for entry in judged.values()]), usual)
        found = {}
        for client, entry in judged.items():
            often = self._seen[client].times >= LEAST_TIMES
            short = entry.shortfall - usual > max(LEAST_SHORTFALL, deviation)
            if often and short and entry.shortfall - entry.gain > LEAST_BALANCE and entry.least > LEAST_EVER:
                found[client] = entry
        return found

    def state(self, *, sums: bool = True) -> list[Any]:
        """What was observed, JSON-serialisable; without `sums`, those are the caller's to keep."""
        return [
            [plain(client), seen.weight, *(row.tolist() if sums else None for row in _rows(seen)), seen.times]
            for client, seen in self._seen.items()
        ]

    def sums(self) -> np.ndarray:
        """What a state without them leaves out, (K, 3, C), in its order."""
        rows = [_rows(seen) for seen in self._seen.values()]
        return np.array(rows) if rows else np.zeros((0, 3, self.num_classes))

    def load(self, state: Any, sums: np.ndarray | None = None) -> None:
        """Go on where the one that gave `state` stood; what is no such state is refused, with no change. `sums` are
        those of a state without them."""
        found = {}
        entries = state if sums is None else with_sums(state, sums, 3)
        kept = read_sums(entries, "naaa", self.num_classes, "recalls of ")
        for client, (weight, short, gain, best, times) in kept.items():
            found[client] = _Seen(weight, np.array(short), np.array(gain), np.array(best), times)
        self._seen = found


def _rows(seen: _Seen) -> tuple[np.ndarray, ...]:
    return seen.short, seen.gain, seen.best


def with_sums(entries: Any, sums: np.ndarray, rows: int) -> list[Any]:
    """The entries of a state without sums, with them: `rows` of C per client. What does not fit is refused."""
    many = len(entries) if is_without_sums(entries) else 0
    if not many or sums.shape[:-1] != ((many,) if rows == 1 else (many, rows)):
        raise InputError(f"state: sums of shape {sums.shape}; accepted: those of the clients that it names")
    listed = sums.reshape(many, rows, -1).tolist()
    return [[*entry[:2], *own, *entry[2 + rows :]] for entry, own in zip(entries, listed, strict=True)]


def is_without_sums(entries: Any) -> bool:
    """Whether what a state says was observed leaves out the sums of somebody, and so of everybody."""
    several = isinstance(entries, list | tuple) and all(isinstance(entry, list | tuple) for entry in entries)
    return several and bool(entries) and all(len(entry) > 2 and entry[2] is None for entry in entries)


def plain(client: ClientId) -> ClientId:
    """A client id as JSON holds it: NumPy's whole numbers are ids as good as any."""
    return int(client) if isinstance(client, np.integer) else client


def read_sums(entries: Any, form: str, num_classes: int, what: str = "") -> dict[ClientId, list[Any]]:
    """Sums by client as a state lists them: the client, figures by `form` ("n" for a number, "a" for one per class),
    the first of which is a weight, and how often it was observed. Anything else is refused."""
    found: dict[ClientId, list[Any]] = {}
    wrong = InputError("state: what was observed; accepted: what state_dict() returned")
    if not isinstance(entries, list | tuple):
        raise wrong
    for entry in entries:
        if not isinstance(entry, list | tuple):
            raise wrong
        if len(entry) != len(form) + 2:
            raise InputError(f"state: {len(entry)} entries for a client; accepted: what state_dict() returned")
        client, *figures, times = entry
        for kind, figure in zip(form, figures, strict=True):
            row = figure if kind == "a" else [figure]
            if not isinstance(row, list | tuple) or not all(map(_is_finite, row)):
                raise wrong
            if kind == "a" and len(row) != num_classes:
                raise InputError(f"state: {what}{len(row)} classes; accepted: {num_classes}")
        known = isinstance(client, str | int) and not isinstance(client, bool) and client not in found
        counted = isinstance(times, int) and not isinstance(times, bool) and 1 <= times <= 2**53
        if not known or not counted or not figures[0] > 0:
            raise wrong
        found[client] = [*figures, times]
    return found


def _is_finite(value: Any) -> bool:
    """Whether it is a number, and one that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def claimed_shares(reports: np.ndarray, epsilon: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Label distributions (K, C) that reports claim, and the total variation (K,) that noise may have moved them by."""
    counts = np.maximum(np.asarray(reports, dtype=np.float64), 0.0)
    totals = counts.sum(axis=1, keepdims=True)
    classes = counts.shape[1]
    shares = np.where(totals > 0, counts / np.where(totals > 0, totals, 1.0), 1.0 / classes)
    if epsilon is None:
        return shares, np.zeros(len(counts))
    return shares, np.minimum(classes / (2 * epsilon * np.maximum(totals[:, 0], 1.0)), 1.0)


def _deviation(values: np.ndarray, middle: float) -> float:
    """Spread of the values below the middle, where liars are not."""
    return max(1.4826 * float(np.median(middle - values[values <= middle])), LEAST_DEVIATION)
