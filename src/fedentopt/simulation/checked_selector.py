"""A run's selector as its planner asks it: what one of the user's own answers is checked, what it raises is one line.

Each answer is checked when it is first used, so that a selector with two mistakes is refused for the one that a run
meets first. One of ours is asked by the same way: its answers are as they should be, and its time is counted here too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import numpy as np

from fedentopt.errors import InputError
from fedentopt.own_code import describe_error, is_of_handler, is_ours
from fedentopt.selection import Candidates, Census, ClientId, Cohort, Observation, Selector
from fedentopt.simulation.config import RunConfig


class CheckedSelector:
    """`ours` says whether the selector is one of this package, `needs` what it is to be told."""

    def __init__(self, selector: Selector, config: RunConfig) -> None:
        self.ours = is_ours(selector)
        self.needs: frozenset[str] = frozenset(getattr(selector, "needs", ()))
        self._selector, self._config = selector, config
        self._name = f"selector: {config.selector!r}"
        self._everybody = frozenset(range(config.clients))
        self._seconds = 0.0

    def register(self, reports: np.ndarray) -> None:
        """Take clients in, which belongs to no round's time. One of the user's own may keep what it is given, and
        change it: it gets a copy."""
        self._call("register", reports if self.ours else reports.copy(), noisy=self._config.epsilon is not None)
        self._seconds = 0.0

    def believe(self, counts: np.ndarray | None, clients: list[int]) -> None:
        """Let it choose by these counts of the clients."""
        self._call("update", counts, noisy=True, ids=clients)

    def census(self) -> Census | None:
        """Whether everybody is to train before round 1."""
        wanted = self._call("census") if hasattr(self._selector, "census") else None
        if wanted is None:
            return None
        known = isinstance(wanted, Census) and _is_number(wanted.epochs) and _is_number(wanted.samples, none=True)
        if not known:
            raise InputError(
                f"{self._name}: census gave {_shown(wanted, Census)}; "
                f"accepted: Census, or None, with epochs a whole number from 1, and samples too, or none"
            )
        return cast(Census, wanted)

    def candidates(self, *available: list[int]) -> tuple[tuple[int, ...], int | None] | None:
        """Whom to ask for their loss, and on how many samples (None: all); None where nobody is to be asked."""
        wanted = self._call("candidates", *available)
        if wanted is None:
            return None
        known = isinstance(wanted, Candidates) and isinstance(wanted.ids, Iterable)
        if not known or not _is_number(wanted.samples, none=True):
            raise InputError(
                f"{self._name}: candidates gave {_shown(wanted, Candidates)}; "
                f"accepted: Candidates, or None, with samples a whole number from 1, or none"
            )
        return self._clients(tuple(wanted.ids), wanted, "asks", "Candidates"), wanted.samples

    def select(self, *available: list[int], losses: Mapping[int, float] | None) -> tuple[tuple[int, ...], Cohort]:
        """The clients chosen, by number, and the cohort as the selector gave it, for `limit` and `weights`."""
        cohort = self._call("select", *available, **({} if losses is None else {"losses": losses}))
        chosen = self._clients(tuple(getattr(cohort, "clients", ())), cohort)
        if len(chosen) > self._config.cohort_size:
            raise InputError(
                f"{self._name} selected {len(chosen)} clients; accepted: at most {self._config.cohort_size}"
            )
        limits = cohort.sample_limits
        if limits is not None and not isinstance(limits, Mapping):
            raise InputError(
                f"{self._name} gave {type(limits).__name__} as sample_limits; "
                f"accepted: a mapping from client to one number per class"
            )
        return chosen, cohort

    def limit(self, cohort: Cohort, client: int, counts: np.ndarray) -> np.ndarray | None:
        """How many of a client's samples of each class it may use, whole and at most its `counts`; None: all."""
        limit = None if cohort.sample_limits is None else cohort.sample_limits.get(client)
        if limit is None:
            return None
        given = _array(limit)
        numbers = given.dtype.kind in "iuf" and given.shape == counts.shape
        if not numbers or not (given >= 0).all():  # infinity is no limit, NaN nothing at all
            raise InputError(
                f"{self._name} limits client {client} to {limit!r}; accepted: one number per class, 0 or more"
            )
        whole: np.ndarray = np.minimum(given, counts).astype(np.int64)
        return whole

    def weights(self, cohort: Cohort, chosen: Collection[int]) -> dict[int, float] | None:
        """The clients' parts in the average, where the selector defines them and the run takes them."""
        weights = getattr(cohort, "weights", None)
        if weights is None or self._config.averaging == "samples":
            return None
        values = _array(weights, np.float64)
        if values.shape != (len(chosen),) or not np.isfinite(values).all() or (values <= 0).any():
            raise InputError(f"{self._name} gave the weights {weights!r}; accepted: one above 0 per client")
        return dict(zip(chosen, values.tolist(), strict=True))

    def observe(self, observations: Mapping[int, Observation]) -> None:
        self._call("observe", cast("Mapping[ClientId, Observation]", observations))

    def add_seconds(self, seconds: float) -> None:
        """Count time as the selector's that was spent on it elsewhere, for several runs at once."""
        self._seconds += seconds

    def take_seconds(self) -> float:
        """The time that it took since this was asked last."""
        spent, self._seconds = self._seconds, 0.0
        return spent

    def state_dict(self) -> Any:
        """What it must not forget beside `arrays`. A memory that JSON would change is refused."""
        state = self._call("state_dict")
        try:
            same = json.loads(json.dumps(state)) == state
        except (TypeError, ValueError):
            same = False
        if not same:
            raise InputError(
                f"{self._name} has a memory that JSON does not keep: {state!r}; "
                f"accepted: numbers, text, lists, and mappings with text as keys"
            )
        return state

    def arrays(self) -> dict[str, np.ndarray]:
        """What it must not forget beside that. A type that a checkpoint would change is refused."""
        given = self._call("arrays") if hasattr(self._selector, "arrays") else {}
        kept: dict[str, np.ndarray] = {}
        for name, array in given.items() if isinstance(given, Mapping) else [("arrays", given)]:
            try:
                kept[name] = np.array(array)
            except (TypeError, ValueError, RuntimeError):
                kept[name] = np.zeros(0, dtype=object)
            floats = kept[name].dtype in (np.float32, np.float64)
            if not isinstance(given, Mapping) or not isinstance(name, str) or not floats:
                raise InputError(
                    f"{self._name}: arrays gave {name!r} of type {kept[name].dtype}; "
                    f"accepted: a mapping from text to arrays of float32 or float64"
                )
        return kept

    def load(self, state: Any, arrays: Mapping[str, np.ndarray]) -> None:
        """Go on from `state_dict()` and `arrays()`; a selector without any arrays is given none."""
        self._call("load_state_dict", state)
        if arrays:
            self._call("load_arrays", arrays)

    def _clients(
        self, chosen: tuple[Any, ...], given: object, did: str = "selected", form: str = "a Cohort"
    ) -> tuple[int, ...]:
        if not chosen or len(set(chosen)) < len(chosen) or not self._everybody.issuperset(chosen):
            raise InputError(
                f"{self._name} {did} {chosen or given!r}; "
                f"accepted: {form} whose clients are distinct numbers from 0 to {self._config.clients - 1}"
            )
        return tuple(int(k) for k in chosen)

    def _call(self, method: str, *arguments: Any, **more: Any) -> Any:
        started = time.perf_counter()
        try:
            return getattr(self._selector, method)(*arguments, **more)
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            if self.ours or is_of_handler(error):
                raise
            raise InputError(f"{self._name}: {method} raised {describe_error(error)}") from error
        finally:
            self._seconds += time.perf_counter() - started


def _array(given: Any, dtype: Any = None) -> np.ndarray:
    """Empty for what NumPy cannot read: lists of several lengths, tensors that need a gradient."""
    try:
        return np.asarray(given, dtype=dtype)
    except (TypeError, ValueError, RuntimeError):
        return np.zeros(0)


def _is_number(value: object, *, none: bool = False) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return (none and value is None) or (whole and int(value) >= 1)  # type: ignore[call-overload]


def _shown(given: object, kind: type) -> str:
    return repr(given) if isinstance(given, kind) else type(given).__name__
