"""From a model's name to a model, as a function of a seed."""

from __future__ import annotations

import torch
from torch import nn

from fedentopt.errors import InputError
from fedentopt.models.factory import check_own_model, own_model
from fedentopt.models.head import find_head
from fedentopt.models.keyed_dropout import key_dropout
from fedentopt.models.lenet5 import lenet5
from fedentopt.models.weights import load_weights

NAMES = ("lenet5", "vgg11", "efficientnet-b0", "efficientnet-b3")


def build(name: str, num_classes: int, *, seed: int, image_size: int = 32, weights: str | None = None) -> nn.Module:
    """The model `name` for `num_classes` classes and square RGB images, on the CPU, in training mode.

    `name`: one of `NAMES`, or "package.module:factory" for one's own. Its start depends on `seed` alone;
    torch's global generators are left as they were. `weights`: a local file to start from (see
    `load_weights`). Dropout layers become keyed ones (see `keyed_dropout`).
    """
    if num_classes < 2:
        raise InputError(f"num_classes: {num_classes} is out of range; accepted: at least 2")
    if image_size < 1:
        raise InputError(f"image_size: {image_size} is out of range; accepted: at least 1")
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: that would also reseed the CUDA generators, which are not forked here.
        torch.default_generator.manual_seed(seed % 2**63)
        model = _make(name, num_classes, image_size)
        key_dropout(model)
        if ":" in name:
            check_own_model(model, name, num_classes, image_size)
        if weights is not None:
            load_weights(model, weights, find_head(model))
    return model.train()


def _make(name: str, num_classes: int, image_size: int) -> nn.Module:
    if name == "lenet5":
        return lenet5(num_classes, image_size)
    # torchvision takes seconds to load, so only the models that need it do.
    if name == "vgg11":
        from fedentopt.models.vgg11 import vgg11

        return vgg11(num_classes, image_size)
    if name in ("efficientnet-b0", "efficientnet-b3"):
        from fedentopt.models.efficientnet import efficientnet

        return efficientnet(name.removeprefix("efficientnet-"), num_classes)
    if ":" in name:
        return own_model(name, num_classes).to("cpu")
    raise InputError(f"model: {name!r} is unknown; accepted: {', '.join(NAMES)} or package.module:factory")
