"""Which layers of a model run fused in training (`fused_layers`, `fused_convolutions`), and where.

Found by what layers are and where they stand: BatchNorm in a Sequential with the activation behind it, torchvision's
`MBConv` (EfficientNet) whole, depthwise convolutions. Parameters, names and buffers stay the layers' own. What differs
from these in anything (a subclass, a hook, a `forward` or a type of its own) runs as torch has it, and so does
everything in evaluation, in double precision, with maps in another order or inside code of one's own:

    EfficientNet-B0, -B3    all of it
    EfficientNet-Lite0      BatchNorm with ReLU6; its residuals and its convolutions, which pad in their own way, are
                            torch's
    vgg11-bn, in streams    BatchNorm, with ReLU where no pool comes between (`lowering.pool_before_relu`)
    others                  `nn.BatchNorm2d` in a Sequential, with the SiLU, ReLU or ReLU6 right behind it; depthwise
                            `nn.Conv2d` of 3x3 or 5x5 without bias anywhere; BatchNorm that a `forward` calls by itself
                            is torch's

One training step of EfficientNet-B0 at 224 pixels reads and writes 170 M values of maps per sample in torch's own
layers (681 MB in float32): BatchNorm and SiLU 45 M of them forward and 52 M backward, squeeze-and-excitation 7 M and
23 M, convolutions 14 M and 27 M, residuals 3 M. 12 M are copies that autograd keeps of what SiLU overwrites
(`bound_model` spares them); with BatchNorm and all behind it fused, 98 M are left.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from fedentopt.models.keyed_dropout import KeyedStochasticDepth
from fedentopt.simulation.lowering import is_plain
from fedentopt.simulation.trainers import fused_convolutions, fused_layers
from fedentopt.simulation.trainers.masked_norm import Padding
from fedentopt.simulation.triton import runs_on

Forward = Callable[[Tensor], Tensor]


class FusedForm(NamedTuple):
    """What of a step in the streams trainer is fused; what it computes is the same but for rounding.

    `norms`: BatchNorm and what follows it element by element: the activation, and in EfficientNet's blocks
    squeeze-and-excitation, stochastic depth and the residual sum. `depthwise`: depthwise convolutions in kernels of our
    own. Convolutions of 1x1 as matrix products were tried and did not pay.
    """

    norms: bool = False
    depthwise: bool = False


def form_for(device: torch.device, bf16: bool) -> FusedForm:
    """What is fused there unless somebody asks for something else, as it paid on an H200
    (`benchmarks/efficientnet_step.py`): in bf16 cuDNN's depthwise convolutions are faster than ours."""
    return FusedForm(norms=True, depthwise=not bf16) if device.type == "cuda" else FusedForm()


class FusedBlocks:
    """The fused layers of one module, which stand in for its own while `running`."""

    def __init__(self, padding: Padding) -> None:
        self.on = False
        self.padding = padding

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.on = True
        try:
            yield
        finally:
            self.on = False


def fusible(model: nn.Module, form: FusedForm, device: torch.device) -> dict[str, str]:
    """The layers of `model` that run fused there in this form: by name, whether "norms" or "depthwise" has them do."""
    if not any(form) or not runs_on(device):
        return {}
    found = {}
    for name, layer in model.named_modules():
        if form.depthwise and is_plain(layer, nn.Conv2d) and fused_convolutions.takes_depthwise(layer):
            found[name] = "depthwise"
        elif form.norms and (_is_block(layer) or (_is_sequence(layer) and any(_norm(child) for child in layer))):
            found[name] = "norms"
    return found


def fuse_blocks(
    module: nn.Module, model: nn.Module, form: FusedForm, padding: Padding, device: torch.device
) -> FusedBlocks:
    """Let layers of `module` run fused while the result is `running`; which of them, the same layers of `model` say,
    of which it is a copy that may have been given hooks since."""
    fused = FusedBlocks(padding)
    layers, copies = dict(model.named_modules()), dict(module.named_modules())
    for name in fusible(model, form, device):
        layer, copy = layers[name], copies[name]
        before: Forward = copy.forward
        if isinstance(copy, nn.Conv2d):
            made: Forward = partial(_convolve, fused, copy, before)
        elif isinstance(copy, nn.Sequential):
            assert isinstance(layer, nn.Sequential)
            made = partial(_sequence, fused, copy, before, [_norm(child) for child in layer])
        else:
            made = partial(_block, fused, copy, before)
        copy.forward = made
    return fused


def _is_sequence(layer: nn.Module) -> TypeGuard[nn.Sequential]:
    """A Sequential, by that or another name, that calls its layers one after the other."""
    plain = isinstance(layer, nn.Sequential) and type(layer).forward is nn.Sequential.forward
    return plain and is_plain(layer, type(layer))


def _norm(layer: nn.Module) -> bool:
    return is_plain(layer, nn.BatchNorm2d) and fused_layers.takes_norm(layer)


def _kind(layer: nn.Module | None) -> str | None:
    """The name of an activation that can ride along."""
    return None if layer is None or not is_plain(layer, type(layer)) else fused_layers.KINDS.get(type(layer))


def _torchvision(module: str, name: str) -> Any:
    """A class of torchvision's; without torchvision loaded no model can hold one, and loading it takes seconds."""
    return getattr(sys.modules.get(f"torchvision.{module}"), name, None)


def _is_block(block: Any) -> bool:
    """An `MBConv` as torchvision makes it: [expand,] depthwise, squeeze-and-excitation, project."""
    if (kind := _torchvision("models.efficientnet", "MBConv")) is None or not is_plain(block, kind):
        return False
    inner: Any = block.block
    if not _is_sequence(inner) or len(inner) not in (3, 4):
        return False
    parts: list[Any] = list(inner)
    *before, excite, project = parts
    depth = block.stochastic_depth
    ends = [[type(layer) for layer in part] if _is_sequence(part) else [] for part in (*before, project)]
    full = [nn.Conv2d, nn.BatchNorm2d, nn.SiLU]
    return (
        all(end == full for end in ends[:-1])
        and ends[-1] == full[:2]
        and _norm(before[-1][1])
        and _norm(project[1])
        and _kind(before[-1][2]) is not None
        and is_plain(excite, _torchvision("ops.misc", "SqueezeExcitation"))
        and is_plain(excite.avgpool, nn.AdaptiveAvgPool2d)
        and excite.avgpool.output_size == 1
        and any(is_plain(depth, kind) for kind in (KeyedStochasticDepth, _torchvision("ops", "StochasticDepth")))
    )


def _convolve(fused: FusedBlocks, layer: nn.Conv2d, before: Forward, x: Tensor) -> Tensor:
    if not (fused.on and layer.training):
        return before(x)
    kind = x.device.type
    given = x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x  # as torch's layer has it
    return fused_convolutions.depthwise(layer, given) if fused_layers.takes_maps(given) else before(x)


def _sequence(fused: FusedBlocks, layers: nn.Sequential, before: Forward, norms: list[bool], x: Tensor) -> Tensor:
    if not fused.on:
        return before(x)
    rest = list(zip(layers, norms, strict=True))
    while rest:
        (layer, is_norm), *rest = rest
        if is_norm and layer.training and fused_layers.takes_maps(x):
            kind = _kind(rest[0][0]) if rest else None
            assert isinstance(layer, nn.BatchNorm2d)
            x = fused_layers.normalise(layer, x, fused.padding.real, kind or "none")
            rest = rest[1:] if kind else rest
        else:
            x = layer(x)
    return x


def _block(fused: FusedBlocks, block: Any, before: Forward, x: Tensor) -> Tensor:
    if not fused.on or not block.training:
        return before(x)
    *expand, (convolve, norm, act), excite, (project, last) = block.block
    y = x
    for layers in expand:
        y = layers(y)
    real = fused.padding.real
    y = convolve(y)
    if norm.training and fused_layers.takes_maps(y):
        y = fused_layers.excite(norm, y, real, "silu", partial(_gate, excite))
    else:
        y = excite(act(norm(y)))
    y = project(y)
    if not (last.training and fused_layers.takes_maps(y)):
        y = last(y)
    elif block.use_res_connect and fused_layers.takes_maps(x) and x.dtype == y.dtype:
        depth = block.stochastic_depth
        # What it does to ones is what it does to a sample.
        factor = depth(torch.ones(len(y), 1, 1, 1, device=y.device)).flatten() if depth.training and depth.p else None
        return fused_layers.normalise(last, y, real, factor=factor, residual=x)
    else:
        y = fused_layers.normalise(last, y, real)
    if block.use_res_connect:
        y = block.stochastic_depth(y) + x
    return y


def _gate(excite: Any, means: Tensor) -> Tensor:
    """What `SqueezeExcitation` multiplies by, from the means that it would take itself."""
    scale: Tensor = excite.scale_activation(excite.fc2(excite.activation(excite.fc1(means))))
    return scale
