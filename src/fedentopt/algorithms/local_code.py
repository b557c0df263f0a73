"""What a local objective written as code is called with: `local_loss(model, start, batch, context)` -> a scalar tensor.

`model` is the client's, in training mode; `start` the model it began the round from, in evaluation mode, without
gradients. The gradient of what is returned takes the place of the cross-entropy's in the client's SGD step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import nn


class Batch(NamedTuple):
    """The real samples of one local step: augmented, standardised images (B, 3, H, W) and int64 labels (B,).

    Images lie channels-last in memory, as convolutions like them: `flatten` and `reshape` take that, `view` may not.
    """

    x: torch.Tensor
    y: torch.Tensor


class Outputs(NamedTuple):
    """What one forward pass gives: the input of the last linear layer, (B, F), and the logits, (B, C)."""

    features: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class LocalContext:
    """What a local objective may know of its client besides the batch; the same for all steps of a round.

    `vectors` are the client's own, by the names the method declared, each as long as a model's flat parameters;
    `flat(model)` are the parameters of one of the three models in that order, with their gradient. `generator` starts
    from (seed, round, client): draws from it are the same in every sweep and after a stop; torch's global one is shared
    by all clients that train at once.
    `previous` is the client's model of the last round it trained in, in evaluation mode and without gradients, None
    the first time. `outputs(model, x)` runs one of the three models on images and returns what enters its last linear
    layer, (B, F), and its logits (B, C), with their gradients where the model has one: one forward pass like
    `model(x)`, so a model in training mode notes it in its BatchNorm statistics once. `features(model, x)` is the first
    of the two.
    """

    client: int
    round: int
    label_counts: np.ndarray
    lr: float
    vectors: Mapping[str, torch.Tensor]
    previous: nn.Module | None
    outputs: Callable[[nn.Module, torch.Tensor], Outputs]
    flat: Callable[[nn.Module], torch.Tensor]
    generator: torch.Generator

    def features(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """What enters the last linear layer of `model` on images, (B, F)."""
        return self.outputs(model, x).features
