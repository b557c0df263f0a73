"""What a run's server believed beside what was true, and what it made of each client: for runs that have such figures.

The share of liars among the chosen is that of all picks up to a round: single cohorts are too small to show a share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fedentopt.audit.ledger import CONSIDERABLE, FEWEST, LEAST_GAP, LEAST_GAP_UNRELATED, SUSPICIOUS
from fedentopt.errors import InputError
from fedentopt.report.figures import thin
from fedentopt.report.grouping import Method
from fedentopt.results.clients import Verdicts, verdicts
from fedentopt.results.reading import RunResult
from fedentopt.results.records import ClientRecord
from fedentopt.results.rounds import Floats
from fedentopt.results.statistics import Spread
from fedentopt.settings import amount


@dataclass(frozen=True)
class Belief:
    """A row of the table: a method over its finished seeds (over all of them where none is finished)."""

    verdicts: Verdicts | None  # of all seeds together; None where no audit ran
    liars_chosen: Spread  # per cent of all picks
    liars: Spread  # per cent of all clients
    auc: Spread  # in the last round that knows it
    estimate_error: Spread  # likewise
    entropy: Spread  # mean over the rounds
    believed: Spread


def has_beliefs(runs: Iterable[RunResult]) -> bool:
    """Whether the server of some of these runs had reason to doubt reports."""
    return any(bool(np.isfinite(run.rounds.believed_entropy).any()) for run in runs)


def belief(method: Method) -> Belief | None:
    """Figures of one method; None where it has none."""
    runs = method.finished or method.runs
    if not has_beliefs(runs):
        return None

    def spread(value: Callable[[RunResult], float]) -> Spread:
        return Spread.of(map(value, runs))

    return Belief(
        verdicts=verdicts(client for run in runs for client in run.clients or ()),
        liars_chosen=spread(lambda run: _last(liars_among_chosen(run))),
        liars=spread(liars_among_all),
        auc=spread(lambda run: _last(run.rounds.suspicion_auc)),
        estimate_error=spread(lambda run: _last(run.rounds.estimate_error)),
        entropy=spread(lambda run: _mean(run.rounds.entropy)),
        believed=spread(lambda run: _mean(run.rounds.believed_entropy)),
    )


def liars_among_chosen(run: RunResult) -> Floats:
    """Per cent of all picks up to each round that were liars; NaN where that is not known."""
    rounds = run.rounds
    # An algorithm may send some of the chosen away after training: those who trained were chosen too.
    chosen = np.array([max(len(c), len(t)) for c, t in zip(rounds.clients, rounds.trained, strict=True)], dtype=float)
    known = np.isfinite(rounds.liars_chosen) & (chosen > 0)
    lying, all_ = (np.cumsum(np.where(known, values, 0.0)) for values in (rounds.liars_chosen, chosen))
    return np.where(known, 100 * lying / np.maximum(all_, 1.0), np.nan)


def liars_among_all(run: RunResult) -> float:
    """Per cent of all clients that lie; NaN where nobody does."""
    clients = len(run.labels.clients)
    try:
        number = amount(str(run.config.get("liars", "0")), clients, "liars")
    except InputError:  # more than 100 %, which earlier versions took where it came to no more than all once floored
        number = clients
    return 100 * number / clients if number else math.nan


def threshold(clients: Sequence[ClientRecord]) -> float | None:
    """The distance below which nobody is suspected for it; None where nobody can be at all.

    Suspicion is the distance less the usual one, in units of its spread: two clients tell both.
    """
    points = sorted((c.suspicion, c.distance) for c in clients if c.suspicion is not None and c.distance is not None)
    if len(points) < FEWEST or points[-1][0] - points[0][0] < 1e-9:
        return None
    (low, near), (high, far) = points[0], points[-1]
    unit = (far - near) / (high - low)
    usual = near - unit * low
    return min(usual + max(SUSPICIOUS * unit, LEAST_GAP), max(usual + LEAST_GAP_UNRELATED, CONSIDERABLE))


def drawn(clients: Sequence[ClientRecord], most: int) -> list[ClientRecord]:
    """At most so many clients, evenly spaced, and as many again of those that are suspected."""
    kept = {client.client for client in thin(clients, most)}
    kept |= {client.client for client in thin([client for client in clients if client.suspected], most)}
    return [client for client in clients if client.client in kept]


def _last(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else math.nan


def _mean(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else math.nan
