"""Oort: clients whose samples still have a large loss, and that are fast enough.

Lai, Zhu, Madhyastha, Chowdhury: Oort: Efficient Federated Learning via Guided Participant Selection (OSDI 2021). A
client's utility after training is U_k = n_k sqrt(mean of its samples' squared losses). In round t a client that trained
last in round L_k scores

    (min(U_k, clip) - min U) / max(max U - min U, 1e-4) + sqrt(0.1 ln t / L_k),    min U taken times 0.999

over the available ones that have trained, clip being the `clip` quantile of U. Where its seconds s_k exceed the
preferred duration T, the score is multiplied by (T / s_k)^penalty; T is the `threshold` per cent quantile of all
seconds known. Of M seats e = floor(M (1 - eps)) exploit: among those with at least `cut_off` times the (e+1)-th best
score, e are drawn by score. The others explore: of the `window` (M - e) largest clients that have not trained yet,
M - e are drawn by size. Seats that stay empty are drawn uniformly. eps = max(explore decay^t, explore_least), and 0
where nobody is left to explore.

The pacer compares, every `pace` rounds, the exploited utility of the last `pace` rounds with that of those before: a
change of at most 10 % raises the threshold by `pace_step` points (at 100 there is no limit), one of 500 % or more
lowers it.

As in the authors' code (SymbioticLab/Oort), eps decays before its first use, and there is no blacklist. Other than in
it: nobody is penalised before its seconds are known (the code is given a guess at registration); quantile, least and
largest utility are those of clients that have trained (it mixes in the sizes of those that have not); where somebody
new joins after all were explored, exploration goes on. Of a client that tells its mean loss alone, as most apps of
other frameworks do, that mean stands for the root mean square, which is somewhat larger.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from fedentopt.errors import InputError
from fedentopt.selection.cohort import ClientId
from fedentopt.selection.draws import draw_by_weight
from fedentopt.selection.feedback import Observation
from fedentopt.selection.per_client import ClientFigures, as_pairs, is_finite, read_ids, read_pairs
from fedentopt.selection.reports import client_id
from fedentopt.selection.selector import Selector, selector
from fedentopt.settings import setting

LARGEST_UTILITY = 1e300  # what a loss that ran away is worth: differences of utilities stay finite


@selector("oort", label="Oort")
class OortSelector(Selector):
    """A bandit over training losses, with a penalty for slow clients and a share of the seats for new ones."""

    needs: ClassVar[frozenset[str]] = frozenset({"loss", "seconds"})
    sizes_only = True
    explore: float = setting(0.9, help="share of the seats that explore, at the start", low=0, high=1)
    decay: float = setting(0.95, help="factor on that share, each round", above=0, high=1)
    explore_least: float = setting(0.2, help="what that share does not fall below", low=0, high=1)
    clip: float = setting(0.98, help="quantile at which utilities are clipped", low=0, high=1)
    cut_off: float = setting(
        0.7, help="share of the (e+1)-th best score from which on clients may be drawn", low=0, high=1
    )
    window: float = setting(5.0, help="new clients looked at for each seat that explores", low=1)
    threshold: float = setting(10.0, help="per cent quantile of seconds preferred at the start", low=0, high=100)
    penalty: float = setting(2.0, help="exponent of the penalty for clients slower than that", low=0)
    pace: int = setting(20, help="rounds after which the threshold may change", low=1)
    pace_step: float = setting(5.0, help="per cent points by which it changes", low=0)

    def __init__(self, cohort_size: int, seed: int = 0, **settings: Any) -> None:
        super().__init__(cohort_size, seed, **settings)
        self._utility = ClientFigures(np.nan)
        self._last_round = ClientFigures(1.0)
        self._seconds = ClientFigures(np.nan)
        self._preferred = float(self.threshold)  # the threshold, as the pacer has moved it
        self._history: list[float] = []  # exploited utility of the last 2 `pace` rounds
        self._exploited: list[ClientId] = []  # in the last round
        self._heard: dict[ClientId, None] = {}  # since then, in order

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> list[int]:
        now = self.round + 1
        history, preferred = self._paced(now)
        penalties = self._penalties(preferred)[available]
        utility = self._utility.by_number(self._table)[available]
        tried = np.flatnonzero(~np.isnan(utility))
        fresh = np.flatnonzero(np.isnan(utility))
        seats = min(self.cohort_size, available.size)
        eps = max(self.explore * self.decay**now, self.explore_least) if fresh.size else 0.0
        exploit = min(math.floor(seats * (1 - eps) + 1e-9), tried.size)
        rng = self.rng()
        last = self._last_round.by_number(self._table)[available]
        scores = self._scores(utility[tried], last[tried], now) * penalties[tried]
        exploited = tried[self._exploit(rng, scores, exploit)]
        explore = min(fresh.size, seats - exploited.size)
        places: list[int] = exploited.tolist()
        if explore:
            sizes = self.sizes[available[fresh]]
            nearest = _largest(sizes, max(explore, math.floor(self.window * explore)))
            places += fresh[nearest[draw_by_weight(rng, sizes[nearest], explore)]].tolist()
        if len(places) < seats:
            others = np.setdiff1d(np.arange(available.size), places)
            places += rng.permutation(others)[: seats - len(places)].tolist()
        self._history, self._preferred, self._heard = history, preferred, {}
        self._exploited = [self._table.ids[number] for number in available[exploited]]
        return [int(number) for number in available[places]]

    def _scores(self, utility: np.ndarray, last: np.ndarray, now: int) -> np.ndarray:
        if not utility.size:
            return utility
        ordered = np.sort(utility)
        clip = ordered[min(int(utility.size * self.clip), utility.size - 1)]
        least = float(ordered[0]) * 0.999
        reach = max(float(ordered[-1]) - least, 1e-4)
        return np.asarray((np.minimum(utility, clip) - least) / reach + np.sqrt(0.1 * math.log(now) / last))

    def _exploit(self, rng: np.random.Generator, scores: np.ndarray, seats: int) -> np.ndarray:
        if not seats:
            return np.zeros(0, dtype=np.int64)
        order = np.argsort(-scores, kind="stable")
        least = scores[order[min(seats, scores.size - 1)]] * self.cut_off
        near = order[scores[order] >= least]
        return np.asarray(near[draw_by_weight(rng, scores[near], seats)])

    def _penalties(self, preferred: float) -> np.ndarray:
        """A factor on the score of every client, by number; 1 for those whose seconds are not known."""
        seconds = self._seconds.by_number(self._table)
        known = np.sort(seconds[~np.isnan(seconds)])
        if preferred >= 100 or not known.size:
            return np.ones(seconds.size)
        limit = known[min(int(known.size * preferred / 100), known.size - 1)]
        with np.errstate(invalid="ignore"):
            return np.where(seconds > limit, (limit / np.maximum(seconds, 1e-4)) ** self.penalty, 1.0)

    def _paced(self, now: int) -> tuple[list[float], float]:
        """The history with the last round's exploited utility, and the threshold that follows from it."""
        heard = [client for client in self._exploited if client in self._heard]
        told = [self._utility[client] for client in heard if client in self._utility]
        history = [*self._history, sum(told) / (len(told) + 1e-4)][-2 * self.pace :]
        if now < 2 * self.pace or now % self.pace:
            return history, self._preferred
        before, after = sum(history[: -self.pace]), sum(history[-self.pace :])
        if abs(after - before) <= 0.1 * before:
            return history, min(100.0, self._preferred + self.pace_step)
        if abs(after - before) >= 5 * before:
            return history, max(self.pace_step, self._preferred - self.pace_step)
        return history, self._preferred

    def observe(self, observations: Mapping[ClientId, Observation]) -> None:
        """Keep utility, round and seconds of those that trained."""
        for client, seen in observations.items():
            loss = seen.loss if seen.loss_rms is None else seen.loss_rms
            if loss is None or not math.isfinite(loss) or client not in self._table:
                continue
            self._utility[client] = min(max(seen.samples * float(loss), 0.0), LARGEST_UTILITY)
            self._last_round[client] = max(self.round, 1)
            if seen.seconds is not None and math.isfinite(seen.seconds) and seen.seconds >= 0:
                self._seconds[client] = float(seen.seconds)
            self._heard[client_id(client)] = None

    def forget_clients(self, gone: Collection[ClientId]) -> None:
        for figures in (self._utility, self._last_round, self._seconds):
            figures.forget(gone)
        self._exploited = [client for client in self._exploited if client not in gone]
        self._heard = {client: None for client in self._heard if client not in gone}

    def memory(self) -> dict[str, Any]:
        return {
            "utility": as_pairs(self._utility),
            "last_round": as_pairs(self._last_round),
            "seconds": as_pairs(self._seconds),
            "preferred": self._preferred,
            "history": list(self._history),
            "exploited": list(self._exploited),
            "heard": list(self._heard),
        }

    def remember(self, memory: Mapping[str, Any]) -> None:
        utility = read_pairs("utility", memory["utility"], low=0)
        last_round = read_pairs("last_round", memory["last_round"], low=1, whole=True)
        seconds = read_pairs("seconds", memory["seconds"], low=0)
        exploited, heard = read_ids("exploited", memory["exploited"]), read_ids("heard", memory["heard"])
        history, preferred = memory["history"], memory["preferred"]
        most = max(100.0, self.pace_step)
        if not isinstance(history, list) or not all(_is_number(value) and value >= 0 for value in history):
            raise InputError("state: history; accepted: a list of numbers, none below 0")
        if not _is_number(preferred) or not 0 <= preferred <= most:
            raise InputError(f"state: preferred; accepted: a number from 0 to {most:g}")
        self._utility, self._seconds = ClientFigures(np.nan, utility), ClientFigures(np.nan, seconds)
        self._last_round = ClientFigures(1.0, last_round)
        self._exploited, self._heard = exploited, dict.fromkeys(heard)
        self._history, self._preferred = [float(value) for value in history], float(preferred)


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Places of so many of the largest values, the largest first; of equal ones the first."""
    if not 0 < count < values.size:
        return np.argsort(-values, kind="stable")[:count]
    least = np.partition(values, values.size - count)[values.size - count]
    near = np.flatnonzero(values >= least)
    return np.asarray(near[np.argsort(-values[near], kind="stable")][:count])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)
