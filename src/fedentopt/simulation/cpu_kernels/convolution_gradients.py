"""Gradients of convolution + ReLU + 2x2 max-pool, one image at a time.

Only the position that won its pooling window carries a gradient, so both gradients visit one window per pooled pixel:
a quarter of a dense convolution's work. A row of a window is k * channels neighbouring floats of the image, which fill
the lanes whatever the number of channels. Sums run in a fixed order, image by image.
`c` is a record of `plan.CONV`, `f` the worker's floats; `dy` is the gradient of the layer's output, channels last, zero
where ReLU was.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedentopt.simulation.cpu_kernels.compiled import inner
from fedentopt.simulation.cpu_kernels.lane_arithmetic import add, multiply_add, multiply_add_one, spread8, spread16
from fedentopt.simulation.cpu_kernels.lanes import at, load8, load16, put, store


@inner
def conv_weight_gradient(c: Any, g: int, f: Any, origin: Any, x: int, dy: int, where: int) -> None:
    """Add the gradients of weight and bias to the row at g; what falls into its padding is left for `clear_padding`."""
    pixels, pieces = c.pooled_height * c.pooled_width, c.row // 16
    parts, line = c.kernel * pieces, c.width * c.channels
    for o in range(c.out):
        total = np.float32(0)
        for p in range(pixels):
            total += at(f, dy + p * c.out + o)
        put(f, g + c.bias + o, at(f, g + c.bias + o) + total)
        # Five lanes of the window at a time: enough sums not to wait for each other. Past the end, the last again.
        for part in range(0, parts, 5):
            i1, i2 = min(part + 1, parts - 1), min(part + 2, parts - 1)
            i3, i4 = min(part + 3, parts - 1), min(part + 4, parts - 1)
            q0 = x + part // pieces * line + part % pieces * 16
            q1 = x + i1 // pieces * line + i1 % pieces * 16
            q2 = x + i2 // pieces * line + i2 % pieces * 16
            q3 = x + i3 // pieces * line + i3 % pieces * 16
            q4 = x + i4 // pieces * line + i4 % pieces * 16
            a0 = a1 = a2 = a3 = a4 = spread16(0)
            at_dy, at_origin = dy + o, where + o * c.origin_channel
            for _ in range(pixels):
                window = at(origin, at_origin)
                a0 = multiply_add_one(a0, f, at_dy, load16(f, q0 + window))
                a1 = multiply_add_one(a1, f, at_dy, load16(f, q1 + window))
                a2 = multiply_add_one(a2, f, at_dy, load16(f, q2 + window))
                a3 = multiply_add_one(a3, f, at_dy, load16(f, q3 + window))
                a4 = multiply_add_one(a4, f, at_dy, load16(f, q4 + window))
                at_dy += c.out
                at_origin += c.origin_pixel
            into = g + c.weight + o * c.window + part * 16
            store(f, into, add(load16(f, into), a0))
            if part + 1 < parts:
                store(f, into + 16, add(load16(f, into + 16), a1))
            if part + 2 < parts:
                store(f, into + 32, add(load16(f, into + 32), a2))
            if part + 3 < parts:
                store(f, into + 48, add(load16(f, into + 48), a3))
            if part + 4 < parts:
                store(f, into + 64, add(load16(f, into + 64), a4))


@inner
def clear_padding(c: Any, g: int, f: Any) -> None:
    """Zero the padding of the layer's weight gradient, so that the weights' padding stays zero."""
    for row in range(c.out * c.kernel):
        for t in range(c.kernel * c.channels, c.row):
            put(f, g + c.weight + row * c.row + t, 0)


@inner
def conv_input_gradient(c: Any, w: int, f: Any, origin: Any, dy: int, dx: int, where: int) -> None:
    """The gradient of the image, at dx; the padding of the weights' rows is zero."""
    line, row = c.width * c.channels, c.kernel * c.channels
    for i in range(0, c.height * line, 16):
        store(f, dx + i, spread16(0))
    for p in range(c.pooled_height * c.pooled_width):
        for o in range(c.out):
            gradient = at(f, dy + p * c.out + o)
            if gradient != 0:
                g = spread8(gradient)
                into = dx + at(origin, where + p * c.out + o)
                tap = w + c.weight + o * c.window
                for _ in range(c.kernel):
                    for t in range(0, row, 8):
                        store(f, into + t, multiply_add(load8(f, into + t), g, load8(f, tap + t)))
                    tap += c.row
                    into += line
