"""Fused BatchNorm, squeeze-and-excitation and depthwise convolutions against torch's layers in float64, on the CPU
through Triton's interpreter.

Not collected by itself: `test_triton.py` runs this file in a process where TRITON_INTERPRET=1 was set before
anything could import Triton.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.efficientnet import EfficientNet, MBConvConfig

import toy
from fedentopt.models import build
from fedentopt.models.keyed_dropout import dropout_key, key_dropout
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers import StreamsTrainer, fused_convolutions, fused_layers
from fedentopt.simulation.trainers.fused_blocks import FusedForm, form_for, fuse_blocks, fusible
from fedentopt.simulation.trainers.masked_norm import Padding, mask_norms, masked_batch_norm
from fedentopt.simulation.triton import PlainKernels, norm_excite, norm_statistics
from fedentopt.simulation.work import build_work
from straight_line import clients

pytest_plugins = ["interpreting"]
torch.set_num_threads(1)
CPU = torch.device("cpu")
CLOSE = 5e-6
ACTIVATIONS = {"none": nn.Identity(), "silu": nn.SiLU(), "relu": nn.ReLU(), "relu6": nn.ReLU6()}
ALL = FusedForm(norms=True, depthwise=True)


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def layer(channels: int, **options: object) -> nn.BatchNorm2d:
    """One that has seen data, with weights that are no ones, so that ReLU6 has both its kinks."""
    made = nn.BatchNorm2d(channels, **options)  # type: ignore[arg-type]
    for name, tensor in made.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape) * (6 if name == "weight" else 1) + 0.5)
    return made.train()


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def assert_close(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], near: float = CLOSE) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
            continue
        assert found[name] is not None, name
        assert found[name].shape == value.shape, name
        assert relative(found[name], value) < near, (name, relative(found[name], value))


def results(norm: nn.BatchNorm2d, y: Tensor, push: Tensor, real: int, **leaves: Tensor) -> dict[str, Tensor | None]:
    """What a layer gave and what came back, of the first `real` samples."""
    y.backward(push)
    moved = {name: value.double() for name, value in norm.named_buffers()}
    gradients = {f"d{name}": leaf.grad[:real] for name, leaf in leaves.items()}
    return {"y": y.detach()[:real], **gradients, **{n: p.grad for n, p in norm.named_parameters()}, **moved}


def drawn(shape: tuple[int, ...], real: int) -> tuple[Tensor, Tensor]:
    """Maps far from zero mean, with nonsense in the padding, and an upstream gradient that is zero there."""
    x, push = 3 * torch.randn(shape) + 7, torch.randn(shape)
    x[real:], push[real:] = 1e3, 0
    return last(x), last(push)


@pytest.mark.parametrize(
    ("shape", "real", "activation", "options"),
    [
        ((7, 5, 3, 3), 4, "silu", {}),
        ((5, 40, 5, 5), 5, "relu6", {}),
        ((2, 3, 33, 32), 1, "silu", {"momentum": 0.01, "eps": 0.1}),  # 33 partial sums, most of padding
        ((4, 64, 2, 3), 3, "relu", {"affine": False}),
        ((6, 7, 1, 1), 5, "none", {"track_running_stats": False}),
        ((9, 136, 2, 2), 9, "silu", {}),
    ],
    ids=str,
)
def test_normalising_is_torchs_on_the_real_samples(shape, real, activation, options):
    norm = layer(shape[1], **options)
    exact = copy.deepcopy(norm).double()
    (x, push), residual = drawn(shape, real), last(torch.randn(shape))
    factor = torch.rand(shape[0]) * 2
    wide, beside = (t[:real].double().requires_grad_() for t in (x, residual))
    y = ACTIVATIONS[activation](exact(wide)) * factor[:real, None, None, None] + beside
    expected = results(exact, y, push[:real].double(), real, x=wide, residual=beside)
    mask = torch.arange(shape[0]) < real if real < shape[0] else None
    x.requires_grad_()
    residual.requires_grad_()
    y = fused_layers.normalise(norm, x, mask, activation, factor=factor, residual=residual)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_close(results(norm, y, push, real, x=x, residual=residual), expected)
    assert not x.grad[real:].any()


def test_wherever_the_real_samples_are_and_whatever_padding_gives_back():
    """Against the plain layer of the streams trainer, with a gradient for padding rows too."""
    real = torch.tensor([False, True, False, True, True])
    plain = layer(6)
    norm = copy.deepcopy(plain)
    x, push = last(torch.randn(5, 6, 3, 4)), last(torch.randn(5, 6, 3, 4))
    wide = x.double().requires_grad_()
    expected = results(plain, F.silu(masked_batch_norm(plain.double(), wide, real)), push.double(), 5, x=wide)
    x.requires_grad_()
    assert_close(results(norm, fused_layers.normalise(norm, x, real, "silu"), push, 5, x=x), expected)


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}, {"affine": False}], ids=str)
@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_values_have_no_statistics(count, options):
    plain = layer(5, **options).double()
    norm = copy.deepcopy(plain).float()
    real = torch.arange(3) < count
    x, push = last(torch.randn(3, 5, 1, 1)), last(torch.randn(3, 5, 1, 1))
    push[count:] = 0
    wide = x.double().requires_grad_()
    expected = results(plain, masked_batch_norm(plain, wide, real), push.double(), count, x=wide)
    x.requires_grad_()
    found = results(norm, fused_layers.normalise(norm, x, real), push, count, x=x)
    assert_close(found, expected)
    if options.get("track_running_stats", True):
        assert int(norm.num_batches_tracked) == 0


def test_statistics_far_from_zero_lose_nothing():
    """Sums of squares around zero would have no digit left."""
    x = last(torch.randn(4, 3, 9, 9) + 3e3)
    found = norm_statistics.statistics(nn.BatchNorm2d(3, eps=1e-12), x, None).double()
    values = x.double().transpose(0, 1).flatten(1)
    torch.testing.assert_close(found[0], values.mean(1), rtol=2e-7, atol=0)
    torch.testing.assert_close(found[1], values.var(1, correction=0).rsqrt(), rtol=2e-5, atol=0)


def test_more_partial_sums_than_are_added_at_once():
    parts = torch.randn(5, 300, 11)
    assert relative(norm_statistics.fold(parts), parts.double().sum(1)) < CLOSE
    scale, pooled = torch.randn(150, 11), torch.randn(150, 11)  # two parts per sample
    s, m = (t.double().repeat_interleave(2, 0) for t in (scale, pooled / 7))
    _, p, q, p_unit, q_unit = parts.double()
    expected = torch.stack([(s * p + m * q).sum(0), (s * p_unit + m * q_unit).sum(0)])
    assert relative(norm_excite.fold_sums(parts, scale, pooled, 7), expected) < CLOSE
    x = last(torch.randn(3, 3, 53, 53) * 2 + 5)
    assert 3 * 53 * 53 / norm_statistics.Maps.of(x).span() > 128
    norm, exact = nn.BatchNorm2d(3), nn.BatchNorm2d(3).double()
    found = norm_statistics.statistics(norm, x, torch.tensor([True, False, True])).double()
    exact(x[[0, 2]].double())
    assert relative(found[0], x[[0, 2]].double().mean((0, 2, 3))) < CLOSE
    assert relative(norm.running_var, exact.running_var) < CLOSE
    assert relative(found[2], torch.full((3,), 1 / (2 * 53 * 53)).double()) < CLOSE


def test_a_diverged_model_shows():
    x = torch.randn(4, 3, 2, 2)
    x[1, 2, 0, 1] = math.nan
    y = fused_layers.normalise(nn.BatchNorm2d(3), last(x), None, "relu6")
    assert y[:, 2].isnan().all()
    assert y[:, :2].isfinite().all()


class Gate(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, 3, 1), nn.Conv2d(3, channels, 1)

    def forward(self, means: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1(means))).sigmoid()


@pytest.mark.parametrize(("shape", "real"), [((3, 40, 3, 3), 2), ((2, 5, 40, 9), 2), ((4, 72, 1, 1), 3)], ids=str)
def test_squeeze_and_excitation(shape, real, monkeypatch):
    monkeypatch.setattr(norm_statistics, "WAVE", 12)  # so that few programs per sample are still several
    norm, gate = layer(shape[1]), Gate(shape[1])
    exact, wide_gate = copy.deepcopy(norm).double(), copy.deepcopy(gate).double()
    x, push = drawn(shape, real)
    x[real:] = 2.0
    wide = x[:real].double().requires_grad_()
    a = F.silu(exact(wide))
    expected = results(exact, a * wide_gate(a.mean((2, 3), keepdim=True)), push[:real].double(), real, x=wide)
    mask = torch.arange(shape[0]) < real if real < shape[0] else None
    x.requires_grad_()
    assert_close(results(norm, fused_layers.excite(norm, x, mask, "silu", gate), push, real, x=x), expected)
    for mine, its in zip(gate.parameters(), wide_gate.parameters(), strict=True):
        assert relative(mine.grad, its.grad) < CLOSE


@pytest.mark.parametrize(
    ("shape", "side", "stride", "padding"),
    [
        ((2, 5, 7, 6), 3, 1, 1),
        ((2, 40, 8, 9), 3, 2, 1),
        ((3, 7, 6, 5), 5, 2, 2),
        ((1, 64, 4, 5), 5, 1, 2),
        ((2, 6, 7, 6), 5, 1, 0),
        ((9, 3, 2, 2), 3, 2, 1),
        ((12, 7, 1, 1), 3, 1, 1),
    ],
    ids=str,
)
def test_depthwise_convolutions(shape, side, stride, padding, monkeypatch):
    monkeypatch.setattr("fedentopt.simulation.triton.depthwise.WAVE", 24)
    channels = shape[1]
    conv = nn.Conv2d(channels, channels, side, stride, padding, groups=channels, bias=False)
    assert fused_convolutions.takes_depthwise(conv)
    exact, x = copy.deepcopy(conv).double(), last(torch.randn(shape)).requires_grad_()
    wide = x.detach().double().requires_grad_()
    y, expected = fused_convolutions.depthwise(conv, x), exact(wide)
    push = torch.randn(expected.shape)
    y.backward(push)
    expected.backward(push.double())
    assert y.is_contiguous(memory_format=torch.channels_last)
    for mine, its in ((y, expected), (x.grad, wide.grad), (conv.weight.grad, exact.weight.grad)):
        assert mine.shape == its.shape
        assert relative(mine.detach(), its.detach()) < CLOSE


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 8, 3, groups=4, bias=False), nn.Conv2d(4, 4, 3, groups=2, bias=False),
        nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 4, 7, groups=4, bias=False),
        nn.Conv2d(4, 4, 3, stride=3, groups=4, bias=False), nn.Conv2d(4, 4, (3, 5), groups=4, bias=False),
        nn.Conv2d(4, 4, 3, dilation=2, groups=4, bias=False), nn.Conv2d(4, 4, 3, stride=(1, 2), groups=4, bias=False),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", groups=4, bias=False),
        nn.Conv2d(4, 4, 3, padding="same", groups=4, bias=False), nn.Conv2d(1, 1, 3, bias=False),
    ],
)  # fmt: skip
def test_other_convolutions_stay_torchs(conv):
    assert not fused_convolutions.takes_depthwise(conv)


def test_bf16_maps():
    """All that is summed is float32; maps are rounded once."""
    norm, gate = layer(8), Gate(8)
    exact, wide_gate = copy.deepcopy(norm).double(), copy.deepcopy(gate).double()
    conv = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
    wide_conv = copy.deepcopy(conv).double()
    x, push = last(torch.randn(3, 8, 4, 4).bfloat16()), last(torch.randn(3, 8, 4, 4).bfloat16())
    wide = x.double().requires_grad_()
    a = F.silu(exact(wide_conv(wide)))
    expected = results(exact, a * wide_gate(a.mean((2, 3), keepdim=True)), push.double(), 3, x=wide)
    x.requires_grad_()
    y = fused_layers.excite(norm, fused_convolutions.depthwise(conv, x), None, "silu", gate)
    assert y.dtype == torch.bfloat16
    assert_close(results(norm, y, push, 3, x=x), expected, 3e-2)
    assert relative(conv.weight.grad, wide_conv.weight.grad) < 3e-2
    assert x.grad.dtype == torch.bfloat16
    assert conv.weight.grad.dtype == norm.weight.grad.dtype == torch.float32


def efficientnet() -> nn.Module:
    """Two blocks: one that expands, halves the map and has no residual; one with it and stochastic depth."""
    blocks = [MBConvConfig(1, 3, 1, 8, 8, 1, 1.0, 1.0), MBConvConfig(2, 3, 2, 8, 12, 2, 1.0, 1.0)]
    model = EfficientNet(blocks, dropout=0.2, stochastic_depth_prob=0.5, num_classes=4, last_channel=16)
    key_dropout(model)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.5, 2)
            nn.init.uniform_(norm.bias, -1, 1)
    return model.to(memory_format=torch.channels_last).train()


def one_step(model: nn.Module, form: FusedForm, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Logits, gradients and statistics of three real samples and a padding row."""
    module = copy.deepcopy(model).to(dtype)
    key = dropout_key(module)
    assert key is not None
    key.set(12)
    padding = mask_norms(module)
    fused = fuse_blocks(module, model, form, padding, CPU)
    generator = torch.Generator().manual_seed(1)
    x = last(torch.randn(4, 3, 9, 9, generator=generator)).to(dtype)
    push = torch.randn(4, 4, generator=generator).to(dtype)
    push[3:] = 0
    with padding.masking(torch.arange(4) < 3), fused.running():
        logits = module(x)
    logits.backward(push)
    assert logits.dtype == dtype
    gradients = {name: p.grad for name, p in module.named_parameters()}
    moved = {name: value.to(dtype) for name, value in module.named_buffers()}
    return {"logits": logits.detach()[:3], **gradients, **moved}


def test_every_form_is_the_same_network():
    model = efficientnet()
    exact = one_step(model, FusedForm(), torch.float64)
    for form in (FusedForm(norms=True), FusedForm(depthwise=True), ALL):
        found = one_step(model, form)
        whole = [torch.cat([v.double().flatten() for v in side.values()]) for side in (found, exact)]
        assert found.keys() == exact.keys()
        assert relative(*whole) < 2e-5, form
        for name, value in exact.items():
            scale = value.norm().clamp(min=1e-3 * whole[1].norm())
            assert float((found[name].double() - value).norm() / scale) < 2e-4, (form, name)


def test_what_is_fused_and_when(monkeypatch):
    """Nothing unless asked, in evaluation, outside `running`, or with maps in another order or type."""
    calls: list[str] = []
    for name in ("normalise", "excite", "depthwise"):
        module_of = fused_layers if hasattr(fused_layers, name) else fused_convolutions
        plain: Callable[..., Tensor] = getattr(module_of, name)
        monkeypatch.setattr(
            module_of, name, lambda *a, name=name, plain=plain, **k: calls.append(name) or plain(*a, **k)
        )
    model = efficientnet()
    x = torch.randn(2, 3, 9, 9)
    assert not fusible(model, FusedForm(), CPU)
    assert form_for(CPU, bf16=False) == FusedForm()
    module = copy.deepcopy(model)
    fused = fuse_blocks(module, model, ALL, Padding(), CPU)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert list(before) == list(model.state_dict())
    module(last(x))
    with fused.running():
        assert torch.equal(module.eval()(last(x)), copy.deepcopy(module)(last(x)))
        module.train().to(memory_format=torch.contiguous_format)(x)
        module.double()(last(x).double())
    assert not calls
    module.float().to(memory_format=torch.channels_last)
    with fused.running():
        module(last(x))
    counted = {name: calls.count(name) for name in calls}
    assert counted == {"normalise": 7, "excite": 3, "depthwise": 3}
    calls.clear()
    with fused.running(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        y = module(last(x))
    assert y.dtype == torch.bfloat16
    assert counted == {name: calls.count(name) for name in calls}


def test_a_layer_with_a_hook_stays_torchs():
    """Where it stands in a block, all of that block that is not a layer of its own does, too."""
    model = efficientnet()
    seen = []
    model.features[1][0].block[0][1].register_forward_hook(lambda *_: seen.append(1))
    assert "features.1.0" not in fusible(model, ALL, CPU)
    module = copy.deepcopy(model)
    fused = fuse_blocks(module, model, FusedForm(norms=True), Padding(), CPU)
    with fused.running():
        module(last(torch.randn(2, 3, 9, 9)))
    assert seen == [1]


class SqueezeExcitation(nn.Module):
    """One of a user's own, which only shares torchvision's name."""

    def __init__(self) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.avgpool(x)


class Doubled(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def untracked(model: nn.Module) -> None:
    """Statistics that are there and do not move."""
    model.features[1][0].block[0][1].track_running_stats = False


def uncounted(model: nn.Module) -> None:
    model.features[1][0].block[0][1].num_batches_tracked = None


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "excitation of one's own": lambda m: setattr(m.features[1][0].block, "1", SqueezeExcitation()),
    "excitation to larger maps": lambda m: setattr(m.features[1][0].block[1].avgpool, "output_size", 3),
    "another drop": lambda m: setattr(m.features[1][0], "stochastic_depth", nn.Identity()),
    "norm of one's own": lambda m: setattr(m.features[1][0].block[0], "1", Doubled(8)),
    "another activation": lambda m: setattr(m.features[1][0].block[0], "2", nn.Hardswish()),
    "cumulative statistics": lambda m: setattr(m.features[1][0].block[0][1], "momentum", None),
    "statistics that stand still": untracked,
    "batches not counted": uncounted,
    "doubles": lambda m: m.features[1][0].block[0][1].double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_block_has_otherwise_stays_torchs(change):
    """The block; those of its layers that are as they were are fused by themselves."""
    model = efficientnet()
    assert fusible(model, ALL, CPU)["features.1.0"] == "norms"
    CHANGES[change](model)
    found = fusible(model, ALL, CPU)
    assert "features.1.0" not in found
    assert found["features.2.0"] == "norms"
    if change in ("excitation of one's own", "another drop", "statistics that stand still"):
        module = copy.deepcopy(model)
        plain, fused = copy.deepcopy(module), fuse_blocks(module, model, ALL, Padding(), CPU)
        x = last(torch.randn(3, 3, 9, 9))
        for net in (plain, module):
            key = dropout_key(net)
            assert key is not None
            key.set(4)
        with fused.running():
            y = module(x)
        torch.testing.assert_close(y, plain(x), atol=2e-5, rtol=2e-4)
        for (name, mine), its in zip(module.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, its, atol=2e-5, rtol=2e-4, msg=name)


def test_which_layers_of_other_models_are_fused():
    """Of Lite0 BatchNorm alone, of VGG-11 BatchNorm, of B3 all."""
    found = {name: fusible(build(name, 4, seed=0, image_size=32), ALL, CPU) for name in
             ("efficientnet-b3", "efficientnet-lite0", "vgg11-bn", "vgg11")}  # fmt: skip
    kinds = {name: set(layers.values()) for name, layers in found.items()}
    assert kinds == {"efficientnet-b3": {"norms", "depthwise"}, "efficientnet-lite0": {"norms"},
                     "vgg11-bn": {"norms"}, "vgg11": set()}  # fmt: skip
    lite = {name.rpartition(".")[2] for name in found["efficientnet-lite0"]}
    assert lite == {"stem", "head", "expand", "depthwise", "project"}  # no block as such, so no residual
    assert sum(kind == "depthwise" for kind in found["efficientnet-b3"].values()) == 26


class Noting(PlainKernels):
    """Notes how cuDNN chooses algorithms in every step: whether it may time them, whether bits must repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[bool, bool]] = set()

    def softmax_xent_grad(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.add((torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))
        return super().softmax_xent_grad(*given)


def test_rounds_of_the_streams_trainer(monkeypatch):
    """Full batches, padded ones, a lone sample; more clients than slots."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert not torch.backends.cudnn.deterministic
    data, model = toy.images(samples=120, classes=4, size=9), efficientnet()
    layout = FlatLayout(model, channels_last=True)
    place, transform = DeviceData.place(data, CPU), ImageTransform(data.mean, data.std)
    starts = layout.pack(model.state_dict())[None]
    rows = [replace(row, start_row=0, lr=1e-4, task=replace(row.task, batch_size=4, epochs=1)) for row in clients(7)]
    rows = [replace(rows[i], correction_mode=0) for i in (3, 6)]  # of one sample and of five
    work = build_work(rows, 4, 4, CPU, wants_losses=True)
    made = [StreamsTrainer(model, layout, place, transform, Noting(), 1, masks=True, form=form) for form in (None, ALL)]
    assert "fused" not in made[0].describe()
    assert made[1].describe().endswith("fused: BatchNorm, depthwise convolutions")
    plain, fused = (trainer.train(starts, work) for trainer in made)
    assert made[0].kernels.seen == {(True, False), (False, False)}  # timed for full batches
    assert made[1].kernels.seen == {(False, True)}
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (True, False)
    assert any(form.masked for i in range(work.rows) for form in made[1]._batches(work, i))
    gap = (fused.models - plain.models).norm(dim=1) / (plain.models - starts).norm(dim=1)
    assert float(gap.max()) < 1e-3
    torch.testing.assert_close(fused.losses, plain.losses, rtol=1e-4, atol=1e-4)
