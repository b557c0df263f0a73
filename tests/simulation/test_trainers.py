"""Stacked, streams and loop are one trainer in three shapes: same models, to float tolerance, in the hard cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import toy
from fedentopt.errors import InputError
from fedentopt.models import build
from fedentopt.randomness import key
from fedentopt.simulation.aggregation import Blend, blend_models
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.lowering import lower
from fedentopt.simulation.planning import ClientWork
from fedentopt.simulation.trainers import choice, stacked
from fedentopt.simulation.trainers.bound_model import BoundModel
from fedentopt.simulation.trainers.stacked import StackedTrainer, StepShape, ladder
from fedentopt.simulation.trainers.stacked_nets import LoweredNet, VmapNet
from fedentopt.simulation.trainers.streams import StreamsTrainer
from fedentopt.simulation.triton import PlainKernels
from fedentopt.simulation.work import Row, build_work


def everything(model: str, **extra: object) -> list:
    """All methods, on uneven clients with partial batches, stragglers and dropout."""
    common = {"stragglers": 0.5, "dropout": 0.2, "epochs": 3, "rounds": 3, "model": model, "lr": 0.02} | extra
    return [toy.config(**(common | method)) for method in toy.METHODS]


@pytest.mark.parametrize("model", ["toy:linear", "toy:branching"])
@pytest.mark.parametrize("trainer", ["stacked", "streams"])
def test_trainers_agree_for_every_algorithm(model, trainer):
    data = toy.images(samples=90)
    configs = everything(model)
    loop = toy.run(configs, data, trainer="loop")
    other = toy.run(configs, data, trainer=trainer)
    for config, a, b in zip(configs, loop, other, strict=True):
        assert [r.clients for r in a.records] == [r.clients for r in b.records]
        assert toy.difference(a, b) < 2e-5, config.method
    sizes = {len(r.trained) for outcome in loop for r in outcome.records}
    assert min(sizes) < 3  # somebody dropped out, or the case was not hard


def test_a_model_that_vmap_would_train_in_single_precision_is_not_stacked_in_bf16(monkeypatch):
    config = toy.config(model="toy:branching", precision="bf16")
    with pytest.raises(InputError, match=r"^trainer: torch.func.vmap, .* has no products in bf16; accepted: auto, str"):
        toy.run([config], toy.images(), trainer="stacked")
    for where in ("runs_on", "wide_runs_on"):
        monkeypatch.setattr(choice, where, lambda device: False)
    monkeypatch.setattr(choice, "_kernels", lambda device, precision: PlainKernels())
    for model, precision, chosen in (
        ("toy:branching", "bf16", "streams"), ("toy:branching", "fp32", "stacked"), ("toy:pooled", "bf16", "stacked"),
    ):  # fmt: skip
        made = build(model, 3, seed=0, image_size=8)
        assert choice.choose_trainer("auto", made, torch.device("cuda"), 8, precision=precision) == chosen


def test_lenet_stacked_by_hand_written_backward_agrees():
    data = toy.images(samples=60, size=32)
    configs = [toy.config(model="lenet5", **m, rounds=2) for m in toy.METHODS[:9]]
    loop = toy.run(configs, data, trainer="loop")
    stacked = toy.run(configs, data, trainer="stacked")
    for config, a, b in zip(configs, loop, stacked, strict=True):
        assert toy.difference(a, b) < 1e-5, config.method


def test_trainers_agree_on_a_constant_channel():
    data = toy.images(samples=60, size=32)
    data.x_train[:, 2], data.x_test[:, 2] = 128, 131
    data = replace(data, mean=(0.4, 0.4, 128 / 255), std=(0.25, 0.25, 0.0))
    config = toy.config(model="lenet5", rounds=2, grayscale=0.3, lr=0.05)
    loop, *others = (toy.run([config], data, trainer=trainer)[0] for trainer in ("loop", "stacked", "streams"))
    assert loop.diverged_round is None
    assert all(toy.difference(loop, other) < 1e-5 for other in others)


def test_batches_of_one_sample_train_on_the_compiled_kernels():
    config = toy.config(model="lenet5", clients=4, cohort="3", rounds=2, batch_size=1)
    data = toy.images(samples=60, size=32)
    loop, *others = (toy.run([config], data, trainer=trainer)[0] for trainer in ("loop", "stacked", "streams"))
    assert all(toy.difference(loop, other) < 1e-5 for other in others)


def test_batchnorm_and_dropout_agree_between_loop_and_streams():
    data = toy.images(samples=70)
    configs = [toy.config(model="toy:normed", stragglers=0.5, **m) for m in toy.METHODS[:9]]
    loop = toy.run(configs, data, trainer="loop")
    streams = toy.run(configs, data, trainer="streams")
    for config, a, b in zip(configs, loop, streams, strict=True):
        assert toy.difference(a, b) < 2e-5, config.method
    # Statistics moved, and the count of batches is the whole number of steps, averaged.
    model = loop[0].model
    assert model["1.num_batches_tracked"].dtype == torch.int64
    assert int(model["1.num_batches_tracked"]) > 0
    assert float(model["1.running_var"].min()) > 0


@pytest.mark.parametrize("trainer", ["loop", "streams"])
def test_a_batch_of_one_sample_is_normalised_by_running_statistics(trainer):
    data = toy.images(samples=3)
    data = replace(data, x_train=data.x_train[[0] * 3], y_train=data.y_train[[0] * 3])  # alike: no order matters
    settings = {"clients": 1, "cohort": "1", "partition": "iid", "rounds": 1, "lr": 0.1} | toy.PLAIN
    config = toy.config(model="toy:narrow", epochs=2, batch_size=1, **settings)
    (outcome,) = toy.run([config], data, trainer=trainer)

    model = build("toy:narrow", 3, seed=key(config.seed, "model") >> 1, image_size=8)
    model[2].eval()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=config.momentum, weight_decay=config.weight_decay)
    x = ImageTransform(data.mean, data.std).standardise(torch.from_numpy(data.x_train[:1]))
    for _ in range(6):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(x), torch.from_numpy(data.y_train[:1])).backward()
        optimiser.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(outcome.model[name], value, atol=1e-5, rtol=1e-5)


def test_a_last_batch_of_one_sample_leaves_the_others_their_statistics():
    data = toy.images(samples=9)
    config = toy.config(model="toy:narrow", clients=1, cohort="1", partition="iid", rounds=1, epochs=2)
    loop, streams = (toy.run([config], data, trainer=name)[0] for name in ("loop", "streams"))
    assert int(loop.model["2.num_batches_tracked"]) == 2  # of four batches, two had a variance
    assert toy.difference(loop, streams) < 2e-5


def test_a_model_with_batchnorm_cannot_be_stacked():
    with pytest.raises(ValueError, match="BatchNorm, other buffers, dropout or frozen parameters cannot be stacked"):
        toy.run([toy.config(model="toy:normed")], toy.images(), trainer="stacked")


def rows_of(sizes: list[int], epochs: list[int], batch: int) -> list[Row]:
    start = np.cumsum([0, *sizes])
    return [
        Row(
            task=ClientWork(k, np.arange(start[k], start[k + 1]), np.ones(3), epochs[k], batch), start_row=0,
            order_key=100 + k, augment_key=200 + k, dropout_key=300 + k, lr=0.05, weight_decay=0.01, momentum=0.9,
            mu=0.0, logit_scale=None, logit_shift=None,
        )
        for k in range(len(sizes))
    ]  # fmt: skip


def trainers(model, data):
    place = DeviceData.place(data, torch.device("cpu"))
    transform = ImageTransform(data.mean, data.std, 0.2, 0.5, 0.1)
    layout = FlatLayout(model)
    yield layout, StackedTrainer(model, layout, place, transform, PlainKernels())
    yield layout, StreamsTrainer(model, layout, place, transform, PlainKernels(), slots=2)


def test_every_client_sees_each_sample_once_an_epoch_and_real_samples_only():
    sizes, epochs, batch = [5, 17, 8, 1], [2, 3, 1, 4], 8
    work = build_work(rows_of(sizes, epochs, batch), batch, 3, torch.device("cpu"))
    assert work.steps_host.tolist() == sorted(work.steps_host, reverse=True) == [9, 4, 2, 1]
    start = np.cumsum([0, *sizes])
    for row, source in enumerate(work.source):
        index = work.index[:, row].numpy()
        steps, n = int(work.steps_host[row]), sizes[source]
        assert (index[steps:] == -1).all()
        epoch = index[:steps].reshape(epochs[source], -1)
        for seen in epoch:
            assert sorted(seen[seen >= 0]) == list(range(start[source], start[source] + n))
        assert (index[:steps] >= 0).sum(1).tolist() == work.filled(row).tolist()
    orders = [tuple(e[e >= 0]) for e in work.index[:9, 0].reshape(3, -1).numpy()]
    assert len(set(orders)) == 3  # another order every epoch


def test_a_client_is_the_same_alone_and_in_a_stack():
    data = toy.images(samples=60)
    model = toy.linear(3)
    rows = rows_of([5, 17, 8, 20], [2, 3, 1, 2], 8)
    for layout, trainer in trainers(model, data):
        starts = layout.pack(model.state_dict())[None]
        together = build_work(rows, 8, 3, torch.device("cpu"))
        trained = trainer.train(starts, together).models
        for row, source in enumerate(together.source):
            alone = trainer.train(starts, build_work([rows[source]], 8, 3, torch.device("cpu"))).models
            torch.testing.assert_close(alone[0], trained[row], atol=1e-6, rtol=1e-5)
        assert (trained[0] - trained[1]).abs().max() > 1e-4


def test_lent_models_are_the_same_bits_and_the_callers_own_stay():
    data = toy.images(samples=60)
    model = toy.linear(3)
    rows = rows_of([5, 17, 8, 20, 3], [2, 3, 1, 2, 1], 8)
    for layout, trainer in trainers(model, data):
        starts = torch.stack([layout.pack(model.state_dict()), layout.pack(toy.linear(3).state_dict())])
        work = build_work(rows, 8, 3, torch.device("cpu"))
        own = trainer.train(starts, work).models
        kept = own.clone()
        lent = trainer.train(starts, work, lend=True).models
        assert lent.shape == own.shape
        assert torch.equal(lent, own)
        stacked = isinstance(trainer, StackedTrainer)
        # Rows of which each begins a line of memory, not a copy of them.
        assert (lent.stride(0) % 32 == 0 and lent.data_ptr() == trainer._buffers.w.data_ptr()) == stacked
        other = trainer.train(starts, build_work(rows[::-1], 8, 3, torch.device("cpu")), lend=True).models
        assert not torch.equal(other, kept)
        assert torch.equal(own, kept)
        blends = [
            Blend(1, 0.25, np.array([4, 0, 2]), np.array([0.5, 0.25, 0.1]), np.array([0.5, 0.25, 0.25])),
            Blend(0, 0.0, np.array([1, 3]), np.array([0.7, 0.3]), np.array([0.5, 0.5])),
        ]
        beside, apart = (blend_models(starts, some, blends, layout) for some in (other.contiguous(), other))
        assert torch.equal(beside, apart)
        # In parts there is no one place where all of them are.
        assert trainer.shrink()
        parts = trainer.train(starts, work, lend=True).models
        torch.testing.assert_close(parts, kept, atol=1e-6, rtol=1e-5)


def test_finished_clients_are_frozen_whole():
    """A replayed prefix may hold finished rows: neither weights nor momentum may move."""
    data = toy.images(samples=60)
    model = toy.linear(3)
    place = DeviceData.place(data, torch.device("cpu"))
    layout = FlatLayout(model)
    trainer = StackedTrainer(model, layout, place, ImageTransform(data.mean, data.std), PlainKernels())
    starts = layout.pack(model.state_dict())[None]
    work = build_work(rows_of([30, 5], [1, 1], 8), 8, 3, torch.device("cpu"))
    expected = trainer.train(starts, work).models
    buffers = trainer._buffers
    buffers.load(work, starts)
    trainer._begin(buffers, work.rows)
    trainer._step(buffers, StepShape(2, True))
    after_one = buffers.w[1].clone(), buffers.v[1].clone()
    for _ in range(3):
        trainer._step(buffers, StepShape(2, True))  # the whole stack, although row 1 has finished
    assert torch.equal(buffers.w[1], after_one[0])
    assert torch.equal(buffers.v[1], after_one[1])
    torch.testing.assert_close(buffers.w[:2], expected, atol=1e-6, rtol=1e-5)


def test_soft_labels_of_many_samples_are_passed_in_blocks_and_are_those_of_the_whole(monkeypatch):
    """Kernels count elements in 32 bits: no pass may hold more images than `PREDICT_PIXELS` allows."""
    data = toy.images(samples=60)
    model = toy.linear(3)
    layout, trainer = next(trainers(model, data))
    row = layout.pack(model.state_dict())
    samples = [np.arange(50), np.arange(50, 57)]
    logits, seen = trainer.net.logits, []

    def watched(weights, x):
        seen.append(x.shape[1])
        return logits(weights, x)

    monkeypatch.setattr(trainer.net, "logits", watched)
    models = torch.stack([row, row * 0.5])
    whole = trainer.soft_labels(models, samples)
    assert seen == [50, 7]
    monkeypatch.setattr(stacked, "PREDICT_PIXELS", 8 * data.x_train[0, 0].size)
    in_blocks = trainer.soft_labels(models, samples)
    assert seen[2:] == [8] * 6 + [2, 7]
    np.testing.assert_allclose(in_blocks, whole, rtol=1e-6)


def test_work_in_parts_equals_the_whole():
    data = toy.images(samples=60)
    model = toy.linear(3)
    rows = rows_of([5, 17, 8, 20], [2, 3, 1, 2], 8)
    for layout, trainer in trainers(model, data):
        starts = layout.pack(model.state_dict())[None]
        work = build_work(rows, 8, 3, torch.device("cpu"))
        whole = trainer.train(starts, work).models
        assert trainer.shrink()
        torch.testing.assert_close(trainer.train(starts, work).models, whole, atol=1e-6, rtol=1e-5)
        while trainer.shrink():
            pass
        torch.testing.assert_close(trainer.train(starts, work).models, whole, atol=1e-6, rtol=1e-5)


def test_the_ladder_never_wastes_more_than_an_eighth():
    for n in range(1, 2000):
        assert n <= ladder(n) < n + max(1, n / 8)
    assert len({ladder(n) for n in range(1, 1001)}) < 70


def test_what_is_lowered_and_what_is_not():
    from fedentopt.models import build

    lenet = build("lenet5", 10, seed=0)
    layout = FlatLayout(lenet)
    assert [type(b).__name__ for b in lower(lenet, lambda *_: True)] == ["ConvBlock"] * 2 + ["LinearBlock"] * 3
    assert lower(lenet, lambda *_: False) is None
    assert lower(toy.branching(3), lambda *_: True) is None
    assert lower(toy.normed(3), lambda *_: True) is None
    odd = ({"stride": 2}, {"padding": 1}, {"dilation": 2}, {"groups": 3}, {"bias": False}, {"stride": (1, 2)})
    for kernel, more in [(3, {}), ((3, 2), {}), ((2, 3), {}), *((3, one) for one in odd)]:
        conv = nn.Conv2d(3, 6, kernel, **more)
        net = nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3))
        net(torch.zeros(1, 3, 12, 12))
        assert (lower(net, lambda *_: True) is not None) == (kernel == 3 and not more), conv
    x = torch.randn(2, 4, 3, 32, 32)
    rows = torch.stack([layout.pack(build("lenet5", 10, seed=s).state_dict()) for s in (1, 2)])
    by_hand = LoweredNet(lower(lenet, lambda *_: True), layout, PlainKernels()).logits(rows, x)
    torch.testing.assert_close(by_hand, VmapNet(lenet, layout).logits(rows, x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("affine", [True, False])
def test_one_value_per_channel_without_statistics_is_at_the_mean(affine):
    model = nn.Sequential(nn.BatchNorm2d(3, affine=affine, track_running_stats=False), nn.Flatten(), nn.Linear(3, 2))
    layer = BoundModel(model, FlatLayout(model), torch.device("cpu")).module[0]
    bias = [0.5, -1.0, 2.0] if affine else [0.0, 0.0, 0.0]
    if affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([2.0, 3.0, 4.0]))
            layer.bias.copy_(torch.tensor(bias))
    x = torch.rand(1, 3, 1, 1, requires_grad=True)
    assert layer(x).flatten().tolist() == bias
    layer(x).sum().backward()
    assert x.grad.flatten().tolist() == ([2.0, 3.0, 4.0] if affine else [1.0, 1.0, 1.0])  # as with fixed statistics
