"""The kernel that Python calls: all steps of one client, or the logits of many images.

It does not hold the interpreter's lock, starts no thread, and touches nothing but the memory it is handed, so a
client's bits are the same whoever works beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedentopt.simulation.augment import DRAWS
from fedentopt.simulation.numba.compiled import entry, numba, part
from fedentopt.simulation.numba.convolution import (
    clear_padding,
    conv_input_gradient,
    conv_relu_pool,
    conv_relu_pool_columns,
    conv_weight_gradient,
    pack_taps,
)  # fmt: skip
from fedentopt.simulation.numba.gather import load_image
from fedentopt.simulation.numba.lane_arithmetic import rectify_gradient, spread16
from fedentopt.simulation.numba.lanes import at, load16, put, store
from fedentopt.simulation.numba.linear import (
    linear,
    linear_input_gradient,
    linear_weight_gradient,
    pack_units,
)  # fmt: skip
from fedentopt.simulation.numba.loss import add_sample_losses, cross_entropy_gradient
from fedentopt.simulation.numba.plan import CONV, LINEAR, NET
from fedentopt.simulation.numba.update import sgd_step

types = numba.types
FLOATS, DOUBLES, INTS = types.float32[::1], types.float64[::1], types.int32[::1]
BYTES, LONGS = types.uint8[::1], types.int64[::1]
NETS, CONVS, LINEARS = (types.Array(numba.from_dtype(record), 1, "C") for record in (NET, CONV, LINEAR))


@part
def _forward(
    net: Any, convs: Any, linears: Any, n: int, images: Any, index: Any, draws: Any, first: int, settings: Any,
    f: Any, origins: Any, pixels: Any,
) -> None:  # fmt: skip
    """Samples index[first : first + n] of the images through all layers."""
    for i in range(len(convs)):
        pack_taps(convs[i], net.w, f)
    for i in range(len(linears)):
        pack_units(linears[i], net.w, f)
    bytes_of_image = net.image_channels * net.height * net.width_of_image
    for s in range(n):
        image = np.int64(at(index, first + s)) * bytes_of_image
        load_image(net, images, image, draws, (first + s) * DRAWS, settings, pixels, f, net.input + s * net.stride)
        for i in range(len(convs)):
            c = convs[i]
            y, origin = c.output + s * c.out_stride, c.origin + s * c.origin_stride
            if c.planar:
                conv_relu_pool_columns(c, net.w, f, origins, net.parted, net.half, y, origin)
            else:
                conv_relu_pool(c, f, origins, c.input + s * c.stride, y, origin)
        if len(convs):
            c, features = convs[len(convs) - 1], linears[0].input + s * linears[0].stride
            size = c.pooled_height * c.pooled_width
            for o in range(c.out):
                for p in range(size):
                    put(f, features + o * size + p, at(f, c.output + p * c.out + o))
    for i in range(len(linears)):
        linear(linears[i], f, n)


@part
def _backward_linears(net: Any, convs: Any, linears: Any, n: int, f: Any) -> None:
    """Gradients of all linear layers and, if a convolution comes before them, of the features."""
    for i in range(len(linears) - 1, -1, -1):
        l = linears[i]
        linear_weight_gradient(l, net.g, f, net.upstream, n)
        if i or len(convs):
            linear_input_gradient(l, net.w, f, net.upstream, n)
            if i == 0 or linears[i - 1].relu:
                for j in range(l.input, l.input + n * l.stride, 16):
                    store(f, net.upstream + j, rectify_gradient(load16(f, j), load16(f, net.upstream + j)))


@part
def _backward_convs(net: Any, convs: Any, linears: Any, n: int, f: Any, origins: Any) -> None:
    """Gradients of all convolutions, image by image, from those of the features."""
    for i in range(len(convs)):
        for j in range(0, convs[i].window * convs[i].out, 16):
            store(f, net.g + convs[i].weight + j, spread16(0))
        for j in range(convs[i].out):
            put(f, net.g + convs[i].bias + j, 0)
    last = convs[len(convs) - 1]
    size = last.pooled_height * last.pooled_width
    for s in range(n):
        features = net.upstream + linears[0].input + s * linears[0].stride
        for o in range(last.out):
            for p in range(size):
                put(f, last.gradient + p * last.out + o, at(f, features + o * size + p))
        for i in range(len(convs) - 1, -1, -1):
            c = convs[i]
            origin = c.origin + s * c.origin_stride
            conv_weight_gradient(c, net.g, f, origins, c.input + s * c.stride, c.gradient, origin)
            if i:
                before = convs[i - 1].gradient
                conv_input_gradient(c, net.w, f, origins, c.gradient, before, origin)
                for j in range(0, c.height * c.width * c.channels, 16):
                    value = load16(f, c.input + s * c.stride + j)
                    store(f, before + j, rectify_gradient(value, load16(f, before + j)))
    for i in range(len(convs)):
        clear_padding(convs[i], net.g, f)


@entry(
    types.void(
        NETS, CONVS, LINEARS, BYTES, LONGS, INTS, LONGS, types.int64, FLOATS, FLOATS, FLOATS, types.int64, FLOATS,
        FLOATS, FLOATS, DOUBLES, FLOATS, INTS, BYTES,
    )
)  # fmt: skip
def run(
    nets: Any, convs: Any, linears: Any, images: Any, labels: Any, index: Any, filled: Any, batch: int, draws: Any,
    settings: Any, rates: Any, mode: int, scale: Any, shift: Any, logits: Any, sums: Any, f: Any, origins: Any,
    pixels: Any,
) -> None:  # fmt: skip
    """Take the samples index[t * batch : t * batch + filled[t]] of each step t, with five draws each.

    With room in `logits`, write the logits of all samples there. Without, do an SGD step on each batch, and with room
    in `sums` add its samples' losses there.
    """
    net, head = nets[0], linears[len(linears) - 1]
    done = 0
    for t in range(len(filled)):
        n, first = filled[t], t * batch
        _forward(net, convs, linears, n, images, index, draws, first, settings, f, origins, pixels)
        if len(logits):
            for s in range(n):
                for c in range(head.units):
                    logits[done] = at(f, head.output + s * head.out_stride + c)
                    done += 1
        else:
            if len(sums):
                add_sample_losses(head, f, n, labels, index, first, sums)
            cross_entropy_gradient(head, f, net.upstream, n, labels, index, first, scale, shift)
            _backward_linears(net, convs, linears, n, f)
            if len(convs):
                _backward_convs(net, convs, linears, n, f, origins)
            sgd_step(net, f, rates, mode)
