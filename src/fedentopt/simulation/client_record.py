"""What the server of a run knows of each client at some moment, beside what only the simulation knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedentopt.results.records import ClientRecord, RoundRecord

if TYPE_CHECKING:
    from fedentopt.simulation.planning import RunPlanner


def doubts_reports(planner: RunPlanner) -> bool:
    """Whether some client lies, reports are audited, or labels are inferred without any."""
    return bool(planner.liars) or planner.config.audit != "off" or _infers(planner)


def client_records(planner: RunPlanner, records: Sequence[RoundRecord]) -> tuple[ClientRecord, ...] | None:
    """A record per client after these rounds; None for runs in which nobody has reason to doubt reports."""
    if not doubts_reports(planner):
        return None
    config, selector, infers = planner.config, planner.selector, _infers(planner)
    audit = planner.audit if config.audit != "off" else None
    chosen = np.bincount([client for record in records for client in record.clients], minlength=config.clients)
    liars = frozenset(planner.liars)
    true_sizes = planner.counts.sum(axis=1)
    sizes = planner.read_counts.sum(axis=1)
    shares = planner.counts / np.maximum(true_sizes, 1)[:, None]
    entries = {} if audit is None else audit.entries()
    suspects = {} if audit is None else audit.suspects()
    made = []
    for client in range(config.clients):
        entry, estimate, observed = entries.get(client), None, None
        if infers:
            estimate, observed = selector.estimate(client), selector.times_seen(client)
        elif audit is not None:
            found, observed = audit.estimate(client), audit.times_seen(client)
            estimate = None if found is None else found.shares
        error = None if estimate is None else float(np.abs(estimate - shares[client]).sum() / 2)
        made.append(
            ClientRecord(
                client=client,
                liar=client in liars,
                chosen=int(chosen[client]),
                observed=observed,
                suspicion=None if entry is None else entry.score,
                suspected=None if audit is None else client in suspects,
                distance=None if entry is None else entry.distance,
                agreement=None if entry is None else entry.agreement,
                estimate_error=error,
                # Where labels are inferred nobody reports.
                reported_size=None if infers else float(sizes[client]),
                true_size=float(true_sizes[client]),
            )
        )
    return tuple(made)


def _infers(planner: RunPlanner) -> bool:
    return bool(getattr(planner.selector, "labels_from_heads", False))
