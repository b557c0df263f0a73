"""The audit: what clients reported about their labels beside what their training shows, and what to believe.

A client's distance is the total variation between its estimate and its report, less what the noise of epsilon explains.
Its suspicion is how far that lies above the median of all observed clients, in units of their spread (1.4826 times the
median absolute deviation, which a third of liars does not move far). Its agreement is the cosine between estimate and
report, both less the even distribution; 0 for a report that is even. Estimates often exaggerate, so amounts tell less
than which classes there are. A client is suspected

- when its suspicion is high, the distance beyond what its own estimate may be off by, and the agreement not high, or
- when it was observed at least twice, its distance is considerable and above the median, and there is hardly any
  agreement.

Not audited: the number of samples, which is also a client's weight in the average; `size_cap` bounds what a report
counts for, not that weight. Who claims the classes it has in somewhat other amounts passes, also with some of every
class beside them, and so does who trains on made-up data. A last layer made to fit its claim passes until it has been
seen often, unless the server has images of its own to look at clients' models with (`recall`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from fedentopt.audit.estimate import FURTHEST, Estimates, LabelEstimate, can_be_read, estimate_tables, medians
from fedentopt.audit.recall import Recall, Recalls, RecallSuspicion, plain, read_sums, with_sums
from fedentopt.errors import InputError
from fedentopt.labels import LARGEST_COUNT

ClientId: TypeAlias = str | int
POLICIES = ("off", "warn", "replace", "quarantine")
"""off: reports are believed and nothing is watched. warn: suspects are named. replace: once a client has trained, its
estimate takes the place of its report. quarantine: suspects are not chosen."""
# Set by hand on recorded rounds of LeNet-5, one or two seeds per split, so that few honest clients are suspected.
SUSPICIOUS = 2.5
AGREES = 0.7
UNRELATED = 0.3
CONSIDERABLE, LEAST_GAP_UNRELATED = 0.2, 0.1
LEAST_GAP = 0.15
FIRST_DOUBT = 0.5
"""A distance must exceed what an estimate may be off by, after a single observation by half as much again."""
LEAST_DEVIATION = 0.03
EVEN = 0.05
"""A report nearer to the even distribution than this says nothing about which classes there are."""
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
    agreement: float = 0.0

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


def _agreement(estimated: np.ndarray, claimed: np.ndarray) -> float:
    seen, said = estimated - 1 / len(estimated), claimed - 1 / len(claimed)
    if np.abs(said).sum() / 2 < EVEN:
        return 0.0
    return float(seen @ said / np.sqrt(max(float(seen @ seen) * float(said @ said), 1e-18)))


def change_table(changes: Mapping[ClientId, Change], num_classes: int) -> np.ndarray:
    """Changes client by client, (K, C); what does not fit, is not finite or absurdly far is refused."""
    for client, change in changes.items():
        if np.shape(change.change) != (num_classes,):
            raise _no_change(client, change, num_classes)
        if not 0 <= change.samples < np.inf:
            raise InputError(f"samples: {change.samples!r} of client {client!r}; accepted: finite, from 0 on")
    table = np.array([change.change for change in changes.values()])
    readable = can_be_read(table)
    if not readable.all():
        client = list(changes)[int(readable.argmin())]
        raise _no_change(client, changes[client], num_classes)
    return table


def _no_change(client: ClientId, change: Change, num_classes: int) -> InputError:
    return InputError(
        f"head: of client {client!r}: shape {np.shape(change.change)}; accepted: ({num_classes},), "
        f"one finite number per class, at most {FURTHEST:g} in size"
    )


class Audit:
    """Watches what clients report and what their training shows.

    `epsilon` is that of the noise in the reports, None for none. `size_cap`: reported sizes count for at most so many
    times the median report; None for no limit.
    """

    def __init__(
        self, num_classes: int, policy: str = "warn", *, epsilon: float | None = None, size_cap: float | None = None
    ) -> None:
        if isinstance(num_classes, bool) or not isinstance(num_classes, int | np.integer) or num_classes < 1:
            raise InputError(f"num_classes: {num_classes!r} is out of range; accepted: whole numbers from 1")
        if policy not in POLICIES:
            raise InputError(f"audit: {policy!r} is unknown; accepted: {', '.join(POLICIES)}")
        if epsilon is not None and not epsilon > 0:
            raise InputError(f"epsilon: {epsilon!r} is out of range; accepted: above 0, or none")
        if size_cap is not None and not size_cap >= 1:
            raise InputError(f"size_cap: {size_cap!r} is out of range; accepted: at least 1, or none")
        self.num_classes, self.policy, self.epsilon, self.size_cap = num_classes, policy, epsilon, size_cap
        self._reports: dict[ClientId, np.ndarray] = {}
        self._seen: dict[ClientId, _Seen] = {}
        self._distances: dict[ClientId, float] = {}  # of those that reported and were seen
        self._agreements: dict[ClientId, float] = {}
        self._largest: float | None = None  # the size that a report counts for at most, None until asked for
        self._recalls = Recalls(num_classes)
        self._belied: dict[ClientId, RecallSuspicion] | None = None  # by recalls, as long as nothing changes

    def report(self, client: ClientId, counts: Any) -> None:
        """Note what a client says about its labels; a later report takes the place of an earlier one."""
        row = np.asarray(counts, dtype=np.float64)
        if row.shape != (self.num_classes,) or not (np.abs(row) <= LARGEST_COUNT).all():
            raise InputError(
                f"counts: of client {client!r}: shape {row.shape}; accepted: ({self.num_classes},), finite, at most "
                "2**53 in size"
            )
        self._reports[client] = row
        self._largest = None
        self._measure(client)
        self._belied = None

    def forget(self, clients: Iterable[ClientId]) -> None:
        """Forget clients that have left."""
        clients = list(clients)
        for client in clients:
            for kept in (self._reports, self._seen, self._distances, self._agreements):
                kept.pop(client, None)
        self._recalls.forget(clients)
        self._largest = self._belied = None

    def observe(
        self, changes: Mapping[ClientId, Change], *, untrained: bool = False, estimates: Estimates | None = None
    ) -> None:
        """Learn from clients that trained from one model; `untrained`: nobody had trained that before. `estimates` are
        those of their `change_table`, where they are known already."""
        if not changes:
            return
        if estimates is None:
            estimates = estimate_tables(change_table(changes, self.num_classes), untrained=untrained)
        shares, spreads, levels = estimates
        fresh = max(float(medians(levels[None])[0]), 0.05) ** 2
        weighted = zip(fresh * shares, (fresh * spreads).tolist(), (fresh * levels).tolist(), strict=True)
        for (client, change), (own, spread, level) in zip(changes.items(), weighted, strict=True):
            known = self._seen.get(client)
            if known is None:
                known = self._seen[client] = _Seen(0.0, np.zeros(self.num_classes), 0.0, 0.0, 0.0, 0)
            known.weight += fresh
            known.shares = known.shares + own
            known.spread += spread
            known.level += level
            known.samples, known.times = float(change.samples), known.times + 1
            self._measure(client)

    def observe_recalls(self, recalls: Mapping[ClientId, Recall]) -> None:
        """Learn from how well the models of clients that trained in one round know the server's images."""
        self._recalls.observe(recalls, self._reports)
        self._belied = None

    def times_seen(self, client: ClientId) -> int:
        """How often a client has been observed."""
        known = self._seen.get(client)
        return 0 if known is None else known.times

    def estimate(self, client: ClientId) -> LabelEstimate | None:
        """What all observations of a client say together; None before the first."""
        known = self._seen.get(client)
        if known is None:
            return None
        return LabelEstimate(known.shares / known.weight, known.spread / known.weight, known.level / known.weight)

    def shares(self, client: ClientId) -> np.ndarray | None:
        """The label distribution of that estimate alone."""
        known = self._seen.get(client)
        return None if known is None else known.shares / known.weight

    def distance(self, client: ClientId) -> float:
        """That of a client that reported and has been observed."""
        return self._distances[client]

    def distances(self) -> dict[ClientId, float]:
        """Total variation between report and estimate, less what noise explains, of all that reported and were seen."""
        return dict(self._distances)

    def suspicions(self) -> dict[ClientId, float]:
        """Suspicion of every client that reported and has been observed; what recalls say is added."""
        usual, deviation = self._usual()
        found = {client: (distance - usual) / deviation for client, distance in self._distances.items()}
        for client, score in self.recall_scores().items():
            found[client] = found.get(client, 0.0) + score
        return found

    def recall_scores(self) -> dict[ClientId, float]:
        """What recalls alone say, of clients that reported and whose models the server has tried."""
        return {client: entry.score for client, entry in self._recalls.judge(self._reports, self.epsilon).items()}

    def suspects(self) -> dict[ClientId, Suspicion | RecallSuspicion]:
        """The clients suspected at present, and why."""
        return {**self.belied_by_recalls(), **self._belied_by_heads()}

    def belied_by_recalls(self) -> dict[ClientId, RecallSuspicion]:
        """Those of the suspects whose models do not know what they claim to have."""
        if self._belied is None:
            self._belied = self._recalls.suspects(self._reports, self.epsilon)
        return self._belied

    def _belied_by_heads(self) -> dict[ClientId, Suspicion]:
        if len(self._distances) < FEWEST:
            return {}
        usual, deviation = self._usual()
        gap = max(LEAST_GAP, SUSPICIOUS * deviation)
        return {
            client: self._suspicion(client, usual, deviation)
            for client, distance in self._distances.items()
            if (distance - usual > gap and distance > self._doubt(client) and self._agreements[client] < AGREES)
            or (distance > max(usual + LEAST_GAP_UNRELATED, CONSIDERABLE) and self._unrelated(client))
        }

    def entries(self) -> dict[ClientId, Suspicion]:
        """Every client that reported and has been observed as `suspects` would name it, suspected or not."""
        usual, deviation = self._usual()
        return {client: self._suspicion(client, usual, deviation) for client in self._distances}

    def believed(self, client: ClientId) -> np.ndarray:
        """Label counts to select by: the report, or the estimate where the policy puts it in its place."""
        limit = self._limit()
        known = self._seen.get(client)
        if self.policy == "replace" and known is not None:
            # Recalls that belie a report belie the last layer that came with it: what they say themselves is believed.
            seen_by_recall = self._recalls.shares(client) if client in self.belied_by_recalls() else None
            shares = known.shares / known.weight if seen_by_recall is None else seen_by_recall
            return np.asarray(shares * min(known.samples, limit))
        report = np.maximum(self._reports.get(client, np.zeros(self.num_classes)), 0.0)
        total = report.sum()
        return np.asarray(report * (limit / total) if total > limit else report)

    def _limit(self) -> float:
        if self.size_cap is None or not self._reports:
            return np.inf
        if self._largest is None:
            sizes = [max(row.clip(min=0).sum(), 1.0) for row in self._reports.values()]
            self._largest = self.size_cap * float(np.median(sizes))
        return self._largest

    def _measure(self, client: ClientId) -> None:
        """Renew distance and agreement of a client after a report or an observation."""
        if client in self._reports and client in self._seen:
            claimed, estimated = self._claimed(client), self._estimated(client)
            self._distances[client] = float(np.abs(estimated - claimed).sum()) / 2 - self._noise(client)
            self._agreements[client] = _agreement(estimated, claimed)

    def _noise(self, client: ClientId) -> float:
        """The distance that noise in a report explains: C draws of Laplace(1/epsilon) among the fewest samples that the
        report leaves likely, two standard deviations above their mean."""
        if self.epsilon is None:
            return 0.0
        fewest = float(self._reports[client].sum()) - np.sqrt(2 * self.num_classes) / self.epsilon
        moved = (self.num_classes + 2 * np.sqrt(self.num_classes)) / (2 * self.epsilon)
        return float(min(moved / max(fewest, 1.0), 1.0))

    def _claimed(self, client: ClientId) -> np.ndarray:
        report = np.maximum(self._reports[client], 0.0)
        total = float(report.sum())
        return report / total if total > 0 else np.full(self.num_classes, 1.0 / self.num_classes)

    def _estimated(self, client: ClientId) -> np.ndarray:
        known = self._seen[client]
        return known.shares / known.weight

    def _usual(self) -> tuple[float, float]:
        """Median distance, and the deviation from it that is usual."""
        if not self._distances:
            return 0.0, LEAST_DEVIATION
        distances = np.fromiter(self._distances.values(), dtype=np.float64)
        usual = float(np.median(distances))
        return usual, max(1.4826 * float(np.median(np.abs(distances - usual))), LEAST_DEVIATION)

    def _doubt(self, client: ClientId) -> float:
        """The distance that a client's own estimate may explain."""
        known = self._seen[client]
        return (1 + FIRST_DOUBT / known.times) * known.spread / known.weight

    def _unrelated(self, client: ClientId) -> bool:
        return self._agreements[client] < UNRELATED and self._seen[client].times > 1

    def _suspicion(self, client: ClientId, usual: float, deviation: float) -> Suspicion:
        distance = self._distances[client]
        score = (distance - usual) / deviation
        claimed, estimated = self._claimed(client), self._estimated(client)
        return Suspicion(score, distance, usual, claimed, estimated, self._agreements[client])

    def state_dict(self, *, shares: bool = True) -> dict[str, Any]:
        """What was observed, JSON-serialisable; reports are the caller's to keep. Without `shares`, so are
        what `arrays` gives: numbers per client and class, which as text are many."""
        state: dict[str, Any] = {
            "policy": self.policy,
            "seen": [
                [
                    plain(client),
                    known.weight,
                    known.shares.tolist() if shares else None,
                    known.spread,
                    known.level,
                    known.samples,
                    known.times,
                ]
                for client, known in self._seen.items()
            ],
        }
        return state | ({"recalls": self._recalls.state(sums=shares)} if len(self._recalls) else {})

    def arrays(self) -> dict[str, np.ndarray]:
        """What a state without shares leaves out, in double precision, which going on to the bit takes: `shares`
        (`share_sums`) and `recalls`, each where there are any."""
        found = {"shares": self.share_sums(), "recalls": self._recalls.sums()}
        return {name: sums for name, sums in found.items() if sums.size}

    def share_sums(self) -> np.ndarray:
        """The sums of shares (K, C) that a state without them leaves out, in its order."""
        rows = [known.shares for known in self._seen.values()]
        return np.array(rows) if rows else np.zeros((0, self.num_classes))

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Go on where the audit that made `state` stood; what is no such state is refused, with no change.

        `arrays` are those of a state without shares."""
        known = isinstance(state, Mapping) and set(state) - {"recalls"} == {"policy", "seen"}
        if not known or state["policy"] != self.policy:
            raise InputError(
                f"state: of another audit; accepted: what state_dict() returned, with policy {self.policy}"
            )
        seen = {}
        sums = {name: np.asarray(array, dtype=np.float64) for name, array in (arrays or {}).items()}
        entries = with_sums(state["seen"], sums["shares"], 1) if "shares" in sums else state["seen"]
        kept = read_sums(entries, "nannn", self.num_classes)
        for client, (weight, shares, spread, level, samples, times) in kept.items():
            slack = 1e-6 * weight  # what rounding may have added up to
            shared = min(shares) >= 0 and abs(sum(shares) - weight) <= slack
            if not shared or min(spread, level, samples) < 0 or max(spread, level) > weight + slack:
                raise InputError(f"state: what was seen of client {client!r}; accepted: what state_dict() returned")
            seen[client] = _Seen(weight, np.array(shares), spread, level, samples, times)
        self._recalls.load(state.get("recalls", ()), sums.get("recalls"))
        self._seen, self._distances, self._agreements = seen, {}, {}
        for client in seen:
            self._measure(client)
        self._belied = None
