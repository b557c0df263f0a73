"""The wide convolution kernels against torch's autograd in float64, on the CPU through Triton's interpreter.

Not collected by itself: `test_triton.py` runs this file in a process where TRITON_INTERPRET=1 was set before
anything could import Triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import toy
from fedentopt.models.keyed_dropout import dropout_key, key_dropout
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers import StackedTrainer
from fedentopt.simulation.trainers.wide_blocks import wide_blocks
from fedentopt.simulation.trainers.wide_net import WideNet
from fedentopt.simulation.triton import ops, wide, wide_maps
from straight_line import clients, world

pytest_plugins = ["interpreting"]
torch.set_num_threads(1)
CLOSE = 2e-6


def vgg_like(size: int, last: int) -> nn.Sequential:
    """Pool after ReLU, no pool, pool before ReLU; maps keep their size."""
    features = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
        nn.Conv2d(64, last, 3, padding="same"), nn.MaxPool2d(2), nn.ReLU(),
    )  # fmt: skip
    return nn.Sequential(features, nn.Flatten(), nn.Linear(last * (size // 4) ** 2, 5))


def shrinking(size: int, kernel: int) -> nn.Sequential:
    """Few channels, no padding, odd maps, two linear layers, dropout in all places where it may be."""
    second = size - 2 * (kernel - 1)
    model = nn.Sequential(
        nn.Conv2d(3, 32, kernel), nn.ReLU(), nn.Conv2d(32, 16, kernel), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(16 * (second // 2) ** 2, 24), nn.ReLU(), nn.Dropout(0.5), nn.Linear(24, 5),
    )  # fmt: skip
    key_dropout(model)
    return model


def uneven(size: int) -> nn.Sequential:
    """Another kernel and another padding in every layer, one of them even, channels that are no power of two."""
    grown = size + 4 - 4  # padding 2 and a 5x5 kernel, then padding 0 and 2x2, then padding 2 and 4x4
    grown = (grown - 1 + 4 - 3) // 2
    return nn.Sequential(
        nn.Conv2d(3, 48, 5, padding=2), nn.ReLU(), nn.Conv2d(48, 32, 2), nn.ReLU(), nn.Conv2d(32, 16, 4, padding=2),
        nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * grown**2, 5),
    )  # fmt: skip


def normed(size: int, *, bias: bool) -> nn.Sequential:
    """BatchNorm behind all convolutions but one: with a pool, which may leave a line over, without; pool first."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=bias), nn.BatchNorm2d(32, momentum=0.3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 48, 3, padding=1, bias=bias), nn.BatchNorm2d(48), nn.ReLU(), nn.Conv2d(48, 16, 2),
        nn.BatchNorm2d(16, eps=0.1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 16, 3, padding=1), nn.BatchNorm2d(16), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(0.25), nn.Flatten(),
        nn.Linear(16 * ((size // 2 - 1) // 2) ** 2, 5),
    )  # fmt: skip
    key_dropout(model)
    for layer in model:
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)
            nn.init.normal_(layer.running_mean)  # type: ignore[arg-type]
            nn.init.uniform_(layer.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    return model


MODELS: dict[str, tuple[Callable[[], nn.Sequential], int, int]] = {
    "vgg": (lambda: vgg_like(8, 128), 8, 3),
    "vgg, whole batch": (lambda: vgg_like(4, 64), 4, 64),
    "vgg, more than a batch": (lambda: vgg_like(4, 64), 4, 70),
    "shrinking": (lambda: shrinking(9, 3), 9, 10),
    "shrinking, 5x5": (lambda: shrinking(11, 5), 11, 20),
    "uneven": (lambda: uneven(5), 5, 20),
    "normed": (lambda: normed(7, bias=True), 7, 10),
    "normed, whole batch": (lambda: normed(6, bias=False), 6, 64),
    "normed, more than a batch": (lambda: normed(6, bias=True), 6, 70),
}


def stack(name: str, n: int) -> tuple[FlatLayout, Tensor, WideNet]:
    make, size, _ = MODELS[name]
    models = [make() for _ in range(n)]
    layout = FlatLayout(models[0], channels_last=True)
    blocks = wide_blocks(models[0], size)
    assert blocks is not None
    rows = torch.stack([layout.pack(model.state_dict()) for model in models])
    return layout, rows, WideNet(blocks, layout, ops("cpu", exact=True))


def reference(name: str, layout: FlatLayout, row: Tensor) -> nn.Sequential:
    model = MODELS[name][0]().double()
    model.load_state_dict({name: value.double() for name, value in layout.unpack(row).items()})
    return model


def error(out: Tensor, wanted: Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    _, size, batch = MODELS[name]
    layout, rows, net = stack(name, 2)
    before = rows.clone()
    gradient = torch.full_like(rows, math.nan)
    x, labels = torch.randn(2, batch, 3, size, size), torch.randint(0, 5, (2, batch))
    x[1, -2:], labels[1, -2:] = 0.0, -1
    scale, shift = torch.rand(2, 5) + 0.5, torch.randn(2, 5)
    keys = torch.randint(-(2**62), 2**62, (2,))
    state = rows[:, layout.parameter_width :].clone() if net.blocks.normed else None
    net.step(rows, gradient, x, labels, scale, shift, keys, state=state)
    assert torch.equal(rows, before)
    logits = net.logits(rows, x[:1])
    for i in range(2):
        model = reference(name, layout, rows[i])
        shared = dropout_key(model)
        assert (shared is not None) == net.blocks.draws
        if shared is not None:
            shared.set(keys[i])
        real = labels[i] >= 0
        F.cross_entropy(model(x[i, real].double()) * scale[i] + shift[i], labels[i, real]).backward()
        for slot in layout.parameters:
            wanted = model.get_parameter(slot.name).grad
            assert wanted is not None
            if wanted.norm() < 1e-12:  # of a bias that BatchNorm takes away again
                assert not slot.view(gradient)[i].any(), slot.name
            else:
                assert error(slot.view(gradient)[i], wanted) < CLOSE, slot.name
        for slot in layout.buffers:
            assert state is not None
            moved = replace(slot, offset=slot.offset - layout.parameter_width).view(state)[i]
            assert error(moved, model.get_buffer(slot.name).double()) < CLOSE, slot.name
        assert error(logits[i], reference(name, layout, rows[i]).eval()(x[0].double()).detach()) < CLOSE


def test_the_engine_trains_a_model_with_dropout_as_one_by_one() -> None:
    configs = [
        toy.config(model="toy:dropping", rounds=1, clients=4, cohort="2", epochs=1, precision="fp32-exact", **method)
        for method in ({"algorithm": "fedavg"}, {"algorithm": "scaffold", "seed": 1})
    ]
    data = toy.images(samples=48)
    said: list[str] = []
    stacked = toy.run(configs, data, trainer="stacked", say=said.append)
    assert "wide convolutions" in said[0]
    for config, outcome in zip(configs, stacked, strict=True):
        assert toy.difference(outcome, toy.run([config], data, trainer="loop")[0]) < CLOSE


def test_losses_of_wide_models_are_those_of_the_loop() -> None:
    """Of training, uneven clients and terms in the logits included, and of models on clients' data."""
    stacked, loop = (world("toy:dropping", name) for name in ("stacked", "loop"))
    assert isinstance(stacked.trainer, StackedTrainer)
    assert isinstance(stacked.trainer.net, WideNet)
    rows = [replace(row, task=replace(row.task, epochs=1)) for i, row in enumerate(clients(4)) if i != 1]
    told = [w.trainer.train(w.starts, w.work(rows, wants_losses=True)) for w in (stacked, loop)]
    assert told[0].losses is not None
    torch.testing.assert_close(told[0].losses, told[1].losses, atol=1e-5, rtol=1e-5)
    own = [np.arange(9), np.arange(30, 34), np.arange(50, 65)]
    means = [w.trainer.mean_losses(w.starts, [2, 0, 2], own).read() for w in (stacked, loop)]
    np.testing.assert_allclose(*means, rtol=1e-5)


def test_only_the_first_rows_are_written() -> None:
    layout, rows, net = stack("vgg, whole batch", 3)
    gradient = torch.full_like(rows, 7.0)
    net.step(rows, gradient, torch.randn(2, 4, 3, 4, 4), torch.zeros(2, 4, dtype=torch.int64), None, None)
    assert (gradient[2] == 7.0).all()
    assert all((slot.view(gradient)[:2] != 7.0).all() for slot in layout.parameters)


def test_features_of_models_with_their_own_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedentopt.simulation.trainers.wide_net.SAMPLES_IN_FLIGHT", 8)  # two models at a time
    layout, rows, net = stack("vgg, whole batch", 3)
    x = torch.randn(3, 4, 3, 4, 4)
    own, shared = net.features(rows, x), net.features(rows, x[:1])
    for i in range(3):
        model = reference("vgg, whole batch", layout, rows[i])[:2]
        assert error(own[i], model(x[i].double()).detach()) < CLOSE
        assert error(shared[i], model(x[0].double()).detach()) < CLOSE


@pytest.mark.parametrize("parts", [1, 3, 16])
def test_a_weight_gradient_in_parts(parts: int) -> None:
    x, dy = torch.randn(1, 4, 64, 64), torch.randn(1, 4, 64, 64)
    dw = torch.full((1, 64, 9, 64), math.nan)
    wide.weight_grad(x, dy, dw, (2, 2), 1, precision="ieee", parts=parts)
    images = x.double().view(2, 2, 64, 64).permute(3, 2, 0, 1)
    weight = torch.zeros(64, 64, 3, 3, dtype=torch.float64, requires_grad=True)
    F.conv2d(images, weight, padding=1).backward(dy.double().view(2, 2, 64, 64).permute(3, 2, 0, 1))
    assert weight.grad is not None
    assert error(dw[0], weight.grad.permute(0, 2, 3, 1).flatten(1, 2)) < CLOSE


def test_bf16_maps(bf16_numbers: None) -> None:
    # Whole numbers that bf16 holds, so that the result must be exact.
    def whole(*shape: int, largest: int = 1) -> Tensor:
        return torch.randint(-largest, largest + 1, shape).float()

    x, w, bias = whole(2, 4, 64, 64), whole(2, 64, 9, 64), whole(2, 64, largest=20)
    images = x.view(2, 2, 2, 64, 64).permute(0, 3, 4, 1, 2)
    short, turned = wide_maps.turn(w, torch.bfloat16, copy=True, turned=True)
    assert turned is not None
    y = wide.convolution(x.bfloat16(), short, bias, (2, 2), 1, models=2, precision="tf32")
    back = wide.convolution(x.bfloat16(), turned, None, (2, 2), 1, models=2, taps_first=True, precision="tf32")
    dw = torch.empty(2, 64, 9, 64)
    wide.weight_grad(*(x.transpose(2, 3).contiguous().bfloat16() for _ in range(2)), dw, (2, 2), 1, precision="tf32")
    for i in range(2):
        kernel = w[i].view(64, 3, 3, 64).permute(0, 3, 1, 2).clone().requires_grad_()
        image = images[i].clone().requires_grad_()
        out = F.conv2d(image, kernel, bias[i], padding=1)
        out.backward(images[i])
        assert image.grad is not None
        assert kernel.grad is not None
        assert torch.equal(y[i].float().view(2, 2, 64, 64), out.detach().relu().permute(2, 3, 0, 1).bfloat16().float())
        assert torch.equal(back[i].float().view(2, 2, 64, 64), image.grad.permute(2, 3, 0, 1).bfloat16().float())
        assert torch.equal(dw[i], kernel.grad.permute(0, 2, 3, 1).flatten(1, 2))
    pooled, pooled_t, code = wide_maps.pool(x.bfloat16().relu(), (2, 2), pooled=True, keep=True)
    wanted = F.max_pool2d(images.flatten(0, 1).relu(), 2).view(2, 64, 64)
    assert torch.equal(pooled[:, 0].float(), wanted)
    assert pooled_t is not None
    assert torch.equal(pooled_t[:, 0].float(), wanted.transpose(1, 2))
    dx, dx_t, sums = wide_maps.unpool(pooled, pooled, code, (2, 2), passes=True)
    assert dx is not None
    assert torch.equal(dx.float().sum(1), wanted)
    assert torch.equal(dx_t.transpose(2, 3), dx)
    bias = torch.empty(2, 64)
    wide_maps.add_parts(sums, 64, bias, 64)
    assert torch.equal(bias, wanted.sum(1))


def test_the_first_of_equal_pixels_wins_and_what_is_not_positive_is_dead() -> None:
    x = torch.zeros(1, 4, 64, 64)
    x[0, 1:3, 0] = 2.0
    x[0, 3, 1] = math.nan
    y, turned, code = wide_maps.pool(x, (2, 2), pooled=True, keep=True)
    assert turned is not None
    assert code is not None
    assert (y[0, 0, 0] == 2.0).all()
    assert (code[0, 0, 0] == 1).all()
    assert y[0, 0, 1].isnan().all()
    assert (code[0, 0, 1] == 3).all()
    assert (code[0, 0, 2:] == 4).all()
    assert torch.equal(turned.transpose(2, 3).nan_to_num(), y.nan_to_num())


def test_a_diverged_model_shows_and_leaves_the_others_alone() -> None:
    layout, rows, net = stack("vgg, whole batch", 2)
    rows[0] = 1e38
    gradient = torch.zeros_like(rows)
    net.step(rows, gradient, torch.randn(2, 3, 3, 4, 4), torch.zeros(2, 3, dtype=torch.int64), None, None)
    assert not layout.parameters[-1].view(gradient)[0].isfinite().all()
    assert gradient[1].isfinite().all()
