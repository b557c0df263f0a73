"""On a machine with a GPU: every piece of a stacked step against float64, at sizes that fill no tile.

Operands are numbers that the precision holds (all of fp32, TF32's 11 bits, bf16's 8), so that products are exact in all
three and only sums round: what is wrong by an index or a mask is wrong by far more. Elsewhere these tests are skipped;
the same kernels run there in Triton's interpreter (`simulation/test_triton.py`), and so do these tests where
TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedentopt.simulation.aggregation import Blend, blend_models
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers.wide_blocks import wide_blocks
from fedentopt.simulation.trainers.wide_net import WideNet
from fedentopt.simulation.triton import AFTER_STEP, IN_GRADIENT, Kernels, PlainKernels, WideForm, ops
from wide_references import (
    assert_near,
    check_shared_taps,
    check_weights_moved,
    put,
    stacked_maps,
    weight_gradients,
    whole_numbers,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PRECISIONS = ["fp32-exact", "fp32"] if INTERPRETED else ["fp32-exact", "fp32", "bf16"]  # the interpreter has no bf16
plain = PlainKernels()


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


def kernels(precision: str, form: WideForm | None = None) -> Kernels:
    made = ops(DEVICE, exact=precision == "fp32-exact", bf16=precision == "bf16", form=form)
    assert "Triton kernels" in made.describe()
    return made


def drawn(precision: str, *shape: int, seed: int = 0) -> Tensor:
    """Numbers that the precision holds, on the CPU in float64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))
    if precision == "bf16":
        x = x.bfloat16().float()
    elif precision == "fp32":
        x = (x.view(torch.int32) & -(1 << 13)).view(torch.float32)
    return x.double()


def in_rows(x: Tensor) -> Tensor:
    """The same numbers inside wider rows, as a layer's weights lie."""
    n, size = len(x), math.prod(x.shape[1:])
    wide = torch.full((n, size + 5), math.nan, device=DEVICE)
    wide[:, :size] = put(x).reshape(n, size)
    return wide[:, :size].unflatten(1, x.shape[1:])


LAYERS = [  # models, batch, channels in, out, kernel, height, width
    (3, 7, 3, 6, 5, 32, 32), (2, 63, 6, 16, 5, 14, 14), (5, 1, 1, 5, 3, 9, 13), (1, 65, 2, 9, 2, 7, 6),
]  # fmt: skip


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layer", LAYERS[:1] + LAYERS[2:3] if INTERPRETED else LAYERS, ids=str)
def test_convolutions_of_few_channels(layer: tuple[int, ...], precision: str) -> None:
    n, batch, ci, co, k, h, w = layer
    own = kernels(precision)
    assert own.fuses_conv(ci, co, k)
    x, weight = drawn(precision, n, batch, ci, h, w), drawn(precision, n, co, ci, k, k)
    bias = drawn(precision, n, co)
    y, top = own.conv_relu_pool_forward(put(x), in_rows(weight), in_rows(bias))
    wanted, wanted_top = plain.conv_relu_pool_forward(x, weight, bias)
    assert_near(y, wanted, what="forward")
    codes = top.cpu()
    assert (codes != wanted_top).double().mean() < 1e-3  # where two pixels are the same but for rounding
    dy = drawn(precision, *y.shape, seed=1)
    dw, db = in_rows(torch.zeros(n, co, ci, k, k)), in_rows(torch.zeros(n, co))
    own.conv_relu_pool_weight_grad(put(x), put(dy), top, dw, db)
    wanted_dw, wanted_db = torch.zeros(n, co, ci, k, k).double(), torch.zeros(n, co).double()
    plain.conv_relu_pool_weight_grad(x, dy, codes, wanted_dw, wanted_db)
    assert_near(dw, wanted_dw, what="gradient of the weights")
    assert_near(db, wanted_db, what="gradient of the bias")
    dx = own.conv_relu_pool_input_grad(put(dy), top, in_rows(weight), (h, w))
    assert_near(dx, plain.conv_relu_pool_input_grad(dy, codes, weight, (h, w)), what="gradient of the input")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sizes", [(2, 63, 84, 10), (3, 5, 37, 19), (1, 70, 20, 130)], ids=str)
def test_linear_layers(sizes: tuple[int, ...], precision: str) -> None:
    n, batch, inputs, outputs = sizes
    own = kernels(precision)
    x, w, b = drawn(precision, n, batch, inputs), drawn(precision, n, outputs, inputs), drawn(precision, n, outputs)
    for relu in (False, True):
        assert_near(own.linear_forward(put(x), in_rows(w), in_rows(b), relu), plain.linear_forward(x, w, b, relu))
    shared = put(x[:1]).expand(n, -1, -1)
    assert_near(own.linear_forward(shared, in_rows(w), in_rows(b)), plain.linear_forward(x[:1].expand(n, -1, -1), w, b))
    dy = drawn(precision, n, batch, outputs, seed=1)
    dw, db = in_rows(torch.zeros(n, outputs, inputs)), in_rows(torch.zeros(n, outputs))
    own.linear_weight_grad(put(x), put(dy), dw, db)
    assert_near(dw, torch.einsum("nbo,nbi->noi", dy, x))
    assert_near(db, dy.sum(1))
    assert_near(own.linear_input_grad(put(dy), in_rows(w)), dy @ w)
    assert_near(own.linear_input_grad(put(dy), in_rows(w), put(x)), (dy @ w) * (x > 0))


@pytest.mark.parametrize(("batch", "classes"), [(10, 7), (1, 2), (63, 100), (65, 3)])
def test_losses(batch: int, classes: int) -> None:
    own = kernels("fp32")
    logits, scale, shift = (drawn("fp32-exact", 3, *s) for s in ((batch, classes), (classes,), (classes,)))
    labels = torch.randint(0, classes, (3, batch), generator=torch.Generator().manual_seed(0))
    labels[0, batch // 2 + 1 :] = -1
    labels[1] = -1
    z = logits.clone().requires_grad_()
    seen = z * scale[:, None] + shift[:, None]
    each = [F.cross_entropy(seen[i], labels[i], ignore_index=-1) for i in (0, 2)]
    gradient, loss = own.softmax_xent_grad(put(logits), labels.to(DEVICE), put(scale), put(shift))
    assert_near(loss[[0, 2]], torch.stack(each), what="loss")
    assert_near(gradient, torch.autograd.grad(sum(each), z)[0], 2e-4, what="gradient")
    assert not loss[1]
    assert not gradient[1].any()
    sums = torch.zeros(4, 2, dtype=torch.float64, device=DEVICE)
    wanted = torch.zeros(4, 2, dtype=torch.float64)
    for _ in range(2):
        own.add_sample_losses(put(logits), labels.to(DEVICE), sums)
        plain.add_sample_losses(logits, labels, wanted)
    assert_near(sums, wanted, what="sums")


@pytest.mark.parametrize("width", [1500, 1403, 7])
def test_the_optimiser(width: int) -> None:
    own, n = kernels("fp32"), 5
    w, v, g, start = (drawn("fp32-exact", n, width, seed=seed) for seed in range(4))
    correction = drawn("fp32-exact", 3, width, seed=4)
    rates = {name: drawn("fp32-exact", n, seed=i).abs() for i, name in enumerate(("lr", "momentum", "weight_decay"))}
    rates["mu"] = torch.tensor([0.0, 0.5, 0.0, 1.0, 0.3]).double()
    numbers = {
        "start_row": [1, 0, 3, 2, 2], "steps": [3, 2, 5, 9, 9], "correction_row": [2, 0, 1, -1, 0],
        "correction_mode": [IN_GRADIENT, IN_GRADIENT, AFTER_STEP, AFTER_STEP, 0],
    }  # fmt: skip
    rows = {name: torch.tensor(values, dtype=torch.int32) for name, values in numbers.items()}
    new = [in_rows(w), in_rows(v)]
    settings = {name: value.to(DEVICE) for name, value in rows.items()} | {k: put(r) for k, r in rates.items()}
    step = torch.tensor([2], device=DEVICE)
    own.sgd_update(*new, in_rows(g), n=4, start=put(start), step=step, correction=put(correction), **settings)
    wanted = [w.clone(), v.clone()]
    plain.sgd_update(*wanted, g, n=4, start=start, step=torch.tensor([2]), correction=correction, **rates, **rows)
    for mine, its in zip(new, wanted, strict=True):
        assert_near(mine, its)
        assert torch.equal(mine[[1, 4]].cpu(), its[[1, 4]].float())  # finished, and beyond n


@pytest.mark.parametrize("colours", [1, 3])
@pytest.mark.parametrize("size", [(7, 9), (40, 33)])
def test_batches_of_images(size: tuple[int, int], colours: int) -> None:
    images = torch.randint(0, 256, (20, colours, *size), dtype=torch.uint8)
    plan = torch.randint(0, 20, (4, 3, 7), dtype=torch.int32)
    plan[2, 0, 4:] = -1
    plan[2, 1] = -1
    keys, labels = torch.randint(-(2**63), 2**63 - 1, (3,)), torch.randint(0, 10, (20,))
    transform = ImageTransform((0.5, 0.4, 0.3), (0.2, 0.3, 0.25), jitter=0.3, flip=0.5, grayscale=0.4)
    given = (images, labels, plan, keys, torch.tensor([2]))
    x, y = kernels("fp32").gather_augment(*(part.to(DEVICE) for part in given), transform, 2)
    wanted_x, wanted_y = plain.gather_augment(*given, transform, 2)
    assert torch.equal(y.cpu(), wanted_y)
    assert x.dtype == torch.float32
    assert float((x.cpu() - wanted_x).abs().max()) < 1e-5


def test_server_steps() -> None:
    from toy import normed

    layout = FlatLayout(normed(3))
    starts, trained = drawn("fp32-exact", 4, layout.width), drawn("fp32-exact", 7, layout.width)
    blends = [
        Blend(2, 0.25, np.array([5, 0, 3]), np.array([0.5, 0.25, 0.1]), np.array([0.5, 0.25, 0.25])),
        Blend(0, 0.0, np.array([1]), np.array([2.0]), np.array([1.0])),
    ]
    new = blend_models(put(starts), put(trained), blends, layout).cpu().double()
    width, end = layout.parameter_width, layout.moving_width
    for blend in blends:
        mine = trained[torch.from_numpy(blend.trained)]
        parameters = torch.from_numpy(blend.factors) @ mine[:, :width] + blend.own * starts[blend.row, :width]
        assert_near(new[blend.row, :width], parameters)
        assert_near(new[blend.row, width:end], torch.from_numpy(blend.shares) @ mine[:, width:end])
    assert torch.equal(new[[1, 3]], starts[[1, 3]].float().double())


# Whole steps of wide convolutions. Maps in between are rounded, and where rounding carries a pixel over ReLU's kink its
# whole gradient comes or goes: a share f of the pixels moves a gradient by about sqrt(f); a wrong index by one.
STEP_NEAR = {"fp32-exact": 1e-2, "fp32": 8e-2, "bf16": 2.5e-1}
# Behind BatchNorm more pixels lie near a kink, those of pools included: on the CPU, with operands cut or rounded to
# TF32, gradients of the three models drawn here move by 0.04 to 0.13, as smaller roundings decide (80 draws of these),
# and of other models by up to 0.26; eight faults in the kernels of `wide_norm` do so by 0.26 to 14. With maps and their
# gradients in bf16 they move by 0.22 to 0.27 (92 draws): those kernels are looked at closely in fp32 alone.
NORMED_NEAR = STEP_NEAR | {"fp32": 2e-1, "bf16": 4e-1}
# Logits and running statistics have no kinks: on the CPU they move by 3e-6, 2e-3 and 3e-3.
FORWARD_NEAR = {"fp32-exact": 1e-4, "fp32": 1e-2, "bf16": 1e-2}
FORMS = {
    "usual": WideForm(), "first": WideForm(first=True), "descriptors": WideForm(descriptors=True),
    "joined": WideForm(first=True, descriptors=True, joined=True), "this device's": None,
}  # fmt: skip
STEPS = {
    "vgg": 3,
    "vgg, whole batch": 63,
    "vgg, more than a batch": 70,
    "uneven": 20,
    "shrinking, 5x5": 17,
    "normed": 10,
    "normed, more than a batch": 70,
}  # fmt: skip  (batches)
CASES = [  # every variant is compiled anew, which takes longer than to run it
    *((name, form, "fp32-exact") for form in ("usual", "this device's") for name in STEPS),
    *(("uneven", form, "fp32-exact") for form in ("first", "descriptors", "joined")),
    *((name, form, precision) for form in ("usual", "this device's") for precision in ("fp32", "bf16")
      for name in ("vgg, more than a batch", "uneven", "normed, more than a batch")),
]  # fmt: skip
if INTERPRETED:
    CASES = [("vgg, whole batch", form, "fp32-exact") for form in ("usual", "joined")]


@pytest.mark.parametrize(("name", "form", "precision"), CASES)
def test_steps_of_wide_convolutions(name: str, form: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from wide_interpreted import MODELS, dropout_key, reference

    batch = STEPS[name]
    monkeypatch.setattr("fedentopt.simulation.triton.wide_pooled.NARROWEST", 2)
    make, size, _ = MODELS[name]
    models = [make() for _ in range(3)]
    layout, blocks = FlatLayout(models[0], channels_last=True), wide_blocks(models[0], size)
    assert blocks is not None
    rows = torch.stack([layout.pack(model.state_dict()) for model in models])
    chosen = FORMS[form]
    if chosen is not None and chosen.descriptors:
        chosen = chosen._replace(untransposed=True)
    own = kernels(precision, chosen)
    net = WideNet(blocks, layout, own)
    width = layout.parameter_width
    lines, gradient = (torch.full((3, -(-width // 32) * 32), math.nan, device=DEVICE)[:, :width] for _ in range(2))
    lines.copy_(rows[:, :width])
    state = put(rows[:, width:]).clone() if blocks.normed else None
    near = (NORMED_NEAR if blocks.normed else STEP_NEAR)[precision]
    x, labels = drawn(precision, 3, batch, 3, size, size), torch.randint(0, 5, (3, batch))
    x[1, -2:], labels[1, -2:] = 0.0, -1
    keys = torch.randint(-(2**62), 2**62, (3,))
    net.step(lines, gradient, put(x), labels.to(DEVICE), None, None, keys.to(DEVICE), state=state)
    logits = net.logits(put(rows), put(x[:1]))
    for i in range(3):
        model = reference(name, layout, rows[i])
        shared = dropout_key(model)
        if shared is not None:
            shared.set(keys[i])
        real = labels[i] >= 0
        F.cross_entropy(model(x[i, real]), labels[i, real]).backward()
        for slot in layout.parameters:
            wanted = model.get_parameter(slot.name).grad
            assert wanted is not None
            if wanted.norm() < 1e-12:  # of a bias that BatchNorm takes away again
                assert not slot.view(gradient)[i].any()
            else:
                assert_near(slot.view(gradient)[i], wanted, near, (name, form, slot.name))
        for slot in layout.buffers:
            assert state is not None
            found = replace(slot, offset=slot.offset - width).view(state)[i]
            assert_near(found, model.get_buffer(slot.name).double(), FORWARD_NEAR[precision], (name, form, slot.name))
        evaluated = reference(name, layout, rows[i]).eval()(x[0])
        assert_near(logits[i], evaluated, FORWARD_NEAR[precision], (name, form, "logits"))


needs_hopper = pytest.mark.skipif(
    not INTERPRETED and (not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0)),
    reason="needs tensor descriptors",
)
LINES = [
    (16, 48, (5, 3), 32), (32, 16, (2, 2), 16), (64, 128, (16, 16), 64), (96, 32, (4, 7), 128), (128, 64, (4, 4), 64),
    (256, 32, (3, 4), 64), (512, 512, (2, 2), 64),
]  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize("layer", LINES[:2] if INTERPRETED else LINES, ids=str)
def test_weight_gradients_line_by_line(layer: tuple[int, int, tuple[int, int], int], precision: str) -> None:
    from fedentopt.simulation.triton import wide_lines

    ci, co, size, batch = layer
    x, dy = (whole_numbers(2, size[0] * size[1], batch, c) for c in (ci, co))
    wanted = weight_gradients(x, dy, size)
    for turned in (True, False) if precision == "bf16" else (True,):
        into = in_rows(torch.zeros(2, co, 9, ci))
        maps = (stacked_maps(m, precision, turned) for m in (x, dy))
        wide_lines.weight_grad(*maps, into, size, 1, turned=turned, precision="tf32")
        assert torch.equal(into.cpu().double(), wanted)


SHARED_TAPS = [(128, 256, (8, 8)), (64, 64, (3, 4)), (64, 128, (5, 12)), (128, 64, (4, 16)), (256, 512, (4, 4))]


@needs_hopper
@pytest.mark.skipif(INTERPRETED, reason="here Gluon runs as in test_gluon_kernels.py")
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize("layer", SHARED_TAPS, ids=str)
def test_convolutions_that_share_what_taps_read(
    layer: tuple[int, int, tuple[int, int]], precision: str, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedentopt.simulation.triton import wide_forms

    gluon = wide_forms.gluon_kernels()
    if gluon is None or gluon.taps is None:
        pytest.skip("Triton's version has another Gluon")
    check_shared_taps(gluon.taps, layer, precision, back, monkeypatch)


UPDATED = [(512, 512, (2, 2), 64), (256, 512, (4, 4), 64), (128, 256, (8, 8), 64)]  # one of each kind of tile
UPDATED_IN_LINES = [
    (128, 256, (8, 8), 64), (256, 64, (6, 8), 64), (128, 64, (9, 16), 64), (128, 128, (5, 8), 32),
    (128, 64, (3, 4), 64),
]  # fmt: skip


@needs_hopper
@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize("layer", [(32, 16, (2, 2), 64)] if INTERPRETED else UPDATED, ids=str)
def test_weights_moved_by_their_gradients(layer: tuple[int, int, tuple[int, int], int], precision: str) -> None:
    from fedentopt.simulation.triton import wide_update

    def step(*given: Any, turned: bool) -> None:
        wide_update.weight_step(*given, 1, side=3, turned=turned, described=True, precision="tf32")

    check_weights_moved(step, layer, precision)


@needs_hopper
@pytest.mark.skipif(INTERPRETED, reason="here Gluon runs as in test_gluon_kernels.py")
@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.parametrize("layer", UPDATED_IN_LINES, ids=str)
def test_weights_moved_by_their_gradients_line_by_line(
    layer: tuple[int, int, tuple[int, int], int], precision: str
) -> None:
    from fedentopt.simulation.triton import wide_forms

    gluon = wide_forms.gluon_kernels()
    if gluon is None:
        pytest.skip("Triton's version has another Gluon")
    lines = gluon.step_lines
    ci, co, size, batch = layer
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert lines.fits(ci, co, batch, size, 3, 1, dtype, "tf32")
    check_weights_moved(lines.weight_step, layer, precision)


@needs_hopper
@pytest.mark.skipif(INTERPRETED, reason="here Gluon runs as in test_gluon_kernels.py")
@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_line_by_line_gives_the_same_bits(precision: str) -> None:
    """With numbers whose sums are rounded; so a model's bits do not depend on which of the two kernels trains it."""
    from fedentopt.simulation.triton import wide_forms, wide_update
    from fedentopt.simulation.triton.interface import Optimiser

    gluon = wide_forms.gluon_kernels()
    if gluon is None:
        pytest.skip("Triton's version has another Gluon")
    lines = gluon.step_lines
    n, ci, co, size, turned = 3, 256, 256, (8, 8), precision != "bf16"
    maps = [stacked_maps(torch.randn(n, 64, 64, c).double(), precision, turned) for c in (ci, co)]
    w, v = (torch.randn(n, co * 9 * ci, device=DEVICE) for _ in range(2))
    each, rows = torch.full((n,), 0.1, device=DEVICE), torch.zeros(n, dtype=torch.int32, device=DEVICE)
    found = []
    for by_lines in (False, True):
        own = Optimiser(
            w.clone(), v.clone(), w, each, each, each, each, w.flip(0).contiguous(), rows, rows + 9,
            torch.ones(1, dtype=torch.int64, device=DEVICE), None, rows - 1, rows,
        )  # fmt: skip
        rounded = torch.zeros(n, co, 9, ci, device=DEVICE, dtype=torch.float32 if turned else torch.bfloat16)
        copies = wide_update.Copies(None if turned else rounded, rounded.view(n, 9, ci, co) if turned else None)
        if by_lines:
            lines.weight_step(*maps, 0, own, copies, size, turned=turned)
        else:
            settings = {"side": 3, "turned": turned, "described": True, "precision": "tf32"}
            wide_update.weight_step(*maps, 0, own, copies, size, 1, **settings)
        found.append((own.w, own.v, rounded))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
