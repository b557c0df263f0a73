"""KL selection: the clients with the most data first, then whoever holds the rarest class.

Seol, Kim: Performance Enhancement in Federated Learning by Reducing Class Imbalance of Non-IID Data (Sensors
2023), Algorithm 2. Clients are sorted by number of samples, largest first (ties: registered first). The first
one sets v = its counts and m = max(v). The rest are scanned in order: with f the rarest class in v (ties: the
lowest class), a client that holds f joins and uses min(m - v_c, its count) samples of each class c, which are
added to v. The scan starts over with those not yet chosen until M have joined. When nobody left holds the
rarest class, the rarest one that somebody holds takes its place; clients without any sample join last.

There is nothing random in it: with the same clients available it picks the same ones, and the same part of their
data, every round. Noisy counts are rounded, since they bound numbers of samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedentopt.selection.cohort import Cohort
from fedentopt.selection.rows import Rows
from fedentopt.selection.selector import Selector, selector


@selector("kl", label="KL")
class KLSelector(Selector):
    """Seol and Kim's selection. Its cohorts carry `sample_limits`, per client and class."""

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        # While everybody is there: version of the table, size, and what was picked.
        self._kept: tuple[tuple[int, int], list[int], list[np.ndarray]] | None = None

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Cohort:
        assert self._table.num_classes is not None
        asked = (self._table.version, self.cohort_size)
        if available.size == len(self._table) and self._kept is not None and self._kept[0] == asked:
            _, places, kept = self._kept
            limits = [limit.copy() for limit in kept]
        else:
            places, limits = pick_by_rarest(self._table.rows.take(available), self._table.num_classes, self.cohort_size)
            if available.size == len(self._table):
                self._kept = (asked, places, [limit.copy() for limit in limits])
        picked = available[places].tolist()
        clients = (self._table.ids[number] for number in picked)
        return self.cohort(picked, sample_limits=dict(zip(clients, limits, strict=True)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # It draws nothing: states written before every selector had a seed hold none.
        super().load_state_dict({"seed": self.seed, **state} if isinstance(state, Mapping) else state)


def pick_by_rarest(counts: Rows, num_classes: int, size: int) -> tuple[list[int], list[np.ndarray]]:
    """Rows in the order picked, and how many samples of each class each of them uses."""
    growing = _Growing(counts, num_classes)
    order = np.argsort(-growing.counts.totals(), kind="stable").tolist()
    growing.join(order.pop(0))
    while order and len(growing.picked) < size:
        left = growing.scan(order, size)
        if len(left) == len(order):  # nobody who is left holds any sample
            for row in left[: size - len(growing.picked)]:
                growing.join(row)
            break
        order = left
    return growing.picked, growing.limits


class _Growing:
    """A cohort in the making: v, m, and who of the others holds what."""

    def __init__(self, counts: Rows, num_classes: int) -> None:
        whole = np.rint(counts.values)
        self.counts = Rows(counts.indptr, counts.classes, whole).filter(whole > 0)
        self.picked: list[int] = []
        self.limits: list[np.ndarray] = []
        self._v = np.zeros(num_classes, dtype=np.int64)
        self._m = np.iinfo(np.int64).max  # no bound for the first client, which sets it
        self._holders = np.bincount(self.counts.classes, minlength=num_classes)  # clients not yet chosen, by class

    def join(self, row: int) -> None:
        """Take a client in, with as much of its data as fits under m."""
        classes, values = self.counts.row(row)
        limit = np.zeros_like(self._v)
        limit[classes] = np.minimum(self._m - self._v[classes], values.astype(np.int64))
        self._v += limit
        self._holders[classes] -= 1
        if not self.picked:
            self._m = int(self._v.max())
        self.picked.append(row)
        self.limits.append(limit)

    def scan(self, order: list[int], size: int) -> list[int]:
        """One pass over the others; returns those who did not join."""
        left: list[int] = []
        rarest = self._rarest()
        for place, row in enumerate(order):
            if rarest is None or len(self.picked) == size:
                return left + order[place:]
            if rarest in self.counts.row(row)[0]:
                self.join(row)
                rarest = self._rarest()
            else:
                left.append(row)
        return left

    def _rarest(self) -> int | None:
        """The class with the lowest count among those that somebody not yet chosen holds."""
        held = np.flatnonzero(self._holders)
        return int(held[np.argmin(self._v[held])]) if held.size else None
