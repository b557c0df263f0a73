"""FedEntOpt: cohorts of maximum label entropy, with a buffer that keeps recent clients out (Algorithm 1).

Every round starts from L = 0. The first client is drawn uniformly from those outside the buffer B; every further
one maximises H((L + l) / |L + l|) over the available clients that are neither in B nor in this round's cohort.
A chosen client enters B at once, and while B holds more than Q clients the one that entered first leaves it.
Ties (within 1e-9 bits) go to the client registered first. Q may be 0 to K - M.

With a `target` distribution q the greedy step minimises KL(cohort || q) = sum_c p_c log2(p_c / q_c) instead; a
uniform target gives the same picks, since then KL = log2 C - H. A class with weight 0 in the target counts as
2**-1000, which keeps KL finite: samples of it cost 1000 bits times their share, so clients that hold some are
avoided as long as there is any other choice.

When clients are away and nobody is left to pick, the buffered clients that are available leave the buffer, the
one that entered first first, one at a time and only until a pick is possible; they are named in
`Cohort.released`. Clients that are away keep their place in the buffer.

First in, first out lets clients that were picked together leave the buffer together, and so be picked together again,
as clients that claim even labels are. With `release="random"` the one to leave is drawn uniformly, with the seed, from
the quarter of the buffer that entered first (at least one client).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from fedentopt.errors import InputError
from fedentopt.selection.cohort import ClientId, Cohort
from fedentopt.selection.measures import row_scores
from fedentopt.selection.per_client import read_ids
from fedentopt.selection.reports import check_places
from fedentopt.selection.scorer import Scorer
from fedentopt.selection.selector import Selector, check_int, selector
from fedentopt.settings import amount, setting

ZERO_WEIGHT_BITS = 1000.0
RELEASES = ("fifo", "random")


@selector("fedentopt", label="FedEntOpt")
class EntropySelector(Selector):
    """FedEntOpt: `cohort_size` is M, `buffer_size` Q, `target` a label prior other than uniform, `release` who leaves
    the buffer: "fifo", the one that entered first, or "random", one of its oldest quarter.

    A buffer of more than K - M clients is refused at `select`, K being the most clients that were ever
    registered at a time: those who left since count as away.
    """

    stream = 0x4645
    run_settings: ClassVar[Mapping[str, Any]] = {
        "buffer": setting(
            "50%",
            help="FedEntOpt's buffer, Q: a number or a per cent of K, at most K-M",
            amount=True,
            option="buffer",
        ),
        "release": setting(
            "fifo",
            help="who leaves the buffer: fifo, the one that entered first, or random, one of its oldest quarter",
            choices=RELEASES,
        ),
    }

    def __init__(
        self,
        cohort_size: int,
        buffer_size: int = 0,
        seed: int = 0,
        target: ArrayLike | None = None,
        *,
        release: str = "fifo",
        **settings: Any,
    ) -> None:
        super().__init__(cohort_size, seed, **settings)
        self.buffer_size = check_int("buffer_size", buffer_size, 0)
        if release not in RELEASES:
            raise InputError(f"release: {release!r} is unknown; accepted: {', '.join(RELEASES)}")
        self.release = release
        self.target = None if target is None else _distribution(target)
        self._log_target = None if self.target is None else _log2(self.target)
        self._buffer: OrderedDict[ClientId, None] = OrderedDict()
        self._most_clients = 0
        # A uniform target is entropy; taking that path keeps the picks the same to the last tie.
        self._log_scores = None if self.target is None or np.ptp(self.target) == 0 else self._log_target
        self._scorer = Scorer(self._table, self._log_scores)

    @classmethod
    def for_run(cls, *, cohort_size: int, clients: int, seed: int, **settings: Any) -> Self:
        """See `Selector.for_run`; `buffer` is a number of clients or a per cent of them."""
        size = amount(settings.pop("buffer", "50%"), clients, "buffer")
        return cls(cohort_size, buffer_size=size, seed=seed, **settings)

    @classmethod
    def check_run(cls, *, cohort_size: int, clients: int, **settings: Any) -> None:
        """Refuse a buffer that leaves too few clients for a cohort."""
        buffer = settings.get("buffer", "50%")
        size = amount(buffer, clients, "buffer")
        if size > clients - cohort_size:
            raise InputError(
                f"buffer: {buffer!r} gives {size} clients; with {clients} clients and cohorts of "
                f"{cohort_size} at most {clients - cohort_size} can be kept out"
            )

    @property
    def buffer(self) -> tuple[ClientId, ...]:
        """Clients kept out at present, the one that entered first first."""
        return tuple(self._buffer)

    def register(
        self, counts: Any, *, noisy: bool = False, ids: Sequence[ClientId] | None = None, num_classes: int | None = None
    ) -> None:
        if self.target is not None and self.num_classes is None and num_classes is None:
            num_classes = self.target.size
        super().register(counts, noisy=noisy, ids=ids, num_classes=num_classes)
        self._most_clients = max(self._most_clients, len(self._table))

    def remove(self, ids: Iterable[ClientId]) -> None:
        """Forget clients, in the buffer too; unknown ones are refused, and then nobody is removed."""
        for gone in self._table.remove(ids):
            self._buffer.pop(gone, None)

    def pick(self, available: np.ndarray, losses: np.ndarray | None) -> Cohort:
        rows = available
        self._check_sizes()
        buffer = self._buffer.copy()  # put in place at the end: an interrupted round leaves no trace
        kept_out = self._available(buffer, rows)
        scores = self._scorer.begin(rows, closed=np.fromiter(kept_out.values(), dtype=np.int64))
        candidates = rows.size - len(kept_out)
        oldest_first = iter(tuple(kept_out))
        picked: list[int] = []
        released: list[ClientId] = []
        while len(picked) < self.cohort_size:
            if not candidates:
                let_go = next((client for client in oldest_first if client in kept_out), None)
                if let_go is None:
                    break
                del buffer[let_go]
                scores.admit(kept_out.pop(let_go))
                released.append(let_go)
                candidates += 1
            number = scores.best() if picked else self._draw(scores.candidates())
            scores.gather(number)
            candidates -= 1
            picked.append(number)
            buffer[self._table.ids[number]] = None
            while len(buffer) > self.buffer_size:
                leaver = self._leaver(buffer, len(picked))
                del buffer[leaver]
                if leaver in kept_out:  # else it is away, or already in this cohort
                    scores.admit(kept_out.pop(leaver))
                    candidates += 1
        picked = self.exchange(picked, buffer, rows, np.fromiter(kept_out.values(), dtype=np.int64))
        self._buffer = buffer
        cohort = self.cohort(picked, released=tuple(released))
        if self._log_target is None:
            return cohort
        divergence = -float(row_scores(cohort.label_counts[None, :].astype(np.float64), self._log_target)[0])
        return replace(cohort, divergence=max(divergence, 0.0))

    def _leaver(self, buffer: OrderedDict[ClientId, None], pick: int) -> ClientId:
        """Who leaves a buffer that is one too full, after so many picks of this round."""
        if self.release == "fifo":
            return next(iter(buffer))
        oldest = list(islice(buffer, max(1, len(buffer) // 4)))
        return oldest[int(self.rng(pick, len(buffer)).integers(len(oldest)))]

    def _check_sizes(self) -> None:
        most = max(self._most_clients - self.cohort_size, 0)
        if self.buffer_size > most:
            raise InputError(
                f"buffer_size: {self.buffer_size}; accepted: at most {most}, with {self._most_clients} clients and "
                f"cohorts of {self.cohort_size}"
            )

    def _available(self, buffer: Iterable[ClientId], rows: np.ndarray) -> dict[ClientId, int]:
        """The buffered clients that are among `rows`, oldest first, and their numbers."""
        numbers = self._table.find(buffer)
        here = numbers >= 0
        if rows.size < len(self._table):  # ascending, as all numbers of clients that are available are
            here = rows[np.minimum(np.searchsorted(rows, numbers), rows.size - 1)] == numbers
        listed = zip(buffer, numbers.tolist(), here.tolist(), strict=True)
        return {client: number for client, number, is_here in listed if is_here}

    def exchange(
        self, picked: list[int], buffer: OrderedDict[ClientId, None], rows: np.ndarray, closed: np.ndarray
    ) -> list[int]:
        """What may still change about the greedy cohort and, in place, the buffer; here nothing. Those of `rows` that
        are `closed` are kept out."""
        return picked

    def _draw(self, candidates: np.ndarray) -> int:
        return int(candidates[self.rng().integers(candidates.size)])

    def state_dict(self) -> dict[str, Any]:
        target = None if self.target is None else self.target.tolist()
        release = (
            {} if self.release == "fifo" else {"release": self.release}
        )  # as states were before there was a choice
        return super().state_dict() | {"buffer_size": self.buffer_size, "target": target} | release

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        release = state.get("release", "fifo") if isinstance(state, Mapping) else self.release
        if release != self.release:
            raise InputError(f"state: release is {release!r}; accepted: {self.release!r}, as set here")
        super().load_state_dict(state)

    def memory(self) -> dict[str, Any]:
        return {"buffer": list(self._buffer), "most_clients": self._most_clients}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Where no client is registered yet, those in the buffer may register afterwards, and are away until they do.

        Refused: a buffer that names clients other than those registered, one twice, or more than fit.
        """
        most_clients = check_int("state: most_clients", memory["most_clients"], 0)
        buffer = read_ids("buffer", memory["buffer"])
        if len(self._table):
            self._table.numbers_of(buffer, "state: buffer: client")
        if len(buffer) > self.buffer_size:
            raise InputError(f"state: buffer holds {len(buffer)} clients; accepted: at most {self.buffer_size}")
        self._buffer = OrderedDict.fromkeys(buffer)
        self._most_clients = max(self._most_clients, most_clients)


def _distribution(target: ArrayLike) -> np.ndarray:
    check_places("target", target)
    try:
        weights = np.asarray(target)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged, or a tensor that NumPy cannot read
        raise InputError(f"target: {target!r}; accepted: one weight a class") from error
    if weights.ndim != 1 or weights.size == 0 or weights.dtype.kind not in "iuf":
        raise InputError(f"target: {target!r}; accepted: one weight a class")
    weights = weights.astype(np.float64)
    for c, weight in enumerate(weights):
        if not (np.isfinite(weight) and weight >= 0):
            raise InputError(f"target: the weight of class {c} is {weight}; accepted: finite numbers, 0 or more")
    if not weights.max() > 0:
        raise InputError("target: all weights are 0; accepted: at least one above 0")
    with np.errstate(over="ignore"):
        if not np.isfinite(weights.sum()):
            weights = weights / weights.max()
    return np.asarray(weights / weights.sum())


def _log2(target: np.ndarray) -> np.ndarray:
    return np.where(target > 0, np.log2(np.maximum(target, 2.0**-ZERO_WEIGHT_BITS)), -ZERO_WEIGHT_BITS)
