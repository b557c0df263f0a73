"""BatchNorm among wide convolutions against float64 torch and the loop trainer, through Triton's interpreter.

Not collected by itself: `test_triton.py` runs this file in a process where TRITON_INTERPRET=1 was set before
anything could import Triton.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import straight_line
import toy
from fedentopt.models import build
from fedentopt.simulation.head_stage import ModuleEncoders, StackedEncoders
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers import StackedTrainer
from fedentopt.simulation.trainers.wide_blocks import wide_blocks
from fedentopt.simulation.trainers.wide_net import WideNet
from fedentopt.simulation.triton import EVERY, WideForm, ops, wide_maps, wide_norm, wide_pooled, wide_update
from fedentopt.simulation.work import Row
from straight_line import World, clients, world

pytest_plugins = ["interpreting"]
torch.set_num_threads(1)
NAME = "toy:wide_normed"
FORMS = {
    "plain": WideForm(), "update": WideForm(first=True, update=True),
    "every": EVERY,
}  # fmt: skip


@pytest.fixture(params=FORMS)
def stacked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    """A stack in one of the forms; layers as small as these are taken as large ones are."""
    monkeypatch.setattr(wide_update, "SHARED", 1)
    monkeypatch.setattr(wide_pooled, "NARROWEST", 2)
    monkeypatch.setattr("fedentopt.simulation.triton.form_for", lambda device: FORMS[request.param])
    made = world(NAME, "stacked")
    assert isinstance(made.trainer, StackedTrainer)
    assert isinstance(made.trainer.net, WideNet)
    assert made.trainer.net.updates == FORMS[request.param].update
    return made


def short(places: list[int]) -> list[Row]:
    """Some of the uneven clients, for one epoch or two."""
    every = clients(9)
    return [replace(every[k], task=replace(every[k].task, epochs=1 + k % 2)) for k in places]


def test_uneven_clients_train_as_one_by_one_in_float64(stacked: World) -> None:
    """Partial batches, clients that stop early, terms in logits, a push; running statistics as well."""
    work = stacked.work(short([0, 2, 5]), wants_losses=True)
    models, losses = straight_line.train(stacked, work)
    trained = stacked.trainer.train(stacked.starts, work)
    torch.testing.assert_close(trained.models, models.float(), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(trained.losses, losses, atol=2e-5, rtol=2e-5, check_dtype=False)
    p = stacked.layout.parameter_width
    moved = (trained.models - stacked.starts[work.start_row])[:, p : stacked.layout.moving_width]
    assert (moved.abs().amax(1) > 0.1).all()  # statistics and the number of batches


def test_lone_values_and_the_same_bits_alone(stacked: World) -> None:
    """Batches of one sample, whose last map is one pixel: normalised by running statistics, as in the loop trainer."""
    loop, (first, lone, last) = world(NAME, "loop"), short([2, 3, 4])
    rows = [first, lone, replace(last, task=replace(last.task, samples=last.task.samples[:9]))]  # one of them is left
    work = stacked.work(rows, wants_losses=True)
    many = stacked.trainer.train(stacked.starts, work)
    told = loop.trainer.train(loop.starts, loop.work(rows, wants_losses=True))
    plain = [w.layout.to_canonical(models) for w, models in ((stacked, many.models), (loop, told.models))]
    torch.testing.assert_close(*plain, atol=2e-5, rtol=2e-5)
    assert many.losses is not None
    torch.testing.assert_close(many.losses, told.losses, atol=2e-5, rtol=2e-5)
    alone = stacked.trainer.train(stacked.starts, stacked.work(rows[:1], wants_losses=True))
    place = int(np.flatnonzero(work.source == 0)[0])
    assert torch.equal(many.models[place], alone.models[0])
    assert alone.losses is not None
    assert torch.equal(many.losses[place], alone.losses[0])


def test_models_are_evaluated_by_their_running_statistics() -> None:
    stack, loop = (world(NAME, name) for name in ("stacked", "loop"))
    assert isinstance(stack.trainer, StackedTrainer)
    starts = [w.starts.clone() for w in (stack, loop)]
    for w, rows in zip((stack, loop), starts, strict=True):
        for slot in w.layout.buffers:
            drawn = torch.rand(3, *slot.shape, generator=torch.Generator().manual_seed(len(slot.name))) + 0.5
            slot.view(rows).copy_(drawn)
    images = stack.data.test_images[:20]
    logits = [w.trainer.predict(rows, images) for w, rows in zip((stack, loop), starts, strict=True)]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    own = [np.arange(9), np.arange(30, 34), np.arange(50, 65)]
    pairs = zip((stack, loop), starts, strict=True)
    means = [w.trainer.mean_losses(rows, [2, 0, 2], own).read() for w, rows in pairs]
    np.testing.assert_allclose(*means, rtol=1e-5)
    pairs = zip((stack, loop), starts, strict=True)
    soft = [w.trainer.soft_labels(rows, own) for w, rows in pairs]
    np.testing.assert_allclose(*soft, rtol=1e-4)


def test_encoders_of_a_second_stage_use_their_running_statistics() -> None:
    stack = world(NAME, "stacked")
    assert isinstance(stack.trainer, StackedTrainer)
    assert isinstance(stack.trainer.net, WideNet)
    rows = [stack.starts[:2].clone(), stack.starts[1:].clone()]  # two runs of two clusters
    for slot, own in itertools.product(stack.layout.buffers, rows):
        slot.view(own).copy_(torch.rand(2, *slot.shape) + 0.5)
    images = stack.transform.standardise(stack.data.test_images[:12]).unflatten(0, (2, 6))
    found = StackedEncoders(stack.trainer.net).features(rows, images)
    model = build(NAME, straight_line.CLASSES, seed=5, image_size=4)
    expected = ModuleEncoders(model, stack.layout, images.device).features(rows, images)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(StackedEncoders(stack.trainer.net).features(rows[1:], images[1:]), expected[1:])


def test_a_mean_number_of_batches_is_a_whole_one_again() -> None:
    """As where each client's module has it: the server's mean of clients with 2 and 3 batches is none of a layer's."""
    trained = []
    for made in (world(NAME, "stacked"), world(NAME, "loop")):
        for slot in made.layout.integer_slots():
            slot.view(made.starts).copy_(torch.tensor([2.6, 0.4, 7.0]))
        models = made.trainer.train(made.starts, made.work(short([0, 2, 5]))).models
        trained.append(torch.stack([slot.view(models) for slot in made.layout.integer_slots()]))
    assert torch.equal(*trained)


def test_the_engine_trains_them_as_one_by_one() -> None:
    methods = ({"algorithm": "fedavg"}, {"algorithm": "scaffold", "seed": 1})
    common = {"model": NAME, "rounds": 2, "clients": 4, "cohort": "2", "epochs": 1, "precision": "fp32-exact"}
    configs = [toy.config(**(common | method)) for method in methods]
    data, said = toy.images(samples=48, size=4), list[str]()
    stack = toy.run(configs, data, trainer="stacked", say=said.append)
    assert "wide convolutions" in said[0]
    for config, outcome in zip(configs, stack, strict=True):
        alone = toy.run([config], data, trainer="loop")[0]
        assert toy.difference(outcome, alone) < 1e-5
        assert alone.model["1.num_batches_tracked"] > 0


def test_bf16_products(bf16_numbers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps and their gradients in bf16, statistics and gradients of weights in fp32; the plain form and all at once."""
    monkeypatch.setattr(wide_update, "SHARED", 1)
    models = [toy.wide_normed(5) for _ in range(2)]
    layout, blocks = FlatLayout(models[0], channels_last=True), wide_blocks(models[0], 4)
    assert blocks is not None
    rows = torch.stack([layout.pack(model.state_dict()) for model in models]).bfloat16().float()
    x, labels = torch.randn(2, 16, 3, 4, 4), torch.randint(0, 5, (2, 16))
    labels[1, -3:] = -1
    p, exact = layout.parameter_width, torch.zeros_like(rows)
    for i, model in enumerate(models):
        model.load_state_dict(layout.unpack(rows[i]))
        real = labels[i] >= 0
        F.cross_entropy(model.double()(x[i, real].double()), labels[i, real]).backward()
        for slot in layout.parameters:
            slot.view(exact[i : i + 1])[0].copy_(model.get_parameter(slot.name).grad)
        for slot in layout.buffers:
            slot.view(exact[i : i + 1])[0].copy_(model.get_buffer(slot.name))
    for form in (WideForm(), EVERY._replace(update=False)):
        net = WideNet(blocks, layout, ops("cpu", bf16=True, form=form))
        gradient, state = torch.zeros(2, p), rows[:, p:].clone()
        net.step(rows[:, :p], gradient, x, labels, None, None, state=state)
        # The interpreter cuts digits off, and some pixels change sides of ReLU's kink; a wrong index moves all by one.
        for part, wanted, near in ((gradient, exact[:, :p], 0.25), (state, exact[:, p:], 2e-2)):
            assert float((part - wanted).norm() / wanted.norm()) < near


def test_padding_stays_finite_whatever_a_batch_is_divided_by() -> None:
    """Of the same image a few times over nothing varies, and a row of zeros beside them is a million times as far from
    the mean after each layer."""
    layers: list[nn.Module] = []
    for inputs in (3, *(16,) * 7):
        layers += [nn.Conv2d(inputs, 16, 1, bias=False), nn.BatchNorm2d(16, eps=1e-12), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 5))
    layout, blocks = FlatLayout(model, channels_last=True), wide_blocks(model, 1)
    assert blocks is not None
    row = layout.pack(model.state_dict())[None]
    p = layout.parameter_width
    x, labels = torch.full((1, 8, 3, 1, 1), 0.7), torch.full((1, 8), 2)
    x[:, 5:], labels[:, 5:] = 0.0, -1
    gradient = torch.zeros(1, p)
    WideNet(blocks, layout, ops("cpu", exact=True)).step(
        row[:, :p], gradient, x, labels, None, None, state=row[:, p:].clone()
    )
    assert gradient.isfinite().all()


def test_nobody_is_asked_in_batches_as_wide_as_those_that_train(
    stacked: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For them there are kernels that add up in another order, so a loss would depend on who else is asked."""
    assert isinstance(stacked.trainer, StackedTrainer)
    widths, logits = [], stacked.trainer.net.logits
    monkeypatch.setattr(stacked.trainer.net, "logits", lambda rows, x: widths.append(x.shape[1]) or logits(rows, x))
    for sizes in ([5], [64], [70, 3], [1, 2, 60]):
        stacked.trainer.mean_losses(stacked.starts, [i % 3 for i in range(len(sizes))], [np.arange(n) for n in sizes])
    assert set(widths) == {128}


def test_pools_choose_as_those_behind_other_layers_do() -> None:
    """The first of equal pixels, none where nothing is positive, NaN where one is."""
    z = torch.randint(-1, 3, (2, 20, 64, 16)).float()
    z[1, 5, 3] = torch.nan
    as_it_is = wide_norm.Slope(torch.ones(2, 16), torch.zeros(2, 16))
    found = wide_norm.activated(z, as_it_is, (4, 5), pooled=True, keep=True, turned=True)
    for mine, its in zip(found, wide_maps.pool(z.relu(), (4, 5), pooled=True, keep=True), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0, equal_nan=True)


def test_statistics_of_values_far_from_zero() -> None:
    z: Tensor = torch.randn(2, 9, 64, 32) * 1e-2 + 300.0
    real = torch.ones(2, 64)
    real[1, 40:] = 0.0
    found = wide_norm.statistics(z, real)
    for i, kept in enumerate((64, 40)):
        exact = z[i, :, :kept].double()
        torch.testing.assert_close(found.mean[i].double(), exact.mean((0, 1)), rtol=1e-6, atol=0)
        torch.testing.assert_close(found.var[i].double(), exact.var((0, 1), correction=0), rtol=1e-3, atol=0)
