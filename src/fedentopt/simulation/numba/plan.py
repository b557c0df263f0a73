"""A lowered net as the kernels read it: records of sizes, and of places in one worker's memory.

All floats of a worker lie in one array, and a place is an offset into it. Parameters lie there as a padded row: every
row of a weight matrix, and every row of a convolution's window, begins at a cache line and is filled up to whole lanes.
Nothing that lies in the padding ever reaches a result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.lowering import ConvBlock, LinearBlock, lower

LANES = 16
SLACK = 3 * LANES  # floats behind a place that lanes may touch


def _record(*names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])


NET = _record(
    "w", "v", "g", "anchor", "push", "width",  # padded rows of parameters, velocity, gradient, ..., and their length
    "image_channels", "height", "width_of_image", "channels_last",
    "input", "stride",  # where the first layer reads an image, and the next one
    "planes", "plane",  # three channels while an image is augmented, each so long
    "parted", "half",  # the image by even and odd columns, where the first convolution wants it so; else half is 0
    "upstream",  # how far behind an activation its gradient lies
)  # fmt: skip
CONV = _record(
    "channels", "height", "width", "out", "kernel", "pooled_height", "pooled_width",
    "weight", "bias",  # in a padded row
    "row", "window",  # padded length of a window's row, and of the whole window
    "taps", "out_lanes",  # the weights with output channels innermost, padded to whole lanes
    "input", "stride", "output", "out_stride",  # images, channels last
    "planar",  # the output by channels, where the kernel writes it so
    "origin", "origin_stride", "origin_pixel", "origin_channel",  # among the whole numbers
    "gradient",  # of the output, one image at a time
)  # fmt: skip
LINEAR = _record("inputs", "units", "relu", "weight", "bias", "row", "taps", "input", "stride", "output", "out_stride")


@dataclass(frozen=True)
class Place:
    """A parameter in the padded row: `rows` rows of `length` floats, `padded` apart."""

    name: str
    offset: int
    rows: int
    length: int
    padded: int


@dataclass(frozen=True)
class Plan:
    """The records of one net for batches of up to `batch` images, and how much memory they speak of."""

    net: np.ndarray
    convs: np.ndarray
    linears: np.ndarray
    parameters: tuple[Place, ...]
    batch: int
    floats: int
    origins: int
    pixels: int

    def pad(self, layout: FlatLayout, row: torch.Tensor, padded: torch.Tensor) -> None:
        """A model's parameters, from a flat row into a padded one."""
        for ours, theirs in self._pairs(layout, row, padded):
            ours.copy_(theirs)

    def unpad(self, layout: FlatLayout, padded: torch.Tensor, row: torch.Tensor) -> None:
        """The inverse of `pad`."""
        for ours, theirs in self._pairs(layout, row, padded):
            theirs.copy_(ours)

    def _pairs(
        self, layout: FlatLayout, row: torch.Tensor, padded: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        slots = {slot.name: slot for slot in layout.parameters}
        pairs = []
        for p in self.parameters:
            first = slots[p.name].offset
            ours = padded[p.offset : p.offset + p.rows * p.padded].view(p.rows, p.padded)[:, : p.length]
            pairs.append((ours, row[first : first + p.rows * p.length].view(p.rows, p.length)))
        return pairs


def lowered(model: nn.Module, image_shape: tuple[int, int]) -> list[ConvBlock | LinearBlock] | None:
    """The net's blocks if these kernels can train it on images of this height and width, or None."""
    blocks = lower(model, lambda *_: True)
    if blocks is None:
        return None
    parameters = dict(model.named_parameters())
    if len(parameters) != 2 * len(blocks) or not all(p.requires_grad for p in parameters.values()):
        return None  # a tensor shared between layers has a gradient from each; a frozen one has none
    channels, (height, width) = 3, image_shape
    features: int | None = None
    for block in blocks:
        shape = parameters[block.weight].shape
        if isinstance(block, ConvBlock):
            height, width = (height - int(shape[2]) + 1) // 2, (width - int(shape[3]) + 1) // 2
            if shape[1] != channels or height < 1 or width < 1:
                return None
            channels = int(shape[0])
        elif shape[1] != (channels * height * width if features is None else features):
            return None
        else:
            features = int(shape[0])
    return blocks


class _Places:
    """Hands out places, each at a cache line and with slack behind."""

    def __init__(self) -> None:
        self.length = 0

    def take(self, count: int) -> int:
        place = self.length
        self.length += _up(count + SLACK)
        return place


def _up(count: int, multiple: int = LANES) -> int:
    return -(-count // multiple) * multiple


def _prefers_columns(width: int, pooled_width: int, out: int) -> bool:
    """Whether lanes along a row of pooled pixels are fuller than lanes along the output channels."""
    return width % 2 == 0 and pooled_width / _up(pooled_width, 8) > out / _up(out, 8)


def make_plan(
    blocks: list[ConvBlock | LinearBlock], layout: FlatLayout, image_channels: int, image_shape: tuple[int, int],
    batch: int,
) -> Plan:  # fmt: skip
    """Give every part of a net that `lowered` accepted its place."""
    shapes = {slot.name: slot.shape for slot in layout.parameters}
    row, floats, activations, origins = _Places(), _Places(), _Places(), _Places()
    parameters: list[Place] = []

    def parameter(name: str, rows: int, length: int) -> int:
        parameters.append(Place(name, row.take(rows * _up(length)), rows, length, _up(length)))
        return parameters[-1].offset

    convs, linears = [], []
    conv_blocks = [block for block in blocks if isinstance(block, ConvBlock)]
    channels, (height, width) = 3, image_shape
    pixels = _up(height * width) + SLACK
    first_stride = stride = channels * _up(height * width)
    first = place = activations.take(batch * stride)
    half = 0
    for i, block in enumerate(conv_blocks):
        out, _, kernel, _ = shapes[block.weight]
        pooled = (height - kernel + 1) // 2, (width - kernel + 1) // 2
        size, out_lanes = out * math.prod(pooled), _up(out, 8)
        by_columns = i == 0 and _prefers_columns(width, pooled[1], out)
        half = pixels // 2 + SLACK if by_columns else half
        channel = _up(math.prod(pooled) + SLACK) if by_columns else 1
        room = out * channel if by_columns else _up(size)
        # The last output is needed as features, in another order: one image's worth of room is enough.
        out_stride = _up(size) if i < len(conv_blocks) - 1 else 0
        out_place = activations.take(max(batch * out_stride, size))
        convs.append(
            (
                channels, height, width, out, kernel, *pooled,
                parameter(block.weight, out * kernel, kernel * channels), parameter(block.bias, 1, out),
                _up(kernel * channels), kernel * _up(kernel * channels),
                floats.take((1 + kernel * kernel * channels) * out_lanes), out_lanes,
                place, stride, out_place, out_stride, activations.take(room) if by_columns else 0,
                origins.take(batch * room), room, 1 if by_columns else out, channel, floats.take(size),
            )
        )  # fmt: skip
        channels, (height, width), place, stride = out, pooled, out_place, out_stride
    inputs = channels * height * width
    if conv_blocks:
        stride = _up(inputs)
        place = activations.take(batch * stride)
    for layer in blocks[len(conv_blocks) :]:
        units = shapes[layer.weight][0]
        out_place, out_stride = activations.take(batch * _up(units)), _up(units)
        linears.append(
            (
                inputs, units, int(isinstance(layer, LinearBlock) and layer.relu),
                parameter(layer.weight, units, inputs), parameter(layer.bias, 1, units), _up(inputs),
                floats.take((1 + inputs) * _up(units)), place, stride, out_place, out_stride,
            )
        )  # fmt: skip
        inputs, place, stride = units, out_place, out_stride

    rows = [floats.take(row.length) for _ in range(5)]
    planes, parted = floats.take(3 * pixels), floats.take(3 * 2 * half)
    conv_records, linear_records = np.array(convs, dtype=CONV), np.array(linears, dtype=LINEAR)
    # Activations come last, followed by their gradients.
    begin = floats.take(2 * activations.length)
    for records in (conv_records, linear_records):
        records["input"] += begin
        records["output"] += begin
    conv_records["planar"][conv_records["planar"] > 0] += begin
    net = (
        *rows, row.length, image_channels, *image_shape, int(bool(conv_blocks)), first + begin, first_stride,
        planes, pixels, parted, half, activations.length,
    )  # fmt: skip
    return Plan(
        np.array([net], dtype=NET), conv_records, linear_records, tuple(parameters), batch, floats.length,
        origins.length, 3 * pixels,
    )  # fmt: skip
