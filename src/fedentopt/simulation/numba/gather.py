"""From a stored uint8 image to what the net sees: what `augment.ImageTransform` does, one image at a time.

Pixels go through in blocks of sixteen, rows one after another; a block that reaches past the image works on zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedentopt.simulation.augment import BRIGHTNESS, CONTRAST, FLIP, GREY, GREYED, SATURATION, ImageTransform
from fedentopt.simulation.numba.compiled import inner
from fedentopt.simulation.numba.lane_arithmetic import add, clamp, multiply, multiply_add, spread16, sum_lanes
from fedentopt.simulation.numba.lanes import (
    at,
    copy_bytes16,
    load16,
    load_bytes16,
    put,
    store,
    store_parted,
    store_woven,
)

RED, GREEN, BLUE = np.float32(GREY[0]), np.float32(GREY[1]), np.float32(GREY[2])
BYTE = np.float32(1.0 / 255.0)
ONE = np.float32(1)
LOW, SPAN, GREYSCALE, MIRROR, SCALE, OFFSET = 0, 1, 2, 3, 4, 7  # places in `settings`


def settings(transform: ImageTransform) -> np.ndarray:
    """The transform's numbers as the kernels read them."""
    low = max(0.0, 1.0 - transform.jitter)
    span = 1.0 + transform.jitter - low if transform.jitter > 0 else 0.0
    scale = transform.scale
    offset = [-m * s for m, s in zip(transform.mean, scale, strict=True)]
    return np.array([low, span, transform.grayscale, transform.flip, *scale, *offset], dtype=np.float32)


@inner
def copy_pixels(net: Any, images: Any, image: int, mirrored: bool, pixels: Any) -> None:
    """The image's bytes, its rows turned round if asked, as three channels; grey comes three times."""
    width, size = net.width_of_image, net.height * net.width_of_image
    for c in range(3):
        source = image + (c * size if net.image_channels == 3 else 0)
        target = c * net.plane
        for row in range(0, size, width):
            if width < 16:
                for j in range(width):
                    put(pixels, target + row + j, at(images, source + row + (width - 1 - j if mirrored else j)))
            else:
                for block in range(0, width, 16):
                    j = min(block, width - 16)
                    start = width - 16 - j if mirrored else j
                    copy_bytes16(pixels, target + row + j, images, source + row + start, mirrored)


@inner
def load_image(
    net: Any, images: Any, image: int, draws: Any, d: int, settings: Any, pixels: Any, f: Any, x: int
) -> None:  # fmt: skip
    """The image whose bytes begin at `image`, augmented by the five draws at d, standardised, to x.

    Channels last for a convolution, channels first for features; by even and odd columns too where the net asks.
    """
    copy_pixels(net, images, image, at(draws, d + FLIP) < at(settings, MIRROR), pixels)
    size, half = net.height * net.width_of_image, net.half
    low, span = at(settings, LOW), at(settings, SPAN)
    r0, g0, b0 = net.planes, net.planes + net.plane, net.planes + 2 * net.plane
    red, green, blue = spread16(RED), spread16(GREEN), spread16(BLUE)
    brightness = spread16(BYTE * (low + at(draws, d + BRIGHTNESS) * span) if span > 0 else BYTE)
    total = spread16(0)
    for i in range(0, size, 16):
        r = clamp(multiply(load_bytes16(pixels, i), brightness))
        g = clamp(multiply(load_bytes16(pixels, net.plane + i), brightness))
        b = clamp(multiply(load_bytes16(pixels, 2 * net.plane + i), brightness))
        total = add(total, multiply_add(multiply_add(multiply(red, r), green, g), blue, b))
        store(f, r0 + i, r)
        store(f, g0 + i, g)
        store(f, b0 + i, b)
    contrast = low + at(draws, d + CONTRAST) * span if span > 0 else ONE
    saturation = low + at(draws, d + SATURATION) * span if span > 0 else ONE
    level = spread16((ONE - contrast) * (sum_lanes(total) / np.float32(size)))
    contrasted, saturated, rest = spread16(contrast), spread16(saturation), spread16(ONE - saturation)
    greyed = at(draws, d + GREYED) < at(settings, GREYSCALE)
    s0, s1, s2 = spread16(at(settings, SCALE)), spread16(at(settings, SCALE + 1)), spread16(at(settings, SCALE + 2))
    o0, o1, o2 = spread16(at(settings, OFFSET)), spread16(at(settings, OFFSET + 1)), spread16(at(settings, OFFSET + 2))
    for i in range(0, size, 16):
        r, g, b = load16(f, r0 + i), load16(f, g0 + i), load16(f, b0 + i)
        if span > 0:
            r = clamp(multiply_add(level, contrasted, r))
            g = clamp(multiply_add(level, contrasted, g))
            b = clamp(multiply_add(level, contrasted, b))
            grey = multiply(rest, multiply_add(multiply_add(multiply(red, r), green, g), blue, b))
            r = clamp(multiply_add(grey, saturated, r))
            g = clamp(multiply_add(grey, saturated, g))
            b = clamp(multiply_add(grey, saturated, b))
        if greyed:
            r = multiply_add(multiply_add(multiply(red, r), green, g), blue, b)
            g = r
            b = r
        r, g, b = multiply_add(o0, s0, r), multiply_add(o1, s1, g), multiply_add(o2, s2, b)
        if net.channels_last:
            store_woven(f, x + 3 * i, r, g, b)
        else:
            store(f, r0 + i, r)
            store(f, g0 + i, g)
            store(f, b0 + i, b)
        if half:
            even = net.parted + i // 2
            store_parted(f, even, even + half, r)
            store_parted(f, even + 2 * half, even + 3 * half, g)
            store_parted(f, even + 4 * half, even + 5 * half, b)
    if not net.channels_last:
        for c in range(3):
            for i in range(size):
                put(f, x + c * size + i, at(f, net.planes + c * net.plane + i))
