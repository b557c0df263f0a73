"""Which models the wide convolution kernels take: a plain Sequential, layer by layer.

Convolutions (stride 1), each followed by ReLU and perhaps a 2x2 max-pool, then linear layers with ReLU between them.
BatchNorm may stand between a convolution and its ReLU, dropout behind the last map and each ReLU between linear layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedentopt.models.keyed_dropout import KeyedDropout
from fedentopt.simulation.lowering import REACH, flatten, is_plain, is_pool2

WINDOW = 128  # most entries of a window of the first layer, whose input has the few channels of an image
CHANNELS = 16  # all other layers have multiples of this
LARGEST_KERNEL = 7
PADDED = (16, 32, 64)  # a batch is padded to one of the first two, or to a multiple of the last (`wide_maps.padded`)

Layers = list[tuple[str, nn.Module]]


@dataclass(frozen=True)
class WideNorm:
    """BatchNorm by the name of its layer."""

    name: str
    eps: float
    momentum: float

    @property
    def weight(self) -> str:
        return f"{self.name}.weight"

    @property
    def bias(self) -> str:
        return f"{self.name}.bias"


@dataclass(frozen=True)
class WideConv:
    """Convolution and ReLU, with BatchNorm between them and a max-pool behind where there are such, by the names of
    weight and bias."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    side: int
    padding: int
    pooled: bool
    norm: WideNorm | None

    @property
    def window(self) -> int:
        """Entries of the window of every pixel, filled up, if the layer is taken as one of a single tap, else 0."""
        entries = self.side**2 * self.inputs
        return 0 if self.inputs % CHANNELS == 0 else max(CHANNELS, 1 << (entries - 1).bit_length())


@dataclass(frozen=True)
class Dropped:
    """A dropout layer: its probability and its number among the model's dropout layers."""

    chance: float
    layer: int


@dataclass(frozen=True)
class WideLinear:
    """Linear layer; every one but the last is followed by ReLU and perhaps by dropout."""

    weight: str
    bias: str
    dropped: Dropped | None


@dataclass(frozen=True)
class WideBlocks:
    """A whole model: its convolutions, dropout of their features, its linear layers."""

    convolutions: tuple[WideConv, ...]
    dropped: Dropped | None
    linears: tuple[WideLinear, ...]

    @property
    def normed(self) -> bool:
        return any(conv.norm for conv in self.convolutions)

    @property
    def draws(self) -> bool:
        return self.dropped is not None or any(linear.dropped for linear in self.linears)

    def most_images(self, image_size: int) -> int:
        """Images of one batch whose largest map, padding included, the kernels can address."""
        size, numbers = image_size, 0
        for block in self.convolutions:
            size += 2 * block.padding - block.side + 1
            numbers = max(numbers, size**2 * max(block.outputs, block.window))
            size //= 2 if block.pooled else 1
        most = REACH // numbers
        tiles = [tile for tile in PADDED if tile <= most]
        return most // tiles[-1] * tiles[-1] if tiles else 0


def wide_blocks(model: nn.Module, image_size: int) -> WideBlocks | None:
    """The model as wide convolutions and linear layers, or None if a layer does not fit."""
    rest = flatten(model)
    if rest is None:
        return None
    convolutions: list[WideConv] = []
    size = image_size
    while rest:
        name, conv = rest[0]
        if not is_plain(conv, nn.Conv2d):
            break
        padding = _padding(conv)
        entries = conv.kernel_size[0] ** 2 * conv.in_channels
        fits = conv.in_channels % CHANNELS == 0 if convolutions else conv.in_channels <= 4 and entries <= WINDOW
        if padding is None or not fits or conv.out_channels % CHANNELS:
            return None
        rest = rest[1:]
        norm, rest = _norm(rest)
        if norm is None and conv.bias is None:
            return None
        after = [layer for _, layer in rest[:2]]
        if after and is_pool2(after[0]):
            after.reverse()  # ReLU and max-pool commute
        if not after or not is_plain(after[0], nn.ReLU):
            return None
        pooled = len(after) == 2 and is_pool2(after[1])
        side = conv.kernel_size[0]
        size = (size + 2 * padding - side + 1) // (2 if pooled else 1)
        if size < 1:
            return None
        bias = None if conv.bias is None else f"{name}.bias"
        shape = (conv.in_channels, conv.out_channels, side, padding)
        convolutions.append(WideConv(f"{name}.weight", bias, *shape, pooled, norm))
        rest = rest[2:] if pooled else rest[1:]
    dropped, rest = _dropped(rest)
    flat = rest[0][1] if rest else None
    if not convolutions or flat is None or not is_plain(flat, nn.Flatten) or (flat.start_dim, flat.end_dim) != (1, -1):
        return None
    rest = rest[1:]
    if dropped is None:  # dropout may as well stand behind the flattening
        dropped, rest = _dropped(rest)
    linears = _linears(rest)
    return None if linears is None else WideBlocks(tuple(convolutions), dropped, linears)


def _norm(rest: Layers) -> tuple[WideNorm | None, Layers]:
    """The BatchNorm that comes first, if one does that learns and keeps running statistics, and what is left."""
    name, layer = rest[0] if rest else ("", None)
    if layer is None or not is_plain(layer, nn.BatchNorm2d):
        return None, rest
    if not (layer.affine and layer.bias is not None and layer.track_running_stats) or layer.momentum is None:
        return None, rest
    return WideNorm(name, layer.eps, layer.momentum), rest[1:]


def _dropped(rest: Layers) -> tuple[Dropped | None, Layers]:
    """The dropout layer that comes first, if one does, and what is left."""
    layer = rest[0][1] if rest else None
    if layer is not None and is_plain(layer, KeyedDropout) and layer.axes is None:
        return (Dropped(layer.p, layer.layer) if layer.p else None), rest[1:]
    return None, rest


def _linears(rest: Layers) -> tuple[WideLinear, ...] | None:
    found: list[WideLinear] = []
    while rest:
        name, linear = rest[0]
        if not is_plain(linear, nn.Linear) or linear.bias is None:
            return None
        rest = rest[1:]
        dropped = None
        if rest:
            if not is_plain(rest[0][1], nn.ReLU):
                return None
            dropped, rest = _dropped(rest[1:])
            if not rest:
                return None
        found.append(WideLinear(f"{name}.weight", f"{name}.bias", dropped))
    return tuple(found) if found else None


def _padding(conv: nn.Conv2d) -> int | None:
    """The padding of a plain square convolution; None if it is anything else."""
    side = conv.kernel_size[0]
    plain = (
        conv.kernel_size == (side, side)
        and side <= LARGEST_KERNEL
        and conv.stride == (1, 1)
        and conv.padding_mode == "zeros"
        and conv.dilation == (1, 1)
        and conv.groups == 1
    )
    padding = conv.padding
    if padding == "same":
        padding = (side // 2,) * 2 if side % 2 else (-1, -1)  # an even kernel pads one side more than the other
    elif padding == "valid":
        padding = (0, 0)
    if not plain or isinstance(padding, str) or padding[0] != padding[1] or not 0 <= padding[0] < side:
        return None
    return int(padding[0])
