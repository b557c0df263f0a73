"""Training replies: checked before they reach an aggregation, and read for selectors that need more than labels.

A reply that is wrong (no parameters, others than the model's, other shapes or kinds, numbers that are not finite, a
weight that cannot be a number of steps; for SCAFFOLD the same of the control terms) is its site's failure and nobody
else's. Parameters are NumPy arrays and numbers, or torch tensors where the model's are, and are put in the model's
types: NVFlare's sums have those of the replies, and would hand half precision, or a type that torch does not know, to
every site. Metrics that could not be
averaged with the others' are dropped, and the reply is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AlgorithmConstants

from fedentopt.errors import InputError
from fedentopt.labels import LARGEST_COUNT
from fedentopt.selection import Head, Observation, Selector

SERVED = frozenset({"loss", "head", "update", "seconds", "kept"})
"""What a selector may need that an NVFlare server can tell it."""


def as_array(value: Any) -> np.ndarray:
    """A parameter as a NumPy array; tensors of types that NumPy lacks (bfloat16) as float32, which holds them."""
    if hasattr(value, "materialize"):  # NVFlare's reference to a tensor on disk
        value = value.materialize()
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        try:
            return np.asarray(value.numpy())
        except TypeError:
            return np.asarray(value.float().numpy())
    return np.asarray(value)


def check_reply(sent: FLModel, reply: FLModel) -> None:
    """Refuse a reply that must not be averaged, saying what is wrong; the types of its arrays become the model's."""
    if not isinstance(reply.params, dict) or not reply.params:
        raise InputError("the reply holds no parameters")
    if sent.params:
        _check_group("parameter", sent.params, reply.params)
        missing = [name for name in sent.params if name not in reply.params]
        if missing and reply.params_type == ParamsType.FULL:  # a difference may leave out what did not change
            raise InputError(f"parameter {missing[0]!r} is missing")
    else:
        for name, value in reply.params.items():
            _check_finite("parameter", name, as_array(value))
    meta = reply.meta or {}
    steps = meta.get(FLMetaKey.NUM_STEPS_CURRENT_ROUND, 1)
    if (
        isinstance(steps, bool)
        or not isinstance(steps, int | float | np.integer | np.floating)
        or not 0 < steps <= LARGEST_COUNT
    ):
        raise InputError(f"{FLMetaKey.NUM_STEPS_CURRENT_ROUND}: {steps!r}; accepted: a number above 0, at most 2**53")
    controls = (sent.meta or {}).get(AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL)
    if controls is not None:
        change = meta.get(AlgorithmConstants.SCAFFOLD_CTRL_DIFF)
        if not isinstance(change, dict):
            raise InputError(f"the reply holds no control terms ({AlgorithmConstants.SCAFFOLD_CTRL_DIFF})")
        _check_group("control term", controls, change)


def usable_metrics(metrics: Any) -> dict[str, Any]:
    """The metrics without those that NVFlare would trip over; none of them where there are none, since for one site
    that sends no metrics NVFlare would average nobody's.

    Finite numbers and arrays stay, as Python numbers and NumPy arrays, and so does what NVFlare does not average (text,
    lists, dictionaries).
    """
    kept: dict[str, Any] = {}
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        if value is None or isinstance(value, str | list | tuple | set | dict):
            kept[name] = value
            continue
        try:
            array = as_array(value)
            _check_finite("metric", name, array)
        except Exception:
            continue
        kept[name] = float(array) if array.ndim == 0 else array
    return kept


def shapes_of(metrics: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of usable metrics, of those that NVFlare averages."""
    return {name: np.shape(value) for name, value in metrics.items() if isinstance(value, float | np.ndarray)}


def stays_finite(before: Mapping[str, Any], change: Mapping[str, Any]) -> bool:
    """Whether what was averaged is finite, also when it is added to what was before."""
    for name, value in change.items():
        array = as_array(value)
        with np.errstate(over="ignore", invalid="ignore"):
            total = array + as_array(before[name]) if name in before else array
        if not (np.isfinite(array).all() and np.isfinite(total).all()):
            return False
    return True


def observation(
    needs: frozenset[str],
    sent: Mapping[str, np.ndarray],
    reply: FLModel,
    *,
    samples: int,
    seconds: float,
    head: tuple[str, str | None] | None,
    loss_metric: str,
    travel: float | None = None,
) -> Observation | None:
    """What a selector that `needs` it is told of a site; None where the site does not tell its loss.

    `sent` is the model the site started from. A site's loss is its metric `loss_metric`, the root mean square of its
    samples' losses `loss_metric`_rms where it tells that too. With the head goes `travel`, what the site's step sizes
    add up to, known of every site or of none.
    """
    loss = loss_rms = None
    if "loss" in needs:
        metrics = reply.metrics or {}
        loss, loss_rms = _number(metrics.get(loss_metric)), _number(metrics.get(f"{loss_metric}_rms"))
        if loss is None:
            return None
    update: np.ndarray | None = None
    change: Head | None = None
    if needs & {"head", "update"}:
        params = reply.params or {}
        full = reply.params_type == ParamsType.FULL

        def moved(name: str) -> np.ndarray:
            if name not in params:
                return np.zeros(sent[name].shape, dtype=np.float32)
            with np.errstate(over="ignore", invalid="ignore"):  # beyond single precision: selectors leave it out
                value = as_array(params[name]).astype(np.float32)
                return value - sent[name].astype(np.float32) if full else value

        if "update" in needs:
            update = np.concatenate([moved(name).ravel() for name in sent]).astype(np.float32)
        if "head" in needs and head is not None:
            change = Head(moved(head[0]), None if head[1] is None else moved(head[1]))
    return Observation(
        samples=samples,
        loss=loss,
        loss_rms=loss_rms,
        head=change,
        update=update,
        seconds=seconds if "seconds" in needs else None,
        kept=True if "kept" in needs else None,
        travel=travel,
    )


def check_model(
    selector: Selector, model: Mapping[str, Any], num_classes: int, named: tuple[str, str | None] | None
) -> tuple[str, str | None] | None:
    """Refuse a model whose change the selector could not be told; names of its last layer where that is needed."""
    if selector.needs & {"head", "update"} and not model:
        raise InputError(
            f"model: selector {selector.name} needs to know how sites change the model, and the job starts without "
            "one; accepted: a start model"
        )
    return _find_head(selector.name, model, num_classes, named) if "head" in selector.needs else None


def _find_head(
    selector: str, model: Mapping[str, Any], num_classes: int, named: tuple[str, str | None] | None
) -> tuple[str, str | None]:
    """Names of the last layer's weight (classes, features) and bias: those given, else the last that fit."""
    shapes = {name: as_array(value).shape for name, value in model.items()}
    if named is not None:
        for name in named:
            if name is not None and name not in shapes:
                raise InputError(f"head: the model has no parameter {name!r}; accepted: {', '.join(shapes)}")
        return named
    weights = [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == num_classes]
    if not weights:
        raise InputError(
            f"head: selector {selector} needs the last layer, and no parameter of the model has the shape "
            f"({num_classes}, features); accepted: its names as head=[weight, bias], of {', '.join(shapes)}, or a "
            "selector that does not look at it"
        )
    names = list(shapes)
    after = names[names.index(weights[-1]) + 1 :]
    bias = next((name for name in after if shapes[name] == (num_classes,)), None)
    return weights[-1], bias


def _check_group(what: str, own: Mapping[str, Any], given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in own:
            raise InputError(f"{what} {name!r} is not in the model")
        if _kind(value) != _kind(own[name]):
            raise InputError(f"{what} {name!r} is a {type(value).__name__}, not a {type(own[name]).__name__}")
        array, shape = as_array(value), as_array(own[name]).shape
        if array.shape != shape:
            raise InputError(f"{what} {name!r} has shape {array.shape}, not {shape}")
        _check_numbers(what, name, array)
        given[name] = fitted = _in_type_of(own[name], value)
        _check_finite(what, name, array if fitted is value else as_array(fitted))


def _in_type_of(own: Any, value: Any) -> Any:
    """A parameter in the type of the model's; fractions in the place of whole numbers in double precision, and whole
    numbers in the place of others as they are, since a smaller type would fold them over."""
    if _kind(value) == "tensor":
        tensor, like = (each.materialize() if hasattr(each, "materialize") else each for each in (value, own))
        if tensor.dtype == like.dtype or not (tensor.is_floating_point() or like.is_floating_point()):
            return value
        return tensor.double() if tensor.is_floating_point() > like.is_floating_point() else tensor.to(like.dtype)
    array, dtype = np.asarray(value), np.asarray(own).dtype
    if array.dtype == dtype or "f" not in (array.dtype.kind, dtype.kind):
        return value
    with np.errstate(over="ignore"):  # what is too large for the model is not finite there
        return array.astype(np.float64 if (array.dtype.kind == "f") > (dtype.kind == "f") else dtype)


def _kind(value: Any) -> str:
    """Whether sums can be formed with it: arrays and numbers with each other, tensors with tensors."""
    if hasattr(value, "detach") or hasattr(value, "materialize"):
        return "tensor"
    return "array" if isinstance(value, np.ndarray | np.integer | np.floating | int | float) else type(value).__name__


def _check_numbers(what: str, name: object, array: np.ndarray) -> None:
    if array.dtype.kind not in "biuf":
        raise InputError(f"{what} {name!r} is of type {array.dtype}; accepted: real numbers")


def _check_finite(what: str, name: object, array: np.ndarray) -> None:
    _check_numbers(what, name, array)
    if not np.isfinite(array).all():
        raise InputError(f"{what} {name!r} holds numbers that are not finite")


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
