"""Whether padded batches give a model the step of their real samples: tried, before any step of its is padded.

A model with BatchNorm can be padded if the layers' statistics leave padding out (`masked_norm`) and nothing else in it
looks across samples or keeps count of them. What layers it has can be read; what its `forward` does cannot, so two
samples alone are compared with the same two and a padding row, in double precision: logits, gradients and buffers must
agree as closely as that allows.
"""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedentopt.models import keyed_draws
from fedentopt.simulation.device import untuned
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers.masked_norm import MASKED, mask_norms

CLOSE = 1e-7  # of a tensor's largest number; rounding leaves some 1e-13, another sample in a mean far more


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
        with untuned():
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
    pairs = [(logits, others[:2]), *zip(alone.buffers(), padded.buffers(), strict=True)]
    for mine, its in zip(alone.parameters(), padded.parameters(), strict=True):
        if (mine.grad is None) != (its.grad is None):
            return False
        if mine.grad is not None and its.grad is not None:
            pairs.append((mine.grad, its.grad))
    # Gradients that are zero but for rounding, as of a bias before BatchNorm, are measured by the largest of all.
    largest = max(float(pair[0].detach().abs().max()) for pair in pairs if pair[0].numel())
    return all(
        float((mine - its).detach().abs().max()) <= CLOSE * max(float(mine.detach().abs().max()), CLOSE * largest)
        for mine, its in pairs
        if mine.numel()
    )
