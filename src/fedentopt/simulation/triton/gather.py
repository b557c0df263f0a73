# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Gather, augment and standardise a stacked batch from uint8 images in one Triton kernel.

The same draws and the same arithmetic as `augment.ImageTransform.augment` (its plain twin): one program per sample
reads the step's index, hashes the sample's key, and walks the image twice, once for the mean grey level that contrast
needs and once to write the result. Nothing between uint8 and the standardised float ever reaches memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedentopt.randomness import GOLDEN, MASK, MULTIPLIERS, signed
from fedentopt.simulation.augment import BRIGHTNESS, CONTRAST, FLIP, GREY, GREYED, SATURATION, ImageTransform
from fedentopt.simulation.triton.windows import power_of_two

_GOLDEN = tl.constexpr(signed(GOLDEN))
_FIRST = tl.constexpr(signed(MULTIPLIERS[0]))
_SECOND = tl.constexpr(signed(MULTIPLIERS[1]))
_FLIP = tl.constexpr(signed((FLIP * GOLDEN) & MASK))
_BRIGHTNESS = tl.constexpr(signed((BRIGHTNESS * GOLDEN) & MASK))
_CONTRAST = tl.constexpr(signed((CONTRAST * GOLDEN) & MASK))
_SATURATION = tl.constexpr(signed((SATURATION * GOLDEN) & MASK))
_GREYED = tl.constexpr(signed((GREYED * GOLDEN) & MASK))
_RED, _GREEN, _BLUE = tl.constexpr(GREY[0]), tl.constexpr(GREY[1]), tl.constexpr(GREY[2])


@triton.jit
def mix64(x):
    """splitmix64's output function on int64 (an arithmetic shift drags the sign along, the mask takes it off)."""
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform(key):
    """float32 in [0, 1) from the top 24 bits of a key's draw (the caller has added the draw's number)."""
    return ((mix64(key) >> 40) & 0xFFFFFF).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def lerp(start, end, weight):
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit
def clamp01(x):
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def luma(r, g, b):
    return (_RED * r + _GREEN * g) + _BLUE * b


@triton.jit
def channels(image, at, inside, SIZE: tl.constexpr, COLOURS: tl.constexpr):
    r = tl.load(image + at, mask=inside, other=0).to(tl.float32) * (1.0 / 255.0)
    if COLOURS == 1:
        return r, r, r
    g = tl.load(image + SIZE + at, mask=inside, other=0).to(tl.float32) * (1.0 / 255.0)
    b = tl.load(image + 2 * SIZE + at, mask=inside, other=0).to(tl.float32) * (1.0 / 255.0)
    return r, g, b


@triton.jit(do_not_specialize=["plan_models"])
def gather_kernel(images, labels, plan, keys, step, x, y, plan_models, batch, low, span, greyed, flipped, mean_r,
                  mean_g, mean_b, scale_r, scale_g, scale_b, COLOURS: tl.constexpr, HEIGHT: tl.constexpr,
                  WIDTH: tl.constexpr, JITTER: tl.constexpr, GREYING: tl.constexpr, FLIPPING: tl.constexpr,
                  BLOCK: tl.constexpr):  # fmt: skip
    SIZE: tl.constexpr = HEIGHT * WIDTH
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    slot = tl.program_id(0)
    model = tl.program_id(1).to(tl.int64)
    t = tl.load(step)
    index = tl.load(plan + (t * plan_models + model) * batch + slot).to(tl.int64)
    out = x + (model * batch + slot) * (3 * SIZE)
    pixel = tl.arange(0, BLOCK)
    if index < 0:
        tl.store(y + model * batch + slot, tl.full((), -1, tl.int64))
        for block in range(BLOCKS):
            at = block * BLOCK + pixel
            zero = tl.zeros((BLOCK,), tl.float32)
            tl.store(out + at, zero, mask=at < SIZE)
            tl.store(out + SIZE + at, zero, mask=at < SIZE)
            tl.store(out + 2 * SIZE + at, zero, mask=at < SIZE)
    else:
        tl.store(y + model * batch + slot, tl.load(labels + index).to(tl.int64))
        image = images + index * (COLOURS * SIZE)
        key = mix64(tl.load(keys + model) + (t * batch + slot) * _GOLDEN)
        level = 0.0
        brightness = 1.0
        contrast = 1.0
        saturation = 1.0
        if JITTER:
            brightness = uniform(key + _BRIGHTNESS) * span + low
            contrast = uniform(key + _CONTRAST) * span + low
            saturation = uniform(key + _SATURATION) * span + low
            total = tl.zeros((BLOCK,), tl.float32)
            for block in range(BLOCKS):
                at = block * BLOCK + pixel
                r, g, b = channels(image, at, at < SIZE, SIZE, COLOURS)
                total += luma(clamp01(r * brightness), clamp01(g * brightness), clamp01(b * brightness))
            level = tl.sum(total, axis=0) / SIZE
        turn_grey = False
        if GREYING:
            turn_grey = uniform(key + _GREYED) < greyed
        flip = False
        if FLIPPING:
            flip = uniform(key + _FLIP) < flipped
        for block in range(BLOCKS):
            at = block * BLOCK + pixel
            inside = at < SIZE
            source = at
            if FLIPPING:
                column = at % WIDTH
                source = at + tl.where(flip, WIDTH - 1 - 2 * column, 0)
            r, g, b = channels(image, source, inside, SIZE, COLOURS)
            if JITTER:
                r = clamp01(lerp(level, clamp01(r * brightness), contrast))
                g = clamp01(lerp(level, clamp01(g * brightness), contrast))
                b = clamp01(lerp(level, clamp01(b * brightness), contrast))
                grey = luma(r, g, b)
                r = clamp01(lerp(grey, r, saturation))
                g = clamp01(lerp(grey, g, saturation))
                b = clamp01(lerp(grey, b, saturation))
            if GREYING:
                grey = luma(r, g, b)
                r = tl.where(turn_grey, grey, r)
                g = tl.where(turn_grey, grey, g)
                b = tl.where(turn_grey, grey, b)
            tl.store(out + at, (r - mean_r) * scale_r, mask=inside)
            tl.store(out + SIZE + at, (g - mean_g) * scale_g, mask=inside)
            tl.store(out + 2 * SIZE + at, (b - mean_b) * scale_b, mask=inside)


def gather_augment(
    images: Tensor,
    labels: Tensor,
    plan: Tensor,
    keys: Tensor,
    step: Tensor,
    transform: ImageTransform,
    n: int,
    *,
    block: int = 1024,
    warps: int = 4,
) -> tuple[Tensor, Tensor]:
    """See `interface.Kernels.gather_augment`."""
    colours, height, width = images.shape[1:]
    batch = plan.shape[2]
    x = torch.empty((n, batch, 3, height, width), dtype=torch.float32, device=images.device)
    y = torch.empty((n, batch), dtype=torch.int64, device=images.device)
    low = max(0.0, 1.0 - transform.jitter)
    gather_kernel[(batch, n)](
        images, labels, plan, keys, step, x, y, plan.shape[1], batch, low, 1.0 + transform.jitter - low,
        transform.grayscale, transform.flip, *transform.mean, *transform.scale,
        COLOURS=colours, HEIGHT=height, WIDTH=width,
        JITTER=transform.jitter > 0, GREYING=transform.grayscale > 0, FLIPPING=transform.flip > 0,
        BLOCK=min(block, power_of_two(height * width)), num_warps=warps,
    )  # fmt: skip
    return x, y
