"""Batches with padding: BatchNorm, whole models and whole rounds are those of the real samples alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import toy
from fedentopt.models import build, dropout_key
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers import LoopTrainer, StreamsTrainer
from fedentopt.simulation.trainers.bound_model import BoundModel
from fedentopt.simulation.trainers.masked_norm import mask_norms, masked_batch_norm
from fedentopt.simulation.trainers.padding_trial import can_mask, fill_padding
from fedentopt.simulation.triton import PlainKernels
from fedentopt.simulation.work import build_work
from straight_line import clients

CPU = torch.device("cpu")
LAYERS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
SHAPES = [(7, 5), (6, 3, 4), (7, 5, 1, 1), (9, 4, 3, 5), (5, 2, 2, 3, 2)]


def layer(shape: tuple[int, ...], dtype: torch.dtype, *, bias: bool = True, **options: object) -> nn.Module:
    """A layer that has seen data, with weights that are no ones; new versions of torch have one without a bias."""
    made = LAYERS[len(shape)](shape[1], **options).to(dtype)
    if not bias:
        made.register_parameter("bias", None)
    generator = torch.Generator().manual_seed(1)
    for tensor in made.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return made.train()


def batch(shape: tuple[int, ...], n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values far from zero mean, their upstream gradient (zero for padding), and which rows are real."""
    generator = torch.Generator().manual_seed(2)
    x = 3 * torch.randn(shape, generator=generator, dtype=torch.float64) + 7
    push = torch.randn(shape, generator=generator, dtype=torch.float64)
    x[n:], push[n:] = 1e3, 0
    if len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x.to(dtype), push.to(dtype), torch.arange(shape[0]) < n


def both(
    plain: nn.Module, shape: tuple[int, ...], n: int, dtype: torch.dtype = torch.float64
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Output, gradients and buffers of a layer on the real rows, the same of masked statistics, and dx of padding."""
    masked = copy.deepcopy(plain)
    x, push, real = batch(shape, n, dtype)
    results = []
    for one, rows, forward in ((plain, n, plain), (masked, len(x), lambda x: masked_batch_norm(masked, x, real))):
        given = x[:rows].clone(memory_format=torch.preserve_format).requires_grad_()
        y = forward(given)
        y.backward(push[:rows])
        gradients = [given.grad[:n], *(p.grad for p in one.parameters())]
        results.append([y.detach()[:n], *gradients, *one.buffers()])
    return results[0], results[1], given.grad[n:]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.01, "eps": 0.1}, {"bias": False}]
)
def test_it_is_torchs_on_the_real_samples(shape, options):
    checked = 0
    for n in range(1, shape[0] + 1):
        if n * torch.Size(shape[2:]).numel() < 2:
            continue
        for dtype, near in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
            expected, found, padding = both(layer(shape, dtype, **options), shape, n, dtype)
            for a, b in zip(expected, found, strict=True):
                assert a.dtype == b.dtype
                torch.testing.assert_close(b, a, rtol=near, atol=near)
            assert not padding.any()
            checked += 1
    assert checked >= 2 * (shape[0] - 1)


def test_statistics_by_hand():
    norm = nn.BatchNorm1d(1, momentum=0.5, eps=0.0).double()
    y = masked_batch_norm(norm, torch.tensor([[1.0], [5.0], [9.0]]).double(), torch.tensor([True, True, False]))
    assert y.flatten().tolist() == [-1, 1, 3]  # mean 3, variance 4
    assert norm.running_mean.tolist() == [1.5]
    assert norm.running_var.tolist() == [0.5 + 0.5 * 8]  # of two samples, without bias
    assert int(norm.num_batches_tracked) == 1


def test_gradients_hold_for_any_upstream_gradient_even_of_padding_rows():
    norm = layer((4, 2, 2, 3), torch.float64)
    real = torch.tensor([True, False, True, False])  # and wherever the real rows are
    x = torch.randn(4, 2, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        other = copy.deepcopy(norm)
        del other.weight, other.bias
        other.weight, other.bias = weight, bias
        return masked_batch_norm(other, x, real)

    assert torch.autograd.gradcheck(forward, (x, *norm.parameters()))


@pytest.mark.parametrize(
    "options", [{}, {"track_running_stats": False}, {"affine": False}, {"track_running_stats": False, "bias": False}]
)
@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1, 1)])
def test_one_real_value_per_channel_is_taken_as_without_padding(shape, options):
    """Torch refuses such a batch; a bound model normalises it by its running statistics."""
    net = nn.Sequential(layer(shape, torch.float32, **options))
    layout = FlatLayout(net)
    bound = BoundModel(net, layout, CPU)
    bound.load(layout.pack(net.state_dict()))
    plain = bound.module.double()
    expected, found, padding = both(plain[0], shape, 1)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
    assert not padding.any()
    assert all(
        torch.equal(now, before.to(now.dtype)) for now, before in zip(plain.buffers(), net.buffers(), strict=True)
    )


@pytest.mark.parametrize("n", [1, 3])
def test_one_real_value_is_the_bias_to_the_last_bit_without_statistics(n):
    """A bias begins at zero, where rounding would decide whether a ReLU behind it passes the gradient on."""
    norm = layer((n, 64), torch.float32, track_running_stats=False)
    with torch.no_grad():
        norm.bias.zero_()
    x = 7 + torch.randn(n, 64, generator=torch.Generator().manual_seed(0))
    y = masked_batch_norm(norm, x.requires_grad_(), torch.arange(n) < 1)
    assert not y[0].any()
    y[0].sum().backward()
    torch.testing.assert_close(x.grad[0], norm.weight.detach())  # as with fixed statistics


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}])
def test_a_batch_of_padding_alone_changes_nothing(options):
    norm = layer((3, 2, 2, 2), torch.float64, **options)
    before = copy.deepcopy(norm.state_dict())
    x = torch.randn(3, 2, 2, 2, dtype=torch.float64).requires_grad_()
    y = masked_batch_norm(norm, x, torch.zeros(3, dtype=torch.bool))
    y.backward(torch.zeros_like(y))
    assert y.isfinite().all()
    assert not x.grad.any()
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())


def test_bf16_keeps_its_statistics_in_single_precision():
    norm = layer((16, 4, 5, 5), torch.float32)
    x, push, real = batch((16, 4, 5, 5), 11, torch.float32)
    x, push = x.bfloat16().requires_grad_(), push.bfloat16()
    y = masked_batch_norm(norm, x, real)
    y.backward(push)
    assert y.dtype == x.grad.dtype == torch.bfloat16
    exact = copy.deepcopy(norm).double()
    exact.load_state_dict(layer((16, 4, 5, 5), torch.float64).state_dict())
    wide = x.detach()[:11].double().requires_grad_()
    exact(wide).backward(push[:11].double())
    torch.testing.assert_close(norm.running_var.double(), exact.running_var, rtol=1e-6, atol=0)
    torch.testing.assert_close(norm.weight.grad.double(), exact.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad[:11].double(), wide.grad, rtol=1e-2, atol=1e-2)


def test_without_padding_and_in_evaluation_layers_are_torchs_own():
    net = nn.Sequential(layer((6, 3, 2, 2), torch.float32))
    twin = copy.deepcopy(net)
    padding = mask_norms(net)
    x = torch.randn(6, 3, 2, 2)
    assert torch.equal(net(x), twin(x))
    with padding.masking(torch.arange(6) < 4):
        assert torch.equal(net.eval()(x), twin.eval()(x))
    assert padding.real is None
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), twin.buffers(), strict=True))


@pytest.mark.parametrize(("name", "size"), [("efficientnet-b0", 33), ("efficientnet-lite0", 33)])
def test_a_step_of_efficientnet(name, size):
    """Depthwise convolutions, squeeze-and-excitation, stochastic depth, dropout: padding changes nothing of it."""
    plain = build(name, 4, seed=0, image_size=size).double()
    masked = copy.deepcopy(plain)
    padding = mask_norms(masked)
    for model in (plain, masked):
        dropout_key(model).set(12345)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 3, size, size, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 3, 1])
    loss = nn.functional.cross_entropy(plain(x[:3]), labels)
    loss.backward()
    real = torch.arange(4) < 3
    with padding.masking(real):
        logits = masked(fill_padding(x, real))
    nn.functional.cross_entropy(logits, torch.cat([labels, torch.tensor([-1])]), ignore_index=-1).backward()
    for (tensor, p), q in zip(plain.named_parameters(), masked.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-8, atol=1e-10, msg=lambda text, t=tensor: f"{t}: {text}")
    for p, q in zip(plain.buffers(), masked.buffers(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-10, atol=1e-12)


class AcrossSamples(nn.Module):
    """Looks at the whole batch where no layer tells of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3 * 64), nn.Linear(3 * 64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x.flatten(1)) - x.flatten(1).mean(0))


class OfPatches(nn.Module):
    """Its layer takes the four quarters of an image for samples of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3 * 16), nn.Linear(4 * 3 * 16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x.reshape(len(x) * 4, -1)).view(len(x), -1))


class Counting(nn.Module):
    """Keeps count of samples in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(3 * 64), nn.Linear(3 * 64, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.last(self.norm(x.flatten(1)))


class Renormed(nn.BatchNorm2d):
    """Somebody's own kind of layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def network(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (network(nn.BatchNorm2d(4)), True),
        (network(nn.BatchNorm2d(4, track_running_stats=False)), True),
        (network(nn.BatchNorm2d(4, momentum=None)), False),
        (network(nn.SyncBatchNorm(4)), False),
        (network(Renormed(4)), False),
        (network(nn.Identity()), False),
        (AcrossSamples(), False),
        (OfPatches(), False),
        (Counting(), False),
    ],
)
def test_what_can_be_padded(model, expected):
    before = copy.deepcopy(model.state_dict())
    assert can_mask(model, FlatLayout(model), (8, 8), CPU) == expected
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("wants_losses", [False, True])
def test_rounds_with_padded_batches(wants_losses):
    """Last batches of all kinds: a lone sample, full ones, and one of 19 samples that is padded to a full one."""
    data = toy.images(samples=120, classes=4)
    model = build("toy:normed", 4, seed=5, image_size=8)
    layout = FlatLayout(model)
    place, transform = DeviceData.place(data, CPU), ImageTransform(data.mean, data.std, 0.2, 0.5, 0.1)
    starts = torch.stack([layout.pack(build("toy:normed", 4, seed=s, image_size=8).state_dict()) for s in (5, 6, 7)])
    rows = [replace(row, correction_mode=0, task=replace(row.task, batch_size=20)) for row in clients(9)]
    work = build_work(rows, 20, 4, CPU, wants_losses=wants_losses)
    masked, real = (StreamsTrainer(model, layout, place, transform, PlainKernels(), 2, masks=m) for m in (True, False))
    forms = [form for i in range(work.rows) for form in masked._batches(work, i)]
    assert {form.size for form in forms if form.masked} == {3, 6, 9, 15, 18, 20}
    assert {form.size for form in forms if not form.masked} == {20}
    for _ in range(2):
        found, expected = masked.train(starts, work), real.train(starts, work)
        torch.testing.assert_close(found.models, expected.models, atol=2e-5, rtol=1e-4)
        if wants_losses:
            torch.testing.assert_close(found.losses, expected.losses, atol=1e-5, rtol=1e-5)
    loop = LoopTrainer(model, layout, place, transform, 1)
    torch.testing.assert_close(found.models, loop.train(starts, work).models, atol=2e-5, rtol=1e-4)


def test_on_the_cpu_batches_keep_their_real_sizes_unless_asked():
    data = toy.images(samples=120, classes=4)
    model = build("toy:normed", 4, seed=5, image_size=8)
    trainer = StreamsTrainer(
        model, FlatLayout(model), DeviceData.place(data, CPU), ImageTransform(data.mean, data.std), PlainKernels(), 1
    )
    assert not trainer.masks
    assert "masked" not in trainer.describe()
