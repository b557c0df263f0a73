"""Pixels: decoding image files and resizing, always to uint8, one image at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from fedentopt.errors import InputError

# Formats by name, since Pillow would otherwise try all it knows on a file, some by calling other programs.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
PIECE_BYTES = 32 << 20
_BITS, _PHOTOMETRIC = 258, 262  # tags of TIFF
GREY_MODES = frozenset({"1", "L", "LA", "I", "I;16", "I;16B", "I;16L", "F"})


def piece_length(channels: int, side: int) -> int:
    """How many images to hold in memory at once while converting."""
    return max(1, PIECE_BYTES // (channels * side * side))


def resized(images: np.ndarray, side: int) -> Iterator[np.ndarray]:
    """uint8 (n, 1 or 3, H, W) -> pieces of uint8 (m, 1 or 3, side, side), bilinear; unchanged if of that size."""
    if images.shape[2:] == (side, side):
        yield images
        return
    step = piece_length(images.shape[1], side)
    for start in range(0, len(images), step):
        yield _resize(images[start : start + step], side)


def _resize(images: np.ndarray, side: int) -> np.ndarray:
    out = np.empty((*images.shape[:2], side, side), np.uint8)
    for i, image in enumerate(images):
        picture = Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0)))
        out[i] = _planes(picture.resize((side, side), Image.Resampling.BILINEAR))
    return out


def mode(path: Path) -> str:
    """The colour mode that the file's header tells, without decoding the pixels."""
    try:
        with Image.open(path, formats=FORMATS) as picture:
            return str(picture.mode)
    except Exception as error:  # decoders raise whatever a damaged file makes them stumble over
        raise InputError(f"{path}: not an image that can be read ({error})") from error


def decode(path: Path, side: int, channels: int) -> np.ndarray:
    """An image file as uint8 (channels, side, side): upright as its EXIF says, transparency on black, bilinear."""
    try:
        with Image.open(path, formats=FORMATS) as picture:
            upright = _eight_bit(ImageOps.exif_transpose(picture), picture, channels)
            return _planes(upright.resize((side, side), Image.Resampling.BILINEAR))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:
        raise InputError(f"{path}: the image is damaged or of an unknown kind ({error})") from error


def _eight_bit(picture: Image.Image, file: Image.Image, channels: int) -> Image.Image:
    """The picture of a file in 8 bits per channel; `file` is what was opened, and knows its format."""
    target = "L" if channels == 1 else "RGB"
    if picture.mode.startswith("I;16") or (picture.mode == "I" and file.format in ("PNG", "PPM")):
        # Pillow's own conversion clips 16 bits at 255 instead of scaling them. It calls some 16-bit files "I", and
        # leaves to the reader what else a TIFF says of grey beyond 8 bits: how many there are, and whether 0 is white.
        tags = getattr(file, "tag_v2", {}) if file.format == "TIFF" else {}
        values = np.asarray(picture, np.int64) >> (tags.get(_BITS, (16,))[0] - 8)
        picture = Image.fromarray((255 - values if tags.get(_PHOTOMETRIC) == 0 else values).astype(np.uint8))
    elif picture.mode == "F" and ((shares := np.asarray(picture)) >= 0).all() and (shares <= 1).all():
        picture = Image.fromarray(np.rint(shares * 255).astype(np.uint8))
    elif picture.mode in ("I", "F"):
        accepted = "8 or 16 bits per channel, or floats from 0 to 1"
        raise InputError(f"pixels of mode {picture.mode} have no known range; accepted: {accepted}")
    if picture.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in picture.info:
        black = Image.new("RGBA", picture.size, (0, 0, 0, 255))
        picture = Image.alpha_composite(black, picture.convert("RGBA"))
    return picture.convert(target)


def _planes(picture: Image.Image) -> np.ndarray:
    pixels = np.asarray(picture, np.uint8)
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
