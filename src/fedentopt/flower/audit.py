"""The audit inside a federation: label reports beside what the replies of training show, and what follows from it.

Nothing is asked of clients for it: the replies bring the last layer anyway (`heads`), and `fedentopt.audit` says what
its change tells. A suspicion is logged once per report, with its reason, under the client's name and node: near the
threshold it may come and go from round to round.

warn        suspects are named
replace     once a client has trained, what its training shows takes the place of its report (`roster`)
quarantine  suspects are not picked; where too few others are there, the least suspected fill the cohort. They do not
            train and so cannot announce new counts; they are asked for them 1, 2, 4, ... rounds after they were first
            suspected, and a report that fits lets them back.

How much noise explains a gap goes by the median epsilon of all reports: a client that claims little privacy budget
would otherwise excuse itself.

Not audited: the number of samples, which is also the weight in FedAvg's average. `size_cap` and `weight_cap` bound it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from fedentopt.audit import POLICIES, Audit, Suspicion
from fedentopt.errors import InputError
from fedentopt.flower.report import ClientId, Report, id_order
from fedentopt.selection import Observation, Selector
from fedentopt.selection.heads import change_of

log = logging.getLogger("flwr")


class Watch:
    """Reports, observations and suspects of a federation. Made by `watch_for`."""

    def __init__(self, num_classes: int, policy: str) -> None:
        self.policy = policy
        self._audit = Audit(num_classes, policy)
        self._reports: dict[ClientId, Report] = {}
        self._since: dict[ClientId, int] = {}  # round from which on each of today's suspects is one
        self._named: set[ClientId] = set()  # those whose present report has been called suspect in the log
        self._renewed: set[ClientId] = set()  # those of them that have told new counts since
        self._found: dict[ClientId, Suspicion] | None = None

    # --- what is learnt
    def take(self, reports: Iterable[Report]) -> None:
        """Clients have told their counts, or new ones."""
        told = list(reports)
        self._reports.update({report.client: report for report in told})
        renewed = self._named & {report.client for report in told}
        self._named -= renewed
        self._renewed |= renewed
        usual = float(np.median([_epsilon(report) for report in self._reports.values()])) if self._reports else np.inf
        epsilon = usual if np.isfinite(usual) else None
        if epsilon != self._audit.epsilon:  # all distances are measured anew
            self._audit.epsilon, told = epsilon, list(self._reports.values())
        for report in told:
            self._audit.report(report.client, report.counts)
        self._found = None

    def observe(self, observations: Mapping[ClientId, Observation]) -> dict[ClientId, np.ndarray]:
        """Clients have trained; what is to be believed of them now, where the policy has a say in that."""
        changes = {client: change_of(seen) for client, seen in observations.items()}
        self._audit.observe(changes, untrained=any(seen.untrained for seen in observations.values()))
        self._found = None
        return self.beliefs(changes)

    def forget(self, clients: Iterable[ClientId]) -> None:
        """Clients are gone."""
        gone = list(clients)
        self._audit.forget(gone)
        for client in gone:
            self._reports.pop(client, None)
            self._since.pop(client, None)
        self._named.difference_update(gone)
        self._renewed.difference_update(gone)
        self._found = None

    def beliefs(self, clients: Iterable[ClientId]) -> dict[ClientId, np.ndarray]:
        """Label counts to believe instead of reports, of those of these clients that have trained."""
        if self.policy != "replace":
            return {}
        return {client: self._audit.believed(client) for client in clients if self._audit.times_seen(client)}

    # --- who is suspected
    def suspects(self) -> dict[ClientId, Suspicion]:
        """The clients suspected at present, and why."""
        if self._found is None:
            known = cast("dict[ClientId, Suspicion]", self._audit.suspects())  # no recalls: no image is on the server
            self._found = {client: known[client] for client in sorted(known, key=id_order)}
        return dict(self._found)

    def tell(self, server_round: int, node_of: Callable[[ClientId], int]) -> None:
        """Log who is newly suspected, and who no longer is since its new report fits."""
        now = self.suspects()
        for client, why in now.items():
            if client not in self._named:
                log.warning(
                    "round %d: client %s (node %d) is suspected: %s", server_round, client, node_of(client), why
                )
        for client in sorted(self._renewed - now.keys(), key=id_order):
            log.info("round %d: client %s is no longer suspected: its new report fits", server_round, client)
        self._renewed.clear()
        self._named |= now.keys()
        self._since = {client: self._since.get(client, server_round) for client in now}

    def admitted(self, available: Sequence[ClientId], least: int) -> list[ClientId]:
        """Those that may be picked, in their order: all, or those out of quarantine and as many more as are needed."""
        suspects = self.suspects() if self.policy == "quarantine" else {}
        out = [client for client in available if client in suspects]
        missing = max(least - (len(available) - len(out)), 0)
        early = sorted(out, key=lambda client: (suspects[client].score, id_order(client)))[:missing]
        kept_out = set(out) - set(early)
        return [client for client in available if client not in kept_out]

    def due(self, server_round: int) -> list[ClientId]:
        """Those in quarantine that are to be asked again for their counts in this round."""
        if self.policy != "quarantine":
            return []
        waited = {client: server_round - since for client, since in self._since.items()}
        return [client for client, rounds in waited.items() if rounds > 0 and rounds & (rounds - 1) == 0]

    # --- state
    def state_dict(self) -> dict[str, Any]:
        """What was observed, but for `arrays`; the reports are kept with the register. JSON-serialisable."""
        return {
            "policy": self.policy,
            "audit": self._audit.state_dict(shares=False),
            "since": [[client, since] for client, since in self._since.items()],
            "named": sorted(self._named, key=id_order),
        }

    def arrays(self) -> dict[str, np.ndarray]:
        """What was observed of clients, class by class."""
        return self._audit.arrays()

    def load_state_dict(self, state: Mapping[str, Any] | None, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        """Go on from `state_dict()` and `arrays()`, the reports already taken; without a state, or from another policy,
        from nothing. States of earlier versions hold the arrays."""
        if state is None or state["policy"] != self.policy:
            return
        self._audit.load_state_dict(state["audit"], arrays)
        self._since, self._named, self._renewed = dict(state["since"]), set(state["named"]), set()
        self._found = None


def watch_for(policy: str, num_classes: int, selector: Selector) -> Watch | None:
    """The watch that a strategy with this selector keeps; None for "off". What would change nothing is refused."""
    if policy not in POLICIES:
        raise InputError(f"audit: {policy!r} is unknown; accepted: {', '.join(POLICIES)}")
    if policy == "off":
        return None
    name = getattr(selector, "name", type(selector).__name__)
    reads = getattr(selector, "reads_label_counts", True)
    if getattr(selector, "labels_from_heads", False) and not reads:
        raise InputError(f"audit: {policy} is about label reports, and {name!r} takes none; accepted: off")
    if policy == "replace" and (not reads or getattr(selector, "sizes_only", False)):
        raise InputError(
            f"audit: replace changes nothing, since {name!r} does not select by label counts; accepted: off, warn, "
            "quarantine, or a selector that reads label counts"
        )
    return Watch(num_classes, policy)


def _epsilon(report: Report) -> float:
    """By which the noise of a report has the scale 1 / epsilon; infinite without noise."""
    return float("inf") if report.epsilon is None else report.epsilon / (report.samples_per_person or 1)
