"""What strategies remember between rounds, gathered for a checkpoint and put back.

FedAdagrad, FedAdam and FedYogi keep moments (`m_t`, `v_t`), FedAvgM a momentum vector, adaptive clipping its norm,
and DP wrappers the privacy spent so far. Without these a continued run would be another run, and a continued
accountant would report too small an epsilon.

What nodes are told is kept, too: Flower hands strategies the same config in every round, and one that halves the
learning rate in it every few rounds expects it as it left it.

A strategy of one's own gives what it remembers by `memory()`, a dict of JSON values and NumPy arrays by name, and takes
it back by `remember(memory)`. Without these two methods, an attribute that changes while rounds go by is noticed, and
continuing such a run is refused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import FedAvgM, Strategy

from fedentopt.errors import InputError
from fedentopt.server.state_files import Arrays, check_json

MOMENTS = ("m_t", "v_t")
MOMENTUM = "momentum_vector"
NORM = "clipping_norm"
ACCOUNTANT = "accountant"
MEMORY = "memory"
HEX = "hex"
ROUND = "server-round"
KNOWN = {*MOMENTS, MOMENTUM, NORM, ACCOUNTANT, "strategy"}
EACH_ROUND = {"current_arrays", "current_bst", "_pending_events"}
"""Attributes of Flower's strategies that `configure_train` sets anew."""


def gather(layers: Sequence[Strategy]) -> tuple[dict[str, Arrays], list[dict[str, Any]]]:
    """Arrays by group name, and one JSON document per layer, outermost wrapper first."""
    arrays = server_vectors(layers)
    documents: list[dict[str, Any]] = []
    for depth, layer in enumerate(layers):
        document: dict[str, Any] = {"class": _kind(layer)}
        if _keeps(layer, NORM):
            document[NORM] = float(getattr(layer, NORM))
        if _keeps(layer, ACCOUNTANT):
            document[ACCOUNTANT] = getattr(layer, ACCOUNTANT).state_dict()
        if _has_memory(layer):
            kept = dict(layer.memory())  # type: ignore[attr-defined]
            arrays[f"{depth}.{MEMORY}"] = {n: v for n, v in kept.items() if isinstance(v, np.ndarray)}
            document[MEMORY] = {n: v for n, v in kept.items() if not isinstance(v, np.ndarray)}
            check_json(document[MEMORY], f"strategy: memory() of {_kind(layer)}")
        documents.append(document)
    return arrays, documents


def server_vectors(layers: Sequence[Strategy]) -> dict[str, Arrays]:
    """Moments and momentum of all layers, by group name."""
    arrays: dict[str, Arrays] = {}
    for depth, layer in enumerate(layers):
        for name in MOMENTS:
            if _keeps(layer, name):
                arrays[f"{depth}.{name}"] = dict(getattr(layer, name))
        if _keeps(layer, MOMENTUM):
            arrays[f"{depth}.{MOMENTUM}"] = {str(place): array for place, array in enumerate(getattr(layer, MOMENTUM))}
    return arrays


def put_back(layers: Sequence[Strategy], arrays: Mapping[str, Arrays]) -> None:
    """Give the layers the moments and momentum that `server_vectors` took, and none where there were none."""
    for depth, layer in enumerate(layers):
        for name in MOMENTS:
            if _may_keep(layer, name):
                found = arrays.get(f"{depth}.{name}")
                setattr(layer, name, None if found is None else dict(found))
        if _may_keep(layer, MOMENTUM):
            vector = arrays.get(f"{depth}.{MOMENTUM}")
            setattr(layer, MOMENTUM, None if vector is None else list(vector.values()))


def go_on_from(layers: Sequence[Strategy], arrays: ArrayRecord) -> None:
    """FedAvgM keeps the model it made last, and would go on from that instead of from this one."""
    for layer in layers:
        if isinstance(layer, FedAvgM):
            layer.current_arrays = arrays


def are_finite(arrays: Mapping[str, Arrays]) -> bool:
    """Whether every number of all these arrays is finite."""
    return all(np.isfinite(array).all() for group in arrays.values() for array in group.values())


def restore(layers: Sequence[Strategy], arrays: Mapping[str, Arrays], documents: Sequence[Mapping[str, Any]]) -> None:
    """Put back what `gather` took; a checkpoint of other strategies is refused."""
    kinds, saved = [_kind(layer) for layer in layers], [document["class"] for document in documents]
    if kinds != saved:
        raise InputError(f"checkpoint: written by {' around '.join(saved)}, continued by {' around '.join(kinds)}")
    put_back(layers, arrays)
    for depth, (layer, document) in enumerate(zip(layers, documents, strict=True)):
        if NORM in document:
            setattr(layer, NORM, document[NORM])
        if ACCOUNTANT in document:
            accountant = getattr(layer, ACCOUNTANT, None)
            if accountant is None:
                raise InputError("checkpoint: privacy was accounted for before; go on with an accountant")
            accountant.load_state_dict(document[ACCOUNTANT])
        if MEMORY in document:
            layer.remember({**document[MEMORY], **arrays.get(f"{depth}.{MEMORY}", {})})  # type: ignore[attr-defined]


def attributes(layers: Sequence[Strategy], own: frozenset[str]) -> list[dict[str, str]]:
    """A mark of the value of every attribute that is neither kept here, nor set each round, nor among `own`."""
    return [
        {}
        if _has_memory(layer)
        else {
            name: _mark(value)
            for name, value in vars(layer).items()
            if name not in EACH_ROUND | own and not (name in KNOWN and _may_keep(layer, name))
        }
        for layer in layers
    ]


def forgotten(layers: Sequence[Strategy], before: Sequence[Mapping[str, str]], own: frozenset[str]) -> list[str]:
    """Attributes that have changed since `before` was taken and that no checkpoint keeps."""
    after = attributes(layers, own)
    return [
        f"{_kind(layer)}.{name}"
        for layer, old, new in zip(layers, before, after, strict=True)
        for name in new
        if old.get(name) != new[name]
    ]


def write_config(config: ConfigRecord) -> dict[str, Any]:
    """What nodes are told, as JSON holds it: bytes as {"hex": text}. Without the round's number, which is set anew."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        return {HEX: value.hex()} if isinstance(value, bytes) else value

    return {name: plain(value) for name, value in config.items() if name != ROUND}


def read_config(config: ConfigRecord, saved: Mapping[str, Any]) -> None:
    """Give a config the values that `write_config` took, in its place: an app may hold it, too."""

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(item) for item in value]
        return bytes.fromhex(value[HEX]) if isinstance(value, dict) else value

    for name in [*config]:
        del config[name]
    config.update({name: given(value) for name, value in saved.items()})


def _mark(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.shape} {zlib.crc32(np.ascontiguousarray(value).tobytes())}"
    if isinstance(value, ArrayRecord):
        return " ".join(f"{name} {zlib.crc32(array.data)}" for name, array in value.items())
    if isinstance(value, Mapping):
        return " ".join(f"{name!r} {_mark(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(map(_mark, value))
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(id(value))


def _keeps(layer: Strategy, name: str) -> bool:
    """Whether a layer has under this name what Flower's strategies have there; one's own may mean something else."""
    value = getattr(layer, name, None)
    if name in MOMENTS:
        return isinstance(value, dict) and all(isinstance(array, np.ndarray | np.generic) for array in value.values())
    if name == MOMENTUM:
        return isinstance(value, list) and all(isinstance(array, np.ndarray | np.generic) for array in value)
    if name == NORM:
        return isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return callable(getattr(value, "state_dict", None)) if name == ACCOUNTANT else True


def _may_keep(layer: Strategy, name: str) -> bool:
    """The same, or nothing yet."""
    return hasattr(layer, name) and (getattr(layer, name) is None or _keeps(layer, name))


def _has_memory(layer: Strategy) -> bool:
    return callable(getattr(layer, "memory", None)) and callable(getattr(layer, "remember", None))


def _kind(layer: Strategy) -> str:
    return type(layer).__name__
