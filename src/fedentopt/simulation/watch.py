"""What the server of a simulated run believes about its clients' labels, beside what only the simulation knows.

The audit, where a run has one, the figures of `RoundRecord` that tell how well it does (who lies, how far estimates are
from the truth, how well suspicion tells liars from others, and how well it did so after a client's first and third
observation), and all of it client by client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from fedentopt.audit import Audit, area_under_curve
from fedentopt.results.records import ClientRecord, RoundRecord
from fedentopt.selection import ClientId, Cohort, Observation, Selector
from fedentopt.selection.heads import change_of
from fedentopt.simulation.config import RunConfig

MARKS = {1: "first_auc", 3: "third_auc"}
"""Observations of a client after which its distance is kept, and the figure that is made of them."""


class Watch:
    """`audit` is None where reports are believed as they are."""

    def __init__(
        self, config: RunConfig, counts: np.ndarray, reports: np.ndarray, liars: tuple[int, ...], selector: Selector
    ) -> None:
        self._config, self._selector, self._liars = config, selector, frozenset(liars)
        self._shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        self._sizes, self._reported_sizes = counts.sum(axis=1), np.maximum(reports, 0).sum(axis=1)
        self.infers = bool(getattr(selector, "labels_from_heads", False))
        self._errors: dict[int, float] = {}
        self._marked: dict[int, dict[int, float]] = {number: {} for number in MARKS}
        self.audit: Audit | None = None
        if config.audit != "off" or config.size_cap is not None:
            self.audit = Audit(counts.shape[1], config.audit, epsilon=config.epsilon, size_cap=config.size_cap)
            for client, report in enumerate(reports):
                self.audit.report(client, report)

    @property
    def reads_heads(self) -> bool:
        """Whether last layers are looked at, beside those that the selector asks for."""
        return self._config.audit != "off"

    @property
    def estimates(self) -> bool:
        """Whether the change of last layers is taken for labels: by an audit, or by a selector that infers them."""
        return self.infers or self.reads_heads

    @property
    def doubts_reports(self) -> bool:
        """Whether some client lies, reports are audited, or labels are inferred without any."""
        return bool(self._liars) or self.estimates

    def believed(self, clients: Iterable[int]) -> np.ndarray | None:
        """Label counts that the selector is to choose by; None where those reported stand."""
        if self.audit is None:
            return None
        return np.stack([self.audit.believed(client) for client in clients])

    def available(self) -> list[int] | None:
        """Everybody but those in quarantine; None where nobody is. Where too few are left for a cohort, those least
        suspected fill it."""
        if self.audit is None or self.audit.policy != "quarantine":
            return None
        suspects = self.audit.suspects()
        if not suspects:
            return None
        free = [client for client in range(self._config.clients) if client not in suspects]
        missing = max(self._config.cohort_size - len(free), 0)
        least = sorted((suspicion.score, client) for client, suspicion in suspects.items())[:missing]
        return sorted(free + [cast(int, client) for _, client in least])

    def observe(self, observations: Mapping[int, Observation]) -> list[int]:
        """Look at last layers; gives the clients of whom something else is believed now."""
        if self.audit is None or not self.reads_heads:
            return []
        changes: dict[ClientId, Any] = {client: change_of(seen) for client, seen in observations.items()}
        self.audit.observe(changes, untrained=any(seen.untrained for seen in observations.values()))
        for client in observations:
            marked = self._marked.get(self.audit.times_seen(client))
            if marked is not None:
                marked[client] = self.audit.distance(client)
        if self.audit.policy != "replace":
            return []
        # Whose recalls on the server's images belie a report depends on everybody's.
        return self._seen() if self._config.server_images else list(observations)

    def learnt(self, clients: Iterable[int]) -> None:
        """Renew the errors of these clients' estimates, after the selector too has been told."""
        if not self.estimates:
            return
        found = {client: estimate for client in clients if (estimate := self._estimate(client)) is not None}
        if found:
            apart = np.abs(np.array(list(found.values())) - self._shares[list(found)])
            self._errors.update(zip(found, (apart.sum(axis=1) / 2).tolist(), strict=True))

    def knowledge(self, cohort: Cohort, selected: tuple[int, ...]) -> dict[str, float | None]:
        """What the server knew when it chose this cohort; nothing where there is no reason to doubt reports."""
        if not self.doubts_reports:
            return {}
        errors = self._errors
        # Added up exactly: a run that was stopped and goes on has the clients in another order.
        known: dict[str, float | None] = {
            "believed_entropy": float(cohort.entropy),
            "estimate_error": math.fsum(errors.values()) / len(errors) if errors else None,
        }
        if self._liars:
            known["liars_chosen"] = float(len(self._liars.intersection(selected)))
        if self.audit is not None and self.reads_heads:
            suspects = self.audit.suspects()
            known["suspects"] = float(len(suspects))
            if self._liars:
                known["honest_suspects"] = float(len(suspects.keys() - self._liars))
                known["suspicion_auc"] = self._auc(self.audit.suspicions())
                known |= {MARKS[number]: self._auc(marked) for number, marked in self._marked.items()}
        return known

    def client_records(self, records: Sequence[RoundRecord]) -> tuple[ClientRecord, ...] | None:
        """A record per client after these rounds; None where nobody has reason to doubt reports."""
        if not self.doubts_reports:
            return None
        chosen = np.bincount([k for record in records for k in record.clients], minlength=self._config.clients)
        audit = self.audit if self.reads_heads else None
        entries = {} if audit is None else audit.entries()
        suspects = {} if audit is None else audit.suspects()
        watcher = self._selector if self.infers else audit
        made = []
        for client in range(self._config.clients):
            entry, estimate = entries.get(client), self._estimate(client)
            apart = None if estimate is None else np.abs(estimate - self._shares[client])
            made.append(
                ClientRecord(
                    client=client,
                    liar=client in self._liars,
                    chosen=int(chosen[client]),
                    observed=None if watcher is None else watcher.times_seen(client),
                    suspicion=None if entry is None else entry.score,
                    suspected=None if audit is None else client in suspects,
                    distance=None if entry is None else entry.distance,
                    agreement=None if entry is None else entry.agreement,
                    estimate_error=None if apart is None else float(apart.sum() / 2),
                    # Where labels are inferred nobody reports.
                    reported_size=None if self.infers else float(self._reported_sizes[client]),
                    true_size=float(self._sizes[client]),
                )
            )
        return tuple(made)

    def _auc(self, scores: Mapping[Any, float]) -> float | None:
        lying = [score for client, score in scores.items() if client in self._liars]
        return area_under_curve(lying, [score for client, score in scores.items() if client not in self._liars])

    def _estimate(self, client: int) -> np.ndarray | None:
        if self.infers:
            return self._selector.estimate(client)
        return None if self.audit is None else self.audit.shares(client)

    def state_dict(self) -> dict[str, Any]:
        """JSON-serialisable, `arrays` apart; empty without an audit."""
        if self.audit is None:
            return {}
        marked = {str(number): sorted(kept.items()) for number, kept in self._marked.items()}
        return {
            "audit": self.audit.state_dict(shares=False),
            "marked": {n: [list(pair) for pair in p] for n, p in marked.items()},
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """What the audit observed of clients, class by class."""
        return {} if self.audit is None else self.audit.arrays()

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[int]:
        """Go on where a watch stood, from `state_dict()` and `arrays()`, which are in the states of earlier versions;
        gives the clients of whom something else is believed than they reported."""
        if self.audit is None:
            return []
        self.audit.load_state_dict(state["audit"], arrays)
        for number, kept in self._marked.items():
            kept.clear()
            kept.update(state.get("marked", {}).get(str(number), ()))
        return self._seen() if self.audit.policy == "replace" else []

    def _seen(self) -> list[int]:
        return [k for k in range(self._config.clients) if self.audit is not None and self.audit.times_seen(k)]
