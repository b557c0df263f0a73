"""A model's results have the same bits alone and beside any others: every kernel, through Triton's interpreter.

Not collected by itself: `test_triton.py` runs this file in a process where TRITON_INTERPRET=1 was set before
anything could import Triton. What a compiler makes of the kernels is tested on a GPU (`test_gpu.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import toy
from fedentopt.simulation.aggregation import Blend, blend_models
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.triton import convolution_weight_grad, ops, wide, wide_maps
from fedentopt.simulation.triton.plain import PlainKernels

pytest_plugins = ["interpreting"]
torch.set_num_threads(1)
kernels = ops("cpu")
PRODUCTS: dict[str, Any] = {"bf16": False, "precision": "tf32"}


def same_alone(call: Callable[..., Tensor | tuple[Tensor, ...]], *stacked: Tensor) -> None:
    """`call` on three models gives the first and the last what it gives them alone, bit for bit."""
    together = call(*stacked)
    for i in (0, 2):
        alone = call(*(x[i : i + 1].clone() for x in stacked))
        pairs = zip(together, alone, strict=True) if isinstance(together, tuple) else [(together, alone)]
        for all_of_them, one in pairs:  # type: ignore[has-type]
            assert not all_of_them[i].double().isnan().any()
            assert torch.equal(all_of_them[i], one[0])


def gradients(call: Callable[..., None], *shapes: tuple[int, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """`call`, which writes into its last arguments, as a function that returns them."""

    def made(*given: Tensor) -> tuple[Tensor, ...]:
        into = tuple(torch.full((len(given[0]), *shape), torch.nan) for shape in shapes)
        call(*given, *into)
        return into

    return made


@pytest.fixture(params=[0, 10**9], ids=["large tiles", "small tiles"])
def few_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of the number of models below which products are cut finer."""
    monkeypatch.setattr(wide, "FEW_PROGRAMS", request.param)


def test_fused_convolutions() -> None:
    x, w, b = torch.randn(3, 3, 2, 9, 12), torch.randn(3, 5, 2, 3, 3), torch.randn(3, 5)
    same_alone(kernels.conv_relu_pool_forward, x, w, b)
    y, top = kernels.conv_relu_pool_forward(x, w, b)
    dy = torch.randn_like(y)
    same_alone(gradients(kernels.conv_relu_pool_weight_grad, (5, 2, 3, 3), (5,)), x, dy, top)
    same_alone(lambda dy, top, w: kernels.conv_relu_pool_input_grad(dy, top, w, (9, 12)), dy, top, w)


@pytest.mark.parametrize(("leaf_tiles", "paired"), [(10, 4), (2, 4), (2, 100), (3, 1)])
def test_a_weight_gradient_in_uneven_leaves_and_groups(
    leaf_tiles: int, paired: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution_weight_grad, "LEAF_TILES", leaf_tiles)
    monkeypatch.setattr(convolution_weight_grad, "PAIRED", paired)
    x, w, b = torch.randn(2, 10, 2, 12, 12), torch.randn(2, 4, 2, 3, 3), torch.randn(2, 4)
    y, top = kernels.conv_relu_pool_forward(x, w, b)
    dy = torch.randn_like(y)
    dw, db = torch.full_like(w, torch.nan), torch.full_like(b, torch.nan)
    tiles = convolution_weight_grad.WeightTiles(rows=16)
    convolution_weight_grad.weight_grad(x, dy, top, dw, db, **PRODUCTS, tiles=tiles)
    exact_w, exact_b = w.double(), b.double()
    PlainKernels().conv_relu_pool_weight_grad(x.double(), dy.double(), top, exact_w, exact_b)
    torch.testing.assert_close(dw.double(), exact_w, rtol=2e-3, atol=2e-2)
    torch.testing.assert_close(db.double(), exact_b, rtol=1e-5, atol=1e-4)


def test_sums_of_a_layer_are_cut_by_its_shape_alone() -> None:
    """LeNet-5's layers with batches of 64, less than a leaf, and a layer of large maps."""
    assert convolution_weight_grad.Shares.of(98) == (10, 10, 2, 5)
    assert convolution_weight_grad.Shares.of(25) == (9, 3, 3, 1)
    assert convolution_weight_grad.Shares.of(1) == (1, 1, 1, 1)
    assert convolution_weight_grad.Shares.of(500) == (32, 16, 2, 8)


def test_wide_convolutions(few_programs: None) -> None:
    size, x, w = (2, 2), torch.randn(3, 4, 16, 16), torch.randn(3, 32, 9, 16)
    b, dy = torch.randn(3, 32), torch.randn(3, 4, 16, 32)

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return wide.convolution(x, w, b, size, 1, models=len(x), precision="tf32")

    def weights(x: Tensor, dy: Tensor, dw: Tensor) -> None:
        wide.weight_grad(x, dy, dw, size, 1, precision="tf32")

    same_alone(forward, x, w, b)
    turned = (x.transpose(2, 3).contiguous(), dy.transpose(2, 3).contiguous())
    same_alone(gradients(weights, (32, 9, 16)), *turned)
    # A sum in many parts, and fewer entries than the product has.
    first = gradients(lambda x, dy, dw: wide.weight_grad(x, dy, dw, (8, 8), 0, precision="tf32"), (16, 1, 27))
    same_alone(first, torch.randn(3, 64, 32, 16), torch.randn(3, 64, 16, 16))


def test_what_lies_between_wide_convolutions() -> None:
    x, dy = torch.randn(3, 16, 16, 16).relu(), torch.randn(3, 4, 16, 16)

    def back(x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        y, _, code = wide_maps.pool(x, (4, 4), pooled=True, keep=True)
        dx, dx_t, sums = wide_maps.unpool(dy, y, code, (4, 4), passes=True)
        bias = torch.full((len(x), 16), torch.nan)
        wide_maps.add_parts(sums, 16, bias, 16)
        assert dx is not None
        return y, dx, dx_t, bias

    same_alone(back, x, dy)


def test_linear_layers_and_loss() -> None:
    x, w, b, dy = torch.randn(3, 9, 37), torch.randn(3, 11, 37), torch.randn(3, 11), torch.randn(3, 9, 11)
    same_alone(lambda x, w, b: kernels.linear_forward(x, w, b, relu=True), x, w, b)
    same_alone(gradients(kernels.linear_weight_grad, (11, 37), (11,)), x, dy)
    same_alone(kernels.linear_input_grad, dy, w, x)
    labels, scale, shift = torch.randint(-1, 11, (3, 9)), torch.rand(3, 11), torch.randn(3, 11)
    same_alone(kernels.softmax_xent_grad, dy, labels, scale, shift)
    plain, _ = kernels.softmax_xent_grad(dy, labels)
    neutral, _ = kernels.softmax_xent_grad(dy, labels, torch.ones(3, 11), torch.zeros(3, 11))
    assert torch.equal(plain, neutral)


def test_a_row_without_a_correction_moves_as_if_nobody_had_one() -> None:
    n, width = 2, 100
    w, v, g, start = (torch.randn(n, width) for _ in range(4))
    rates = {name: torch.rand(n) for name in ("lr", "momentum", "weight_decay")} | {"mu": torch.tensor([0.0, 0.5])}
    numbers = torch.tensor([0, 1], dtype=torch.int32)
    settings: dict[str, Any] = rates | {"n": n, "start": start, "start_row": numbers, "step": torch.tensor([0])}
    moved = []
    for corrections in (0, 1):
        extra = {}
        if corrections:
            rows = torch.tensor([-1, 0], dtype=torch.int32)
            extra = {"correction": torch.randn(1, width), "correction_row": rows, "correction_mode": 2 * numbers}
        new_w, new_v = w.clone(), v.clone()
        kernels.sgd_update(new_w, new_v, g, steps=torch.full((n,), 3, dtype=torch.int32), **settings, **extra)
        moved.append(new_w)
    assert torch.equal(moved[0][0], moved[1][0])
    assert not torch.equal(moved[0][1], moved[1][1])


@pytest.mark.parametrize("model", [toy.linear, toy.normed])
def test_server_steps_of_many_runs(model: Callable[[int], torch.nn.Module]) -> None:
    layout = FlatLayout(model(3))
    starts, trained = torch.rand(4, layout.width), torch.rand(6, layout.width)
    trained[4, 3] = torch.inf
    blends = [
        Blend(2, 0.25, np.array([5, 0, 3]), np.array([0.5, 0.25, 0.1]), np.array([0.5, 0.25, 0.25])),
        Blend(0, 0.0, np.array([1]), np.array([2.0]), np.array([1.0])),
        Blend(3, 0.5, np.array([2, 4]), np.array([0.25, 0.25]), np.array([0.5, 0.5])),
    ]
    new = blend_models(starts, trained, blends, layout)
    width, end = layout.parameter_width, layout.moving_width
    for blend in blends[:2]:
        factors, shares = (torch.from_numpy(f) for f in (blend.factors, blend.shares))
        mine = trained[torch.from_numpy(blend.trained)].double()
        wanted = factors @ mine[:, :width] + blend.own * starts[blend.row, :width].double()
        torch.testing.assert_close(new[blend.row, :width].double(), wanted, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(
            new[blend.row, width:end].double(), shares @ mine[:, width:end], atol=1e-6, rtol=1e-6
        )
        # Alone, with its clients elsewhere among the trained ones.
        few = trained[torch.from_numpy(np.sort(blend.trained))]
        moved = Blend(blend.row, blend.own, blend.trained.argsort().argsort(), blend.factors, blend.shares)
        assert torch.equal(blend_models(starts, few, [moved], layout)[blend.row], new[blend.row])
    # Where they were trained, each at the start of a line of memory.
    apart = torch.full((7, -(-layout.width // 32) * 32 + 32), torch.nan)[:6, : layout.width]
    assert torch.equal(blend_models(starts, apart.copy_(trained), blends, layout), new)
    assert new[3, 3].isinf()  # spoilt by its own client, which the engine then sees
    assert new[:3].isfinite().all()
    assert torch.equal(new[1], starts[1])
    assert torch.equal(new[:, end:], starts[:, end:])


def test_a_run_alone_and_beside_others() -> None:
    """Through the engine: other methods, other lengths, another number of clients."""
    common = {"model": "toy:pooled", "rounds": 2, "clients": 3, "cohort": "2", "epochs": 1, "batch_size": 8}
    data = toy.images(samples=16)
    methods = ({"algorithm": "scaffold"}, {"algorithm": "fedlc", "seed": 1, "cohort": "1"})
    configs = [toy.config(**(common | method)) for method in methods]
    together = toy.run(configs, data, trainer="stacked")[0]
    alone = toy.run(configs[:1], data, trainer="stacked")[0]
    assert [r.loss for r in alone.records] == [r.loss for r in together.records]
    assert all(torch.equal(alone.model[name], together.model[name]) for name in alone.model)
