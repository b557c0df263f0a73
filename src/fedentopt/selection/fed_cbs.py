"""Fed-CBS: clients drawn one after another, the likelier the less imbalanced the labels of all drawn so far become.

Zhang, Li, Du, Liu, Chen, et al.: Fed-CBS: A Heterogeneity-Aware Client Sampling Mechanism for Federated Learning via
Class-Imbalance Reduction (ICML 2023, arXiv 2209.15245). With L the labels of a set S and N their number,

    QCID(S) = sum_c (L_c / N - 1/C)^2

and in round t, T_k being 1 plus the times k was chosen before,

    P(first = k)  ~  QCID({k})^-beta_1 + lam sqrt(3 ln t / (2 T_k))
    P(m-th = k)   ~  QCID(S + k)^-beta_m / (a term that is the same for all k),    m = 2 .. M,

without replacement, beta_m = beta m. QCID is at least 1e-12 here, or a perfectly even client would outweigh all others
without bound; a set without any sample counts as one class alone, 1 - 1/C. Weights are worked with as logarithms:
QCID^-m overflows soon.

The paper writes QCID with inner products l_i l_j, K x K of them, which clients could compute encrypted. With
a = L - N/C and b(x) = |x - mean x|^2 the same is (b(l) + 2 a l + b(L)) / (N + n)^2: one product with the counts a draw.

Among many clients (4,096 or more) that product is in single precision (`screen`), with a bound on how far it is off:
whose bound is loose is evaluated exactly, among the others somebody is drawn by an upper bound of the weight and kept
with probability weight / bound. That draws from the same distribution, with other random numbers. Where most bounds are
loose, as of clients that are all perfectly even, everybody is evaluated exactly.

FedXplore's code uses the candidate's T in the second draw and exponents m - 2 on ratios; the paper is followed here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from fedentopt.selection.cohort import ClientId
from fedentopt.selection.draws import draw_one, draw_place
from fedentopt.selection.per_client import ClientFigures, as_pairs, read_pairs
from fedentopt.selection.rows import Rows
from fedentopt.selection.scorer import FEW_CELLS
from fedentopt.selection.screen import Screen
from fedentopt.selection.selector import Selector, selector
from fedentopt.settings import setting

LEAST = 1e-12
MANY = 1 << 12
_LOOSE = 1.0  # by how much the logarithm of a weight may be overestimated (e draws for one) before it is exact
_CHUNK = 1 << 15


@selector("fed-cbs", label="Fed-CBS")
class FedCBSSelector(Selector):
    """Clients drawn one by one, by how little class imbalance (QCID) the cohort then has."""

    lam: float = setting(10.0, help="weight of the exploration in the first draw", low=0)
    beta: float = setting(1.0, help="exponent of QCID in the m-th draw, over m", above=0)

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self._times = ClientFigures(0.0)
        self._kept: tuple[int, Imbalance] | None = None

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        if self._kept is None or self._kept[0] != self._table.version:
            self._kept = (self._table.version, Imbalance(self._table.rows, self._table.num_classes or 1))
        imbalance = self._kept[1]
        rng = self.rng()
        open_rows = np.zeros(len(self._table), dtype=bool)
        open_rows[available] = True
        gathered = np.zeros(self._table.num_classes or 1)
        picked: list[int] = []
        while len(picked) < min(self.cohort_size, available.size):
            if picked:
                number = imbalance.draw(rng, gathered, open_rows, self.beta * (len(picked) + 1))
            else:
                number = int(available[draw_one(rng, self._first(imbalance, available))])
            classes, values = self._table.rows.row(number)
            gathered[classes] += values
            open_rows[number] = False
            picked.append(number)
        self._times.add([self._table.ids[number] for number in picked], 1)
        return picked

    def _first(self, imbalance: Imbalance, available: np.ndarray) -> np.ndarray:
        """Logarithms of the first draw's weights."""
        alone = -self.beta * imbalance.log_single[available]
        if not self.lam or not self.round:  # ln 1 = 0
            return np.asarray(alone)
        times = 1 + self._times.by_number(self._table)[available]
        explore = self.lam * np.sqrt(1.5 * math.log(self.round + 1) / times)
        return np.asarray(np.logaddexp(alone, np.log(explore)))

    def forget_clients(self, gone: Collection[ClientId]) -> None:
        self._times.forget(gone)

    def memory(self) -> dict[str, Any]:
        return {"times": as_pairs(self._times)}

    def remember(self, memory: Mapping[str, Any]) -> None:
        self._times = ClientFigures(0.0, read_pairs("times", memory["times"], low=1, whole=True))


class Imbalance:
    """QCID of a set with one client more, for all clients of a table."""

    def __init__(self, rows: Rows, num_classes: int) -> None:
        totals = rows.totals()
        self._scale = max(float(totals.max(initial=0.0)), float(np.finfo(np.float64).tiny))
        self._rows = Rows(rows.indptr, rows.classes, rows.values / self._scale)
        self._classes = num_classes
        self._sizes = totals / self._scale
        self._own = np.maximum(self._rows.row_sums(self._rows.values**2) - self._sizes**2 / num_classes, 0.0)
        self._dense = self._rows.dense(num_classes) if len(rows) * num_classes <= FEW_CELLS else None
        target = np.full(num_classes, 1 / num_classes)
        many = len(rows) >= MANY and Screen.serves(rows, target)
        self._screen = Screen(rows, totals, target) if many else None
        self._columns: list[np.ndarray] | None = None  # the counts class by class, made when bounds first say nothing
        self.log_single = self._log(self._own, self._sizes)

    def _log(self, spread: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """ln QCID from b and N, both of the set."""
        empty = sizes <= 0
        q = np.where(empty, 1 - 1 / self._classes, spread / np.maximum(sizes**2, np.finfo(np.float64).tiny))
        return np.asarray(np.log(np.maximum(q, LEAST)))

    def logs(self, gathered: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
        """ln QCID(S + k) for the clients at these places, or for all."""
        gathered = gathered / self._scale
        total = float(gathered.sum())
        apart = gathered - total / self._classes
        if places is None and self._dense is not None:
            products = self._dense @ apart
        elif places is None and self._screen is not None:
            products = self._products(apart)
        else:
            rows = self._rows if places is None else self._rows.take(places)
            products = rows.row_sums(rows.values * apart[rows.classes])
        own, sizes = (self._own, self._sizes) if places is None else (self._own[places], self._sizes[places])
        spread = own + 2 * products + float(apart @ apart)
        return self._log(np.maximum(spread, 0.0), sizes + total)

    def _products(self, apart: np.ndarray) -> np.ndarray:
        """The product of all counts with a vector, a chunk of clients at a time."""
        if self._columns is None:
            starts = range(0, len(self._rows), _CHUNK)
            parts = (self._rows.part(start, start + _CHUNK) for start in starts)
            self._columns = [np.ascontiguousarray(part.dense(self._classes).T) for part in parts]
        return np.concatenate([apart @ counts for counts in self._columns])

    def draw(self, rng: np.random.Generator, gathered: np.ndarray, open_rows: np.ndarray, beta: float) -> int:
        """One of the open clients, with probability proportional to QCID(S + k)^-beta."""
        if self._screen is not None:
            bounds = self._screen.spread(gathered, open_rows)
            if bounds is not None:
                drawn = self._draw_by_bound(rng, gathered, beta, *bounds)
                if drawn is not None:
                    return drawn
        if self._dense is not None or self._screen is not None:
            return draw_one(rng, np.where(open_rows, -beta * self.logs(gathered), -np.inf))
        places = np.flatnonzero(open_rows)
        # Of most clients, all at once: taking rows out costs more than those few products.
        logs = self.logs(gathered)[places] if 2 * places.size > open_rows.size else self.logs(gathered, places)
        return int(places[draw_one(rng, -beta * logs)])

    def _draw_by_bound(
        self, rng: np.random.Generator, gathered: np.ndarray, beta: float, chi2: np.ndarray, off: float, share: float
    ) -> int | None:
        """The same draw from bounds of chi2 = C QCID; None where too many of them are loose."""
        scale = (1 + share) * self._classes
        # Single precision rounds ln and exp too: by less than this, on logarithms down to that of LEAST.
        slack = beta * 30 * 1e-6 + 1e-5
        # Loose where chi2 / (chi2 - off), to the power of beta, exceeds what may be wasted; and chi2 stays above off.
        loose = off * max(2.0, 1 / -math.expm1(-_LOOSE / beta))
        near = np.flatnonzero(chi2 < max(loose, 2 * LEAST * self._classes))
        if near.size * 16 > chi2.size or slack > _LOOSE:
            return None
        exact = -beta * self.logs(gathered, near)
        far = np.empty_like(chi2)
        tops, sums = [], []
        for start in range(0, chi2.size, _CHUNK):
            part = far[start : start + _CHUNK]
            np.subtract(chi2[start : start + _CHUNK], np.float32(off), out=part)
            inside = near[np.searchsorted(near, start) : np.searchsorted(near, start + _CHUNK)]
            part[inside - start] = np.inf
            np.log(part, out=part)
            part *= np.float32(-beta)
            tops.append(top := float(part.max()))
            if top == -math.inf:
                sums.append(0.0)
                continue
            part -= np.float32(top)
            np.exp(part, out=part)
            sums.append(float(part.sum(dtype=np.float64)))
        # Weights of the chunks and, at the end, of the near ones, relative to the largest.
        logs = np.array(tops) + slack + beta * math.log(scale)
        top = max(float(logs.max()), float(exact.max(initial=-math.inf)))
        if top == -math.inf:
            return None
        weights = np.append(np.exp(logs - top) * sums, np.exp(exact - top).sum())
        ends = np.cumsum(weights)
        while True:
            part_number = draw_place(rng, ends)
            if part_number == len(sums):
                return int(near[draw_one(rng, exact)])
            start = part_number * _CHUNK
            place = draw_place(rng, np.cumsum(far[start : start + _CHUNK], dtype=np.float64))
            bound = logs[part_number] + math.log(far[start + place])
            weight = -beta * float(self.logs(gathered, np.array([start + place]))[0])
            if math.log(max(rng.random(), 1e-300)) < weight - bound:
                return start + place
