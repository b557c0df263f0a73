"""Whether padded batches give a model the step of their real samples: tried, before any step of its is padded.

A model with BatchNorm can be padded if the layers' statistics leave padding out (`masked_norm`) and nothing else in it
looks across samples or keeps count of them. What layers it has can be read; what its `forward` does cannot, so two
samples alone are compared with the same two and a padding row, in double precision: logits, gradients and buffers must
agree as closely as that allows.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedentopt.models import keyed_draws
from fedentopt.simulation.device import without_cudnn
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers.masked_norm import MASKED, mask_norms

T = TypeVar("T")
CLOSE = 1e-6  # in relation to all compared: rounding leaves 1e-13, or 1e-8 where maps shrink to one pixel


def fill_padding(x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The batch with its first sample in the padding rows: whatever a model does to real samples stays finite there."""
    return torch.where(real.view(-1, *(1,) * (x.dim() - 1)), x, x[:1])


def can_mask(model: nn.Module, layout: FlatLayout, image_size: tuple[int, int], device: torch.device) -> bool:
    """Whether padding rows leave the steps of `model` on images of this size as they are."""
    norms = {name: layer for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)}
    if not norms or keyed_draws(model) is not None:
        return False
    if any(type(layer) not in MASKED or layer.momentum is None for layer in norms.values()):
        return False
    if any(slot.name.rpartition(".")[0] not in norms for slot in layout.buffers):
        return False
    try:
        with without_cudnn():
            return _agrees(model, image_size, device)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever the model makes of a padded batch: it is not to get one
        return False


def _agrees(model: nn.Module, image_size: tuple[int, int], device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, *image_size, generator=generator, dtype=torch.float64).to(device)
    real = torch.tensor([True, True, False], device=device)
    alone, padded = (copy.deepcopy(model).double().to(device).train() for _ in range(2))
    padding = mask_norms(padded)
    logits = alone(images)
    push = torch.randn(logits.shape, generator=generator, dtype=torch.float64).to(device)
    logits.backward(push)
    with padding.masking(real):
        others = padded(fill_padding(torch.cat([images, images[:1]]), real))
    others.backward(torch.cat([push, torch.zeros_like(push[:1])]))
    if any((mine.grad is None) != (its.grad is None) for mine, its in _pairs(alone.parameters(), padded.parameters())):
        return False
    return (
        _close([(logits, others[:2])])
        and _close([(a.grad, b.grad) for a, b in _pairs(alone.parameters(), padded.parameters()) if a.grad is not None])
        and _close(_pairs(alone.buffers(), padded.buffers()))
    )


def _pairs(mine: Iterable[T], its: Iterable[T]) -> list[tuple[T, T]]:
    return list(zip(mine, its, strict=True))


def _close(pairs: Sequence[tuple[torch.Tensor | None, torch.Tensor | None]]) -> bool:
    """Whether the tensors are the same but for rounding, together: some are zero but for rounding themselves."""
    flat = [
        torch.cat([t.detach().double().flatten() for t in side if t is not None]) for side in zip(*pairs, strict=True)
    ]
    return not flat or float((flat[0] - flat[1]).norm()) <= CLOSE * float(flat[0].norm())
