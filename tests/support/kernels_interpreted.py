"""The Triton kernels against their plain twins in float64, on the CPU through Triton's interpreter.

Not collected by itself: `test_triton.py` runs this file in a process where TRITON_INTERPRET=1 was set before
anything could import Triton.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedentopt.errors import InputError
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.triton import (
    AFTER_STEP,
    DEAD,
    IN_GRADIENT,
    convolution,
    convolution_input_grad,
    convolution_weight_grad,
    linear,
    ops,
)
from fedentopt.simulation.triton.plain import PlainKernels

pytest_plugins = ["interpreting"]
torch.set_num_threads(1)
CLOSE = 2e-6
plain = PlainKernels()
triton = ops("cpu")


def rows(n: int, *shape: int, value: float | None = None) -> Tensor:
    """(n, *shape) inside wider rows, as a layer's weights are."""
    size = math.prod(shape)
    wide = torch.randn(n, size + 5) if value is None else torch.full((n, size + 5), value)
    return wide[:, :size].unflatten(1, shape)


def assert_close(out: Tensor, reference: Tensor) -> None:
    assert out.shape == reference.shape
    error = float((out.double() - reference).norm() / reference.norm())
    assert error < CLOSE  # NaN is not


def test_a_nan_is_never_close() -> None:
    one = torch.ones(3, dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1.0, math.nan, 1.0]), one)


LAYERS = [  # n, batch, in, out, kernel, height, width
    (2, 2, 3, 6, 5, 32, 32),  # LeNet-5's first: two pooled pixels a row
    (2, 3, 6, 16, 5, 14, 14),  # and its second
    (1, 2, 2, 3, 3, 9, 12),  # a floored row
    (2, 2, 1, 5, 1, 5, 7),  # a kernel of one, both sides odd
    (1, 2, 3, 4, 4, 11, 10),  # an even kernel
    (2, 1, 3, 4, 7, 13, 16),  # four neighbours
    (1, 2, 2, 9, 2, 6, 6),
    (1, 1, 1, 2, 3, 22, 8),  # more than eight pooled rows
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_convolution_relu_pool(layer: tuple[int, ...]) -> None:
    n, batch, ci, co, k, h, w = layer
    assert triton.fuses_conv(ci, co, k)
    x, weight, bias = torch.randn(n, batch, ci, h, w), rows(n, co, ci, k, k), rows(n, co)
    y, top = triton.conv_relu_pool_forward(x, weight, bias)
    wanted, wanted_top = plain.conv_relu_pool_forward(x.double(), weight.double(), bias.double())
    assert_close(y, wanted)
    assert torch.equal(top, wanted_top)
    assert (top == DEAD).any()
    assert (top < DEAD).any()
    dy = torch.randn_like(y)
    gradient = torch.full((n, co * ci * k * k + co + 3), math.nan)
    dw, db = gradient[:, : co * ci * k * k].unflatten(1, (co, ci, k, k)), gradient[:, -co - 3 : -3]
    triton.conv_relu_pool_weight_grad(x, dy, top, dw, db)
    wanted_dw, wanted_db = torch.zeros(n, co, ci, k, k).double(), torch.zeros(n, co).double()
    plain.conv_relu_pool_weight_grad(x.double(), dy.double(), top, wanted_dw, wanted_db)
    assert_close(dw, wanted_dw)
    assert_close(db, wanted_db)
    assert gradient[:, -3:].isnan().all()  # what is not the layer's stays as it was
    dx = triton.conv_relu_pool_input_grad(dy, top, weight, (h, w))
    assert_close(dx, plain.conv_relu_pool_input_grad(dy.double(), top, weight.double(), (h, w)))


@pytest.mark.parametrize(("layer", "tiles"), [(LAYERS[1], 3), (LAYERS[2], 2)], ids=str)
def test_convolution_tiles_do_not_matter(layer: tuple[int, ...], tiles: int) -> None:
    """Several tiles a program, more partial sums than are added at once, block rows in halves."""
    n, batch, ci, co, k, h, w = layer
    settings: dict[str, Any] = {"bf16": False, "precision": "tf32"}
    x, weight, bias = torch.randn(n, batch, ci, h, w), rows(n, co, ci, k, k), rows(n, co)
    y, top = convolution.forward(x, weight, bias, **settings, tiles=convolution.ForwardTiles(16, tiles, 32))
    wanted, wanted_top = plain.conv_relu_pool_forward(x.double(), weight.double(), bias.double())
    assert_close(y, wanted)
    assert torch.equal(top, wanted_top)
    dy = torch.randn_like(y)
    wanted_dw, wanted_db = torch.zeros(n, co, ci, k, k).double(), torch.zeros(n, co).double()
    plain.conv_relu_pool_weight_grad(x.double(), dy.double(), top, wanted_dw, wanted_db)
    for rows_of_a_tile in (16, 32):
        dw, db = rows(n, co, ci, k, k, value=math.nan), rows(n, co, value=math.nan)
        shape = convolution_weight_grad.WeightTiles(rows_of_a_tile)
        convolution_weight_grad.weight_grad(x, dy, top, dw, db, **settings, tiles=shape)
        assert_close(dw, wanted_dw)
        assert_close(db, wanted_db)
    wanted_dx = plain.conv_relu_pool_input_grad(dy.double(), top, weight.double(), (h, w))
    for halves in (1, 2):
        shape = convolution_input_grad.InputTiles(16, halves=halves)
        assert_close(convolution_input_grad.input_grad(dy, top, weight, (h, w), **settings, tiles=shape), wanted_dx)


def test_convolution_gradients_are_those_of_autograd() -> None:
    x, weight, bias = torch.randn(1, 3, 2, 8, 8), rows(1, 4, 2, 3, 3), rows(1, 4)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    y = torch.relu(torch.conv2d(leaves[0][0], leaves[1][0], leaves[2][0]))
    y = torch.nn.functional.max_pool2d(y, 2)
    dy = torch.randn(1, *y.shape)
    dx, dw, db = torch.autograd.grad(y, leaves, dy[0].double())
    _, top = triton.conv_relu_pool_forward(x, weight, bias)
    into, into_bias = rows(1, 4, 2, 3, 3), rows(1, 4)
    triton.conv_relu_pool_weight_grad(x, dy, top, into, into_bias)
    assert_close(into, dw)
    assert_close(into_bias, db)
    assert_close(triton.conv_relu_pool_input_grad(dy, top, weight, (8, 8)), dx)


def test_ties_go_to_the_first_position() -> None:
    x = torch.ones(1, 1, 3, 32, 32)
    weight, bias = rows(1, 6, 3, 5, 5, value=0.25), rows(1, 6, value=0.5)
    y, top = triton.conv_relu_pool_forward(x, weight, bias)
    assert (y == 19.25).all()
    assert (top == 0).all()


def test_a_nan_reaches_every_output_it_touches_and_no_other_image() -> None:
    x, weight, bias = torch.randn(2, 2, 3, 32, 32), rows(2, 6, 3, 5, 5), rows(2, 6)
    x[1, 0, 2, 13, 17] = math.nan
    y, _ = triton.conv_relu_pool_forward(x, weight, bias)
    wanted, _ = plain.conv_relu_pool_forward(x.double(), weight.double(), bias.double())
    assert y[wanted.isnan()].isnan().all()
    y[1, 0] = 0  # inside the image it may spread further: a shifted filter's zeros meet it too
    assert not y.isnan().any()


def test_one_batch_for_all_models_needs_no_copies() -> None:
    x = torch.randn(1, 2, 3, 32, 32).expand(3, -1, -1, -1, -1)
    weight, bias = rows(3, 6, 3, 5, 5), rows(3, 6)
    y, _ = triton.conv_relu_pool_forward(x, weight, bias)
    assert_close(y, plain.conv_relu_pool_forward(x.double(), weight.double(), bias.double())[0])
    flat = torch.randn(1, 4, 21).expand(3, -1, -1)
    w, b = rows(3, 5, 21), rows(3, 5)
    assert_close(triton.linear_forward(flat, w, b), plain.linear_forward(flat.double(), w.double(), b.double()))


def test_what_is_too_large_to_fuse_is_said() -> None:
    assert triton.fuses_conv(6, 16, 5)
    assert not triton.fuses_conv(64, 128, 3)
    assert not triton.fuses_conv(1, 4, 9)


@pytest.mark.parametrize("sizes", [(2, 64, 84, 10), (3, 5, 37, 19), (1, 70, 20, 130)], ids=str)
def test_linear(sizes: tuple[int, ...]) -> None:
    n, batch, inputs, outputs = sizes
    x, w, b = torch.randn(n, batch, inputs), rows(n, outputs, inputs), rows(n, outputs)
    for relu in (False, True):
        assert_close(
            triton.linear_forward(x, w, b, relu), plain.linear_forward(x.double(), w.double(), b.double(), relu)
        )
    dy, dw, db = torch.randn(n, batch, outputs), rows(n, outputs, inputs, value=math.nan), rows(n, outputs)
    triton.linear_weight_grad(x, dy, dw, db)
    assert_close(dw, torch.einsum("nbo,nbi->noi", dy.double(), x.double()))
    assert_close(db, dy.double().sum(1))
    assert_close(triton.linear_input_grad(dy, w), dy.double() @ w.double())
    assert_close(triton.linear_input_grad(dy, w, x), (dy.double() @ w.double()) * (x > 0))


@pytest.mark.parametrize("fours", [False, True])
def test_linear_gradients_in_several_steps(fours: bool) -> None:
    n, batch, inputs, outputs = 2, 37, 41, 50
    tiles = linear.LinearTiles(16, 32, 16, fours=fours)
    settings: dict[str, Any] = {"bf16": False, "precision": "tf32", "tiles": tiles}
    x, dy, w = torch.randn(n, batch, inputs), torch.randn(n, batch, outputs), rows(n, outputs, inputs)
    dw, db = rows(n, outputs, inputs, value=math.nan), rows(n, outputs, value=math.nan)
    linear.weight_grad(x, dy, dw, db, **settings)
    assert_close(dw, torch.einsum("nbo,nbi->noi", dy.double(), x.double()))
    assert_close(db, dy.double().sum(1))
    assert_close(linear.input_grad(dy, w, x, **settings), (dy.double() @ w.double()) * (x > 0))


def test_relu_passes_a_nan_on() -> None:
    x = torch.tensor([[[math.nan, 1.0]]])
    assert triton.linear_forward(x, torch.ones(1, 16, 2), torch.zeros(1, 16), relu=True).isnan().all()


@pytest.mark.parametrize("colours", [1, 3])
@pytest.mark.parametrize(
    "strengths",
    [{}, {"jitter": 0.3, "flip": 0.5, "grayscale": 0.4}, {"jitter": 1.4}, {"flip": 1.0}, {"grayscale": 1.0}],
    ids=str,
)
def test_gather_and_augment(colours: int, strengths: dict[str, float]) -> None:
    images = torch.randint(0, 256, (20, colours, 7, 9), dtype=torch.uint8)
    labels = torch.randint(0, 10, (20,))
    plan = torch.randint(0, 20, (4, 3, 6), dtype=torch.int32)
    plan[2, 0, 4:] = -1
    plan[2, 1] = -1
    keys = torch.randint(-(2**63), 2**63 - 1, (3,))
    transform = ImageTransform((0.5, 0.4, 0.3), (0.2, 0.3, 0.0 if strengths else 0.25), **strengths)
    arguments = (images, labels, plan, keys, torch.tensor([2]), transform, 2)
    x, y = triton.gather_augment(*arguments)
    wanted_x, wanted_y = plain.gather_augment(*arguments)
    assert torch.equal(y, wanted_y)
    assert y[0, 4:].eq(-1).all()
    assert x[1].eq(0).all()
    assert float((x - wanted_x).abs().max()) < 5e-6


def test_a_step_beyond_the_plan_is_noticed() -> None:
    images, plan = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, 1, 2, dtype=torch.int32)
    transform = ImageTransform((0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
    arguments = images, torch.tensor([1, 0]), plan, torch.tensor([7])
    triton.gather_augment(*arguments, torch.tensor([2]), transform, 1)
    with pytest.raises(Exception, match="outside every tensor of the launch"):
        triton.gather_augment(*arguments, torch.tensor([3]), transform, 1)


def test_gather_walks_images_larger_than_a_block() -> None:
    images = torch.randint(0, 256, (3, 3, 40, 40), dtype=torch.uint8)
    transform = ImageTransform((0.5, 0.4, 0.3), (0.2, 0.3, 0.25), jitter=0.3, flip=0.5, grayscale=0.1)
    plan = torch.tensor([[[2, 0, 1]]], dtype=torch.int32)
    arguments = (images, torch.tensor([3, 1, 2]), plan, torch.tensor([-5]), torch.tensor([0]), transform, 1)
    x, y = triton.gather_augment(*arguments)
    assert y.tolist() == [[2, 3, 1]]
    assert float((x - plain.gather_augment(*arguments)[0]).abs().max()) < 5e-6


@pytest.mark.parametrize(("scaled", "shifted"), [(False, False), (True, True), (True, False), (False, True)])
def test_softmax_and_loss(scaled: bool, shifted: bool) -> None:
    logits = torch.randn(3, 10, 7) * 30
    labels = torch.randint(0, 7, (3, 10))
    labels[0, 3:] = -1
    labels[1] = -1
    scale = torch.rand(3, 7) if scaled else None
    shift = torch.randn(3, 7) if shifted else None
    grad, loss = triton.softmax_xent_grad(logits, labels, scale, shift)
    z = logits.double().requires_grad_()
    seen = z if scale is None else z * scale.double()[:, None]
    seen = seen if shift is None else seen + shift.double()[:, None]
    wanted = [torch.nn.functional.cross_entropy(seen[i][labels[i] >= 0], labels[i][labels[i] >= 0]) for i in (0, 2)]
    assert_close(loss[[0, 2]], torch.stack(wanted).detach())
    assert_close(grad, torch.autograd.grad(sum(wanted), z)[0])
    assert loss[1] == 0
    assert grad[1].eq(0).all()


def test_a_diverged_model_has_a_nan_loss_and_spoils_no_other() -> None:
    logits = torch.randn(2, 4, 3)
    logits[0, 1, 2] = math.nan
    grad, loss = triton.softmax_xent_grad(logits, torch.zeros(2, 4, dtype=torch.int64))
    assert loss[0].isnan()
    assert grad[0, 1].isnan().all()
    assert not loss[1].isnan()
    assert not grad[1].isnan().any()


@pytest.mark.parametrize(("batch", "classes"), [(10, 7), (1, 2), (70, 300)])
def test_sums_of_sample_losses(batch: int, classes: int) -> None:
    logits = torch.randn(3, batch, classes) * 3
    labels = torch.randint(0, classes, (3, batch))
    labels[0, batch // 2 + 1 :] = -1
    labels[1] = -1
    sums = torch.rand(5, 2, dtype=torch.float64)
    before = sums.clone()
    for _ in range(2):  # they add up
        triton.add_sample_losses(logits, labels, sums)
    for i in (0, 2):
        real = labels[i] >= 0
        losses = torch.nn.functional.cross_entropy(logits[i][real].double(), labels[i][real], reduction="none")
        wanted = 2 * torch.stack([losses.sum(), losses.square().sum()])
        # A loss close to zero is the difference of two numbers close to one.
        torch.testing.assert_close(sums[i] - before[i], wanted, atol=1e-6, rtol=CLOSE)
    assert torch.equal(sums[[1, 3, 4]], before[[1, 3, 4]])


def test_sums_of_sample_losses_of_logits_that_do_not_lie_in_order() -> None:
    logits, labels = torch.randn(4, 3, 5).permute(1, 2, 0), torch.randint(0, 4, (3, 5))
    sums, wanted = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    triton.add_sample_losses(logits, labels, sums)
    plain.add_sample_losses(logits.double(), labels, wanted)
    assert_close(sums, wanted)


def test_a_diverged_model_spoils_its_own_sums_alone() -> None:
    logits, sums = torch.randn(2, 4, 3), torch.zeros(2, 2, dtype=torch.float64)
    logits[0, 1, 2] = math.nan
    triton.add_sample_losses(logits, torch.zeros(2, 4, dtype=torch.int64), sums)
    assert sums[0].isnan().all()
    assert sums[1].isfinite().all()


@pytest.mark.parametrize("width", [1500, 1403])
def test_optimiser(width: int) -> None:
    n = 5
    w, v, g, start = (torch.randn(n, width) for _ in range(4))
    correction = torch.randn(3, width)
    settings = {
        "n": 4, "lr": torch.rand(n), "momentum": torch.rand(n), "weight_decay": torch.rand(n),
        "mu": torch.tensor([0.0, 0.5, 0.0, 1.0, 0.3]), "start": start, "step": torch.tensor([2]),
        "start_row": torch.tensor([1, 0, 3, 2, 2], dtype=torch.int32),
        "steps": torch.tensor([3, 2, 5, 9, 9], dtype=torch.int32),
    }  # fmt: skip
    corrected = {
        "correction": correction, "correction_row": torch.tensor([2, 0, 1, -1, 0], dtype=torch.int32),
        "correction_mode": torch.tensor([IN_GRADIENT, IN_GRADIENT, AFTER_STEP, AFTER_STEP, 0], dtype=torch.int32),
    }  # fmt: skip
    for extra in ({}, corrected):
        new_w, new_v = w.clone(), v.clone()
        triton.sgd_update(new_w, new_v, g, **settings, **extra)
        for row in (1, 4):  # finished, and beyond n
            assert torch.equal(new_w[row], w[row])
            assert torch.equal(new_v[row], v[row])
        for row in (0, 2, 3):
            at = {k: t[row].double() for k, t in settings.items() if k in ("lr", "momentum", "weight_decay", "mu")}
            old = w[row].double()
            d = g[row] + at["weight_decay"] * old + at["mu"] * (old - start[settings["start_row"][row]])
            late = torch.zeros(width).double()
            if extra and row == 0:
                d = d + correction[2]
            if extra and row == 2:
                late = correction[1].double()
            moved = at["momentum"] * v[row].double() + d
            assert_close(new_v[row], moved)
            assert_close(new_w[row], old - at["lr"] * (moved + late))


def test_bf16_products(bf16_numbers: None) -> None:
    def short(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(torch.float32)

    rounded = ops("cpu", bf16=True)
    x, weight, bias = short(torch.randn(1, 2, 3, 12, 12)), short(rows(1, 4, 3, 3, 3)), rows(1, 4)
    y, top = rounded.conv_relu_pool_forward(x, weight, bias)
    assert_close(y, plain.conv_relu_pool_forward(x.double(), weight.double(), bias.double())[0])
    dy, dw, db = short(torch.randn(y.shape)), rows(1, 4, 3, 3, 3), rows(1, 4)
    rounded.conv_relu_pool_weight_grad(x, dy, top, dw, db)
    wanted = torch.zeros(1, 4, 3, 3, 3).double()
    plain.conv_relu_pool_weight_grad(x.double(), dy.double(), top, wanted, torch.zeros(1, 4).double())
    assert_close(dw, wanted)
    dx = rounded.conv_relu_pool_input_grad(dy, top, weight, (12, 12))
    assert_close(dx, plain.conv_relu_pool_input_grad(dy.double(), top, weight.double(), (12, 12)))
    flat, w, b = short(torch.randn(1, 3, 20)), short(rows(1, 17, 20)), rows(1, 17)
    assert_close(rounded.linear_forward(flat, w, b), plain.linear_forward(flat.double(), w.double(), b.double()))


def test_which_kernels_run_is_said() -> None:
    assert triton.describe() == "Triton kernels, TF32 products"
    assert ops("cpu", exact=True).describe() == "Triton kernels, fp32 products"
    assert ops("cpu", bf16=True).describe() == "Triton kernels, bf16 products"
    with pytest.raises(InputError, match="exact and bf16"):
        ops("cpu", exact=True, bf16=True)
