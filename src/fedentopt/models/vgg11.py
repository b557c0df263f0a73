"""VGG-11 (Simonyan and Zisserman, "Very deep convolutional networks", 2015): torchvision's features, one linear layer.

The eight convolutions with their initialisation are torchvision's; its three-layer ImageNet classifier is
replaced by one linear layer on the 512 features. Images of 64 pixels and more leave a map larger than 1×1,
which is averaged first, so that the linear layer is the same for every size.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn
from torchvision.models.vgg import cfgs, make_layers

from fedentopt.errors import InputError

SMALLEST = 32  # five poolings


def vgg11(num_classes: int, image_size: int) -> nn.Sequential:
    """A freshly initialised VGG-11; images must be at least 32 pixels wide."""
    if image_size < SMALLEST:
        raise InputError(f"image_size: {image_size} is too small for vgg11; accepted: at least {SMALLEST}")
    features = make_layers(cfgs["A"], batch_norm=False)
    for layer in features:
        # torchvision does this in the constructor of its whole network, with 120 M weights nobody uses here.
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    layers: OrderedDict[str, nn.Module] = OrderedDict(features=features)
    if image_size >= 2 * SMALLEST:
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["classifier"] = nn.Linear(512, num_classes)
    return nn.Sequential(layers)
