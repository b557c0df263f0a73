"""What a label-aware controller may be given, checked before anything is made; and the selector it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.scaffold import Scaffold

from fedentopt.errors import InputError
from fedentopt.nvflare.replies import SERVED
from fedentopt.own_code import is_import_path, make_own
from fedentopt.selection import SELECTORS, EntropySelector, Selector
from fedentopt.selection.own_selectors import check_own_selector
from fedentopt.server.local_training import LocalTraining

WHOLE = {"num_classes": 1, "query_timeout": 1, "train_timeout": 0, "node_timeout": 1}
"""Whole numbers and the least that is accepted."""


def check_class(cls: type, selection: type, state: str | None) -> None:
    """Refuse controllers whose sites return something else than models, and states that would forget something."""
    joined = next((each for each in cls.__mro__ if not issubclass(each, selection)), object)
    if not issubclass(joined, FedAvg | Scaffold):
        raise InputError(
            f"{cls.__name__}: {joined.__name__} cannot be joined; accepted: FedAvg, Scaffold and what descends "
            "from them"
        )
    if state is not None and joined not in (FedAvg, Scaffold):
        raise InputError(
            f"state: {joined.__name__} may remember more than is kept; accepted with a state: FedAvg, Scaffold"
        )


def check_options(options: Mapping[str, Any], controller_options: Mapping[str, Any]) -> None:
    """Refuse the first that is out of range, and those of the controller's that selection replaces."""
    for name, least in WHOLE.items():
        value = options[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{name}: {value!r} is not accepted; accepted: a whole number of at least {least}")
    cap = options["size_cap"]
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not (cap == 0 or 1 <= cap < inf):
        raise InputError(f"size_cap: {cap!r} is not accepted; accepted: a number from 1, or 0 for no limit")
    cohort_size = options["cohort_size"]
    if controller_options.get("num_clients", cohort_size) != cohort_size:
        raise InputError(
            f"num_clients: {controller_options['num_clients']!r} has no place here; cohort_size says how many sites "
            "train"
        )
    exclude = options["exclude"]
    if exclude is not None and not _are_texts(exclude):  # one name alone would be read letter by letter
        raise InputError(f"exclude: {exclude!r} is not accepted; accepted: a list of sites' names, as in ['site-1']")
    head = options["head"]
    if head is not None and not (_are_texts(head) and 1 <= len(head) <= 2):
        raise InputError(f"head: {head!r} is not accepted; accepted: names of the last layer's weight and bias")


def make_selector(
    cohort_size: int,
    num_classes: int,
    buffer_size: int,
    seed: int,
    target: Sequence[float] | None,
    selector: str | None,
    settings: Mapping[str, Any] | None,
) -> Selector:
    """FedEntOpt with these settings, or the selector of that name or import path with its own; others are refused, and
    those that need what NVFlare's sites are not asked for."""
    if selector is None:
        if settings:
            raise InputError("selector_args: given without a selector; accepted: buffer_size, seed and target")
        made = EntropySelector(cohort_size, buffer_size, seed, target)
        if made.target is not None and made.target.size != num_classes:
            raise InputError(f"target: {made.target.size} weights; accepted: {num_classes}, one for each class")
        return made
    if buffer_size != 0 or target is not None:
        raise InputError("selector: give either a selector or buffer_size and target, which would build one")
    if not isinstance(selector, str):
        raise InputError(f"selector: {selector!r}; accepted: a name ({', '.join(SELECTORS.names)}) or module:Class")
    if is_import_path(selector):
        own = make_own("selector", selector, cohort_size, seed=seed, **(settings or {}))
    else:
        try:
            own = SELECTORS.get(selector)(cohort_size, seed=seed, **(settings or {}))
        except TypeError as error:
            raise InputError(f"selector_args: {error}") from error
    if not isinstance(own, Selector):
        raise InputError(f"selector: {selector} gives a {type(own).__name__}; accepted: a Selector")
    check_own_selector(own, selector)
    if own.labels_from_heads:
        raise InputError(
            f"selector: {own.name} takes a census in which every site trains and asks for no label counts; this "
            "controller takes none and asks for them; accepted: selectors that go by label counts, such as fedentopt"
        )
    beyond = ", ".join(sorted(own.needs - SERVED))
    if beyond:
        raise InputError(
            f"selector: {own.name} needs {beyond}, which NVFlare's sites are not asked for; accepted: selectors "
            f"that need nothing beyond label counts and {', '.join(sorted(SERVED))}"
        )
    return own


def _are_texts(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(each, str) for each in value)


def read_local(local: Mapping[str, Any] | None, selector: Selector) -> LocalTraining | None:
    """How all sites train, None where that is not said; refused where it does not tell their steps, or tells nobody."""
    if local is None:
        return None
    training = LocalTraining.read(local)
    if "head" not in selector.needs:
        raise InputError(
            f"local: selector {selector.name} does not look at last layers, so that step sizes change nothing; "
            "accepted: with selectors that need the head, such as hics-fl and divfl"
        )
    if not training.complete:
        raise InputError(
            f"local: {dict(local)!r} does not say every site's steps; accepted: lr, and steps or batch_size"
        )
    return training
