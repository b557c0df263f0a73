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

from collections.abc import Sequence

import numpy as np

from fedentopt.selection.cohort import Cohort
from fedentopt.selection.selector import TableSelector


class KLSelector(TableSelector):
    """Seol and Kim's selection. Its cohorts carry `sample_limits`, per client and class."""

    name = "kl"

    def _pick(self, rows: np.ndarray) -> Cohort:
        assert self._table.num_classes is not None
        counts = np.rint(self._table.rows.take(rows).dense(self._table.num_classes)).astype(np.int64)
        places, limits = pick_by_rarest(counts, self.cohort_size)
        picked = rows[places].tolist()
        clients = (self._table.ids[number] for number in picked)
        return self._cohort(picked, sample_limits=dict(zip(clients, limits, strict=True)))


def pick_by_rarest(counts: np.ndarray, size: int) -> tuple[list[int], list[np.ndarray]]:
    """Rows of the (clients, classes) counts in the order picked, and how much of each class each one uses."""
    order = np.argsort(-counts.sum(axis=1), kind="stable").tolist()
    first = order.pop(0)
    v = counts[first].copy()
    m = v.max()
    picked, limits = [first], [v.copy()]
    while order and len(picked) < size:
        left = _scan(counts, order, v, m, size, picked, limits)
        if len(left) == len(order):  # only clients without a sample are left
            for row in left[: size - len(picked)]:
                picked.append(row)
                limits.append(np.zeros_like(v))
            break
        order = left
    return picked, limits


def _scan(
    counts: np.ndarray,
    order: Sequence[int],
    v: np.ndarray,
    m: int,
    size: int,
    picked: list[int],
    limits: list[np.ndarray],
) -> list[int]:
    """One pass over the clients in order; `v`, `picked` and `limits` grow, those not chosen are returned."""
    holders = (counts[order] > 0).sum(axis=0)  # how many of those not yet chosen hold each class
    left = []
    for row in order:
        if len(picked) < size and holders.any():
            rarest = int(np.argmin(np.where(holders > 0, v, np.iinfo(np.int64).max)))
            if counts[row, rarest] > 0:
                limit = np.minimum(m - v, counts[row])
                v += limit
                holders -= counts[row] > 0
                picked.append(row)
                limits.append(limit)
                continue
        left.append(row)
    return left
