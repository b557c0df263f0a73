"""Which models the wide kernels take; what they compute is tested in Triton's interpreter (`wide_interpreted.py`)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import toy
from fedentopt.errors import InputError
from fedentopt.models import build
from fedentopt.models.keyed_dropout import key_dropout
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.lowering import lower
from fedentopt.simulation.trainers import StackedTrainer, WideNet, choice
from fedentopt.simulation.trainers import wide_blocks as wide_blocks_module
from fedentopt.simulation.trainers.choice import choose_trainer, wants_channels_last
from fedentopt.simulation.trainers.wide_blocks import Dropped, WideBlocks, WideNorm, wide_blocks
from fedentopt.simulation.triton import PlainKernels, ops

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
    assert [linear.weight for linear in blocks.linears] == ["classifier.weight"]
    assert not blocks.draws


@pytest.mark.parametrize(
    "changes",
    [
        {"out_channels": 40}, {"kernel_size": 9, "padding": 4}, {"kernel_size": (3, 1)}, {"padding": (1, 0)},
        {"padding": 3}, {"stride": 2}, {"groups": 2}, {"bias": False}, {"dilation": 2, "padding": 2},
        {"padding_mode": "reflect"}, {"kernel_size": 4, "padding": "same"}, {"kernel_size": 7, "padding": 0},
    ],
)  # fmt: skip
def test_other_convolutions_do_not_fit(changes: dict[str, object]) -> None:
    size = 6 if changes.get("kernel_size") == 7 else 16  # a kernel larger than the map
    assert wide_blocks(wide(), size) is not None
    assert wide_blocks(wide(**changes), size) is None


@pytest.mark.parametrize(
    ("changes", "padding"),
    [
        ({"out_channels": 48}, 1), ({"kernel_size": 5, "padding": 2}, 2), ({"padding": 0}, 0), ({"padding": "same"}, 1),
        ({"padding": "valid"}, 0), ({"kernel_size": 1, "padding": 0}, 0), ({"kernel_size": 2, "padding": 1}, 1),
    ],
)  # fmt: skip
def test_these_convolutions_do(changes: dict[str, object], padding: int) -> None:
    blocks = wide_blocks(wide(**changes), 16)
    assert blocks is not None
    assert blocks.convolutions[1].padding == padding


def test_other_layers_do_not_fit() -> None:
    fits = list(wide())
    assert wide_blocks(nn.Sequential(*fits, nn.ReLU()), 16) is None
    assert wide_blocks(nn.Sequential(*fits, nn.Linear(5, 5)), 16) is None  # no ReLU between
    assert wide_blocks(nn.Sequential(nn.Conv2d(3, 64, 7, padding=3), *fits[1:]), 16) is None  # 147 entries a window
    assert wide_blocks(nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), *fits[1:]), 16) is None  # no image
    assert wide_blocks(nn.Sequential(*fits[:4], nn.MaxPool2d(3), *fits[5:]), 16) is None
    assert wide_blocks(nn.Sequential(*fits[:4], nn.AdaptiveAvgPool2d(1), *fits[5:]), 16) is None
    assert wide_blocks(nn.Sequential(*fits[:3], *fits[4:]), 16) is None  # no ReLU
    assert wide_blocks(nn.Sequential(*fits[:4], *fits[5:]), 16) is not None  # no pool at all
    assert wide_blocks(nn.Sequential(nn.Flatten(), nn.Linear(5, 5)), 16) is None
    assert wide_blocks(nn.Linear(5, 5), 16) is None
    assert wide_blocks(build("lenet5", 10, seed=0), 32) is None
    assert wide_blocks(build("efficientnet-b0", 10, seed=0), 32) is None


def test_batch_norm_between_a_convolution_and_its_relu() -> None:
    fits = list(wide())
    found = wide_blocks(nn.Sequential(*fits[:1], nn.BatchNorm2d(64, eps=0.01, momentum=0.2), *fits[1:]), 16)
    assert found is not None
    assert found.normed
    assert found.convolutions[0].norm == WideNorm("1", 0.01, 0.2)
    assert found.convolutions[1].norm is None
    for other in (
        nn.BatchNorm2d(64, affine=False), nn.BatchNorm2d(64, track_running_stats=False),
        nn.BatchNorm2d(64, momentum=None), nn.InstanceNorm2d(64), nn.GroupNorm(4, 64),
    ):  # fmt: skip
        assert wide_blocks(nn.Sequential(*fits[:1], other, *fits[1:]), 16) is None
    assert wide_blocks(nn.Sequential(*fits[:2], nn.BatchNorm2d(64), *fits[2:]), 16) is None  # behind the ReLU


def test_a_layer_that_never_trains_does_not_fit() -> None:
    """Frozen statistics: in the model's own passes the layer stays in evaluation mode, whatever the trainer asks."""
    fits = list(wide())
    model = nn.Sequential(fits[0], nn.BatchNorm2d(64), *fits[1:])
    assert wide_blocks(model, 16) is not None
    frozen = model[1].eval()
    frozen.train = lambda mode=True: frozen  # type: ignore[method-assign]
    model.train()(torch.randn(2, 3, 16, 16))
    assert not frozen.num_batches_tracked
    assert wide_blocks(model, 16) is None


def test_dropout_between_linear_layers_and_behind_the_maps() -> None:
    fits = list(wide())
    ends = [nn.Linear(4096, 20), nn.ReLU(), nn.Dropout(0.5), nn.Linear(20, 5)]
    for middle in ([nn.Dropout(0.25), nn.Flatten()], [nn.Flatten(), nn.Dropout(0.25)]):
        model = nn.Sequential(*fits[:5], *middle, *ends)
        key_dropout(model)
        blocks = wide_blocks(model, 16)
        assert blocks is not None
        assert blocks.dropped == Dropped(0.25, 0)
        assert [linear.dropped for linear in blocks.linears] == [Dropped(0.5, 1), None]
    for other in (
        [*fits[:5], nn.Dropout2d(0.5), *fits[5:]], [*fits[:2], nn.Dropout(0.5), *fits[2:]], [*fits, nn.Dropout(0.5)],
        [*fits[:5], nn.Dropout(0.5), nn.Flatten(), nn.Dropout(0.5), fits[6]],
    ):  # fmt: skip
        model = nn.Sequential(*other)
        key_dropout(model)
        assert wide_blocks(model, 16) is None


def test_weights_lie_as_the_kernels_that_run_want_them() -> None:
    # Both kinds of kernels take this model; those for few channels come first, and read plain weights.
    both = nn.Sequential(nn.Conv2d(3, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 36, 5))
    assert wide_blocks(both, 16) is not None
    assert lower(both, ops("cpu").fuses_conv) is not None
    assert not wants_channels_last("stacked", both, 16, CPU, "fp32")
    assert wants_channels_last("streams", both, 16, CPU, "fp32")


def test_without_triton_a_wide_model_trains_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert ops("cpu").wide is None
    model = build("vgg11", 10, seed=0)
    assert choose_trainer("auto", model, CPU, 32) == "loop"
    assert choose_trainer("stacked", model, CPU, 32) == "stacked"
    assert wants_channels_last("stacked", model, 32, CPU, "fp32")
    assert not wants_channels_last("stacked", build("lenet5", 10, seed=0), 32, CPU, "fp32")


def plain_cnn(image_size: int, channels: int = 64) -> nn.Sequential:
    """Two convolutions that keep the size, and a linear layer."""
    convolutions = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * image_size**2, 4))


def test_images_with_the_largest_map_by_hand() -> None:
    vgg = wide_blocks(build("vgg11", 10, seed=0), 32)
    assert vgg is not None
    assert vgg.most_images(32) == 2**31 // (64 * 32**2)  # 128 * 16 ** 2, and less from there on
    grown = wide_blocks(wide(padding=1, kernel_size=2), 8)
    assert grown is not None
    # A kernel of 2 with padding 1 makes 9 pixels of 8; 44 images more would be padded to a whole tile of 64.
    assert grown.most_images(8) == 2**31 // (64 * 9**2) - 44


@pytest.mark.parametrize("reach", [1, 15, 16, 40, 64, 100, 128, 668, 1002])
def test_padding_has_its_place_in_the_largest_map(reach: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 668 images that fit, 704 would be kept."""
    pytest.importorskip("triton")
    from fedentopt.simulation.triton.wide_maps import padded

    monkeypatch.setattr(wide_blocks_module, "REACH", reach * 64 * 16**2)
    blocks = wide_blocks(wide(), 16)
    assert blocks is not None
    most = blocks.most_images(16)
    assert most == 0 or padded(most) <= reach
    assert padded(most + 1) > reach


def test_maps_beyond_what_the_wide_kernels_address_train_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain network of one's own on images of 224 pixels, evaluated in batches of 1000: 3.2e9 numbers per map."""
    cuda = torch.device("cuda")
    for where in ("runs_on", "wide_runs_on"):
        monkeypatch.setattr(choice, where, lambda device: True)
    monkeypatch.setattr(choice, "_kernels", lambda device, precision: ops("cpu"))
    assert 64 * 181**2 * 1024 < 2**31 < 64 * 182**2 * 1024  # padded to whole tiles
    assert choose_trainer("auto", plain_cnn(181), cuda, 181, batch=1000) == "stacked"
    assert choose_trainer("auto", plain_cnn(182), cuda, 182, batch=1000) == "streams"
    assert choose_trainer("auto", plain_cnn(182), cuda, 182, batch=512) == "stacked"
    assert choose_trainer("auto", plain_cnn(224, 32), cuda, 224, batch=1000) == "stacked"
    for name in ("streams", "stacked"):
        assert choose_trainer(name, plain_cnn(181), cuda, 181, batch=1000) == name
    with pytest.raises(InputError, match=r"^trainer: batches of 1000 images of 224 x 224 .* at most 640 images; acc"):
        choose_trainer("stacked", plain_cnn(224), cuda, 224, batch=1000)
    # Built in, only batches larger than any client's data get there.
    vgg = build("vgg11", 10, seed=0)
    assert choose_trainer("auto", vgg, cuda, 32, batch=2**15) == "stacked"
    assert choose_trainer("auto", vgg, cuda, 32, batch=2**15 + 1) == "streams"


def test_maps_of_few_channels_are_addressed_in_32_bits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pooled maps of 64 channels for 1000 images pass 2**31 numbers from 369 pixels on."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(choice, "runs_on", lambda device: True)
    monkeypatch.setattr(choice, "wide_runs_on", lambda device: False)
    monkeypatch.setattr(choice, "_kernels", lambda device, precision: ops("cpu"))
    assert 64 * 183**2 * 1000 < 2**31 < 64 * 184**2 * 1000
    for size, chosen in ((368, "stacked"), (370, "streams")):
        model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(1, 4))
        assert choose_trainer("auto", model, cuda, size, batch=1000) == chosen
    with pytest.raises(InputError, match=r"^trainer: batches of 1000 images of 370 x 370 .* at most 991 images; acc"):
        choose_trainer("stacked", model, cuda, 370, batch=1000)


def test_no_pass_over_a_clients_samples_has_larger_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Soft labels of 9000 images of 32 pixels: 256 outputs of a first layer make 2.4e9 numbers of them."""
    data = toy.images(samples=60)
    model = toy.wide(3)
    place, layout = DeviceData.place(data, CPU), FlatLayout(model)
    trainer = StackedTrainer(model, layout, place, ImageTransform(data.mean, data.std), PlainKernels())
    seen: list[int] = []

    class Watched(WideNet):
        def __init__(self, blocks: WideBlocks) -> None:
            self.blocks = blocks

        def logits(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape[1])
            return torch.zeros(len(rows), x.shape[1], 3)

    blocks = wide_blocks(model, 8)
    assert blocks is not None
    trainer.net = Watched(blocks)
    monkeypatch.setattr(wide_blocks_module, "REACH", 20 * 64 * 8 * 8)
    trainer.soft_labels(layout.pack(model.state_dict())[None], [np.arange(36)])
    assert seen == [16, 16, 4]  # padded, 20 images would be 32
