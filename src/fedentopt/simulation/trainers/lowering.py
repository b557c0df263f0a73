"""Seeing through a plain Sequential: which layers it is made of, so that trainers can fuse them."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


def is_plain(layer: nn.Module, kind: type[Layer]) -> TypeGuard[Layer]:
    """A layer of exactly this kind that does what torch says: no subclass, no hook, no forward of its own."""
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return type(layer) is kind and not any(hooks) and "forward" not in vars(layer)


def flatten(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers of a plain (nested) Sequential with their qualified names, or None if it is anything else.

    None too where layers share a parameter, whose gradient would come from each, or do not train one.
    """
    layers = _layers(model)
    if layers is None:
        return None
    parameters = [parameter for _, layer in layers for parameter in layer.parameters()]
    if len({id(p) for p in parameters}) < len(parameters) or not all(p.requires_grad for p in parameters):
        return None
    return layers


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]] | None:
    if not is_plain(model, nn.Sequential):
        return None
    layers: list[tuple[str, nn.Module]] = []
    for name, child in model._modules.items():  # named_children() leaves out a layer's second appearance
        assert child is not None
        inner = _layers(child)
        if inner is None:
            layers.append((name, child))
        else:
            layers.extend((f"{name}.{n}", layer) for n, layer in inner)
    return layers


def is_pool2(layer: nn.Module) -> bool:
    """A 2x2 max-pool of stride 2 and nothing else."""
    return (
        is_plain(layer, nn.MaxPool2d)
        and layer.kernel_size in (2, (2, 2))
        and layer.stride in (2, (2, 2))
        and layer.padding in (0, (0, 0))
        and layer.dilation in (1, (1, 1))
        and not layer.ceil_mode
        and not layer.return_indices
    )


def pool_before_relu(model: nn.Module) -> nn.Module:
    """Swap ReLU and max-pool wherever they follow each other in a plain (nested) Sequential, in place.

    relu(max_pool(x)) = max_pool(relu(x)), gradients included, and a quarter of the ReLU's work. Names of layers with
    parameters do not change, since the two swapped ones have none. A Sequential inside anything else stays as it is:
    its layers may be called one by one.
    """
    if not is_plain(model, nn.Sequential):
        return model
    for i in range(len(model) - 1):
        first, second = model[i], model[i + 1]
        if is_plain(first, nn.ReLU) and is_plain(second, nn.MaxPool2d) and not second.return_indices:
            model[i], model[i + 1] = second, first
    for child in model:
        pool_before_relu(child)
    return model
