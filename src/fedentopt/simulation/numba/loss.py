"""Gradient of the softmax cross-entropy of scaled and shifted logits, averaged over a batch; sums of the plain one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedentopt.simulation.numba.compiled import inner
from fedentopt.simulation.numba.lanes import at, put


@inner
def cross_entropy_gradient(
    l: Any, f: Any, upstream: int, n: int, labels: Any, index: Any, first: int, scale: Any, shift: Any
) -> None:  # fmt: skip
    """scale * (softmax(scale * logits + shift) - [class = label]) / n, where the gradient of the last layer belongs.

    Sample s of the batch is number index[first + s] of the data set.
    """
    share = np.float32(1) / np.float32(n)
    for s in range(n):
        logits = l.output + s * l.out_stride
        dz = logits + upstream
        label = at(labels, at(index, first + s))
        largest = at(f, logits) * at(scale, 0) + at(shift, 0)
        for c in range(l.units):
            z = at(f, logits + c) * at(scale, c) + at(shift, c)
            put(f, dz + c, z)
            if z > largest:
                largest = z
        total = np.float32(0)
        for c in range(l.units):
            e = np.float32(math.exp(at(f, dz + c) - largest))
            put(f, dz + c, e)
            total += e
        for c in range(l.units):
            hit = np.float32(1) if c == label else np.float32(0)
            put(f, dz + c, at(scale, c) * (at(f, dz + c) / total - hit) * share)


@inner
def add_sample_losses(l: Any, f: Any, n: int, labels: Any, index: Any, first: int, sums: Any) -> None:
    """Add the sum and the sum of squares of the samples' cross-entropies of the plain logits to sums[0] and sums[1]."""
    for s in range(n):
        logits = l.output + s * l.out_stride
        largest = at(f, logits)
        for c in range(1, l.units):
            if at(f, logits + c) > largest:
                largest = at(f, logits + c)
        total = 0.0
        for c in range(l.units):
            total += math.exp(np.float64(at(f, logits + c)) - largest)
        own = np.float64(at(f, logits + at(labels, at(index, first + s)))) - largest
        loss = math.log(total) - own
        sums[0] += loss
        sums[1] += loss * loss
