"""The order in which images and feature maps lie in memory: channels last, unless a user's model cannot work on that.

What comes out of a convolution follows its input and its weights. `x.view(len(x), -1)` behind one, as many models have
it, is refused by torch for channels-last maps; such a model gets its images, and keeps its weights, in plain order.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def keep_order(model: nn.Module, images: torch.Tensor) -> None:
    """Give a model that works on `images`, but not on the same ones channels-last, all images in plain order."""
    other = copy.deepcopy(model).to(memory_format=torch.channels_last)
    try:
        with torch.no_grad():
            other(images.contiguous(memory_format=torch.channels_last))
    except Exception:  # of torch, or of a check of the user's own
        model.register_forward_pre_hook(_plain)


def keeps_order(model: nn.Module) -> bool:
    """Whether `keep_order` has found that a model needs plain order."""
    return _plain in model._forward_pre_hooks.values()


def _plain(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0].contiguous(), *inputs[1:])
