"""Which models the wide kernels take; what they compute is tested in Triton's interpreter (`wide_interpreted.py`)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedentopt.models import build
from fedentopt.simulation.kernels import ops
from fedentopt.simulation.trainer import choose_trainer, wants_channels_last
from fedentopt.simulation.wide_model import wide_blocks

CPU = torch.device("cpu")


def wide(**changes: object) -> nn.Sequential:
    """A small model that fits, but for the changes to its second convolution."""
    settings = {"in_channels": 64, "out_channels": 64, "kernel_size": 3, "padding": 1} | changes
    second = nn.Conv2d(**settings)  # type: ignore[arg-type]
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(second.out_channels * 64, 5))


def test_vgg11_is_eight_convolutions_and_a_linear_layer() -> None:
    blocks = wide_blocks(build("vgg11", 10, seed=0), 32)
    assert blocks is not None
    assert [c.outputs for c in blocks.convolutions] == [64, 128, 256, 256, 512, 512, 512, 512]
    assert [c.pooled for c in blocks.convolutions] == [True, True, False, True, False, True, False, True]
    assert blocks.weight == "classifier.weight"


@pytest.mark.parametrize(
    "changes",
    [
        {"out_channels": 96}, {"kernel_size": 5, "padding": 2}, {"padding": 0}, {"stride": 2}, {"groups": 2},
        {"bias": False}, {"dilation": 2, "padding": 2}, {"padding_mode": "reflect"},
    ],
)  # fmt: skip
def test_other_convolutions_do_not_fit(changes: dict[str, object]) -> None:
    assert wide_blocks(wide(), 16) is not None
    assert wide_blocks(wide(**changes), 16) is None


def test_other_layers_do_not_fit() -> None:
    fits = list(wide())
    assert wide_blocks(nn.Sequential(*fits[:1], nn.BatchNorm2d(64), *fits[1:]), 16) is None
    assert wide_blocks(nn.Sequential(*fits, nn.ReLU(), nn.Linear(5, 5)), 16) is None
    assert wide_blocks(nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), *fits[1:]), 16) is None  # 72 entries a window
    assert wide_blocks(nn.Sequential(*fits[:4], nn.MaxPool2d(3), *fits[5:]), 16) is None
    assert wide_blocks(nn.Sequential(*fits[:4], *fits[5:]), 16) is not None  # no pool at all
    assert wide_blocks(nn.Sequential(nn.Flatten(), nn.Linear(5, 5)), 16) is None
    assert wide_blocks(nn.Linear(5, 5), 16) is None
    assert wide_blocks(build("lenet5", 10, seed=0), 32) is None
    assert wide_blocks(build("efficientnet-b0", 10, seed=0), 32) is None


def test_a_map_of_odd_size_is_not_pooled() -> None:
    assert wide_blocks(wide(), 16) is not None
    assert wide_blocks(wide(), 17) is None


def test_without_triton_a_wide_model_trains_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert ops("cpu").wide is None
    model = build("vgg11", 10, seed=0)
    assert choose_trainer("auto", model, CPU, 32) == "loop"
    assert choose_trainer("stacked", model, CPU, 32) == "stacked"
    assert wants_channels_last("stacked", model, 32)
    assert not wants_channels_last("stacked", build("lenet5", 10, seed=0), 32)
