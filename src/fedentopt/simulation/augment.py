"""From stored uint8 images to what a model sees: augmentation and standardisation, on the device.

Per sample and in this order: brightness, contrast, saturation (factors uniform in [max(0, 1-j), 1+j], as
torchvision's ColorJitter without its random order), grey with probability `grayscale`, horizontal flip with
probability `flip`, then (x - mean) / std per channel; a constant channel, whose std is 0, is divided by 1. A sample's
draws hang on its key alone. This is the plain version; `triton.gather` and `numba.gather` do the same in one pass.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from fedentopt.errors import InputError
from fedentopt.randomness import uniform_torch

GREY = (0.2989, 0.587, 0.114)  # ITU-R 601-2 luma, as torchvision's rgb_to_grayscale
FLIP, BRIGHTNESS, CONTRAST, SATURATION, GREYED = range(5)  # draw numbers of a sample's key
DRAWS = 5
# A deviation below this is what rounding leaves of 0: one pixel that differs by one step of 1/255 among 10**15
# gives more.
CONSTANT = 1e-10


@dataclass(frozen=True)
class ImageTransform:
    """Augmentation strengths (zero is off) and the data set's per-channel statistics.

    Refused: means and deviations that are not three finite numbers each, and negative deviations.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    jitter: float = 0.0
    flip: float = 0.0
    grayscale: float = 0.0

    def __post_init__(self) -> None:
        for name, values in (("mean", self.mean), ("std", self.std)):
            low = 0.0 if name == "std" else -math.inf
            if len(values) != 3 or not all(math.isfinite(value) and value >= low for value in values):
                also = ", 0 or more" if name == "std" else ""
                raise InputError(f"{name}: {tuple(values)} of a data set; accepted: three finite numbers{also}")

    @property
    def scale(self) -> tuple[float, ...]:
        """What a channel's distance from its mean is multiplied by: 1 / std, or 1 for a channel without deviation."""
        return tuple(1.0 / s if s > CONSTANT else 1.0 for s in self.std)

    def standardise(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 (M, 1 or 3, H, W) -> float32 (M, 3, H, W), without augmentation."""
        return self._standardise(_to_rgb(images))

    def draw(self, keys: torch.Tensor) -> torch.Tensor:
        """All draws of samples with these int64 keys (M,): float32 (5, M)."""
        return torch.stack([uniform_torch(keys, number) for number in range(DRAWS)])

    def augment(self, images: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """uint8 (M, 1 or 3, H, W) and int64 keys (M,) -> float32 (M, 3, H, W)."""
        return self.apply(images, self.draw(keys))

    def apply(self, images: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        """As `augment`, with the draws (5, M) already made."""
        x = _to_rgb(images)
        if self.jitter > 0:
            low = max(0.0, 1.0 - self.jitter)
            jitter = draws[BRIGHTNESS : SATURATION + 1] * (1.0 + self.jitter - low) + low
            factor = jitter[..., None, None, None]
            x = (x * factor[0]).clamp_(0, 1)
            level = _grey(x).mean(dim=(1, 2, 3), keepdim=True)
            x = torch.lerp(level, x, factor[1]).clamp_(0, 1)
            x = torch.lerp(_grey(x), x, factor[2]).clamp_(0, 1)
        if self.grayscale > 0:
            x = torch.where(_per_sample(draws[GREYED] < self.grayscale), _grey(x), x)
        if self.flip > 0:
            x = torch.where(_per_sample(draws[FLIP] < self.flip), x.flip(-1), x)
        return self._standardise(x)

    def _standardise(self, x: torch.Tensor) -> torch.Tensor:
        mean = _per_channel(tuple(self.mean), x.device)
        return (x - mean) * _per_channel(self.scale, x.device)


@functools.cache
def _per_channel(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Constants on the device, made once: making them anew would make the host wait for the device every time."""
    return torch.tensor(values, dtype=torch.float32).to(device).view(1, 3, 1, 1)


def _to_rgb(images: torch.Tensor) -> torch.Tensor:
    x = images.to(torch.float32) * (1.0 / 255.0)
    return x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x


def _grey(x: torch.Tensor) -> torch.Tensor:
    return (GREY[0] * x[:, 0:1] + GREY[1] * x[:, 1:2]) + GREY[2] * x[:, 2:3]


def _per_sample(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1, 1, 1, 1)
