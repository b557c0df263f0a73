"""What a label-aware strategy may be given, checked before anything is made; and the selector it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from flwr.serverapp.strategy import FedAvg, Strategy

from fedentopt.errors import InputError
from fedentopt.selection import EntropySelector, Selector

WHOLE = {"num_classes": 1, "replacements": 0, "refresh_every": 0, "query_attempts": 1, "forget_after": 1}
"""Whole numbers and the least that is accepted; the last two may be None."""
MAY_BE_NONE = ("query_attempts", "forget_after")
SECONDS = ("query_timeout", "query_pause", "query_patience", "node_timeout")
CAPS = ("size_cap", "weight_cap")
EVALUATE_BY = ("seed", "labels")


def check_options(options: Mapping[str, Any], strategy_options: Mapping[str, Any]) -> None:
    """Refuse the first that is out of range, and those of the strategy's that selection replaces."""
    for name in ("fraction_train", "min_train_nodes"):
        if name in strategy_options:
            raise InputError(
                f"{name}: {strategy_options[name]!r} has no place here; cohort_size says how many clients train"
            )
    for name, least in WHOLE.items():
        value = options[name]
        if value is None and name in MAY_BE_NONE:
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            raise InputError(f"{name}: {value!r} is out of range; accepted: whole numbers from {least}")
    for name in SECONDS:
        value = options[name]
        if not is_number(value) or not 0 < value < float("inf"):
            raise InputError(f"{name}: {value!r} is out of range; accepted: numbers above 0")
    for name in CAPS:
        cap = options[name]
        if cap is not None and not (is_number(cap) and 1 <= cap < float("inf")):  # below 1 nobody would be usual
            raise InputError(f"{name}: {cap!r} is out of range; accepted: numbers from 1, or None for no limit")
    if options["evaluate_by"] not in EVALUATE_BY:
        raise InputError(f"evaluate_by: {options['evaluate_by']!r} is unknown; accepted: {', '.join(EVALUATE_BY)}")


def make_selector(
    selector: Selector | None,
    cohort_size: int,
    num_classes: int,
    buffer_size: int,
    seed: int,
    target: Sequence[float] | None,
    release: str,
) -> Selector:
    """The selector that was given, or FedEntOpt with these settings; both at once are refused."""
    if selector is None:
        selector = EntropySelector(cohort_size, buffer_size, seed, target, release=release)
    elif (buffer_size, seed, release) != (0, 0, "fifo") or target is not None:
        raise InputError(
            "selector: give either a selector or buffer_size, seed, target and release, which would build one"
        )
    elif selector.cohort_size != cohort_size:
        raise InputError(f"cohort_size: {cohort_size} differs from the selector's {selector.cohort_size}")
    aim = selector.target if isinstance(selector, EntropySelector) else None
    if aim is not None and aim.size != num_classes:  # else the first client would be blamed, after the query
        raise InputError(f"target: {aim.size} weights; accepted: {num_classes}, one for each class (num_classes)")
    return selector


def check_class(cls: type, selection: type) -> None:
    """Refuse a class whose joined strategy would be passed over: FedAvg's methods stand before those of others."""
    order = cls.__mro__
    behind = [base for base in order[order.index(FedAvg) + 1 :] if base is not Strategy and issubclass(base, Strategy)]
    if behind:
        raise InputError(
            f"{cls.__name__}: {behind[0].__name__} does not descend from FedAvg, so {selection.__name__} cannot be "
            "joined to it; accepted: strategies that do"
        )
    joined = order[order.index(selection) + 1 : order.index(FedAvg)]
    own_start = [base for base in joined if "start" in vars(base)]
    if own_start:
        raise InputError(
            f"{cls.__name__}: {own_start[0].__name__} has a start() of its own, which {selection.__name__}'s would "
            "replace; accepted: strategies that leave the round loop to Flower"
        )


def is_number(value: object) -> TypeGuard[int | float]:
    """A number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)
