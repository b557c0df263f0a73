"""Seeing through a plain Sequential: which layers it is made of, and as which blocks the kernels can take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)
REACH = 2**31  # numbers of one model's maps of a batch that the 32-bit offsets of kernels can tell apart


def is_plain(layer: nn.Module, kind: type[Layer]) -> TypeGuard[Layer]:
    """A layer of exactly this kind that does what torch says: no subclass, no hook, no forward or mode of its own."""
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    return type(layer) is kind and not any(hooks) and vars(layer).keys().isdisjoint(("forward", "train"))


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


@dataclass(frozen=True)
class ConvBlock:
    """Convolution, ReLU and 2x2 max-pool, by the names of the weight and the bias."""

    weight: str
    bias: str


@dataclass(frozen=True)
class LinearBlock:
    """Linear layer, with the ReLU that follows it if one does."""

    weight: str
    bias: str
    relu: bool


def lower(model: nn.Module, fuses: Callable[[int, int, int], bool]) -> list[ConvBlock | LinearBlock] | None:
    """The model as blocks that the kernels know, or None if a layer does not fit.

    `fuses(in_channels, out_channels, kernel)` says which convolutions the kernels take.
    """
    layers = flatten(model)
    if layers is None:
        return None
    blocks: list[ConvBlock | LinearBlock] = []
    rest = list(layers)
    while rest and is_plain(rest[0][1], nn.Conv2d):
        name, conv = rest[0][0], rest[0][1]
        pair = [layer for _, layer in rest[1:3]]
        pooled = len(pair) == 2 and any(is_plain(p, nn.ReLU) for p in pair) and any(is_pool2(p) for p in pair)
        if not (pooled and _is_basic(conv) and fuses(conv.in_channels, conv.out_channels, conv.kernel_size[0])):
            return None
        blocks.append(ConvBlock(f"{name}.weight", f"{name}.bias"))
        rest = rest[3:]
    flat = rest[0][1] if rest else None
    if flat is None or not is_plain(flat, nn.Flatten) or (flat.start_dim, flat.end_dim) != (1, -1):
        return None
    rest = rest[1:]
    while rest and is_plain(rest[0][1], nn.Linear) and rest[0][1].bias is not None:
        relu = len(rest) > 1 and is_plain(rest[1][1], nn.ReLU)
        blocks.append(LinearBlock(f"{rest[0][0]}.weight", f"{rest[0][0]}.bias", relu))
        rest = rest[2:] if relu else rest[1:]
    last = blocks[-1] if blocks else None
    if rest or not isinstance(last, LinearBlock) or last.relu:  # logits come straight from a linear layer
        return None
    return blocks


def _is_basic(conv: nn.Module) -> bool:
    """Square kernel, stride 1, no padding, no groups, with a bias."""
    return (
        is_plain(conv, nn.Conv2d)
        and conv.kernel_size[0] == conv.kernel_size[1]
        and conv.stride == (1, 1)
        and conv.padding == (0, 0)
        and conv.dilation == (1, 1)
        and conv.groups == 1
        and conv.bias is not None
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
