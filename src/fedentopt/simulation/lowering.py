"""Seeing through a plain Sequential: which layers it is made of, so that trainers can fuse them."""

from __future__ import annotations

from torch import nn


def flatten(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers of a (nested) Sequential with their qualified names, or None if it is anything else."""
    if not isinstance(model, nn.Sequential):
        return None
    layers: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        inner = flatten(child)
        if inner is None:
            layers.append((name, child))
        else:
            layers.extend((f"{name}.{n}", layer) for n, layer in inner)
    return layers


def is_pool2(layer: nn.Module) -> bool:
    """A 2x2 max-pool of stride 2 and nothing else."""
    return (
        isinstance(layer, nn.MaxPool2d)
        and layer.kernel_size in (2, (2, 2))
        and layer.stride in (2, (2, 2))
        and layer.padding in (0, (0, 0))
        and layer.dilation in (1, (1, 1))
        and not layer.ceil_mode
        and not layer.return_indices
    )


def pool_before_relu(model: nn.Module) -> nn.Module:
    """Swap ReLU and max-pool wherever they follow each other in a Sequential, in place.

    relu(max_pool(x)) = max_pool(relu(x)), gradients included, and a quarter of the ReLU's work. Names of layers with
    parameters do not change, since the two swapped ones have none.
    """
    for module in model.modules():
        if not isinstance(module, nn.Sequential):
            continue
        for i in range(len(module) - 1):
            if isinstance(module[i], nn.ReLU) and isinstance(module[i + 1], nn.MaxPool2d):
                module[i], module[i + 1] = module[i + 1], module[i]
    return model
