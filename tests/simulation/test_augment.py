"""Augmentation: its operations equal torchvision's, its draws have the stated distributions."""

from __future__ import annotations

import pytest
import torch
from torchvision.transforms.v2 import functional as V

from fedentopt.errors import InputError
from fedentopt.randomness import key, signed
from fedentopt.simulation.augment import BRIGHTNESS, CONTRAST, DRAWS, FLIP, GREYED, SATURATION, ImageTransform

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def pictures(n: int, channels: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def restore(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor(STD).view(1, 3, 1, 1) + torch.tensor(MEAN).view(1, 3, 1, 1)


def sample_keys(n: int) -> torch.Tensor:
    return torch.tensor([signed(key(3, "augment-test", i)) for i in range(n)])


def test_each_operation_equals_torchvisions():
    images = pictures(5)
    transform = ImageTransform(MEAN, STD, jitter=0.2, flip=0.5, grayscale=0.1)
    draws = torch.full((DRAWS, 5), 0.99)
    draws[BRIGHTNESS] = torch.tensor([0.5, 1.0, 0.0, 0.5, 0.75])
    draws[CONTRAST] = torch.tensor([0.5, 0.5, 0.25, 0.0, 1.0])
    draws[SATURATION] = torch.tensor([0.0, 0.5, 0.75, 0.5, 0.5])
    draws[FLIP, 3], draws[GREYED, 4] = 0.2, 0.05
    out = restore(transform.apply(images, draws))
    for i in range(5):
        x = images[i].float() / 255
        x = V.adjust_brightness(x, 0.8 + 0.4 * float(draws[BRIGHTNESS, i]))
        x = V.adjust_contrast(x, 0.8 + 0.4 * float(draws[CONTRAST, i]))
        x = V.adjust_saturation(x, 0.8 + 0.4 * float(draws[SATURATION, i]))
        if i == 3:
            x = V.horizontal_flip(x)
        if i == 4:
            x = V.rgb_to_grayscale(x, num_output_channels=3)
        torch.testing.assert_close(out[i], x, atol=2e-5, rtol=1e-4)


def test_switched_off_it_only_standardises():
    images = pictures(4)
    plain = ImageTransform(MEAN, STD)
    torch.testing.assert_close(plain.augment(images, sample_keys(4)), plain.standardise(images))
    torch.testing.assert_close(restore(plain.standardise(images)), images.float() / 255, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("zero", [0.0, 1e-17])
def test_a_channel_without_deviation_is_divided_by_one(zero):
    images = pictures(4)
    images[:, 2] = 128
    out = ImageTransform((0.4, 0.5, 128 / 255), (0.2, 0.25, zero)).standardise(images)
    torch.testing.assert_close(out[:, :2], ImageTransform(MEAN, STD).standardise(images)[:, :2])
    assert float(out[:, 2].abs().max()) < 1e-6
    images[0, 2, 0, 0] = 255  # in a test image
    out = ImageTransform((0.4, 0.5, 128 / 255), (0.2, 0.25, zero)).standardise(images)
    assert float(out[0, 2, 0, 0]) == pytest.approx(127 / 255)


@pytest.mark.parametrize(
    ("mean", "std", "words"),
    [
        (MEAN, (0.2, -0.1, 0.3), r"std: \(0.2, -0.1, 0.3\) .*accepted: three finite numbers, 0 or more"),
        (MEAN, (0.2, float("nan"), 0.3), "std: .*nan"),
        (MEAN, (0.2,), "std: .*three"),
        ((0.4, float("inf"), 0.6), STD, "mean: .*inf.*accepted: three finite numbers$"),
    ],
)
def test_statistics_that_are_none_are_refused(mean, std, words):
    with pytest.raises(InputError, match=words):
        ImageTransform(mean, std)


def test_a_mean_may_be_negative():
    x = ImageTransform((-0.5, 0.0, 0.5), (0.5, 1.0, 2.0)).apply(
        torch.zeros(1, 3, 1, 1, dtype=torch.uint8), torch.ones(5, 1)
    )
    assert x.flatten().tolist() == [1.0, 0.0, -0.25]


def test_grey_images_become_rgb():
    grey = pictures(3, channels=1)
    out = ImageTransform(MEAN, STD).standardise(grey)
    assert out.shape == (3, 3, 8, 8)
    torch.testing.assert_close(restore(out)[:, 2:], grey.float() / 255, atol=1e-6, rtol=1e-6)


def test_a_sample_depends_on_its_key_alone():
    images, keys = pictures(6), sample_keys(6)
    transform = ImageTransform(MEAN, STD, jitter=0.2, flip=0.5, grayscale=0.1)
    together = transform.augment(images, keys)
    for i in range(6):
        assert torch.equal(transform.augment(images[i : i + 1], keys[i : i + 1])[0], together[i])
    assert not torch.equal(transform.augment(images, keys.flip(0)), together)


def test_statistics():
    n = 4000
    keys = sample_keys(n)
    bright = torch.full((n, 3, 8, 8), 100, dtype=torch.uint8)
    bright[:, :, :, 0] = 50  # a left edge shows flips
    transform = ImageTransform((0, 0, 0), (1, 1, 1), flip=0.5)
    flipped = transform.augment(bright, keys)[:, 0, 0, 0] > 0.3
    assert float(flipped.float().mean()) == pytest.approx(0.5, abs=0.03)
    colourful = torch.zeros(n, 3, 4, 4, dtype=torch.uint8)
    colourful[:, 0] = 200
    greyed = ImageTransform((0, 0, 0), (1, 1, 1), grayscale=0.1).augment(colourful, keys)[:, 1, 0, 0] > 0
    assert float(greyed.float().mean()) == pytest.approx(0.1, abs=0.02)
    flat = torch.full((n, 3, 4, 4), 100, dtype=torch.uint8)  # contrast and saturation leave a flat grey image alone
    factor = ImageTransform((0, 0, 0), (1, 1, 1), jitter=0.2).augment(flat, keys)[:, 0, 0, 0] / (100 / 255)
    assert float(factor.min()) >= 0.8 - 1e-4
    assert float(factor.max()) <= 1.2 + 1e-4
    assert float(factor.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(factor.var()) == pytest.approx(0.4**2 / 12, rel=0.08)
