"""From a model's name to a model, as a function of a seed.

A user's own model goes by "package.module:factory", where factory(num_classes) returns an `nn.Module`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedentopt.errors import InputError
from fedentopt.models.efficientnet_lite import EfficientNetLite
from fedentopt.models.head import find_head, marking_head
from fedentopt.models.host_reads import note_host_reads
from fedentopt.models.keyed_draws import key_draws
from fedentopt.models.keyed_dropout import DropoutKey, key_dropout
from fedentopt.models.memory_order import keep_order
from fedentopt.models.networks import efficientnet, lenet5, vgg11
from fedentopt.models.pretrained import PRETRAINED, load_pretrained
from fedentopt.models.weights import load_weights
from fedentopt.own_code import call_own, describe_error, find_own, is_of_handler, make_own

_WHOLE = 2**24  # up to here float32 holds every whole number


def own_model(spec: str, num_classes: int, factory: Callable[[int], nn.Module] | None = None) -> nn.Module:
    """Call the factory, imported where none is given (see `make_own`), and refuse a result that is no `nn.Module`."""
    model = make_own("model", spec, num_classes) if factory is None else call_own("model", spec, factory, num_classes)
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {spec}({num_classes}) returned {type(model).__name__}; accepted: torch.nn.Module")
    try:
        return model.to("cpu")
    except NotImplementedError as error:  # made on torch's meta device
        raise InputError(f"model: {spec}({num_classes}) has no weights; accepted: a model made on the CPU") from error


def check_own_model(
    model: nn.Module, spec: str, num_classes: int, image_size: int, channels: int, key: DropoutKey | None
) -> None:
    """Try a zero image, which also tells where the last linear layer is, how many channels the model takes of grey
    images, in which order it can have them in memory, whether it draws beside its dropout layers, and whether its
    numbers reach Python.

    Refused are a failing forward, another width than `num_classes`, nothing to train, numbers that float32 does not
    hold, randomness that cannot be keyed.
    """
    if channels == 1:
        _take_grey(model, spec, image_size)
    images = torch.zeros(2, 3, image_size, image_size)
    model.eval()
    with marking_head(model):
        output = _forward(model, images, spec)
    if not isinstance(output, torch.Tensor) or tuple(output.shape) != (2, num_classes):
        got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise InputError(
            f"model: {spec} gives {got} for images of shape {tuple(images.shape)}; accepted: one row of "
            f"{num_classes} logits per image, (2, {num_classes})"
        )
    _check_numbers(model, spec, images)
    keep_order(model, images)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"model: {spec} has no parameter that requires a gradient; accepted: at least one")
    try:
        key_draws(model, images, key)
        note_host_reads(model, images)
    except InputError as error:
        accepted = "layers and functions of torch that draw in the forward pass of training"
        raise InputError(f"model: {spec}: {error}; accepted: {accepted}") from error
    except Exception as error:
        if is_of_handler(error):
            raise
        raise _failed(spec, images, error) from error
    model.train()


def _check_numbers(model: nn.Module, spec: str, images: torch.Tensor) -> None:
    """Refuse what does not survive float32, in which parameters and buffers are trained, averaged and kept."""
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        kind = str(tensor.dtype).removeprefix("torch.")
        if tensor.is_complex():
            raise InputError(f"model: {spec} holds {name} in {kind}; accepted: real numbers, which train in float32")
        if tensor.is_floating_point() or not tensor.numel():
            continue
        if float(tensor.double().abs().max()) > _WHOLE:  # torch has no maximum of unsigned numbers
            raise InputError(f"model: {spec} holds {name} in {kind}, beyond what float32 counts; accepted: up to 2**24")
    others = [(name, t.dtype) for name, t in named if t.is_floating_point() and t.dtype != torch.float32]
    if others:
        try:
            with torch.no_grad():
                copy.deepcopy(model).float()(images)
        except Exception as error:
            if is_of_handler(error):
                raise
            name, kind = others[0][0], str(others[0][1]).removeprefix("torch.")
            raise InputError(
                f"model: {spec} holds {name} in {kind} and fails in float32, in which models train: "
                f"{describe_error(error)}; accepted: a model in float32"
            ) from error


def _take_grey(model: nn.Module, spec: str, image_size: int) -> None:
    """Let a model that takes no other see grey images as one channel; any other sees them as three equal ones."""
    three = torch.zeros(2, 3, image_size, image_size)
    try:
        _forward(copy.deepcopy(model).eval(), three, spec)  # a copy: a lazy layer would take the size for its own
    except InputError as error:
        hook = model.register_forward_pre_hook(first_channel)
        try:
            _forward(copy.deepcopy(model).eval(), three, spec)
        except InputError as also:
            hook.remove()
            reasons = [describe_error(one.__cause__ or one) for one in (error, also)]
            if reasons[0] == reasons[1]:  # nothing that channels have to do with
                raise error from error.__cause__
            raise InputError(f"{error}; with one channel: {reasons[1]}") from error


def first_channel(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """One channel of images whose channels are all the same."""
    return (inputs[0][:, :1], *inputs[1:])


def _forward(model: nn.Module, images: torch.Tensor, spec: str) -> Any:
    try:
        with torch.no_grad():
            return model(images)
    except Exception as error:
        if is_of_handler(error):
            raise
        raise _failed(spec, images, error) from error


def _failed(spec: str, images: torch.Tensor, error: Exception) -> InputError:
    return InputError(f"model: {spec} failed on images of shape {tuple(images.shape)}: {describe_error(error)}")


INITIALISATIONS = ("network", "layers")
NAMES = ("lenet5", "vgg11", "vgg11-bn", "efficientnet-b0", "efficientnet-b3", "efficientnet-lite0")


def build(
    name: str,
    num_classes: int,
    *,
    seed: int,
    image_size: int = 32,
    weights: str | None = None,
    factory: Callable[[int], nn.Module] | None = None,
    channels: int = 3,
    initialisation: str = "network",
) -> nn.Module:
    """The model `name` for `num_classes` classes and square images, on the CPU, in training mode.

    `name`: one of `NAMES`, or "package.module:factory" for one's own. Its start depends on `seed` alone;
    torch's global generators are left as they were. `weights`: a local file to start from (see
    `load_weights`), or "pretrained" (see `load_pretrained`). `factory`: makes one's own model in the place of what
    `name` stands for. Dropout layers become keyed ones (see `keyed_dropout`), other draws of one's own model are keyed
    too (see `keyed_draws`). Images come as RGB; of data with one of `channels`, one's own model may take that one.
    `initialisation`: "network" draws as the code that the network comes from does, "layers" by every layer's own
    default in torch; loaded weights win over either.
    """
    if initialisation not in INITIALISATIONS:
        raise InputError(f"initialisation: {initialisation!r} is unknown; accepted: {', '.join(INITIALISATIONS)}")
    if num_classes < 2:
        raise InputError(f"num_classes: {num_classes} is out of range; accepted: at least 2")
    if image_size < 1:
        raise InputError(f"image_size: {image_size} is out of range; accepted: at least 1")
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would also reseed the CUDA generators, which are not forked here.
        torch.default_generator.manual_seed(seed % 2**63)
        model = _make(name, num_classes, image_size, factory)
        key = key_dropout(model)
        if ":" in name or factory is not None:
            check_own_model(model, name, num_classes, image_size, channels, key)
        if initialisation == "layers":
            _draw_by_layer(model, name)
        if weights == PRETRAINED:
            load_pretrained(model, name, find_head(model))
        elif weights is not None:
            load_weights(model, weights, find_head(model))
    return model.train()


def check_name(name: str) -> None:
    """Refuse a name behind which there is no model; one's own is imported, not called."""
    if ":" in name:
        find_own("model", name)
    elif name not in NAMES:
        raise InputError(f"model: {name!r} is unknown; accepted: {', '.join(NAMES)} or package.module:factory")


def _draw_by_layer(model: nn.Module, name: str) -> None:
    """Draw all weights anew, each layer by its own rule (`reset_parameters`); a layer without one stays as it is."""
    for layer in model.modules():
        reset = getattr(layer, "reset_parameters", None)
        if callable(reset):
            try:
                reset()
            except Exception as error:
                if is_of_handler(error):
                    raise
                raise InputError(
                    f"initialisation: a layer of {name}, {type(layer).__name__}, cannot be drawn anew by its "
                    f"reset_parameters(): {describe_error(error)}; accepted: network"
                ) from error


def _make(name: str, num_classes: int, image_size: int, factory: Callable[[int], nn.Module] | None) -> nn.Module:
    if factory is not None:
        return own_model(name, num_classes, factory)
    if ":" in name:
        return own_model(name, num_classes)
    check_name(name)
    if name == "lenet5":
        return lenet5(num_classes, image_size)
    if name in ("vgg11", "vgg11-bn"):
        return vgg11(num_classes, image_size, batch_norm=name.endswith("-bn"))
    if name in ("efficientnet-b0", "efficientnet-b3"):
        return efficientnet(name.removeprefix("efficientnet-"), num_classes)
    return EfficientNetLite(num_classes)
