"""The audit: what clients reported about their labels beside what their training shows, and what to believe.

A client's distance is the total variation between its estimate and its report, less what the noise of epsilon explains.
Its suspicion is how far that lies above the median of all observed clients, in units of their spread (1.4826 times the
median absolute deviation, which a third of liars does not move far). A client is suspected when its suspicion is high
and the gap is beyond what its own estimate may be off by.

Not audited: the number of samples, which is also a client's weight in the average. Only `size_cap` bounds it. Who sends
a last layer made to fit its claim, or trains on made-up data, passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fedentopt.audit.estimate import LabelEstimate, label_estimates
from fedentopt.errors import InputError

ClientId: TypeAlias = str | int
POLICIES = ("off", "warn", "replace", "quarantine")
"""off: reports are believed and nothing is watched. warn: suspects are named. replace: once a client has trained, its
estimate takes the place of its report. quarantine: suspects are not chosen."""
# Set by hand on recorded rounds of LeNet-5, one seed per split, so that few honest clients are suspected.
SUSPICIOUS = 2.5
LEAST_GAP = 0.15
FIRST_DOUBT = 0.5
"""A distance must exceed what an estimate may be off by, after a single observation by half as much again."""
LEAST_DEVIATION = 0.03
FEWEST = 5
"""Observed clients below which nobody is suspected: there is no median to speak of."""


@dataclass(frozen=True)
class Change:
    """What a client's training shows: the change of its last layer per unit of travel (see `head_change`), and the
    number of samples it trained on."""

    change: np.ndarray
    samples: float


@dataclass(frozen=True)
class Suspicion:
    """Why a client is suspected."""

    score: float
    distance: float
    usual: float
    reported: np.ndarray
    estimated: np.ndarray

    def __str__(self) -> str:
        gap = self.estimated - self.reported
        most, least = int(gap.argmax()), int(gap.argmin())
        return (
            f"report and training differ by {self.distance:.0%} of the samples, others by {self.usual:.0%}; "
            f"class {least}: {self.reported[least]:.0%} reported, {self.estimated[least]:.0%} seen; "
            f"class {most}: {self.reported[most]:.0%} reported, {self.estimated[most]:.0%} seen"
        )


@dataclass
class _Seen:
    """Sums over the observations of a client, weighted by how fresh the model was."""

    weight: float
    shares: np.ndarray
    spread: float
    level: float
    samples: float
    times: int


def area_under_curve(positive: Sequence[float], negative: Sequence[float]) -> float | None:
    """The probability that one of the first scores above one of the second, ties counting half; None without both."""
    if not positive or not negative:
        return None
    above = np.asarray(positive)[:, None] - np.asarray(negative)[None, :]
    return float(np.mean((above > 0) + 0.5 * (above == 0)))


class Audit:
    """Watches what clients report and what their training shows.

    `epsilon` is that of the noise in the reports, None for none. `size_cap`: reported sizes count for at most so many
    times the median report; None for no limit.
    """

    def __init__(
        self, num_classes: int, policy: str = "warn", *, epsilon: float | None = None, size_cap: float | None = None
    ) -> None:
        if policy not in POLICIES:
            raise InputError(f"audit: {policy!r} is unknown; accepted: {', '.join(POLICIES)}")
        if epsilon is not None and not epsilon > 0:
            raise InputError(f"epsilon: {epsilon!r} is out of range; accepted: above 0, or none")
        if size_cap is not None and not size_cap >= 1:
            raise InputError(f"size_cap: {size_cap!r} is out of range; accepted: at least 1, or none")
        self.num_classes, self.policy, self.epsilon, self.size_cap = num_classes, policy, epsilon, size_cap
        self._reports: dict[ClientId, np.ndarray] = {}
        self._seen: dict[ClientId, _Seen] = {}

    def report(self, client: ClientId, counts: Any) -> None:
        """Note what a client says about its labels; a later report takes the place of an earlier one."""
        row = np.asarray(counts, dtype=np.float64)
        if row.shape != (self.num_classes,) or not np.isfinite(row).all():
            raise InputError(
                f"counts: of client {client!r}: shape {row.shape}; accepted: ({self.num_classes},), finite"
            )
        self._reports[client] = row

    def forget(self, clients: Iterable[ClientId]) -> None:
        """Forget clients that have left."""
        for client in clients:
            self._reports.pop(client, None)
            self._seen.pop(client, None)

    def observe(self, changes: Mapping[ClientId, Change], *, untrained: bool = False) -> None:
        """Learn from clients that trained from one model; `untrained`: nobody had trained that before."""
        if not changes:
            return
        for client, change in changes.items():
            if np.shape(change.change) != (self.num_classes,):
                raise InputError(
                    f"head: of client {client!r} has {np.size(change.change)} classes; accepted: {self.num_classes}"
                )
        found = label_estimates(np.stack([change.change for change in changes.values()]), untrained=untrained)
        fresh = max(float(np.median([estimate.level for estimate in found])), 0.05) ** 2
        for (client, change), estimate in zip(changes.items(), found, strict=True):
            known = self._seen.get(client)
            if known is None:
                known = self._seen[client] = _Seen(0.0, np.zeros(self.num_classes), 0.0, 0.0, 0.0, 0)
            known.weight += fresh
            known.shares = known.shares + fresh * estimate.shares
            known.spread += fresh * estimate.spread
            known.level += fresh * estimate.level
            known.samples, known.times = float(change.samples), known.times + 1

    def times_seen(self, client: ClientId) -> int:
        """How often a client has been observed."""
        return self._seen[client].times if client in self._seen else 0

    def estimate(self, client: ClientId) -> LabelEstimate | None:
        """What all observations of a client say together; None before the first."""
        known = self._seen.get(client)
        if known is None:
            return None
        return LabelEstimate(known.shares / known.weight, known.spread / known.weight, known.level / known.weight)

    def suspicions(self) -> dict[ClientId, float]:
        """Suspicion of every client that reported and has been observed."""
        return {client: entry.score for client, entry in self.entries().items()}

    def suspects(self) -> dict[ClientId, Suspicion]:
        """The clients suspected at present, and why."""
        entries = self.entries()
        if len(entries) < FEWEST:
            return {}
        return {
            client: entry
            for client, entry in entries.items()
            if entry.score > SUSPICIOUS
            and entry.distance - entry.usual > LEAST_GAP
            and entry.distance
            > (1 + FIRST_DOUBT / self._seen[client].times) * self._seen[client].spread / self._seen[client].weight
        }

    def believed(self, client: ClientId) -> np.ndarray:
        """Label counts to select by: the report, or the estimate where the policy puts it in its place."""
        report = np.maximum(self._reports.get(client, np.zeros(self.num_classes)), 0.0)
        limit = self._limit()
        known = self._seen.get(client)
        if self.policy == "replace" and known is not None:
            return np.asarray(known.shares / known.weight * min(known.samples, limit))
        total = report.sum()
        return np.asarray(report * (limit / total) if total > limit else report)

    def _limit(self) -> float:
        if self.size_cap is None or not self._reports:
            return np.inf
        return self.size_cap * float(np.median([max(row.clip(min=0).sum(), 1.0) for row in self._reports.values()]))

    def entries(self) -> dict[ClientId, Suspicion]:
        """How the report of every client that reported and has been observed fits, suspected or not."""
        found: dict[ClientId, tuple[float, np.ndarray, np.ndarray]] = {}
        for client, known in self._seen.items():
            if client not in self._reports:
                continue
            report = np.maximum(self._reports[client], 0.0)
            total = float(report.sum())
            claimed = report / total if total > 0 else np.full(self.num_classes, 1.0 / self.num_classes)
            estimated = known.shares / known.weight
            noise = 0.0 if self.epsilon is None else self.num_classes / (2 * self.epsilon * max(total, 1.0))
            found[client] = (float(np.abs(estimated - claimed).sum() / 2) - min(noise, 1.0), claimed, estimated)
        if not found:
            return {}
        distances = np.array([distance for distance, _, _ in found.values()])
        usual = float(np.median(distances))
        deviation = max(1.4826 * float(np.median(np.abs(distances - usual))), LEAST_DEVIATION)
        return {
            client: Suspicion((distance - usual) / deviation, distance, usual, claimed, estimated)
            for client, (distance, claimed, estimated) in found.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """What was observed, JSON-serialisable; reports are the caller's to keep."""
        return {
            "policy": self.policy,
            "seen": [
                [client, known.weight, known.shares.tolist(), known.spread, known.level, known.samples, known.times]
                for client, known in self._seen.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the audit that made `state` stood."""
        if not isinstance(state, Mapping) or set(state) != {"policy", "seen"} or state["policy"] != self.policy:
            raise InputError(
                f"state: of another audit; accepted: what state_dict() returned, with policy {self.policy}"
            )
        seen = {}
        for client, weight, shares, spread, level, samples, times in state["seen"]:
            if len(shares) != self.num_classes:
                raise InputError(f"state: {len(shares)} classes; accepted: {self.num_classes}")
            seen[client] = _Seen(weight, np.array(shares), spread, level, samples, times)
        self._seen = seen
