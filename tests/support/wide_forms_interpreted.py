"""Every form in which wide convolutions can run (`interface.WideForm`) comes to the same, through Triton's interpreter.

Not collected by itself: `test_triton.py` runs this file in a process where TRITON_INTERPRET=1 was set before
anything could import Triton.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import toy
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.planning import ClientWork
from fedentopt.simulation.trainers import StackedTrainer
from fedentopt.simulation.trainers.wide_blocks import wide_blocks
from fedentopt.simulation.trainers.wide_net import WideNet
from fedentopt.simulation.triton import (
    AFTER_STEP,
    EVERY,
    IN_GRADIENT,
    WideForm,
    ops,
    wide,
    wide_descriptors,
    wide_first,
    wide_forms,
    wide_lines,
    wide_maps,
    wide_pooled,
    wide_tiles,
    wide_update,
)
from fedentopt.simulation.triton.interface import Optimiser
from fedentopt.simulation.triton.wide_tiles import Chosen, LayerProduct, WideTiles, misfit
from fedentopt.simulation.work import Row, build_work

pytest_plugins = ["interpreting"]
torch.set_num_threads(1)
CLOSE = 2e-6


def same_size() -> nn.Sequential:
    """Pool behind the first layer, none behind the second; for 4x4 images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 4, 5),
    )  # fmt: skip


def floored() -> nn.Sequential:
    """A first layer of another kernel, one channel, 48 outputs, whose pool leaves a line over; for 6x4 images."""
    return nn.Sequential(
        nn.Conv2d(1, 48, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(48, 16, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 2, 5),
    )  # fmt: skip


def deeper() -> nn.Sequential:
    """A pool behind the first and the third of three layers; for 4x4 images."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 48, 3, padding=1), nn.ReLU(),
        nn.Conv2d(48, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


MODELS = {"same size": (same_size, (3, 4, 4), 5), "floored": (floored, (1, 6, 4), 18)}
DEEPER = {"deeper": (deeper, (3, 4, 4), 18)}


def nets(name: str, n: int, **settings: object) -> tuple[FlatLayout, Tensor, WideNet]:
    made = [(MODELS | DEEPER)[name][0]() for _ in range(n)]
    layout = FlatLayout(made[0], channels_last=True)
    blocks = wide_blocks(made[0], 16)  # any size that leaves a map
    assert blocks is not None
    rows = torch.stack([layout.pack(model.state_dict()) for model in made])
    return layout, rows, WideNet(blocks, layout, ops("cpu", **settings))  # type: ignore[arg-type]


def error(out: Tensor, wanted: Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


JOINED = WideForm(descriptors=True, joined=True)


@pytest.mark.parametrize(
    ("name", "form"), [*((name, WideForm(first=True)) for name in MODELS), ("deeper", JOINED)], ids=str
)
def test_gradients_in_other_forms(name: str, form: WideForm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_pooled, "NARROWEST", 2)
    make, shape, batch = (MODELS | DEEPER)[name]
    layout, rows, net = nets(name, 2, exact=True, form=form)
    x, labels = torch.randn(2, batch, *shape), torch.randint(0, 5, (2, batch))
    x[1, -2:], labels[1, -2:] = 0.0, -1
    gradient = torch.full_like(rows, math.nan)
    net.step(rows, gradient, x, labels, None, None)
    logits = net.logits(rows, x[:1])
    for i in range(2):
        model = make().double()
        model.load_state_dict({key: value.double() for key, value in layout.unpack(rows[i]).items()})
        F.cross_entropy(model(x[i].double()), labels[i], ignore_index=-1).backward()
        for slot in layout.parameters:
            wanted = model.get_parameter(slot.name).grad
            assert wanted is not None
            assert error(slot.view(gradient)[i], wanted) < CLOSE, slot.name
        assert error(logits[i], model(x[0].double()).detach()) < CLOSE


def optimiser(rows: Tensor) -> Optimiser:
    """Settings for two rows: a proximal term and a push in the gradient; a push after the step, and one step only."""
    n = len(rows)
    wide_rows = torch.zeros(n, -(-rows.shape[1] // 32) * 32 + 32)
    w, v, g = (wide_rows.clone()[:, : rows.shape[1]] for _ in range(3))
    w.copy_(rows)
    v.copy_(torch.randn_like(rows) * 0.1)
    return Optimiser(
        w, v, g, lr=torch.rand(n), momentum=torch.rand(n), weight_decay=torch.rand(n),
        mu=torch.tensor([0.5, 0.0]), start=torch.randn(3, rows.shape[1]),
        start_row=torch.tensor([1, 0], dtype=torch.int32),
        steps=torch.tensor([9, 1], dtype=torch.int32), step=torch.zeros(1, dtype=torch.int64),
        correction=torch.randn(2, rows.shape[1]),
        correction_row=torch.tensor([1, 0], dtype=torch.int32),
        correction_mode=torch.tensor([IN_GRADIENT, AFTER_STEP], dtype=torch.int32),
    )  # fmt: skip


@pytest.mark.parametrize("held", [wide_update.HELD, 0], ids=["weights fetched ahead", "when wanted"])
@pytest.mark.parametrize("turned", [True, False], ids=["turned maps", "maps as they lie"])
def test_an_optimiser_in_the_weight_gradient(turned: bool, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_update, "HELD", held)
    ci, co, size = 32, 16, (2, 3)
    x, dy = torch.randn(2, 6, 16, ci), torch.randn(2, 6, 16, co)
    if turned:
        x, dy = (m.transpose(2, 3).contiguous() for m in (x, dy))
    rows = torch.randn(2, 8 + co * 9 * ci + 4)
    inside = optimiser(rows)
    beside = inside._replace(w=inside.w.clone(), v=inside.v.clone(), g=torch.zeros_like(inside.w))
    inside.v[:, 8:-4], beside.v[:, 8:-4] = math.nan, 0.0  # of a round before: step 0 does not read it
    copies = wide_update.Copies(torch.full((2, co, 9, ci), 7.0), torch.full((2, 9, ci, co), 7.0))
    settings = {"precision": "tf32", "turned": turned}
    for step in range(2):
        inside.step.fill_(step)
        frozen = inside.w[1].clone(), inside.v[1].clone(), *(copy[1].clone() for copy in copies if copy is not None)
        wide_update.weight_step(x, dy, 8, inside, copies, size, 1, side=3, **settings)  # type: ignore[arg-type]
        into = beside.g[:, 8:-4].unflatten(1, (co, 9, ci))
        wide.weight_grad(x, dy, into, size, 1, **settings)  # type: ignore[arg-type]
        ops("cpu").sgd_update(n=2, **beside.columns(8, 8 + co * 9 * ci)._asdict())
        for ours, theirs in ((inside.w, beside.w), (inside.v, beside.v)):
            assert error(ours, theirs.double()) < CLOSE
        moved = inside.w[:, 8:-4].unflatten(1, (co, 9, ci))[: 2 - step]
        assert copies.plain is not None
        assert copies.turned is not None
        assert torch.equal(copies.plain[: 2 - step], moved)
        assert torch.equal(copies.turned.permute(0, 3, 1, 2)[: 2 - step], moved)
    # Finished after its one step, and nothing outside the layer has moved.
    after = inside.w[1], inside.v[1], copies.plain[1], copies.turned[1]
    assert all(torch.equal(a, b) for a, b in zip(after, frozen, strict=True))
    assert torch.equal(inside.w[:, :8], rows[:, :8])
    assert torch.equal(inside.w[:, -4:], rows[:, -4:])


def bits(x: Tensor) -> Tensor:
    """With the signs of zeros and of what is no number."""
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_models_begin_a_round(bf16: bool, bf16_numbers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients of one start and one of another, in rows that still hold the round before."""
    monkeypatch.setattr(wide_update, "SHARED", 1)
    layout, starts, net = nets("deeper", 3, bf16=bf16, form=WideForm(update=True, untransposed=True))
    starts = starts.bfloat16().float()  # the interpreter would not round
    starts[0, ::7], starts[2, ::5] = -0.0, 0.0
    old = optimiser(starts[:2])
    w, v = (torch.full((4, 5 * old.w.stride(0)), math.nan)[:, : layout.parameter_width] for _ in range(2))
    net.reserve(w)
    for copies in net._copies.values():
        for copy in copies:
            if copy is not None:
                copy.fill_(7.0)
    begun = starts[[2, 0, 2]]
    net.begin(starts, torch.tensor([2, 0, 2], dtype=torch.int32), w[:3], v)
    assert torch.equal(bits(w[:3]), bits(begun))
    assert w[3].isnan().all()
    moved_by_gradients = torch.zeros(layout.parameter_width, dtype=torch.bool)
    for i, copies in net._copies.items():
        slot = layout.parameters[2 * i]
        assert slot.name == net.blocks.convolutions[i].weight
        moved_by_gradients[slot.offset : slot.offset + slot.size] = True
        weight = slot.view(begun).permute(0, 1, 3, 4, 2).flatten(2, 3)
        for copy, order in zip(copies, ((0, 1, 2, 3), (0, 2, 3, 1)), strict=True):
            if copy is not None:
                torch.testing.assert_close(copy[:3], weight.permute(order).to(copy.dtype), rtol=0, atol=0)
                assert (copy[3] == 7.0).all()
        assert [copy is None for copy in copies] == [not bf16, bf16]
    assert len(net._copies) == 2
    assert not v[:, ~moved_by_gradients].any()
    # Weights that somebody else has written: the copies follow, and the weights stay.
    w[:] = torch.randn_like(w).bfloat16()
    written = w.clone()
    net.refresh(w)
    assert torch.equal(w, written)
    for i, copies in net._copies.items():
        weight = layout.parameters[2 * i].view(written).permute(0, 1, 3, 4, 2).flatten(2, 3)
        for copy, order in zip(copies, ((0, 1, 2, 3), (0, 2, 3, 1)), strict=True):
            assert copy is None or torch.equal(copy, weight.permute(order).to(copy.dtype))


def test_nothing_of_a_round_is_left_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_update, "SHARED", 1)
    layout, starts, _ = nets("same size", 2)
    place = DeviceData.place(toy.images(samples=40, size=4, classes=5), torch.device("cpu"))
    trainer = StackedTrainer(
        same_size(), layout, place, ImageTransform((0.5,) * 3, (0.2,) * 3),
        ops("cpu", exact=True, form=WideForm(update=True)),
    )  # fmt: skip
    rows = [
        Row(
            task=ClientWork(k, np.arange(k, 40, 8)[: 5 - k], np.ones(5), 1, 3), start_row=1 - k, order_key=k,
            augment_key=k, dropout_key=k, lr=0.1, weight_decay=0.01, momentum=0.9, mu=0.0, logit_scale=None,
            logit_shift=None,
        )
        for k in range(2)
    ]  # fmt: skip
    work = build_work(rows, 3, 5, torch.device("cpu"))
    first = trainer.train(starts, work).models
    assert isinstance(trainer.net, WideNet)
    assert trainer._buffers is not None
    for left in (trainer._buffers.w, trainer._buffers.v, *trainer.net._copies[1]):
        if left is not None:
            left.fill_(math.nan)
    again = trainer.train(starts, work).models
    assert torch.equal(bits(again), bits(first))
    assert work.steps_host.tolist() == [2, 2]
    assert float((first - starts[work.start_row]).abs().max()) > 1e-3


def test_the_first_step_has_the_bits_of_zero_momentum() -> None:
    """Gradients and weights that are zeros of both signs among them, and a stale momentum of whatever kind."""
    ci, co, size = 16, 16, (2, 2)
    x, dy = torch.randn(2, 4, 16, ci), torch.randn(2, 4, 16, co)
    dy[..., :4] = -0.0
    rows = torch.randn(2, co * 9 * ci)
    rows[:, ::3], rows[:, 1::3] = -0.0, 0.0
    late = optimiser(rows)._replace(correction=None, mu=torch.zeros(2), steps=torch.full((2,), 9, dtype=torch.int32))
    found = []
    for step, stale in ((1, 0.0), (0, -0.0), (0, math.nan), (0, -math.inf)):  # the first reads its zeros
        late.step.fill_(step)
        o = late._replace(w=late.w.clone(), v=late.v.clone().fill_(stale))
        settings = {"side": 3, "turned": False, "precision": "ieee"}
        wide_update.weight_step(x, dy, 0, o, wide_update.Copies(None, None), size, 1, **settings)  # type: ignore[arg-type]
        found.append((bits(o.w), bits(o.v)))
    for w, v in found[1:]:
        assert torch.equal(w, found[0][0])
        assert torch.equal(v, found[0][1])
    assert not torch.equal(found[0][0], bits(rows))


def test_maps_and_weights_as_they_lie(bf16_numbers: None) -> None:
    """Whole numbers that bf16 holds, so that products from transposed copies and from originals are equal."""
    x, dy = (torch.randint(-1, 2, (2, 6, 16, c)).bfloat16() for c in (16, 32))
    w = torch.randint(-1, 2, (2, 32, 9, 16)).float()
    plain, turned = wide_maps.turn(w, torch.bfloat16, copy=True, turned=True)
    assert turned is not None
    settings = {"models": 2, "precision": "tf32"}
    back = wide.convolution(dy, turned, None, (2, 3), 1, taps_first=True, **settings)  # type: ignore[arg-type]
    same = wide.convolution(dy, plain, None, (2, 3), 1, inputs_first=True, **settings)  # type: ignore[arg-type]
    assert torch.equal(back, same)
    gradients = torch.full((2, 2, 32, 9, 16), math.nan)
    across = [m.transpose(2, 3).contiguous() for m in (x, dy)]
    wide.weight_grad(*across, gradients[0], (2, 3), 1, precision="tf32")
    wide.weight_grad(x, dy, gradients[1], (2, 3), 1, turned=False, precision="tf32")
    assert torch.equal(gradients[0], gradients[1])
    assert gradients.any()


def test_tiles_through_descriptors() -> None:
    """Tiles of a part of a pixel, of two neighbours, and of several lines, which no descriptor fits."""
    x, dy = torch.randn(2, 4, 16, 32), torch.randn(2, 4, 16, 16)
    w, bias, size = torch.randn(2, 16, 9, 32), torch.randn(2, 16), (2, 2)
    _, turned = wide_maps.turn(w, torch.float32, copy=False, turned=True)
    assert turned is not None
    cases = [
        (16, w, {}, x, bias), (32, w, {}, x, bias), (64, w, {}, x, bias), (32, turned, {"taps_first": True}, dy, None),
        (32, w, {"inputs_first": True}, dy, None),
    ]  # fmt: skip
    for rows, weight, order, maps, b in cases:
        settings = {"models": 2, "precision": "tf32", "tiles": wide.WideTiles(rows, 16, 16, 4, 2), **order}
        plain = wide.convolution(maps, weight, b, size, 1, **settings)  # type: ignore[arg-type]
        assert torch.equal(plain, wide_descriptors.joined(maps, weight, b, size, 1, **settings).maps)  # type: ignore[arg-type]
    for across in (True, False):
        a, b = (m.transpose(2, 3).contiguous() for m in (x, dy)) if across else (x, dy)
        gradients = torch.full((2, 2, 16, 9, 32), math.nan)
        for into, described in zip(gradients, (False, True), strict=True):
            wide.weight_grad(a, b, into, size, 1, turned=across, described=described, precision="tf32")
        assert torch.equal(gradients[0], gradients[1])


TABLE = {
    LayerProduct("forward", 16, 32, 2, "tf32"): WideTiles(128, 32, 16, 4, 2),
    LayerProduct("pooled", 16, 32, 2, "tf32"): WideTiles(128, 16, 16, 4, 2),
    LayerProduct("input", 16, 32, 2, "tf32"): WideTiles(32, 16, 32, 4, 2),
    LayerProduct("step", 16, 32, 2, "tf32"): WideTiles(32, 16, 32, 4, 2),
}


@pytest.mark.parametrize("many", [1, 2], ids=["one model is many", "one model is few"])
def test_tiles_of_the_table(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The products that it names take its tiles for so many models, and come to the same."""
    monkeypatch.setattr(wide_tiles, "MANY", many)
    x, dy, w = whole(1, 4, 64, 16), whole(1, 4, 64, 32), whole(1, 32, 9, 16)
    across = [m.transpose(2, 3).contiguous() for m in (x, dy)]
    _, turned = wide_maps.turn(w, torch.float32, copy=False, turned=True)
    assert turned is not None
    bias, size = whole(1, 32), (2, 2)
    taken: list[tuple[int, ...]] = []

    def made(matrix: Tensor, *block: int) -> object:
        taken.append(block)
        return describe(matrix, *block)

    def products() -> list[Tensor]:
        common = {"models": 1, "precision": "tf32"}
        o = optimiser(torch.cat([w.flatten(1)] * 2))
        o = o._replace(w=o.w[:1], v=torch.zeros_like(o.v[:1]), start=o.start * 0, correction=None, step=o.step + 1)
        settings = {"described": True, "precision": "tf32"}
        moves = o._replace(**{name: torch.ones(1) for name in ("lr", "momentum", "weight_decay", "mu")})
        wide_update.weight_step(*across, 0, moves, wide_update.Copies(None, None), size, 1, side=3, **settings)  # type: ignore[arg-type]
        y, _, code = wide_pooled.forward(x, w, bias, size, 1, keep=True, turned=False, **common)  # type: ignore[arg-type]
        assert code is not None
        return [
            wide_descriptors.joined(x, w, bias, size, 1, **common).maps,  # type: ignore[arg-type]
            wide_descriptors.joined(dy, turned, None, size, 1, taps_first=True, **common).maps,  # type: ignore[arg-type]
            moves.w, y, code,
        ]  # fmt: skip

    describe = wide_descriptors.described
    for module in (wide_descriptors, wide_pooled):
        monkeypatch.setattr(module, "described", made)
    usual, blocks = products(), list(taken)
    for product, tiles in TABLE.items():
        assert misfit(product, tiles) is None
        wrong = WideTiles(0, 0, 0, 0, 0)  # nothing could be cut into these
        both = Chosen(few=wrong, many=tiles) if many == 1 else Chosen(few=tiles, many=wrong)
        monkeypatch.setitem(wide_tiles.CHOSEN, product, both)
    taken.clear()
    for ours, theirs in zip(products(), usual, strict=True):
        assert torch.equal(ours, theirs)
    assert blocks != taken
    assert taken == [(1, 1, 128, 16), (1, 16, 16), (1, 1, 128, 16), (1, 32, 16), (1, 1, 32, 32), (1, 16, 32)]


def test_the_table() -> None:
    """Tiles that fit their products; of one product, such as sum in the same order."""
    for product, both in wide_tiles.CHOSEN.items():
        tiles = [one for one in both if one is not None]
        assert tiles
        assert [misfit(product, one) for one in tiles] == [None] * len(tiles)
        assert {one.step for one in tiles} == {128 // (2 if product.kind == "bf16" else 4)}
        if product.name == "input" and product.inputs == product.outputs:  # goes back through a ReLU, with sums
            usual = wide.convolution_tiles(
                product.outputs, product.inputs, 64, product.width,
                torch.bfloat16 if product.kind == "bf16" else torch.float32, "tf32",
            )  # fmt: skip
            assert {one._replace(stages=0) for one in tiles} == {usual._replace(stages=0)}


@pytest.mark.parametrize("turned", [True, False], ids=["turned maps", "maps as they lie"])
@pytest.mark.parametrize(
    ("ci", "co", "padding", "size"),
    [(16, 32, 1, (2, 3)), (48, 16, 0, (4, 3)), (16, 16, 2, (1, 4)), (32, 48, 1, (5, 1)), (16, 16, 1, (4, 4))],
)
def test_a_line_of_taps_at_a_time(ci: int, co: int, padding: int, size: tuple[int, int], turned: bool) -> None:
    """Whole numbers, whose sums are the same in any order; maps of a single line or column among them."""
    height, width = (length + 2 * padding - 2 for length in size)
    x, dy = whole(2, size[0] * size[1], 32, ci), whole(2, height * width, 32, co)
    image = x.unflatten(1, size).permute(0, 3, 4, 1, 2).double()
    weight = torch.zeros(2, co, ci, 3, 3, dtype=torch.float64, requires_grad=True)
    for i in range(2):
        back = dy[i].unflatten(0, (height, width)).permute(2, 3, 0, 1).double()
        F.conv2d(image[i], weight[i], padding=padding).backward(back)
    assert weight.grad is not None
    if turned:
        x, dy = (m.transpose(2, 3).contiguous() for m in (x, dy))
    rows = torch.full((2, co * 9 * ci + 5), math.nan)
    into = rows[:, :-5].unflatten(1, (co, 9, ci))
    wide_lines.weight_grad(x, dy, into, size, padding, turned=turned, precision="tf32")
    assert torch.equal(into, weight.grad.permute(0, 1, 3, 4, 2).flatten(2, 3).float())
    assert rows[:, -5:].isnan().all()
    assert into.any()


@pytest.mark.parametrize("kernel", ["convolution", "pooled", "line of taps", "first"])
def test_models_that_have_finished_are_left_out(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory holds for them stays; the others come out as they do without them."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(*shape, 7, **how))
    monkeypatch.setattr(wide_lines, "empty", torch.empty)
    x, w, bias, size = whole(3, 8, 32, 16), whole(3, 16, 9, 16), whole(3, 16), (2, 4)
    images, across = whole(3, 3, 4, 4, 16), [m.transpose(2, 3).contiguous() for m in (x, whole(3, 8, 32, 16))]

    def products(running: wide_maps.Running | None) -> list[Tensor | None]:
        common = {"precision": "tf32", "running": running}
        if kernel == "convolution":
            return [*wide_descriptors.joined(x, w, bias, size, 1, models=3, turned=True, **common)]  # type: ignore[arg-type]
        if kernel == "pooled":
            return [*wide_pooled.forward(x, w, bias, size, 1, models=3, keep=True, turned=True, **common)]  # type: ignore[arg-type]
        if kernel == "line of taps":
            into = torch.zeros(3, 16, 9, 16)
            wide_lines.weight_grad(*across, into, size, 1, turned=True, **common)  # type: ignore[arg-type]
            return [into]
        first = wide_first.forward(
            images,
            whole_weights,
            bias,
            3,
            32,
            1,
            torch.float32,
            models=3,
            keep=True,
            turned=True,
            **common,  # type: ignore[arg-type]
        )
        return [*first[:3]]

    whole_weights = whole(3, 16, 27)
    wanted = products(None)
    steps, step = torch.tensor([2, 1, 5], dtype=torch.int32), torch.tensor([1])
    for ours, theirs in zip(products(wide_maps.Running(steps, step)), wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(ours[[0, 2]], theirs[[0, 2]])
            assert not torch.equal(ours[1], theirs[1])
            assert (ours[1] % 7 == 0).all()  # sums of what was there


def test_which_layers_go_line_by_line() -> None:
    assert wide_lines.fits(3, "tf32")
    assert not wide_lines.fits(5, "tf32")
    assert not wide_lines.fits(3, "tf32x3")


@pytest.mark.parametrize(
    ("name", "tiles", "words"),
    [
        ("forward", (128, 256, 32, 8, 3), None), ("forward", (96, 256, 32, 8, 3), "96 rows are no whole pixels"),
        ("input", (512, 256, 32, 8, 3), "no part of a line of 4 pixels"), ("pooled", (64, 64, 32, 4, 3), "two pixels"),
        ("input", (128, 256, 32, 8, 5), "bytes of shared memory"), ("step", (128, 96, 32, 8, 3), "256 columns"),
        ("step", (128, 128, 128, 8, 1), "64 entries"), ("step", (1024, 64, 32, 4, 3), "512 outputs"),
    ],
)  # fmt: skip
def test_tiles_that_a_layer_cannot_be_cut_into(name: str, tiles: tuple[int, ...], words: str | None) -> None:
    found = misfit(LayerProduct(name, 256, 512, 4, "tf32"), WideTiles(*tiles))  # type: ignore[arg-type]
    assert found is None if words is None else found is not None and words in found


def whole(*shape: int) -> Tensor:
    """Small whole numbers: sums are exact in any order, and many pixels are equal."""
    return torch.randint(-2, 3, shape).float()


@pytest.mark.parametrize(
    ("ci", "co", "side", "padding", "size"), [(16, 48, 3, 1, (2, 4)), (32, 16, 2, 0, (4, 3)), (16, 32, 1, 0, (2, 3))]
)
def test_a_pool_in_the_convolution(ci: int, co: int, side: int, padding: int, size: tuple[int, int]) -> None:
    """Maps whose last line or column the pool leaves over, one batch for both models, pixels that are equal or NaN."""
    x, w, bias = whole(1, size[0] * size[1], 32, ci), whole(2, co, side**2, ci), whole(2, co)
    x[0, -1, 3] = math.nan
    common = {"models": 2, "precision": "ieee"}
    dense = wide.convolution(x, w, bias, size, padding, **common)  # type: ignore[arg-type]
    grown = (size[0] + 2 * padding - side + 1, size[1] + 2 * padding - side + 1)
    wanted = wide_maps.pool(dense, grown, pooled=True, keep=True)
    for keep in (True, False):
        found = wide_pooled.forward(x, w, bias, size, padding, keep=keep, turned=keep, **common)  # type: ignore[arg-type]
        for ours, theirs in zip(found, wanted[: 3 if keep else 1], strict=False):
            assert ours is not None
            assert theirs is not None
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        assert keep or found[1:] == (None, None)


def test_images_with_their_batch_last() -> None:
    """A whole batch is turned by a kernel, another by torch."""
    for shape in ((2, 16, 3, 4, 4), (2, 9, 3, 4, 4), (1, 16, 3, 3, 5)):
        x = torch.randn(shape)
        y = wide_first.batch_last(x)
        assert y.shape == (shape[0], *shape[2:], 16)
        assert torch.equal(y[..., : shape[1]], x.permute(0, 2, 3, 4, 1))
        assert not y[..., shape[1] :].any()


@pytest.mark.parametrize("rows", [16, 32, 128], ids=["half a pixel", "a pixel", "several lines"])
def test_what_comes_behind_a_convolution(rows: int) -> None:
    x, w, bias, size = whole(2, 6, 32, 16), whole(2, 32, 9, 16), whole(2, 32), (3, 2)
    tiles = wide.WideTiles(rows, 16, 16, 4, 2)
    common = {"models": 2, "precision": "tf32", "tiles": tiles}
    y = wide_descriptors.joined(x, w, bias, size, 1, turned=True, **common)  # type: ignore[arg-type]
    assert torch.equal(y.maps, wide.convolution(x, w, bias, size, 1, **common))  # type: ignore[arg-type]
    assert y.turned is not None
    assert torch.equal(y.turned, y.maps.transpose(2, 3))
    left, dy = whole(2, 6, 32, 16), whole(2, 6, 32, 32)
    common |= {"inputs_first": True}
    back = wide.convolution(dy, w, None, size, 1, **common)  # type: ignore[arg-type]
    wanted = wide_maps.unpool(back, left, None, size, passes=True)
    found = wide_descriptors.joined(dy, w, None, size, 1, turned=True, left=left, **common)  # type: ignore[arg-type]
    assert torch.equal(found.maps, wanted[0])
    assert found.turned is not None
    assert torch.equal(found.turned, wanted[1])
    assert found.sums is not None
    assert torch.equal(found.sums.sum(1), wanted[2].sum(1))
    assert wanted[2].any()


def test_all_forms_at_once_in_bf16(bf16_numbers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_update, "SHARED", 1)
    _, shape, batch = MODELS["same size"]
    layout, rows, net = nets("same size", 2, bf16=True, form=EVERY)
    apart = WideNet(net.blocks, layout, ops("cpu", bf16=True))
    torch.manual_seed(2)
    inside = optimiser(rows)
    torch.manual_seed(2)
    beside = optimiser(rows)
    net.reserve(inside.w)
    for o in (inside, beside):
        o.start[:2], o.v[:] = rows, 0.0
    inside.v.fill_(math.nan)  # of a round before
    net.begin(inside.start, torch.tensor([0, 1], dtype=torch.int32), inside.w.fill_(math.nan), inside.v)
    assert all(copies.turned is None for copies in net._copies.values())
    for step in range(2):
        inside.step.fill_(step)
        beside.step.fill_(step)
        x, labels = torch.randn(2, batch, *shape), torch.randint(0, 5, (2, batch))
        net.step(inside.w, inside.g, x, labels, None, None, None, inside)
        apart.step(beside.w, beside.g, x, labels, None, None)
        apart.kernels.sgd_update(n=2, **beside._asdict())
    assert error(inside.w, beside.w.double()) < 2e-2  # pixels that bf16 makes equal are told apart by one of the two
    for copies in net._copies.values():
        assert copies.plain is not None
        assert copies.plain.float().isfinite().all()


class Beside:
    """A `SideStream` that notes which tensors are read beside; at the join each of them must still be there."""

    def __init__(self) -> None:
        self.read: list[weakref.ref[Tensor]] = []
        self.forks, self.joins, self.inside = 0, 0, False

    @contextmanager
    def fork(self, x: Tensor) -> Iterator[None]:
        self.forks, self.inside = self.forks + 1, True
        yield
        self.inside = False

    def join(self, x: Tensor) -> None:
        assert not self.inside
        assert all(tensor() is not None for tensor in self.read)
        self.joins += 1

    def watch(self, function: Any, reads: int) -> Any:
        """The same function, which reads its first arguments."""

        def watched(*given: Any, **settings: Any) -> Any:
            self.read += [weakref.ref(one) for one in given[:reads] if self.inside]
            return function(*given, **settings)

        return watched


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("pixels", "forks"), [(16, 2), (4, 2), (3, 0)])
def test_what_is_read_beside_is_kept_until_the_join(
    pixels: int, forks: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers whose maps have 2x2 pixels; their input gradients and the first layer's gradient run meanwhile."""
    beside = Beside()
    monkeypatch.setattr(wide_update, "SHARED", 1)
    monkeypatch.setattr(wide_forms, "FEW_PIXELS", pixels)
    monkeypatch.setattr(wide_maps, "add_parts", beside.watch(wide_maps.add_parts, 1))
    monkeypatch.setattr(wide_update, "weight_step", beside.watch(wide_update.weight_step, 2))
    _, shape, batch = DEEPER["deeper"]
    form = WideForm(update=True, descriptors=True, aside=True, joined=joined)
    _, rows, net = nets("deeper", 2, exact=True, form=form)
    moving = optimiser(rows)
    net.reserve(moving.w)
    net.refresh(moving.w)
    net._beside = beside  # type: ignore[assignment]
    x, labels = torch.randn(2, batch, *shape), torch.randint(0, 5, (2, batch))
    net.step(moving.w, moving.g, x, labels, None, None, None, moving)
    assert (beside.forks, beside.joins) == (forks, 1)
    assert len(beside.read) == 3 * forks  # maps and gradient, and the sums that become the bias gradient
    assert moving.w.isfinite().all()
