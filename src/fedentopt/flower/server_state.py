"""What Flower's own strategies remember between rounds, gathered for a checkpoint and put back.

FedAdagrad, FedAdam and FedYogi keep moments (`m_t`, `v_t`), FedAvgM a momentum vector, adaptive clipping its norm,
and DP wrappers the privacy spent so far. Without these a continued run would be another run, and a continued
accountant would report too small an epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.serverapp.strategy import Strategy

from fedentopt.errors import InputError
from fedentopt.flower.checkpoint import Arrays

MOMENTS = ("m_t", "v_t")
MOMENTUM = "momentum_vector"
NORM = "clipping_norm"
ACCOUNTANT = "accountant"


def gather(layers: Sequence[Strategy]) -> tuple[dict[str, Arrays], list[dict[str, Any]]]:
    """Arrays by group name, and one JSON document a layer, outermost wrapper first."""
    arrays: dict[str, Arrays] = {}
    documents: list[dict[str, Any]] = []
    for depth, layer in enumerate(layers):
        for name in MOMENTS:
            if getattr(layer, name, None) is not None:
                arrays[f"{depth}.{name}"] = dict(getattr(layer, name))
        if getattr(layer, MOMENTUM, None) is not None:
            arrays[f"{depth}.{MOMENTUM}"] = {str(place): array for place, array in enumerate(getattr(layer, MOMENTUM))}
        document: dict[str, Any] = {"class": _kind(layer)}
        if hasattr(layer, NORM):
            document[NORM] = float(getattr(layer, NORM))
        if getattr(layer, ACCOUNTANT, None) is not None:
            document[ACCOUNTANT] = getattr(layer, ACCOUNTANT).state_dict()
        documents.append(document)
    return arrays, documents


def restore(layers: Sequence[Strategy], arrays: Mapping[str, Arrays], documents: Sequence[Mapping[str, Any]]) -> None:
    """Put back what `gather` took; a checkpoint of other strategies is refused."""
    kinds, saved = [_kind(layer) for layer in layers], [document["class"] for document in documents]
    if kinds != saved:
        raise InputError(f"checkpoint: written by {' around '.join(saved)}, continued by {' around '.join(kinds)}")
    for depth, (layer, document) in enumerate(zip(layers, documents, strict=True)):
        for name in MOMENTS:
            if f"{depth}.{name}" in arrays:
                setattr(layer, name, dict(arrays[f"{depth}.{name}"]))
        if f"{depth}.{MOMENTUM}" in arrays:
            setattr(layer, MOMENTUM, list(arrays[f"{depth}.{MOMENTUM}"].values()))
        if NORM in document:
            setattr(layer, NORM, document[NORM])
        if ACCOUNTANT in document:
            accountant = getattr(layer, ACCOUNTANT, None)
            if accountant is None:
                raise InputError("checkpoint: privacy was accounted for before; go on with an accountant")
            accountant.load_state_dict(document[ACCOUNTANT])


def _kind(layer: Strategy) -> str:
    return type(layer).__name__
