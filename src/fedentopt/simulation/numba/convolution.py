"""Convolution + ReLU + 2x2 max-pool of one image, forward, in two ways.

Both also say where each pooled value comes from: `origin`, the offset in the input image (channels last) of the window
whose position won, the first on a tie. `c` is a record of `plan.CONV`, `f` the worker's floats.
Lanes that reach past the end of what they write are overwritten by what comes next, so the order of writing matters.

Gradients of convolution + ReLU + 2x2 max-pool, one image at a time.

Only the position that won its pooling window carries a gradient, so both gradients visit one window per pooled pixel:
a quarter of a dense convolution's work. A row of a window is k * channels neighbouring floats of the image, which fill
the lanes whatever the number of channels. Sums run in a fixed order, image by image.
`c` is a record of `plan.CONV`, `f` the worker's floats; `dy` is the gradient of the layer's output, channels last, zero
where ReLU was.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedentopt.simulation.numba.compiled import inner
from fedentopt.simulation.numba.lane_arithmetic import (
    add,
    beats,
    multiply_add,
    multiply_add_one,
    ramp8,
    rectify,
    select,
    spread8,
    spread16,
    spread_int8,
    spread_int16,
)
from fedentopt.simulation.numba.lanes import at, load8, load16, put, store


@inner
def pack_taps(c: Any, w: int, f: Any) -> None:
    """The bias, and the weights with output channels innermost, for `conv_relu_pool`."""
    row = c.kernel * c.channels
    for o in range(c.out):
        put(f, c.taps + o, at(f, w + c.bias + o))
        for ky in range(c.kernel):
            for t in range(row):
                tap = c.taps + (1 + ky * row + t) * c.out_lanes + o
                put(f, tap, at(f, w + c.weight + o * c.window + ky * c.row + t))


@inner
def conv_relu_pool(c: Any, f: Any, origin: Any, x: int, y: int, where: int) -> None:
    """Image at x -> pooled output, channels last, at y, and its origins, in the same order.

    Lanes are output channels. The last block of them is written first, since it may reach past the pixel.
    """
    full = c.out // 16 * 16
    if full < c.out:
        if c.out - full <= 8:
            _pairs_of_8(c, full, f, origin, x, y, where)
        else:
            _singles_of_16(c, full, f, origin, x, y, where)
    for first in range(0, full, 16):
        _singles_of_16(c, first, f, origin, x, y, where)


@inner
def _singles_of_16(c: Any, first: int, f: Any, origin: Any, x: int, y: int, where: int) -> None:
    """16 output channels: the four positions of one pooled pixel at a time."""
    channels, row, line = c.channels, c.kernel * c.channels, c.width * c.channels
    bias = load16(f, c.taps + first)
    for py in range(c.pooled_height):
        for px in range(c.pooled_width):
            corner = (2 * py * c.width + 2 * px) * channels
            a0 = a1 = a2 = a3 = bias
            tap = c.taps + c.out_lanes + first
            for ky in range(c.kernel):
                upper = x + corner + ky * line
                lower = upper + line
                for t in range(row):
                    v = load16(f, tap)
                    a0 = multiply_add_one(a0, f, upper + t, v)
                    a1 = multiply_add_one(a1, f, upper + channels + t, v)
                    a2 = multiply_add_one(a2, f, lower + t, v)
                    a3 = multiply_add_one(a3, f, lower + channels + t, v)
                    tap += c.out_lanes
            place = (py * c.pooled_width + px) * c.out + first
            _pool(
                a0, a1, a2, a3, spread_int16(corner), spread_int16(corner + channels), spread_int16(corner + line),
                spread_int16(corner + line + channels), f, origin, y + place, where + place,
            )  # fmt: skip


@inner
def _pairs_of_8(c: Any, first: int, f: Any, origin: Any, x: int, y: int, where: int) -> None:
    """8 output channels: two pooled pixels at a time, since four sums alone would wait for each other."""
    channels, row, line = c.channels, c.kernel * c.channels, c.width * c.channels
    bias = load8(f, c.taps + first)
    for py in range(c.pooled_height):
        for px in range(0, c.pooled_width, 2):
            apart = 2 * channels if px + 1 < c.pooled_width else 0
            corner = (2 * py * c.width + 2 * px) * channels
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = bias
            tap = c.taps + c.out_lanes + first
            for ky in range(c.kernel):
                upper = x + corner + ky * line
                lower = upper + line
                for t in range(row):
                    v = load8(f, tap)
                    a0 = multiply_add_one(a0, f, upper + t, v)
                    a1 = multiply_add_one(a1, f, upper + channels + t, v)
                    a2 = multiply_add_one(a2, f, lower + t, v)
                    a3 = multiply_add_one(a3, f, lower + channels + t, v)
                    b0 = multiply_add_one(b0, f, upper + apart + t, v)
                    b1 = multiply_add_one(b1, f, upper + apart + channels + t, v)
                    b2 = multiply_add_one(b2, f, lower + apart + t, v)
                    b3 = multiply_add_one(b3, f, lower + apart + channels + t, v)
                    tap += c.out_lanes
            place = (py * c.pooled_width + px) * c.out + first
            _pool(
                a0, a1, a2, a3, spread_int8(corner), spread_int8(corner + channels), spread_int8(corner + line),
                spread_int8(corner + line + channels), f, origin, y + place, where + place,
            )  # fmt: skip
            if apart:
                place += c.out
                corner += apart
                _pool(
                    b0, b1, b2, b3, spread_int8(corner), spread_int8(corner + channels), spread_int8(corner + line),
                    spread_int8(corner + line + channels), f, origin, y + place, where + place,
                )  # fmt: skip


@inner
def conv_relu_pool_columns(c: Any, w: int, f: Any, origin: Any, x: int, half: int, y: int, where: int) -> None:
    """As `conv_relu_pool`, with neighbouring pooled pixels of a row as lanes: few output channels are no loss.

    Each channel of the image lies at x by its even and odd columns, `half` floats apart, in rows of half the width.
    Origins are written channel by channel, each c.origin_channel long; the output too, at c.planar, and then to y.
    """
    line = c.width // 2
    step = ramp8(2 * c.channels)
    right, down = spread_int8(c.channels), spread_int8(c.width * c.channels)
    for o in range(0, c.out, 3):
        p, q = min(o + 1, c.out - 1), min(o + 2, c.out - 1)
        weight = w + c.weight + o * c.window
        for py in range(c.pooled_height):
            for block in range(0, c.pooled_width, 8):
                px = max(min(block, c.pooled_width - 8), 0)
                a0 = a1 = a2 = a3 = spread8(at(f, w + c.bias + o))
                b0 = b1 = b2 = b3 = spread8(at(f, w + c.bias + p))
                d0 = d1 = d2 = d3 = spread8(at(f, w + c.bias + q))
                for channel in range(c.channels):
                    for ky in range(c.kernel):
                        upper = x + channel * 2 * half + (2 * py + ky) * line + px
                        to = weight + ky * c.row + channel
                        for kx in range(c.kernel):
                            even = upper + (kx & 1) * half + (kx >> 1)
                            odd = upper + (~kx & 1) * half + ((kx + 1) >> 1)
                            tp, tq = to + (p - o) * c.window, to + (q - o) * c.window
                            v = load8(f, even)
                            a0 = multiply_add_one(a0, f, to, v)
                            b0 = multiply_add_one(b0, f, tp, v)
                            d0 = multiply_add_one(d0, f, tq, v)
                            v = load8(f, odd)
                            a1 = multiply_add_one(a1, f, to, v)
                            b1 = multiply_add_one(b1, f, tp, v)
                            d1 = multiply_add_one(d1, f, tq, v)
                            v = load8(f, even + line)
                            a2 = multiply_add_one(a2, f, to, v)
                            b2 = multiply_add_one(b2, f, tp, v)
                            d2 = multiply_add_one(d2, f, tq, v)
                            v = load8(f, odd + line)
                            a3 = multiply_add_one(a3, f, to, v)
                            b3 = multiply_add_one(b3, f, tp, v)
                            d3 = multiply_add_one(d3, f, tq, v)
                            to += c.channels
                w0 = add(step, spread_int8((2 * py * c.width + 2 * px) * c.channels))
                w1, w2 = add(w0, right), add(w0, down)
                w3 = add(w2, right)
                place = py * c.pooled_width + px
                there = o * c.origin_channel + place
                _pool(a0, a1, a2, a3, w0, w1, w2, w3, f, origin, c.planar + there, where + there)
                there = p * c.origin_channel + place
                _pool(b0, b1, b2, b3, w0, w1, w2, w3, f, origin, c.planar + there, where + there)
                there = q * c.origin_channel + place
                _pool(d0, d1, d2, d3, w0, w1, w2, w3, f, origin, c.planar + there, where + there)
    for o in range(c.out):
        for i in range(c.pooled_height * c.pooled_width):
            put(f, y + i * c.out + o, at(f, c.planar + o * c.origin_channel + i))


@inner
def _pool(
    a0: Any, a1: Any, a2: Any, a3: Any, w0: Any, w1: Any, w2: Any, w3: Any, f: Any, origin: Any, y: int, where: int
) -> None:  # fmt: skip
    """The largest of four positions, the first on a tie, through ReLU, and which of the windows w0 to w3 it was."""
    wins = beats(a1, a0)
    a0, w0 = select(wins, a1, a0), select(wins, w1, w0)
    wins = beats(a2, a0)
    a0, w0 = select(wins, a2, a0), select(wins, w2, w0)
    wins = beats(a3, a0)
    a0, w0 = select(wins, a3, a0), select(wins, w3, w0)
    store(f, y, rectify(a0))
    store(origin, where, w0)


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
