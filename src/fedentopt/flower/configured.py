"""A strategy from an app's run config, so that an operator changes it without touching code.

    [tool.flwr.app.config.fedentopt]
    strategy = "FedAdam"          # any FedAvg-derived strategy of Flower's; FedAvg without
    selector = "fedentopt"        # any selector that Flower can serve
    cohort-size = 2
    buffer-size = 2
    num-classes = 10
    checkpoint-dir = "/srv/fl/checkpoint"
    audit = "warn"                # with it, how clients train: local-lr, local-epochs, local-batch-size, ...
    local-lr = 0.05
    local-batch-size = 32
    eta = 0.01                    # the strategy's own options, and the selector's settings

    strategy = strategy_from(context.run_config)

Flower hands such a table to an app as keys `fedentopt.cohort-size` and so on; `flwr run --run-config` sets them for one
run. Lists (`exclude`, `head`, `candidate-loss-keys`, `target`) are written with commas.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from flwr.app import UserConfig
from flwr.serverapp import strategy as flower_strategies
from flwr.serverapp.strategy import FedAvg

from fedentopt.errors import InputError
from fedentopt.flower.strategy import LabelAware
from fedentopt.selection import SELECTORS, EntropySelector
from fedentopt.server.local_training import LocalTraining
from fedentopt.settings import settings_of

PREFIX = "fedentopt."
LOCAL = "local_"
"""What settings of `LocalTraining` begin with."""
LISTS = ("exclude", "head", "candidate_loss_keys", "target")
NONE_WORDS = ("none", "")


def strategy_from(run_config: UserConfig, prefix: str = PREFIX, **options: Any) -> LabelAware:
    """The strategy that the keys under `prefix` describe; `options` are given in code and go before them.

    An unknown key, and a value that is not accepted, is refused by name.
    """
    told = {
        name.removeprefix(prefix).replace("-", "_"): value
        for name, value in run_config.items()
        if name.startswith(prefix)
    } | options
    local = {name.removeprefix(LOCAL): told.pop(name) for name in list(told) if name.startswith(LOCAL)}
    if local:
        told["local"] = LocalTraining.read({name: _read(name, value) for name, value in local.items()})
    cls = _joined(str(told.pop("strategy", "FedAvg")))
    selector = str(told.pop("selector", "fedentopt"))
    _check_names(told, cls, selector, prefix)
    told = {name: _read(name, value) for name, value in told.items()}
    if selector != "fedentopt":
        told["selector"] = _selector(selector, told)
    return cls(**told)


def strategies() -> dict[str, type[FedAvg]]:
    """Flower's strategies that selection can be added to, by name."""
    found = {
        name: getattr(flower_strategies, name)
        for name in flower_strategies.__all__
        if inspect.isclass(getattr(flower_strategies, name)) and issubclass(getattr(flower_strategies, name), FedAvg)
    }
    found.pop("FedXgbCyclic", None)  # chooses its own node
    return found


def _joined(name: str) -> type[LabelAware]:
    known = strategies()
    if name not in known:
        raise InputError(f"strategy: {name!r} is unknown; accepted: {', '.join(known)}")
    base = known[name]
    # Named after the strategy alone: a checkpoint knows whose memory it holds.
    return type(f"LabelAware{name}", (LabelAware,) if base is FedAvg else (LabelAware, base), {"__doc__": base.__doc__})


def _check_names(told: Mapping[str, Any], cls: type[LabelAware], selector: str, prefix: str) -> None:
    if selector not in SELECTORS:
        raise InputError(f"selector: {selector!r} is unknown; accepted: {', '.join(SELECTORS.names)}")
    accepted: set[str] = set()
    for base in cls.__mro__:
        if "__init__" in vars(base):
            accepted |= {
                name
                for name, p in inspect.signature(vars(base)["__init__"]).parameters.items()
                if p.kind is not p.VAR_KEYWORD
            }
    accepted -= {"self", "selector", "fraction_train", "min_train_nodes", "args", "kwargs"}
    if selector != "fedentopt":
        accepted -= {"buffer_size", "target", "release"}
        accepted |= {*_settings(selector), "seed"}
    for name in told:
        if name not in accepted:
            given = [LOCAL + field.name for field in fields(LocalTraining)]
            words = ", ".join(sorted(known.replace("_", "-") for known in accepted - {"local"} | set(given)))
            raise InputError(
                f"{prefix}{name.replace('_', '-')}: unknown setting; accepted: strategy, selector, {words}"
            )
    for name in ("cohort_size", "num_classes"):
        if name not in told:
            raise InputError(f"{prefix}{name.replace('_', '-')}: not set; accepted: a whole number from 1")


def _settings(selector: str) -> list[str]:
    """What a selector may be given beside cohort size and seed. One that is a kind of FedEntOpt has its buffer and,
    unless it reads labels from last layers, its target."""
    cls = SELECTORS.get(selector)
    own = [name for name in settings_of(cls) if name not in cls.run_settings]
    if not issubclass(cls, EntropySelector):
        return own
    return [*own, "buffer_size", "release", *(() if cls.labels_from_heads else ("target",))]


def _selector(name: str, told: dict[str, Any]) -> Any:
    own = {setting: told.pop(setting) for setting in _settings(name) if setting in told}
    return SELECTORS.get(name)(told["cohort_size"], seed=told.pop("seed", 0), **own)


def _read(name: str, value: Any) -> Any:
    if name == "exclude" and isinstance(value, int) and not isinstance(value, bool):
        return (value,)  # TOML has no lists here, and one client's number needs no quotes
    if name in LISTS and isinstance(value, str):
        words = [word.strip() for word in value.split(",") if word.strip()]
        if name != "target":
            return tuple(words)
        try:
            return [float(word) for word in words] or None
        except ValueError as error:
            raise InputError(f"target: {value!r}; accepted: one weight per class, with commas between") from error
    if isinstance(value, str) and value.strip().lower() in NONE_WORDS:
        return None
    return value
