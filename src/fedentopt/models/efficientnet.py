"""EfficientNet-B0 and -B3 (Tan and Le, 2019): torchvision's networks with a last layer of C classes."""

from __future__ import annotations

from torch import nn
from torchvision.models import efficientnet_b0, efficientnet_b3


def efficientnet(variant: str, num_classes: int) -> nn.Module:
    """A freshly initialised EfficientNet; `variant` is "b0" or "b3"."""
    make = {"b0": efficientnet_b0, "b3": efficientnet_b3}[variant]
    model: nn.Module = make(weights=None, num_classes=num_classes)
    return model
