"""Models as users write them: shared and frozen parameters, layers with a forward of their own, hooks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

PIXELS = 3 * 8 * 8


def _two_layers(num_classes: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 16), nn.ReLU(), nn.Linear(16, num_classes))


def frozen(num_classes: int) -> nn.Module:
    model = _two_layers(num_classes)
    model[1].requires_grad_(False)
    return model


def nothing_to_train(num_classes: int) -> nn.Module:
    return _two_layers(num_classes).requires_grad_(False)


class _Tied(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.enter, self.a, self.b = nn.Linear(PIXELS, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.b.weight = self.a.weight
        self.leave = nn.Linear(16, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.b(self.a(self.enter(x.flatten(1)).relu()).relu()).relu())


def tied(num_classes: int) -> nn.Module:
    return _Tied(num_classes)


def shared(num_classes: int) -> nn.Module:
    twice = nn.Linear(16, 16)
    layers = [nn.Flatten(), nn.Linear(PIXELS, 16), nn.ReLU(), twice, nn.ReLU(), twice, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, num_classes))


class _Scaled(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 0.5 - 1) * 2


def sequential_with_a_forward(num_classes: int) -> nn.Module:
    return _Scaled(*_two_layers(num_classes))


class _Cosine(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 8 * F.linear(F.normalize(x, dim=1), F.normalize(self.weight, dim=1)) + self.bias


def linear_with_a_forward(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 16), nn.ReLU(), _Cosine(16, num_classes))


class _Centred(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


def convolution_with_a_forward(num_classes: int) -> nn.Module:
    return nn.Sequential(_Centred(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, num_classes))


def weight_norm(num_classes: int) -> nn.Module:
    model = _two_layers(num_classes)
    model[3] = parametrizations.weight_norm(model[3])
    return model


def spectral_norm(num_classes: int) -> nn.Module:
    """Its buffers move in every forward, after weights have been read that the backward pass reads again."""
    last = parametrizations.spectral_norm(nn.Linear(16, num_classes))
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), last)


def hooked(num_classes: int) -> nn.Module:
    model = _two_layers(num_classes)
    model[1].register_forward_hook(lambda layer, entered, left: left * 2)
    return model


def ends_in_relu(num_classes: int) -> nn.Module:
    return nn.Sequential(*_two_layers(num_classes), nn.ReLU())


def untracked(num_classes: int) -> nn.Module:
    """BatchNorm without statistics: it has no buffers, and still sees the whole batch."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(PIXELS, 16), nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, num_classes)
    )


class _Stepwise(nn.Module):
    """Calls the layers of its Sequential one by one."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Linear(4 * 9 + 4 * 36, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        active = self.body[1](self.body[0](x))
        return self.head(torch.cat([active.flatten(1), self.body[2](active).flatten(1)], 1))


def stepwise(num_classes: int) -> nn.Module:
    return _Stepwise(num_classes)


class _Masked(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(PIXELS, num_classes)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(1)) * torch.softmax(self.mask, 0)[0]


def masked(num_classes: int) -> nn.Module:
    return _Masked(num_classes)


class _HeadFirst(nn.Module):
    """Its last layer is registered before its body."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(16, num_classes), nn.Linear(PIXELS, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.flatten(1)).relu())


def head_first(num_classes: int) -> nn.Module:
    return _HeadFirst(num_classes)


class _Unused(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(PIXELS, num_classes), nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(1))


def unused(num_classes: int) -> nn.Module:
    return _Unused(num_classes)


def without_linear(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, num_classes, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class _Viewing(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 4, 3), nn.Linear(4 * 6 * 6, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.enter(x).relu().view(len(x), -1))


def viewing(num_classes: int) -> nn.Module:
    return _Viewing(num_classes)


class _Insisting(_Viewing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous(), "plain order, please"
        return super().forward(x)


def insisting(num_classes: int) -> nn.Module:
    return _Insisting(num_classes)


class _Across(nn.Module):
    """Looks at the whole batch where no layer tells of it."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(PIXELS, 16), nn.Linear(16, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entered = self.enter(x.flatten(1))
        return self.leave((entered - entered.mean(0)).relu())


def across(num_classes: int) -> nn.Module:
    return _Across(num_classes)


class _Contrast(_Viewing):
    """Makes no numbers of an image of one colour."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / x.std((1, 2, 3), keepdim=True))


def contrast(num_classes: int) -> nn.Module:
    return _Contrast(num_classes)


class _Deciding(_Viewing):
    """Which way it takes, its numbers decide."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        return logits if float(logits.detach().abs().max()) < 1e6 else logits * 0.5


def deciding(num_classes: int) -> nn.Module:
    return _Deciding(num_classes)


class _Sharper(_Viewing):
    """Its logits are others in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if self.training else 3)


def sharper(num_classes: int) -> nn.Module:
    return _Sharper(num_classes)


def cumulative(num_classes: int) -> nn.Module:
    """BatchNorm whose statistics are plain means over all batches: Python divides by their number."""
    layers = [nn.Flatten(), nn.Linear(PIXELS, 16), nn.BatchNorm1d(16, momentum=None), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(16, num_classes))


class _Smoothed(nn.Module):
    """Keeps a running mean in a buffer, which it reads and then assigns anew."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(PIXELS, 16), nn.Linear(16, num_classes)
        self.register_buffer("mean", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entered = self.enter(x.flatten(1))
        read = entered * self.mean
        if self.training:
            self.keep(0.9 * self.mean + 0.1 * entered.detach().abs().mean(0))
        return self.leave(read.relu())

    def keep(self, mean: torch.Tensor) -> None:
        self.mean = mean


class _SmoothedData(_Smoothed):
    def keep(self, mean: torch.Tensor) -> None:
        self.mean.data = mean


def smoothed(num_classes: int) -> nn.Module:
    return _Smoothed(num_classes)


def smoothed_data(num_classes: int) -> nn.Module:
    return _SmoothedData(num_classes)
