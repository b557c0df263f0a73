"""Grey images reach a model as one channel where it takes no other, and as three equal ones elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import toy
from fedentopt.errors import InputError
from fedentopt.models import build
from fedentopt.simulation.engine import RunOptions, Task, run_stack


def one(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 9, num_classes))


def three(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 9, num_classes))


def either(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))


def neither(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 36, num_classes))


def made(factory: Callable[[int], nn.Module], channels: int) -> nn.Module:
    return build("own:model", 3, seed=0, image_size=8, factory=factory, channels=channels)


def test_a_model_of_one_channel_sees_one() -> None:
    model = made(one, 1)
    x = torch.rand(5, 1, 8, 8)
    torch.testing.assert_close(model(x.expand(-1, 3, -1, -1)), nn.Sequential(*model)(x))
    assert list(model.state_dict()) == ["0.weight", "0.bias", "4.weight", "4.bias"]


def test_one_that_takes_three_or_any_sees_three() -> None:
    for factory in (three, either):
        model = made(factory, 1)
        assert model[0].in_channels == 3
        assert not model._forward_pre_hooks


def test_colour_images_are_never_cut() -> None:
    with pytest.raises(InputError, match=r"failed on images of shape \(2, 3, 8, 8\)"):
        made(one, 3)


def test_a_model_that_takes_neither_is_refused_with_both_reasons() -> None:
    with pytest.raises(InputError, match=r"got 3 channels.*with one channel: RuntimeError: .*got 1 channels"):
        made(neither, 1)


def test_what_channels_have_nothing_to_do_with_is_said_once() -> None:
    with pytest.raises(InputError, match=r"Float and Double$") as refused:
        made(lambda num_classes: nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes, dtype=torch.float64)), 1)
    assert "with one channel" not in str(refused.value)


class _Last(nn.Module):
    """`one` on the last of three channels, which on grey images is the grey."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.inner = one(num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:, 2:])


@pytest.mark.parametrize("trainer", ["loop", "stacked", "streams"])
def test_every_trainer_trains_it_on_the_grey(trainer: str) -> None:
    data = toy.images(channels=1)
    models = []
    for factory in (one, _Last):
        config = toy.config(model="own:model", batch_size=16, lr=0.05, jitter=0.3, flip=0.5)
        [outcome] = run_stack(
            [Task(config, toy.Memory(), model=factory)], data, RunOptions(device="cpu", trainer=trainer)
        )
        models.append({name.removeprefix("inner."): value for name, value in outcome.model.items()})
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], atol=1e-5, rtol=1e-4)
