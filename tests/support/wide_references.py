"""What kernels for many channels are compared with, on a GPU and on the CPU alike: float64, and numbers that every
precision holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedentopt.simulation.triton import AFTER_STEP, IN_GRADIENT, PlainKernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEAR = 1e-4
plain = PlainKernels()


def put(x: Tensor) -> Tensor:
    return x.float().to(DEVICE)


def assert_near(found: Tensor, wanted: Tensor, near: float = NEAR, what: object = "") -> None:
    assert found.shape == wanted.shape
    gap = float((found.detach().cpu().double() - wanted.detach()).norm() / wanted.detach().norm())
    print(f"{what}: relative difference {gap:.1e}")
    assert gap < near, what  # NaN is not


def whole_numbers(*shape: int) -> Tensor:
    """Small enough that every product and every sum is exact in every precision."""
    return torch.randint(-2, 3, shape).double()


def stacked_maps(x: Tensor, precision: str, turned: bool) -> Tensor:
    """Maps (n, H * W, B, C) as products take them."""
    x = put(x).to(torch.bfloat16 if precision == "bf16" else torch.float32)
    return x.transpose(2, 3).contiguous() if turned else x


def weight_gradients(x: Tensor, dy: Tensor, size: tuple[int, int]) -> Tensor:
    """(n, Co, 9, Ci) of convolutions of 3x3 taps, padded by one, in float64."""
    weight = torch.zeros(len(x), dy.shape[3], x.shape[3], 3, 3, dtype=torch.float64, requires_grad=True)
    for i in range(len(x)):
        image, back = (maps[i].unflatten(0, size).permute(2, 3, 0, 1) for maps in (x, dy))
        F.conv2d(image, weight[i], padding=1).backward(back)
    assert weight.grad is not None
    return weight.grad.permute(0, 1, 3, 4, 2).flatten(2, 3)


def convolved(x: Tensor, w: Tensor, size: tuple[int, int], back: bool) -> Tensor:
    """Maps (n, H * W, B, C) under weights (n, Co, 9, Ci) of 3x3 taps, padded by one, or the gradient of such maps."""
    taps = w.unflatten(2, (3, 3)).permute(0, 1, 4, 2, 3)
    images = x.unflatten(1, size).permute(0, 3, 4, 1, 2)
    convolve = F.conv_transpose2d if back else F.conv2d
    made = torch.stack([convolve(image, tap, padding=1) for image, tap in zip(images, taps, strict=True)])
    return made.permute(0, 3, 4, 1, 2).flatten(1, 2)


def empty_is_nan(*shape: Any, empty: Callable[..., Tensor] = torch.empty, **kind: Any) -> Tensor:
    made = empty(*shape, **kind)
    return made.fill_(math.nan) if made.is_floating_point() else made


def check_shared_taps(
    taps: ModuleType, layer: tuple[int, int, tuple[int, int]], precision: str, back: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of three models the second has finished, and nothing is made of it. One program or many, alone or together: the
    bits are the same."""
    from fedentopt.simulation.triton.wide_maps import Running

    bf16 = precision == "bf16"
    (ci, co, size), n, pixels = layer, 3, layer[2][0] * layer[2][1]
    x, w = whole_numbers(n, pixels, 64, co if back else ci), whole_numbers(n, co, 9, ci)
    bias, left = whole_numbers(n, co), whole_numbers(n, pixels, 64, ci)
    dense = convolved(x, w, size, back)
    wanted = torch.where(left <= 0, 0.0, dense) if back else (dense + bias[:, None, None]).relu()
    maps, below = stacked_maps(x, precision, False), stacked_maps(left, precision, False)
    weights = put(w).to(maps.dtype)
    if back and not bf16:
        weights = weights.permute(0, 2, 3, 1).contiguous()
    order = {"taps_first": back and not bf16, "inputs_first": back and bf16}
    assert taps.fits(maps, weights, size, 1, precision="tf32", **order)
    running = Running(torch.tensor([9, 1, 2], dtype=torch.int32, device=DEVICE), torch.tensor([1], device=DEVICE))

    def made(only: slice = slice(None), running: Running | None = running) -> list[Tensor]:
        part = weights[only]
        y = taps.convolution(
            maps[only], part, None if back else put(bias[only]), size, models=len(part), turned=True,
            left=below[only] if back else None, running=running, **order,
        )  # fmt: skip
        return [one for one in y if one is not None]

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", empty_is_nan)
        y, yt, *sums = made()
    assert all(one[1].isnan().all() for one in (y, yt, *sums))
    for i in (0, 2):
        assert torch.equal(y[i].cpu().double(), wanted[i].to(y.dtype).double())
        assert torch.equal(yt[i], y[i].transpose(1, 2))
        if back:
            assert_near(sums[0][i], wanted[i].to(y.dtype).double().sum(1), 1e-5)
    maps, weights = torch.randn_like(maps), torch.randn_like(weights)
    every = made(running=None)
    monkeypatch.setattr(taps, "multiprocessors", lambda device: 7)
    alone = made(slice(1, 2), None)
    for one, other in zip(every, made(running=None), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(every, alone, strict=True):
        assert torch.equal(one[1:2], other)


def check_weights_moved(
    weight_step: Callable[..., None], layer: tuple[int, int, tuple[int, int], int], precision: str
) -> None:
    """Against the optimiser by itself: a proximal term, both places of a push, the first step and a later one."""
    from fedentopt.simulation.triton import wide_update
    from fedentopt.simulation.triton.interface import Optimiser

    ci, co, size, batch = layer
    n, width, bf16 = 3, co * 9 * ci, precision == "bf16"
    x, dy = (whole_numbers(n, size[0] * size[1], batch, c) for c in (ci, co))
    gradient = weight_gradients(x, dy, size).flatten(1)
    w, v, start, correction = (whole_numbers(n, width) for _ in range(4))
    rates = {"lr": 0.25, "momentum": 0.5, "weight_decay": 0.25}  # exact, too
    settings = {name: torch.full((n,), value) for name, value in rates.items()} | {"mu": torch.tensor([0.5, 0, 0])}
    settings |= {
        "start_row": torch.tensor([2, 0, 1]), "steps": torch.tensor([9, 9, 1]),
        "correction_row": torch.tensor([-1, 0, 2]), "correction_mode": torch.tensor([0, IN_GRADIENT, AFTER_STEP]),
    }  # fmt: skip
    settings = {name: value if value.is_floating_point() else value.int() for name, value in settings.items()}
    for step in (0, 1):
        wanted_w, wanted_v = w.clone(), v.clone() if step else torch.zeros_like(v)
        given = {name: value.double() if value.is_floating_point() else value for name, value in settings.items()}
        now = torch.tensor([step])
        plain.sgd_update(wanted_w, wanted_v, gradient, n=n, start=start, step=now, correction=correction, **given)
        own = Optimiser(
            w=put(w), v=put(v), g=put(gradient), start=put(start), correction=put(correction), step=now.to(DEVICE),
            **{name: value.to(DEVICE) for name, value in settings.items()},
        )  # fmt: skip
        if step == 0:
            own.v.fill_(math.nan)  # of a round before
        turned = torch.full((n, 9, ci, co), math.nan, device=DEVICE)
        rounded = torch.full((n, co, 9, ci), math.nan, device=DEVICE, dtype=torch.bfloat16 if bf16 else torch.float32)
        copies = wide_update.Copies(rounded if bf16 else None, None if bf16 else turned)
        maps = (stacked_maps(m, precision, not bf16) for m in (x, dy))
        weight_step(*maps, 0, own, copies, size, turned=not bf16)
        moving = slice(0, 3 if step == 0 else 2)  # the third has finished after its first step
        assert torch.equal(own.w[moving].cpu().double(), wanted_w[moving])
        assert torch.equal(own.v[moving].cpu().double(), wanted_v[moving])
        new = own.w[moving].unflatten(1, (co, 9, ci))
        made = rounded if bf16 else turned.permute(0, 3, 1, 2)
        assert torch.equal(made[moving], new.to(made.dtype))
        if step:
            assert torch.equal(own.w[2].cpu().double(), w[2])
            assert made[2].isnan().all()
