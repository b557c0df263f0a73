"""A user's own model: "package.module:factory", where factory(num_classes) returns an `nn.Module`."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from fedentopt.errors import InputError
from fedentopt.models.head import marking_head
from fedentopt.own_code import make_own, told


def own_model(spec: str, num_classes: int) -> nn.Module:
    """Import the factory (see `make_own`), call it, and refuse a result that is no `nn.Module`."""
    model = make_own("model", spec, num_classes)
    if not isinstance(model, nn.Module):
        raise InputError(f"model: {spec}({num_classes}) returned {type(model).__name__}; accepted: torch.nn.Module")
    return model


def check_own_model(model: nn.Module, spec: str, num_classes: int, image_size: int) -> None:
    """Try a zero image, which also tells where the last linear layer is.

    Refused are a failing forward, another width than `num_classes`, nothing to train, unkeyed randomness.
    """
    images = torch.zeros(2, 3, image_size, image_size)
    model.eval()
    with marking_head(model):
        output = _forward(model, images, spec)
    if not isinstance(output, torch.Tensor) or tuple(output.shape) != (2, num_classes):
        got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise InputError(
            f"model: {spec} gives {got} for images of shape {tuple(images.shape)}; accepted: one row of "
            f"{num_classes} logits an image, (2, {num_classes})"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(f"model: {spec} has no parameter that requires a gradient; accepted: at least one")
    model.train()
    before = torch.default_generator.get_state()
    _forward(copy.deepcopy(model), images, spec)  # a copy: batch statistics must stay untouched
    if not torch.equal(before, torch.default_generator.get_state()):
        raise InputError(
            f"model: {spec} draws from torch's global generator while training (such as torch.nn.functional.dropout); "
            "accepted: nn.Dropout layers, whose masks can be keyed"
        )


def _forward(model: nn.Module, images: torch.Tensor, spec: str) -> Any:
    try:
        with torch.no_grad():
            return model(images)
    except Exception as error:
        raise InputError(f"model: {spec} failed on images of shape {tuple(images.shape)}: {told(error)}") from error

