"""Whether padded batches give a model the step of their real samples: tried, before any step of its is padded.

Without BatchNorm padding rows are images of zeros that the loss leaves out: enough, unless the model looks across
samples or makes no numbers of such an image. A model with BatchNorm can be padded if the layers' statistics leave
padding out (`masked_norm`) and nothing else in it looks across samples or keeps count of them. What layers it has can
be read; what its `forward` does cannot, so two samples alone are compared with the same two and a padding row: logits,
gradients and buffers must agree. With BatchNorm they do so as closely as double precision allows; without, in the
single precision that a `forward` may insist on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedentopt.models import keyed_draws
from fedentopt.simulation.device import without_cudnn
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.lowering import lower
from fedentopt.simulation.trainers.masked_norm import MASKED, mask_norms
from fedentopt.simulation.trainers.stacked_nets import VmapNet
from fedentopt.simulation.trainers.wide_blocks import wide_blocks

T = TypeVar("T")
Pad = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# In relation to all compared. Rounding leaves 1e-13 in double precision, or 1e-8 where maps shrink to one pixel.
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
# What torch raises, or a check of a user's own; not what a handler of signals does, such as TimeoutError.
REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def fill_padding(x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The batch with its first sample in the padding rows: whatever a model does to real samples stays finite there."""
    return torch.where(real.view(-1, *(1,) * (x.dim() - 1)), x, x[:1])


def can_pad(model: nn.Module, image_size: tuple[int, int]) -> bool:
    """Whether padding rows of zeros leave the steps of a `model` without BatchNorm, on the CPU, as they are."""
    if lower(model, lambda *_: True) is not None or wide_blocks(model, image_size[1]) is not None:
        return True  # all its layers are known
    return _tried(model, image_size, torch.device("cpu"), torch.float32, lambda x, real: x * real.view(-1, 1, 1, 1))


def can_map(model: nn.Module, image_size: int) -> bool:
    """Whether `VmapNet` makes of a `model` that `can_stack`, on the CPU, what the model's own passes do, padding or
    not: tried likewise. Where the data decide which way a forward takes, or torch has no rule for an operation, there
    is no such net."""
    if lower(model, lambda *_: True) is not None:
        return True
    try:
        return _maps(model, image_size)
    except torch.OutOfMemoryError:
        raise
    except REFUSALS:
        return False


def can_mask(model: nn.Module, layout: FlatLayout, image_size: tuple[int, int], device: torch.device) -> bool:
    """Whether padding rows leave the steps of `model` on images of this size as they are."""
    norms = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    if not norms or keyed_draws(model) is not None:
        return False
    if any(type(layer) not in MASKED or layer.momentum is None for layer in norms.values()):
        return False
    if any(slot.name.rpartition(".")[0] not in norms for slot in layout.buffers):
        return False
    return _tried(model, image_size, device, torch.float64, fill_padding)


def _tried(model: nn.Module, image_size: tuple[int, int], device: torch.device, dtype: torch.dtype, pad: Pad) -> bool:
    try:
        with without_cudnn():
            return _agrees(model, image_size, device, dtype, pad)
    except torch.OutOfMemoryError:
        raise
    except REFUSALS:  # it is not to get a padded batch
        return False


def _agrees(model: nn.Module, image_size: tuple[int, int], device: torch.device, dtype: torch.dtype, pad: Pad) -> bool:
    """`pad` gives the padding rows of a batch, those that are not real, what they hold."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, *image_size, generator=generator, dtype=dtype).to(device)
    real = torch.tensor([True, True, False], device=device)
    alone, padded = (copy.deepcopy(model).to(device, dtype).train() for _ in range(2))
    padding = mask_norms(padded)
    logits = alone(images)
    push = torch.randn(logits.shape, generator=generator, dtype=dtype).to(device)
    logits.backward(push)
    with padding.masking(real):
        others = padded(pad(torch.cat([images, images[:1]]), real))
    others.backward(torch.cat([push, torch.zeros_like(push[:1])]))
    if any((mine.grad is None) != (its.grad is None) for mine, its in _pairs(alone.parameters(), padded.parameters())):
        return False
    return (
        _close([(logits, others[:2])], dtype)
        and _close([(a.grad, b.grad) for a, b in _pairs(alone.parameters(), padded.parameters())], dtype)
        and _close(_pairs(alone.buffers(), padded.buffers()), dtype)
    )


def _maps(model: nn.Module, image_size: int) -> bool:
    layout, module = FlatLayout(model), copy.deepcopy(model)
    net, rows = VmapNet(copy.deepcopy(model), layout), layout.pack(model.state_dict())[None]
    images = torch.randn(1, 3, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    images[:, 2], labels, real = 0, torch.tensor([[0, 1, -1]]), images[0, :2]
    logits = module.train()(real)
    F.cross_entropy(logits, labels[0, :2]).backward()
    gradient = torch.zeros_like(rows)
    found = net.step(rows, gradient, images, labels, None, None)[0, :2]
    pairs = _pairs(module.parameters(), layout.parameter_views(gradient).values())
    return (
        _close([(logits, found)], torch.float32)
        and _close([(torch.zeros_like(p) if p.grad is None else p.grad, g[0]) for p, g in pairs], torch.float32)
        and _close([(module.eval()(real), net.logits(rows, images)[0, :2])], torch.float32)
    )


def _pairs(mine: Iterable[T], its: Iterable[T]) -> list[tuple[T, T]]:
    return list(zip(mine, its, strict=True))


def _close(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]], dtype: torch.dtype) -> bool:
    """Whether the tensors are the same but for rounding, together: some are zero but for rounding themselves."""
    flat = [
        torch.cat([t.detach().double().flatten() for t in side if t is not None]) for side in zip(*pairs, strict=True)
    ]
    return not flat or float((flat[0] - flat[1]).norm()) <= CLOSE[dtype] * float(flat[0].norm())
