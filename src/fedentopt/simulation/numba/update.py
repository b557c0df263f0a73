"""One SGD step on padded rows, in one pass: the formula of `trainers.loop.sgd_step`."""

from __future__ import annotations

from typing import Any

from fedentopt.simulation.numba.compiled import inner
from fedentopt.simulation.numba.lane_arithmetic import add, multiply, multiply_add, spread16
from fedentopt.simulation.numba.lanes import at, load16, store
from fedentopt.simulation.work import CORRECTION_MODES

IN_GRADIENT, AFTER_STEP = CORRECTION_MODES["gradient"], CORRECTION_MODES["after"]
LR, WEIGHT_DECAY, MOMENTUM, MU = range(4)  # places in `rates`


@inner
def sgd_step(net: Any, f: Any, rates: Any, mode: int) -> None:
    """d = g + weight_decay w + mu (w - anchor) [+ push]; v = momentum v + d; w = w - lr v [- lr push]."""
    mu = at(rates, MU)
    lr, weight_decay = spread16(-at(rates, LR)), spread16(at(rates, WEIGHT_DECAY))
    momentum, pull, away = spread16(at(rates, MOMENTUM)), spread16(mu), spread16(-mu)
    for i in range(0, net.width, 16):
        w = load16(f, net.w + i)
        d = multiply_add(load16(f, net.g + i), weight_decay, w)
        if mu != 0:
            d = add(d, multiply_add(multiply(pull, w), away, load16(f, net.anchor + i)))
        if mode == IN_GRADIENT:
            d = add(d, load16(f, net.push + i))
        v = multiply_add(d, momentum, load16(f, net.v + i))
        store(f, net.v + i, v)
        w = multiply_add(w, lr, v)
        if mode == AFTER_STEP:
            w = multiply_add(w, lr, load16(f, net.push + i))
        store(f, net.w + i, w)
