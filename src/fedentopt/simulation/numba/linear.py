"""Linear layers of a batch: three matrix products on padded rows, four times sixteen entries at a time.

Each entry of a result is one sum in a fixed order, whatever stands beside it; a last block of fewer than four samples
or units computes the last one again, to the same bits. `l` is a record of `plan.LINEAR`, `f` the worker's floats.
"""

from __future__ import annotations

from typing import Any

from fedentopt.simulation.numba.compiled import inner
from fedentopt.simulation.numba.lane_arithmetic import add, multiply_add_one, rectify, spread16
from fedentopt.simulation.numba.lanes import at, load16, put, store


@inner
def pack_units(l: Any, w: int, f: Any) -> None:
    """Bias and weights of sixteen units at a time, units innermost; units that do not exist stay zero."""
    for first in range(0, l.units, 16):
        block = l.taps + first * (1 + l.inputs)
        for o in range(min(16, l.units - first)):
            put(f, block + o, at(f, w + l.bias + first + o))
            row = w + l.weight + (first + o) * l.row
            for i in range(l.inputs):
                put(f, block + (i + 1) * 16 + o, at(f, row + i))


@inner
def linear(l: Any, f: Any, n: int) -> None:
    """y = x w' + b, through ReLU if the layer has one."""
    for first in range(0, n, 4):
        s1, s2, s3 = min(first + 1, n - 1), min(first + 2, n - 1), min(first + 3, n - 1)
        x0, x1 = l.input + first * l.stride, l.input + s1 * l.stride
        x2, x3 = l.input + s2 * l.stride, l.input + s3 * l.stride
        for o in range(0, l.units, 16):
            tap = l.taps + o * (1 + l.inputs)
            a0 = a1 = a2 = a3 = load16(f, tap)
            for i in range(l.inputs):
                tap += 16
                v = load16(f, tap)
                a0 = multiply_add_one(a0, f, x0 + i, v)
                a1 = multiply_add_one(a1, f, x1 + i, v)
                a2 = multiply_add_one(a2, f, x2 + i, v)
                a3 = multiply_add_one(a3, f, x3 + i, v)
            if l.relu:
                a0, a1, a2, a3 = rectify(a0), rectify(a1), rectify(a2), rectify(a3)
            store(f, l.output + first * l.out_stride + o, a0)
            store(f, l.output + s1 * l.out_stride + o, a1)
            store(f, l.output + s2 * l.out_stride + o, a2)
            store(f, l.output + s3 * l.out_stride + o, a3)


@inner
def linear_weight_gradient(l: Any, g: int, f: Any, upstream: int, n: int) -> None:
    """dw = dy' x and db = the sum of dy over the batch, into the row at g."""
    dy = l.output + upstream
    for o in range(0, l.units, 16):
        total = spread16(0)
        for s in range(n):
            total = add(total, load16(f, dy + s * l.out_stride + o))
        store(f, g + l.bias + o, total)
    for i in range(0, l.inputs, 16):
        for first in range(0, l.units, 4):
            o1, o2, o3 = min(first + 1, l.units - 1), min(first + 2, l.units - 1), min(first + 3, l.units - 1)
            a0 = a1 = a2 = a3 = spread16(0)
            x, d = l.input + i, dy
            for _ in range(n):
                v = load16(f, x)
                a0 = multiply_add_one(a0, f, d + first, v)
                a1 = multiply_add_one(a1, f, d + o1, v)
                a2 = multiply_add_one(a2, f, d + o2, v)
                a3 = multiply_add_one(a3, f, d + o3, v)
                x += l.stride
                d += l.out_stride
            store(f, g + l.weight + first * l.row + i, a0)
            store(f, g + l.weight + o1 * l.row + i, a1)
            store(f, g + l.weight + o2 * l.row + i, a2)
            store(f, g + l.weight + o3 * l.row + i, a3)


@inner
def linear_input_gradient(l: Any, w: int, f: Any, upstream: int, n: int) -> None:
    """dx = dy w."""
    dy, dx = l.output + upstream, l.input + upstream
    for first in range(0, n, 4):
        s1, s2, s3 = min(first + 1, n - 1), min(first + 2, n - 1), min(first + 3, n - 1)
        d0, d1 = dy + first * l.out_stride, dy + s1 * l.out_stride
        d2, d3 = dy + s2 * l.out_stride, dy + s3 * l.out_stride
        for i in range(0, l.inputs, 16):
            tap = w + l.weight + i
            a0 = a1 = a2 = a3 = spread16(0)
            for o in range(l.units):
                v = load16(f, tap)
                a0 = multiply_add_one(a0, f, d0 + o, v)
                a1 = multiply_add_one(a1, f, d1 + o, v)
                a2 = multiply_add_one(a2, f, d2 + o, v)
                a3 = multiply_add_one(a3, f, d3 + o, v)
                tap += l.row
            store(f, dx + first * l.stride + i, a0)
            store(f, dx + s1 * l.stride + i, a1)
            store(f, dx + s2 * l.stride + i, a2)
            store(f, dx + s3 * l.stride + i, a3)
