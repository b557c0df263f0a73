"""The plain kernels, which define the stacked step: against autograd, against torch's modules, and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedentopt.randomness import GOLDEN, MASK, mix64_torch, signed
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.triton import AFTER_STEP, DEAD, IN_GRADIENT, PlainKernels, ops

plain = PlainKernels()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("height", "width", "kernel"), [(12, 10, 5), (13, 9, 3), (7, 7, 2)])
def test_convolution_relu_pool_is_torchs(height: int, width: int, kernel: int) -> None:
    x = torch.randn(3, 4, 2, height, width, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 5, 2, kernel, kernel, dtype=torch.float64, requires_grad=True)
    b = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    wanted = torch.stack([nn.functional.max_pool2d(torch.relu(torch.conv2d(x[i], w[i], b[i])), 2) for i in range(3)])
    dy = torch.randn_like(wanted)
    dx, dw, db = torch.autograd.grad(wanted, (x, w, b), dy)
    with torch.no_grad():
        y, top = plain.conv_relu_pool_forward(x, w, b)
        assert torch.allclose(y, wanted)
        assert torch.equal(top == DEAD, y == 0)
        into, into_bias = torch.full_like(w, math.nan), torch.full_like(b, math.nan)
        plain.conv_relu_pool_weight_grad(x, dy, top, into, into_bias)
        assert torch.allclose(into, dw)
        assert torch.allclose(into_bias, db)
        assert torch.allclose(plain.conv_relu_pool_input_grad(dy, top, w, (height, width)), dx)


def test_the_arg_max_names_the_position_and_the_first_wins() -> None:
    x = torch.zeros(1, 1, 1, 4, 4)
    x[0, 0, 0] = torch.tensor([[0.0, 9, 1, 1], [0, 0, 1, 1], [3, 0, -1, -1], [4, 4, -1, -1]])
    y, top = plain.conv_relu_pool_forward(x, torch.ones(1, 1, 1, 1, 1), torch.zeros(1, 1))
    assert y[0, 0, 0].tolist() == [[9, 1], [4, 0]]
    assert top[0, 0, 0].tolist() == [[1, 0], [2, DEAD]]


def test_linear_is_torchs() -> None:
    x, w, b = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (2, 4, 5), (2, 4)))
    wanted = torch.stack([torch.relu(nn.functional.linear(torch.relu(x[i]), w[i], b[i])) for i in range(2)])
    dy = torch.randn_like(wanted)
    dx, dw, db = torch.autograd.grad(wanted, (x, w, b), dy)
    with torch.no_grad():
        entered = x.relu()
        y = plain.linear_forward(entered, w, b, relu=True)
        assert torch.allclose(y, wanted)
        into, into_bias = torch.empty_like(w), torch.empty_like(b)
        plain.linear_weight_grad(entered, dy * (y > 0), into, into_bias)
        assert torch.allclose(into, dw)
        assert torch.allclose(into_bias, db)
        assert torch.allclose(plain.linear_input_grad(dy * (y > 0), w, relu_of=entered), dx)


def test_gather_takes_the_steps_samples_under_their_own_keys() -> None:
    images = torch.randint(0, 256, (9, 3, 4, 4), dtype=torch.uint8)
    labels = torch.arange(9)
    plan = torch.tensor([[[0, 1]], [[7, -1]]], dtype=torch.int32)
    transform = ImageTransform((0.5, 0.5, 0.5), (0.2, 0.2, 0.2), jitter=0.5, flip=0.5, grayscale=0.5)
    client = 1234567
    x, y = plain.gather_augment(images, labels, plan, torch.tensor([client]), torch.tensor([1]), transform, 1)
    key = mix64_torch(torch.tensor([signed((client + 2 * GOLDEN) & MASK)]))  # batch 1, slot 0: sample number 2
    assert torch.equal(x[0, 0], transform.augment(images[7:8], key)[0])
    assert y.tolist() == [[7, -1]]
    assert x[0, 1].eq(0).all()


def test_softmax_and_loss_by_hand() -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)], [5.0, 5.0]], [[1.0, 2.0], [3.0, 4.0]]])
    labels = torch.tensor([[1, -1], [-1, -1]])
    grad, loss = plain.softmax_xent_grad(logits, labels)
    assert loss.tolist() == pytest.approx([math.log(4 / 3), 0.0])
    assert grad[0].flatten().tolist() == pytest.approx([0.25, -0.25, 0.0, 0.0])
    assert grad[1].eq(0).all()
    grad, loss = plain.softmax_xent_grad(
        logits, labels, scale=torch.tensor([[1.0, 0.0]] * 2), shift=torch.tensor([[0.0, math.log(7.0)]] * 2)
    )
    assert loss[0].item() == pytest.approx(math.log(8 / 7))  # the second logit's factor is zero, its shift log 7
    assert grad[0, 0].tolist() == pytest.approx([0.125, 0.0])


def test_sums_of_sample_losses_by_hand() -> None:
    third = math.log(3.0)
    logits = torch.tensor([[[0.0, third], [third, 0.0], [9.0, -9.0]], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    sums = torch.tensor([[10.0, 20.0], [30.0, 40.0], [50.0, 60.0]], dtype=torch.float64)
    plain.add_sample_losses(logits, torch.tensor([[1, 1, -1], [-1, -1, -1]]), sums)
    near, far = math.log(4 / 3), math.log(4)
    assert sums[0].tolist() == pytest.approx([10 + near + far, 20 + near**2 + far**2])
    assert sums[1:].tolist() == [[30.0, 40.0], [50.0, 60.0]]  # a batch of padding, and a row beyond the models


def test_the_optimiser_by_hand() -> None:
    w, v, g = torch.full((3, 1), 2.0), torch.full((3, 1), 1.0), torch.full((3, 1), 0.5)
    settings = {
        "n": 3, "lr": torch.tensor([0.1, 0.1, 0.1]), "momentum": torch.tensor([0.9, 0.5, 0.9]),
        "weight_decay": torch.tensor([0.25, 0.0, 0.0]), "mu": torch.tensor([0.0, 1.0, 0.0]),
        "start": torch.tensor([[9.0], [1.5]]), "start_row": torch.tensor([0, 1, 0], dtype=torch.int32),
        "steps": torch.tensor([8, 8, 3], dtype=torch.int32), "step": torch.tensor([3]),
        "correction": torch.tensor([[10.0], [20.0]]), "correction_row": torch.tensor([1, 0, 0], dtype=torch.int32),
        "correction_mode": torch.tensor([IN_GRADIENT, AFTER_STEP, IN_GRADIENT], dtype=torch.int32),
    }  # fmt: skip
    plain.sgd_update(w, v, g, **settings)
    # Row 0: d = 0.5 + 0.25 * 2 + 20 = 21; row 1: d = 0.5 + (2 - 1.5) = 1, then 10 more after the step; row 2 is done.
    assert v.flatten().tolist() == pytest.approx([0.9 + 21.0, 0.5 + 1.0, 1.0])
    assert w.flatten().tolist() == pytest.approx([2 - 2.19, 2 - 0.1 * 11.5, 2.0])


def test_without_a_gpu_plain_torch_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert ops("cpu").describe() == "plain torch"
    assert ops("cpu", bf16=True).describe() == "plain torch, bf16 products"
