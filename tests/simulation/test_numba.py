"""The compiled CPU kernels against autograd, the plain augmentation, and themselves under other company."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import toy
from fedentopt.models import build
from fedentopt.simulation.augment import DRAWS, ImageTransform
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.numba import compiled_net
from fedentopt.simulation.planning import ClientWork
from fedentopt.simulation.trainers.loop import LoopTrainer, Worker
from fedentopt.simulation.work import Row, Work, build_work

pytest.importorskip("numba")
CPU = torch.device("cpu")
STATISTICS = ((0.4, 0.5, 0.6), (0.25, 0.2, 0.3))
PLAIN = ImageTransform(*STATISTICS)
STRONG = ImageTransform(*STATISTICS, jitter=0.4, flip=0.5, grayscale=0.3)


def block(channels: int, out: int, kernel: int, pool_first: bool = False) -> list[nn.Module]:
    after = [nn.MaxPool2d(2), nn.ReLU()] if pool_first else [nn.ReLU(), nn.MaxPool2d(2)]
    return [nn.Conv2d(channels, out, kernel), *after]


def net(*layers: nn.Module, seed: int = 0) -> nn.Module:
    """A Sequential whose parameters hang on the seed alone."""
    model = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) / max(1, p[0].numel()) ** 0.5
    return model


def wide_channels() -> nn.Module:
    """Blocks of channels of every kind: a full one and eight, one short of sixteen, a few."""
    return net(*block(3, 21, 3), *block(21, 13, 2, True), *block(13, 5, 2), nn.Flatten(), nn.Linear(10, 11), nn.ReLU(),
               nn.Linear(11, 4))  # fmt: skip


CASES = {
    "lenet": (lambda: build("lenet5", 10, seed=3), (32, 32), 3),
    "lenet on grey": (lambda: build("lenet5", 10, seed=3), (32, 32), 1),
    "odd sizes, floored pools": (wide_channels, (21, 25), 3),
    "columns, more than eight": (lambda: net(*block(3, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 11, 5)), (11, 24), 3),
    "columns, fewer than eight": (lambda: net(*block(3, 4, 5), nn.Flatten(), nn.Linear(4 * 2 * 7, 5)), (9, 18), 1),
    "one pooled pixel": (lambda: net(*block(3, 2, 4), nn.Flatten(), nn.Linear(2, 3)), (5, 5), 3),
    "one by one": (lambda: net(*block(3, 9, 1), *block(9, 7, 1), nn.Flatten(), nn.Linear(63, 3)), (12, 13), 3),
    "linear alone": (lambda: net(nn.Flatten(), nn.Linear(3 * 7 * 9, 5)), (7, 9), 3),
    "narrow linears": (
        lambda: net(nn.Flatten(), nn.Linear(48, 3), nn.ReLU(), nn.Linear(3, 17), nn.Linear(17, 2)), (4, 4), 1,
    ),
}  # fmt: skip


def place(size: tuple[int, int], channels: int, samples: int, classes: int, seed: int = 0) -> DeviceData:
    rng = np.random.default_rng(seed)
    images = torch.from_numpy(rng.integers(0, 256, (samples, channels, *size), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, classes, samples))
    return DeviceData(images, labels, images[:0], labels[:0], classes)


def work_of(samples: int, classes: int, batch: int, epochs: int = 1, correction: torch.Tensor | None = None,
            **settings: object) -> Work:  # fmt: skip
    task = ClientWork(0, np.arange(samples), np.ones(classes), epochs, batch)
    base = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "mu": 0.0, "logit_scale": None, "logit_shift": None}
    row = Row(task=task, start_row=0, order_key=11, augment_key=12, dropout_key=13, **(base | settings))
    return build_work([row], batch, classes, CPU, correction)


def trained(worker: Worker, start: torch.Tensor, work: Work, data: DeviceData, transform=PLAIN) -> torch.Tensor:
    out = torch.full_like(start, torch.nan)
    worker.train(start, work, 0, data, transform, out)
    return out


def classes_of(model: nn.Module) -> int:
    return [m for m in model.modules() if isinstance(m, nn.Linear)][-1].out_features


@pytest.mark.parametrize("samples", [1, 7])
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_logits_equal_float64_autograd(case, samples):
    make, size, channels = CASES[case]
    model = make()
    classes = classes_of(model)
    data = place(size, channels, samples, classes)
    layout = FlatLayout(model, channels_last=True)
    start = layout.pack(model.state_dict())
    worker = Worker(model, layout)
    assert worker.compiled(data.images) is not None
    # One step of learning rate 1 on all samples: what is subtracted is the gradient.
    step = start - trained(worker, start, work_of(samples, classes, samples), data)
    exact = copy.deepcopy(model).double()
    logits = exact(PLAIN.standardise(data.images).double())
    F.cross_entropy(logits, data.labels).backward()
    got = layout.unpack(step)
    for name, parameter in exact.named_parameters():
        # w - (w - g) rounds like w
        scale = float(parameter.grad.abs().max()) + float(parameter.detach().abs().max()) * 0.1
        assert float((got[name] - parameter.grad).abs().max()) < 2e-6 * scale, name
        assert float(parameter.grad.abs().max()) > 0, name
    gap = worker.predict(start, data.images, PLAIN) - logits
    assert float(gap.detach().abs().max()) < 1e-5 * float(logits.detach().abs().max())


LOCAL_TERMS = {
    "plain": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.01},
    "proximal": {"mu": 0.3, "momentum": 0.9},
    "scaled logits": {"logit_scale": np.linspace(0.2, 1, 10), "momentum": 0.9},
    "shifted logits": {"logit_shift": np.linspace(-3, 2, 10), "weight_decay": 0.1},
    "correction in the gradient": {"correction_mode": 1, "momentum": 0.9},
    "correction after the step": {"correction_mode": 2, "momentum": 0.9, "mu": 0.1},
}


@pytest.mark.parametrize("terms", LOCAL_TERMS)
def test_every_local_term_equals_the_module_path(terms):
    model = build("lenet5", 10, seed=5)
    data = place((32, 32), 3, 21, 10)
    layout = FlatLayout(model, channels_last=True)
    start = layout.pack(model.state_dict())
    push = layout.pack(build("lenet5", 10, seed=6).state_dict())[None] * 0.1
    settings = LOCAL_TERMS[terms] | {"lr": 0.05}
    work = work_of(21, 10, 8, 2, push if "correction_mode" in settings else None, **settings)
    assert work.filled(0).tolist() == [8, 8, 5] * 2  # a partial batch among them
    ours = trained(Worker(model, layout), start, work, data, STRONG)
    theirs = trained(Worker(model, layout, compiled=False), start, work, data, STRONG)
    moved = float((theirs - start).abs().max())
    assert moved > 1e-3
    assert float((ours - theirs).abs().max()) < 1e-4 * moved
    if terms != "plain":
        without = trained(Worker(model, layout), start, work_of(21, 10, 8, 2, lr=0.05), data, STRONG)
        assert float((ours - without).abs().max()) > 1e-2 * moved


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(32, 32), (5, 16), (9, 17), (6, 7), (3, 50)])
def test_augmentation_equals_the_plain_one(size, channels):
    from fedentopt.simulation.numba.gather import load_image, settings
    from fedentopt.simulation.numba.plan import lowered, make_plan

    height, width = size
    data = place(size, channels, 12, 2, seed=height)
    draws = np.random.default_rng(width).random((12, DRAWS), dtype=np.float32)
    draws[:, 0] = np.tile([0.1, 0.9], 6)  # mirrored, and not
    draws[:, 4] = np.repeat([0.1, 0.9], 6)  # greyed, and not
    models = [net(nn.Flatten(), nn.Linear(3 * height * width, 2)), net(*block(3, 2, 1), nn.Flatten(),
              nn.Linear(2 * (height // 2) * (width // 2), 2))]  # fmt: skip
    constant = ImageTransform(STATISTICS[0], (STATISTICS[1][0], 0.0, STATISTICS[1][2]), grayscale=0.5)
    mirroring = ImageTransform(*STATISTICS, flip=0.5)
    for transform in (PLAIN, STRONG, ImageTransform(*STATISTICS, jitter=1.5), mirroring, constant):
        expected = transform.apply(data.images, torch.from_numpy(draws.T.copy()))
        for model in models:
            plan = make_plan(lowered(model, size), FlatLayout(model, channels_last=True), channels, size, 1)
            record, f, pixels = plan.net[0], np.zeros(plan.floats, np.float32), np.zeros(plan.pixels, np.uint8)
            place_of_x, half, many = int(record["input"]), int(record["half"]), 3 * height * width
            for i in range(12):
                load_image(record, data.images.view(-1).numpy(), i * channels * height * width, draws.reshape(-1),
                           i * DRAWS, settings(transform), pixels, f, place_of_x)  # fmt: skip
                x = torch.from_numpy(f[place_of_x : place_of_x + many].copy())
                if record["channels_last"]:
                    x = x.view(height, width, 3).permute(2, 0, 1)
                torch.testing.assert_close(x.reshape(3, height, width), expected[i], atol=1e-5, rtol=1e-5)
                if half:
                    parted = f[int(record["parted"]) :][: 6 * half].reshape(3, 2, half)[:, :, : height * width // 2]
                    woven = torch.from_numpy(parted.transpose(0, 2, 1).reshape(3, height, width))
                    torch.testing.assert_close(woven, expected[i], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("out", [2, 6, 16])
def test_a_tie_goes_to_the_first_position(out):
    """Zero weights make every position equal; the windows still differ, and so would their gradients."""
    size = (12, 14)
    model = net(*block(3, out, 3), nn.Flatten(), nn.Linear(out * 5 * 6, 3))
    nn.init.zeros_(model[0].weight)
    nn.init.ones_(model[0].bias)
    data = place(size, 3, 4, 3)
    layout = FlatLayout(model, channels_last=True)
    start = layout.pack(model.state_dict())
    ours = trained(Worker(model, layout), start, work_of(4, 3, 4), data)
    theirs = trained(Worker(model, layout, compiled=False), start, work_of(4, 3, 4), data)
    assert float((theirs - start).abs().max()) > 0.01
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["conv1.weight", "conv1.bias", "conv2.weight", "fc1.weight", "fc2.bias", "fc3.weight"])
def test_what_is_not_finite_is_never_hidden(name, value):
    model = build("lenet5", 10, seed=5)
    data = place((32, 32), 3, 3, 10)
    layout = FlatLayout(model, channels_last=True)
    state = model.state_dict()
    state[name].view(-1)[7 % state[name].numel()] = value
    start = layout.pack(state)
    ours, theirs = Worker(model, layout), Worker(model, layout, compiled=False)
    with np.errstate(all="ignore"):
        mine, module = (w.predict(start, data.images, PLAIN) for w in (ours, theirs))
        result = trained(ours, start, work_of(3, 10, 3), data)
    assert torch.equal(mine.isnan(), module.isnan())
    assert not torch.isfinite(result).all()


def test_pooling_keeps_what_is_not_a_number():
    """One position of one window is not a number (0 times infinity), the others are finite or infinite."""
    model = net(*block(3, 6, 1), nn.Flatten(), nn.Linear(6 * 8 * 8, 3))
    layout = FlatLayout(model, channels_last=True)
    data = place((16, 16), 3, 4, 3)
    images = data.images.clamp(min=1)
    for i, (y, x) in enumerate([(4, 4), (4, 5), (5, 4), (5, 5)]):
        images[i, :, y, x] = 0
    zero_is_zero = ImageTransform((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    state = model.state_dict()
    state["0.weight"][2] = -torch.inf
    state["0.bias"][2] = 0
    start = layout.pack(state)
    mine = Worker(model, layout).predict(start, images, zero_is_zero)
    assert mine.isnan().all()
    state["0.weight"][2] = 1.0
    assert Worker(model, layout).predict(layout.pack(state), images, zero_is_zero).isfinite().all()


def test_bits_do_not_depend_on_company():
    """A client's result and an image's logits are the same alone, in parts, and after other work on the same memory."""
    model = build("lenet5", 10, seed=5)
    data = place((32, 32), 3, 70, 10)
    layout = FlatLayout(model, channels_last=True)
    start = layout.pack(model.state_dict())
    work = work_of(37, 10, 16, 2, lr=0.05, momentum=0.9)
    fresh, used = Worker(model, layout), Worker(model, layout)
    trained(used, start * torch.inf, work_of(70, 10, 64), data, STRONG)
    first = trained(used, start, work, data, STRONG)
    assert torch.equal(trained(fresh, start, work, data, STRONG), first)
    whole = used.predict(first, data.images, PLAIN)
    for part in (slice(0, 1), slice(5, 12), slice(33, 70)):
        assert torch.equal(fresh.predict(first, data.images[part], PLAIN), whole[part])
    assert fresh.predict(first, data.images[:0], PLAIN).shape == (0, 10)


def test_workers_share_images_and_clients_without_changing_a_bit():
    data = toy.images(samples=60, size=32)
    configs = [toy.config(model="lenet5", rounds=2, seed=s, **m) for s in (0, 1) for m in ({}, {"algorithm": "fedrs"})]
    together = toy.run(configs, data, workers=3)
    for config, outcome in zip(configs, together, strict=True):
        alone = toy.run([config], data, workers=1)[0]
        assert all(torch.equal(alone.model[n], outcome.model[n]) for n in alone.model), config.method
        assert [r.loss for r in alone.records] == [r.loss for r in outcome.records]


def test_only_what_the_kernels_know_is_compiled():
    def fits(model: nn.Module, size: tuple[int, int] = (16, 16), channels_last: bool = True) -> bool:
        return compiled_net(model, FlatLayout(model, channels_last=channels_last), size) is not None

    def small(conv: nn.Module, inputs: int) -> nn.Module:
        return nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(inputs, 3))

    assert fits(small(nn.Conv2d(3, 4, 3), 4 * 49))
    assert not fits(small(nn.Conv2d(3, 4, 3), 4 * 49), (20, 16))  # the linear layer is made for another size
    assert not fits(small(nn.Conv2d(3, 4, 3), 4 * 49), channels_last=False)
    assert not fits(small(nn.Conv2d(1, 4, 3), 4 * 49))
    assert not fits(small(nn.Conv2d(3, 4, 3, padding=1), 4 * 64))
    assert not fits(small(nn.Conv2d(3, 4, 3, stride=2), 4 * 9))
    assert not fits(small(nn.Conv2d(3, 4, 3, bias=False), 4 * 49))
    assert not fits(build("vgg11", 10, seed=0), (32, 32))
    assert not fits(toy.branching(3), (8, 8))
    assert not fits(toy.normed(3), (8, 8))
    frozen = small(nn.Conv2d(3, 4, 3), 4 * 49)
    frozen[0].weight.requires_grad_(False)
    assert not fits(frozen)
    shared = nn.Sequential(nn.Flatten(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768))
    shared[3].weight = shared[1].weight
    assert not fits(shared)


def test_without_numba_and_with_bf16_the_module_trains(monkeypatch):
    model = build("lenet5", 10, seed=5)
    data = place((32, 32), 3, 8, 10)
    layout = FlatLayout(model, channels_last=True)

    def says(precision: str = "fp32") -> str:
        trainer = LoopTrainer(model, layout, data, PLAIN, 1, precision)
        trainer.close()
        return trainer.describe()

    assert "compiled kernels" in says()
    assert "torch modules" in says("bf16")
    for name in [n for n in sys.modules if n.startswith("fedentopt.simulation.numba.")]:
        if name.rpartition(".")[2] not in ("plan",):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "torch modules" in says()
    start = layout.pack(model.state_dict())
    assert torch.isfinite(trained(Worker(model, layout), start, work_of(8, 10, 4, lr=0.1), data)).all()


def test_a_kernel_that_cannot_be_kept_on_disk_still_runs():
    from fedentopt.simulation.numba.compiled import entry

    code: dict[str, object] = {}
    exec(compile("def twice(x):\n    return 2 * x\n", "<no such file>", "exec"), code)
    assert entry("int64(int64)")(code["twice"])(21) == 42
