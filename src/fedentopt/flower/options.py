"""What a label-aware strategy may be given, checked before anything is made; and the selector it asks for."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from flwr.serverapp.strategy import FedAvg, Strategy

from fedentopt.errors import InputError
from fedentopt.selection import EntropySelector, Selector
from fedentopt.selection.own_selectors import check_own_selector

WHOLE = {"num_classes": 1, "replacements": 0, "refresh_every": 0, "query_attempts": 1, "forget_after": 1}
"""Whole numbers and the least that is accepted; the last two may be None."""
MAY_BE_NONE = ("query_attempts", "forget_after")
SECONDS = ("query_timeout", "query_pause", "query_patience", "node_timeout")
CAPS = ("size_cap", "weight_cap")
EVALUATE_BY = ("seed", "labels")


def _are_ids(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes)


def _are_bound(value: Any) -> bool:
    return isinstance(value, bool) or (isinstance(value, Mapping) and all(map(_is_whole, value.values())))


def _are_callbacks(value: Any) -> bool:
    return isinstance(value, Sequence) and all(map(callable, value))


def _are_settings(value: Any) -> bool:
    return value is None or isinstance(value, Mapping)


def _is_path(value: Any) -> bool:
    return value is None or (isinstance(value, str | os.PathLike) and str(value) != "")


def _is_selector(value: Any) -> bool:
    return value is None or isinstance(value, Selector)


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, str) or _is_list_of_names(value)


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(name, str) for name in value)


FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "exclude": (_are_ids, "a list of client ids, as in ['oslo', 7]"),
    "bind_names": (_are_bound, "True, False, or {client id: node id}"),
    "pretrained": (_is_truth, "True or False"),
    "selector": (_is_selector, "a selector of fedentopt.selection, such as RandomSelector(10)"),
    "head": (_are_names, "the name of the last layer, or of its weight and bias"),
    "candidate_loss_keys": (_is_list_of_names, "a list of metrics' names, as in ['loss']"),
    "callbacks": (_are_callbacks, "a list of functions"),
    "settings": (_are_settings, "settings by name"),
    "checkpoint_dir": (_is_path, "a folder's path, or None"),
    "metrics_file": (_is_path, "a file's path, or None"),
}
"""What others must be: a text taken for a list of letters, say, would exclude nobody."""


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
        check_whole(name, value, least)
    for name in ("min_available_nodes", "min_evaluate_nodes"):
        check_whole(name, strategy_options.get(name, 0), 0)
    share = strategy_options.get("fraction_evaluate", 1.0)
    if not (is_number(share) and 0 <= share <= 1):  # Flower looks at it after the first round's training
        raise InputError(f"fraction_evaluate: {share!r} is out of range; accepted: a share of the clients from 0 to 1")
    for name, (is_accepted, accepted) in FORMS.items():
        if not is_accepted(options[name]):
            raise InputError(f"{name}: {options[name]!r} is not accepted; accepted: {accepted}")
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
    check_own_selector(selector, type(selector).__name__)
    aim = selector.target if isinstance(selector, EntropySelector) else None
    if aim is not None and aim.size != num_classes:  # else the first client would be blamed, after the query
        raise InputError(f"target: {aim.size} weights; accepted: {num_classes}, one for each class (num_classes)")
    return selector


def check_class(cls: type, selection: type, options: Mapping[str, Any]) -> None:
    """Refuse a class whose joined strategy would be passed over: FedAvg's methods stand before those of others, and
    what selection has or takes under a name does not reach a strategy that has or takes the same."""
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
    own = {name: p.default for name, p in inspect.signature(selection).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for base in joined:
        taken = inspect.signature(vars(base)["__init__"]).parameters if "__init__" in vars(base) else {}
        for name in taken:
            if name in own and options[name] is not own[name]:
                raise InputError(
                    f"{name}: {base.__name__} takes it too, and {selection.__name__} would not hand it on; accepted: "
                    "another name for it there"
                )
        for name in vars(base):
            if name in vars(selection) and not name.startswith("__") and not hasattr(FedAvg, name):
                raise InputError(
                    f"{cls.__name__}: {base.__name__} has {name!r} of its own, which {selection.__name__}'s would "
                    "replace; accepted: another name for it"
                )


def check_whole(name: str, value: Any, least: int) -> None:
    """Refuse what is no whole number from `least` on."""
    if not _is_whole(value) or value < least:
        raise InputError(f"{name}: {value!r} is out of range; accepted: whole numbers from {least}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """A number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)
