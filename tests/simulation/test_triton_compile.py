"""Every kernel, as its wrapper launches it for LeNet-5, compiles for a GPU that need not be there.

The interpreter accepts programs that the compiler refuses (a variable that changes its shape in a loop, a layout that
does not exist), so the launches are caught and handed to Triton's compiler for compute capability 9.0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedentopt.simulation.triton import EVERY, WideForm, form_for, ops

PRELUDE = """
import inspect, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.triton.triton_kernels import TritonKernels

TYPES = {torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.uint8: "*u8",
         torch.int32: "*i32", torch.int64: "*i64"}
compiled = set()

def compile_instead(self, *args, grid, warmup, **named):
    options = {k: named.pop(k) for k in ("num_warps", "num_stages", "maxnreg") if named.get(k, self) is not self}
    named.pop("maxnreg", None)
    options = {k: v for k, v in options.items() if v is not None}
    bound = inspect.signature(self.fn).bind(*args, **named).arguments
    signature, constants, hints = {}, {}, {}
    for i, parameter in enumerate(self.params):
        value = bound[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], hints[(i,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    kernel = triton.compile(
        ASTSource(self, signature, constants, hints), target=GPUTarget("cuda", 90, 32), options=options
    )
    assert kernel.metadata.shared <= 227 * 1024, (self.fn, kernel.metadata.shared)  # what a Hopper GPU has
    compiled.add(self.fn.__module__.rsplit(".", 1)[1] + "." + self.fn.__name__)

JITFunction.run = compile_instead
kernels = TritonKernels()
n, batch = 2, 64
zeros = torch.zeros
"""

FEW_CHANNELS = """
from fedentopt.simulation.triton import blend
images, labels = zeros(9, 3, 32, 32, dtype=torch.uint8), zeros(9, dtype=torch.int64)
plan, keys, step = zeros(2, n, batch, dtype=torch.int32), zeros(n, dtype=torch.int64), zeros(1, dtype=torch.int64)
transform = ImageTransform((0.5,) * 3, (0.2,) * 3, jitter=0.2, flip=0.5, grayscale=0.1)
kernels.gather_augment(images, labels, plan, keys, step, transform, n)
w, v, g = zeros(n, 62012), zeros(n, 62012), zeros(n, 62012)
x1, x2, top1 = zeros(n, batch, 3, 32, 32), zeros(n, batch, 6, 14, 14), zeros(n, batch, 6, 14, 14, dtype=torch.uint8)
x3, top2 = zeros(n, batch, 16, 5, 5), zeros(n, batch, 16, 5, 5, dtype=torch.uint8)
w1, b1 = w[:, :450].unflatten(1, (6, 3, 5, 5)), w[:, 452:458]
w2, b2 = w[:, 460:2860].unflatten(1, (16, 6, 5, 5)), w[:, 2860:2876]
kernels.conv_relu_pool_forward(x1, w1, b1)
kernels.conv_relu_pool_forward(x2, w2, b2)
kernels.conv_relu_pool_weight_grad(x1, x2, top1, w1, b1)
kernels.conv_relu_pool_weight_grad(x2, x3, top2, w2, b2)
kernels.conv_relu_pool_input_grad(x3, top2, w2, (14, 14))
hidden, fc, bias = zeros(n, batch, 84), w[:, 60000:60840].unflatten(1, (10, 84)), w[:, 60840:60850]
logits = kernels.linear_forward(hidden, fc, bias, True)
kernels.softmax_xent_grad(logits, zeros(n, batch, dtype=torch.int64), zeros(n, 10), zeros(n, 10))
kernels.add_sample_losses(logits, zeros(n, batch, dtype=torch.int64), zeros(n, 2, dtype=torch.float64))
kernels.linear_weight_grad(hidden, logits, fc, bias)
kernels.linear_input_grad(logits, fc, hidden)
one, row = zeros(n), zeros(n, dtype=torch.int32)
blend.blend_rows(w, w, v, ends=zeros(n + 1, dtype=torch.int32), places=row,
                 factors=one, shares=one, own=one, rows=row, width=62000, end=62012)
kernels.sgd_update(w, v, g, n=n, lr=one, momentum=one, weight_decay=one, mu=one, start=w, start_row=row, steps=row,
                   step=step, correction=w, correction_row=row, correction_mode=row)
print(" ".join(sorted(compiled)))
"""

MANY_CHANNELS = """
from torch import nn
from fedentopt.models.keyed_dropout import key_dropout
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers.wide_blocks import wide_blocks
from fedentopt.simulation.trainers.wide_net import WideNet
from fedentopt.simulation.triton import EVERY, WideForm, wide_forms, wide_update
from fedentopt.simulation.triton.interface import Optimiser

wide_forms.gluon_kernels = lambda: None  # those have a test of their own
same = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(128 * 16, 10),
)
less = nn.Sequential(
    nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 48, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.5), nn.Flatten(),
    nn.Linear(48 * 9, 10),
)
key_dropout(less)
for model, size, batch in ((same, 8, 64), (less, 11, 10)):
    layout = FlatLayout(model, channels_last=True)
    rows, x, labels = zeros(n, layout.width), zeros(n, batch, 3, size, size), zeros(n, batch, dtype=torch.int64)
    for bf16 in (False, True):
        net = WideNet(wide_blocks(model, size), layout, TritonKernels(bf16=bf16))
        net.step(rows, rows.clone(), x, labels, None, None, zeros(n, dtype=torch.int64))
        net.logits(rows, x[:1])
wide_update.SHARED = 1  # layers as small as these count as large ones
tiny = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.Flatten(), nn.Linear(32 * 16, 10),
)
layout, o = FlatLayout(tiny, channels_last=True), zeros(n, dtype=torch.int32)
rows, one = zeros(n, layout.width), zeros(n)
for bf16 in (False, True):
    net = WideNet(wide_blocks(tiny, 8), layout, TritonKernels(bf16=bf16, form=EVERY))
    net.reserve(rows)
    net.begin(rows, o, rows.clone(), rows.clone())
    terms = Optimiser(rows, rows, rows, one, one, one, one, rows, o, o, zeros(1, dtype=torch.int64),
                      rows if bf16 else None, o, o)
    x, labels = zeros(n, 64, 3, 8, 8), zeros(n, 64, dtype=torch.int64)
    net.step(rows, rows.clone(), x, labels, None, None, None, terms)
deep = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(),
    nn.Conv2d(64, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10),
)
layout, form = FlatLayout(deep, channels_last=True), WideForm(untransposed=True, descriptors=True, joined=True)
rows, x = zeros(n, layout.width), zeros(n, 64, 3, 16, 16)
for bf16 in (False, True):
    net = WideNet(wide_blocks(deep, 16), layout, TritonKernels(bf16=bf16, form=form))
    net.step(rows, rows.clone(), x, labels, None, None)
normed = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 48, 3, padding=1),
    nn.BatchNorm2d(48), nn.ReLU(), nn.Flatten(), nn.Linear(48 * 16, 10),
)
layout = FlatLayout(normed, channels_last=True)
rows, state, x = zeros(n, layout.width), zeros(n, layout.width - layout.parameter_width), zeros(n, 64, 3, 8, 8)
for bf16 in (False, True):
    net = WideNet(wide_blocks(normed, 8), layout, TritonKernels(bf16=bf16, form=form))
    net.step(rows, rows.clone(), x, labels, None, None, state=state)
    net.logits(rows, x[:1])
from fedentopt.simulation.triton import wide_lines
for ci, co in ((128, 64), (256, 16)):
    for dtype in (torch.float32, torch.bfloat16):
        maps = [zeros(n, 16, 64, c, dtype=dtype) for c in (ci, co)]
        wide_lines.weight_grad(*maps, zeros(n, co, 9, ci), (4, 4), 1, turned=False, precision="tf32")
print(" ".join(sorted(name for name in compiled if name.startswith("wide"))))
"""

MAPS = """
from torch import nn
from fedentopt.simulation.triton import depthwise, norm_apply, norm_excite, norm_statistics

real, factor, taps = torch.ones(4, dtype=torch.bool), zeros(4), zeros(5, 5, 96)
for dtype in (torch.float32, torch.bfloat16):
    channels = 96
    x = zeros(4, 8, 8, channels, dtype=dtype).permute(0, 3, 1, 2)
    layer, scale, pooled = nn.BatchNorm2d(channels), zeros(4, channels, dtype=dtype), zeros(4, channels)
    kept = norm_statistics.statistics(layer, x, real)
    norm = norm_apply.Norm(kept, layer.weight.detach(), layer.bias.detach(), "silu")
    bare = norm_apply.Norm(kept, None, None, "relu6")
    norm_apply.apply(x, norm, scale=scale)
    norm_apply.apply(x, bare, factor=factor, residual=x)
    y = depthwise.forward(x, taps, 2, 2)
    if dtype == torch.float32:
        continue
    both = norm_apply.sums(x, x, norm, factor)
    norm_apply.input_grad(x, x, norm, both, real=real, factor=factor)
    norm_apply.input_grad(x, x, norm, both, real=None, scale=scale, pooled=pooled)
    norm_excite.means(x, norm)
    parts = norm_excite.excite_sums(x, x, norm)[1]
    norm_excite.fold_sums(parts, scale, pooled, 64)
    depthwise.input_grad(y, taps, (8, 8), 2, 2)
    depthwise.weight_grad(x, y, 5, 2, 2)
print(" ".join(sorted(compiled)))
"""

KERNELS = {
    FEW_CHANNELS: [
        "blend.blend_kernel", "convolution.forward_kernel", "convolution_input_grad.input_grad_kernel",
        "convolution_weight_grad.fold_kernel", "convolution_weight_grad.weight_grad_kernel",
        "gather.gather_kernel", "linear.forward_kernel",
        "linear.input_grad_kernel", "linear.weight_grad_kernel", "loss.sample_losses_kernel",
        "loss.softmax_xent_kernel", "update.sgd_kernel",
    ],
    MANY_CHANNELS: [
        "wide.convolution_kernel", "wide.weight_grad_kernel", "wide_descriptors.convolution_kernel",
        "wide_first.forward_kernel", "wide_first.weight_grad_kernel", "wide_lines.weight_grad_kernel",
        "wide_maps.add_parts_kernel",
        "wide_maps.dropout_kernel", "wide_maps.pool_kernel", "wide_maps.turn_kernel", "wide_maps.unpool_kernel",
        "wide_maps.windows_kernel", "wide_norm.activate_kernel", "wide_norm.gradient_kernel",
        "wide_norm.gradient_sums_kernel", "wide_norm.moments_kernel", "wide_pooled.forward_kernel",
        "wide_start.start_kernel", "wide_update.weight_step_kernel",
    ],
    MAPS: [
        "depthwise.forward_kernel", "depthwise.input_grad_kernel", "depthwise.weight_grad_kernel",
        "norm_apply.apply_kernel", "norm_apply.input_grad_kernel", "norm_apply.sums_kernel",
        "norm_excite.excite_fold_kernel", "norm_excite.excite_kernel", "norm_excite.means_kernel",
        "norm_statistics.fold_kernel", "norm_statistics.join_kernel", "norm_statistics.statistics_kernel",
    ],
}  # fmt: skip


@pytest.mark.parametrize("launches", KERNELS, ids=["few channels", "many channels", "maps"])
def test_the_kernels_compile_for_a_gpu(launches: str) -> None:
    pytest.importorskip("triton")
    run = subprocess.run([sys.executable, "-c", PRELUDE + launches], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.split() == KERNELS[launches]


WITHOUT_GPU = """
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class NoGPU:
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

driver.set_active(NoGPU())
run = JITFunction.run
"""

AHEAD = """
import json, sys
from dataclasses import replace
import torch, triton
from torch.utils._python_dispatch import TorchDispatchMode
import straight_line
import toy  # noqa: F401  (its models by name)
from fedentopt.models import build
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers import StackedTrainer, stacked
from fedentopt.simulation.triton import EVERY, WideForm, ahead, wide_update
from fedentopt.simulation.triton.triton_kernels import TritonKernels

asked = {True: set(), False: set()}  # variants, by whether they are compiled ahead

def never_launch(self, *arguments, grid, warmup, **named):
    global early
    early = warmup
    return run(self, *arguments, grid=grid, warmup=True, **named)

def note(*, key, fn, **rest):
    asked[early].add((fn.module, fn.name, key))
    return skip

class OnlyOutlines(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if ahead._rehearsing.get():
            tensors = [t for t in (*args, made) if isinstance(t, torch.Tensor)]
            assert all(t.device.type == "meta" for t in tensors), function
            global outlined
            outlined += 1
        return made

JITFunction.run = never_launch
triton.knobs.runtime.jit_cache_hook = note
"""

ROUNDS = """
wide_update.SHARED = 1  # layers as small as these count as large ones
stacked.PREDICT_SAMPLES = 1  # models are evaluated one by one
skip, found = True, {}  # whether Triton is kept from compiling
forms = [WideForm(), EVERY]
usual, every = forms
for name, form, bf16 in (("lenet5", usual, False), ("lenet5", usual, True), ("toy:wide", usual, False),
                         ("toy:wide", every, False), ("toy:wide", every, True), ("toy:dropping", every, False),
                         ("toy:wide_normed", usual, False), ("toy:wide_normed", every, True)):
    made = straight_line.world(name, "loop")
    module = build(name, straight_line.CLASSES, seed=5, image_size=straight_line.SIZES.get(name, 8))
    made.layout = FlatLayout(module, channels_last=name != "lenet5")
    for number in (9, 1):  # of clients; nine of them finish one by one
        kernels = TritonKernels(bf16=bf16, form=form)
        trainer = StackedTrainer(module, made.layout, made.data, made.transform, kernels)
        trainer._compiles = True
        for seen in asked.values():
            seen.clear()
        outlined = 0
        with OnlyOutlines():
            trainer.train(made.starts, made.work(straight_line.clients(number), wants_losses=True))
            if name != "lenet5":
                trainer.net.refresh(trainer._buffers.w)  # as a capture does
            trainer.predict(made.starts, made.data.test_images)
        missing, needless = asked[False] - asked[True], asked[True] - asked[False]
        case = f"{name}, form {forms.index(form)}, bf16 {bf16}, {number} clients"
        found[case] = [len(asked[True]), sorted(missing), sorted(needless), outlined]
print(json.dumps(found))
"""


def rehearsed(script: str) -> Any:
    pytest.importorskip("triton")
    support = str(Path(__file__).parents[1] / "support")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {support!r})\n" + WITHOUT_GPU + AHEAD + script]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_what_is_compiled_ahead_is_what_is_launched() -> None:
    """Of rounds and evaluations on the CPU, whose tensors have memory; rehearsals touch none of them."""
    found = rehearsed(ROUNDS)
    assert len(found) == 16
    for case, (together, missing, needless, operations) in found.items():
        assert together >= 10, case
        assert missing == [], case
        assert needless == [], case
        assert operations, case  # torch's own, between the launches


READY = """
from fedentopt.simulation.triton import update
skip = False
n, built = 2, []

def launches(device):
    rows, one = (torch.zeros(n, 64, device=device) for _ in range(2))
    row, step = torch.zeros(n, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    terms = dict.fromkeys(("lr", "momentum", "weight_decay", "mu"), one[:, 0].contiguous())
    update.sgd_update(rows, rows, rows, n=n, **terms, start=rows, start_row=row, steps=row, step=step)

NoGPU.launcher_cls = lambda self, source, metadata: built.append(source.fn.__name__)
ahead.compile_ahead(lambda: launches("meta"))
early, left = len(asked[True]), JITFunction.run is never_launch and not ahead._rehearsing.get()
launches("cpu")
failed = []
try:
    ahead.compile_ahead(lambda: [launches("meta"), 1 / 0])
except ZeroDivisionError:
    failed = [JITFunction.run is never_launch, not ahead._rehearsing.get()]
del triton.AsyncCompileMode
ahead.compile_ahead(lambda: 1 / 0)
odd = torch.zeros(3, 9).t()[1:]
same = ahead.outline(odd)
kept = [same.shape == odd.shape, same.stride() == odd.stride(), (same.data_ptr() - odd.data_ptr()) % 16]
print(json.dumps([early, len(asked[False]), built, left, failed, kept]))
"""


def test_a_kernel_compiled_ahead_is_ready_with_its_launcher() -> None:
    """Its launch compiles nothing; launches are what they were afterwards, whatever happened in a rehearsal, and where
    Triton cannot compile in threads nothing is rehearsed."""
    assert rehearsed(READY) == [1, 0, ["sgd_kernel"], True, [True, True], [True, True, 0]]


GLUON = """
import json, sys
import torch
from fedentopt.simulation.triton import wide_forms, wide_update
from fedentopt.simulation.triton.interface import Optimiser, Products, WideForm

found = []

def never_launch(self, *arguments, grid, warmup, **named):
    kernel = run(self, *arguments, grid=grid, warmup=True, **named)
    module = self.fn.__module__.rsplit(".", 1)[1]
    ptx = kernel.asm["ptx"]
    found.append([module, kernel.metadata.shared, "wgmma.mma_async" in ptx, "cp.async.bulk.tensor" in ptx])

JITFunction.run = never_launch
n, ci, co, batch = 2, 128, 256, 64
form = WideForm(update=True, descriptors=True, untransposed=True, joined=True, gluon=True)

def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")

for bf16, corrected in ((False, True), (True, False)):
    layers = wide_forms.WideLayers(Products(form=form, precision="tf32", bf16=bf16))
    dtype, whole = torch.bfloat16 if bf16 else torch.float32, torch.int32
    rows = [empty(n, co * 9 * ci) for _ in range(4)]
    each = [empty(n) for _ in range(4)]
    o = Optimiser(*rows[:3], *each, rows[3], empty(n, dtype=whole), empty(n, dtype=whole), empty(1, dtype=torch.int64),
                  rows[0] if corrected else None, empty(n, dtype=whole), empty(n, dtype=whole))
    copy = empty(n, co, 9, ci, dtype=dtype)
    copies = wide_update.Copies(copy if bf16 else None, None if bf16 else copy.view(n, 9, ci, co))
    for side in (8, 4):  # the smaller ones run beside other kernels
        maps = [empty(n, side**2, *((batch, c) if bf16 else (c, batch)), dtype=dtype) for c in (ci, co)]
        layers.weight_step(*maps, 0, o, copies, (side, side), 1, 3)
    size, x, dy = (4, 8), *(empty(n, 32, batch, c, dtype=dtype) for c in (ci, co))
    layers.forward(x, copy, empty(n, co), size, size, 1, pooled=False, keep=True)
    back = copy if bf16 else copy.view(n, 9, ci, co)
    layers.input_grad(dy, back, size, 1, x)
    layers.input_grad(dy, back, size, 1, None)
    layers.forward(x[:, :30].contiguous(), copy, empty(n, co), (5, 6), (5, 6), 1, pooled=False, keep=True)
print(json.dumps(found))
"""


def test_kernels_in_gluon_compile_for_a_gpu_and_layers_that_do_not_fit_take_others() -> None:
    pytest.importorskip("triton")
    from fedentopt.simulation.triton import wide_forms

    if wide_forms.gluon_kernels() is None:
        pytest.skip("Triton's version has another Gluon")
    run = subprocess.run([sys.executable, "-c", WITHOUT_GPU + GLUON], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    taken = ["wide_step_lines", "wide_update", *["wide_taps"] * 3, "wide_descriptors"]
    assert [module for module, *_ in found] == taken * 2
    largest = {"wide_step_lines": 113 * 1024, "wide_taps": 227 * 1024}  # two programs and one on a multiprocessor
    for module, shared, multiplies, copies in found:
        if module in largest:
            assert shared <= largest[module], (module, shared)
            assert (multiplies, copies) == (True, True)


def test_layers_that_kernels_in_gluon_do_not_serve_do_not_fit() -> None:
    pytest.importorskip("triton")
    import torch

    from fedentopt.simulation.triton import wide_forms

    gluon = wide_forms.gluon_kernels()
    if gluon is None:
        pytest.skip("Triton's version has another Gluon")
    lines, taps = gluon.step_lines, gluon.taps
    assert lines is not None
    assert taps is not None
    layer = {"ci": 128, "co": 64, "batch": 64, "size": (8, 8), "side": 3, "padding": 1}
    layer |= {"dtype": torch.bfloat16, "precision": "tf32"}
    assert lines.fits(**layer)
    assert lines.fits(**layer | {"size": (2, 8)})
    for other in (
        {"ci": 64}, {"co": 32}, {"batch": 40}, {"batch": 256}, {"size": (8, 6)}, {"size": (8, 64)}, {"size": (1, 32)},
        {"side": 5}, {"padding": 0}, {"precision": "ieee"},
    ):  # fmt: skip
        assert not lines.fits(**layer | other), other

    def fits(ci: int = 64, co: int = 128, size: tuple[int, int] = (4, 8), batch: int = 64, **named: object) -> bool:
        x, w = (torch.empty(shape, device="meta") for shape in ((2, size[0] * size[1], batch, ci), (2, co, 9, ci)))
        given = {"padding": 1, "taps_first": False, "inputs_first": False, "precision": "tf32"} | named
        return bool(taps.fits(x, w, size, **given))

    assert fits()
    assert fits(co=64, size=(3, 4))
    for other in (
        {"ci": 16}, {"co": 96}, {"size": (2, 8)}, {"size": (4, 6)}, {"batch": 32}, {"batch": 128}, {"padding": 0},
        {"precision": "ieee"},
    ):  # fmt: skip
        assert not fits(**other), other


@pytest.mark.parametrize(
    ("capability", "shared", "version", "form"),
    [
        ((9, 0), 232_448, (3, 6), EVERY),
        ((9, 0), 232_448, (3, 9), EVERY._replace(gluon=False)),  # compiled with, never run
        ((9, 0), 200_000, (3, 6), WideForm()),
        ((8, 0), 232_448, (3, 6), WideForm()),
    ],
    ids=str,
)
def test_the_form_of_a_gpu(
    capability: tuple[int, int], shared: int, version: tuple[int, int], form: WideForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=shared)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    monkeypatch.setattr("fedentopt.simulation.triton._triton_version", lambda: version)
    assert form_for("cuda:0") == form
    assert form_for("cpu") == WideForm()


def test_products_and_sums_stay_one_operation_whatever_triton_does_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """And Triton does not warn the user that its default is about to change."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    name = "TRITON_DEFAULT_FP_FUSION"
    monkeypatch.setenv(name, "0")  # so that it is as before when this test ends
    monkeypatch.delenv(name)

    class Later(triton.knobs.language_knobs):
        default_fp_fusion = triton.knobs.env_bool(name, False)

    monkeypatch.setattr(triton.knobs, "language", Later())
    monkeypatch.setattr("fedentopt.simulation.triton.runs_on", lambda device: True)
    ops("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CUDABackend(GPUTarget("cuda", 90, 32)).parse_options({}).enable_fp_fusion
    monkeypatch.setenv(name, "0")
    ops("cpu")
    assert not CUDABackend(GPUTarget("cuda", 90, 32)).parse_options({}).enable_fp_fusion  # the user's word counts
