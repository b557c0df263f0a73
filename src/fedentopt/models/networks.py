"""The networks known by name, for square RGB images.

LeNet-5 (LeCun et al., "Gradient-based learning applied to document recognition", 1998):
two 5×5 convolutions (6 and 16 channels), each with ReLU and 2×2 max pooling, then 120, 84 and C units:
62,006 parameters for 32×32 images and ten classes.

VGG-11 (Simonyan and Zisserman, "Very deep convolutional networks", 2015): torchvision's features, one linear layer.
The eight convolutions with their initialisation are torchvision's; its three-layer ImageNet classifier is
replaced by one linear layer on the 512 features. Images of 64 pixels and more leave a map larger than 1×1,
which is averaged first, so that the linear layer is the same for every size. With BatchNorm: one layer of it after
every convolution, torchvision's `vgg11_bn`.

EfficientNet-B0 and -B3 (Tan and Le, 2019): torchvision's networks with a last layer of C classes.
EfficientNet-Lite0, of which published weights can be had: `efficientnet_lite`.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedentopt.errors import InputError

SMALLEST_LENET = 16  # below, nothing is left after the second pooling


def lenet5(num_classes: int, image_size: int) -> nn.Sequential:
    """A freshly initialised LeNet-5; the first linear layer's width follows the image size."""
    side = ((image_size - 4) // 2 - 4) // 2
    if side < 1:
        raise InputError(f"image_size: {image_size} is too small for lenet5; accepted: at least {SMALLEST_LENET}")
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 6, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * side * side, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            fc3=nn.Linear(84, num_classes),
        )
    )


SMALLEST_VGG = 32  # five poolings


def vgg11(num_classes: int, image_size: int, *, batch_norm: bool = False) -> nn.Sequential:
    """A freshly initialised VGG-11; images must be at least 32 pixels wide."""
    if image_size < SMALLEST_VGG:
        name = "vgg11-bn" if batch_norm else "vgg11"
        raise InputError(f"image_size: {image_size} is too small for {name}; accepted: at least {SMALLEST_VGG}")
    from torchvision.models.vgg import cfgs, make_layers  # takes seconds to load

    features = make_layers(cfgs["A"], batch_norm=batch_norm)
    for layer in features:
        # torchvision does this in the constructor of its whole network, with 120 M weights nobody uses here.
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    layers: OrderedDict[str, nn.Module] = OrderedDict(features=features)
    if image_size >= 2 * SMALLEST_VGG:
        layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["classifier"] = nn.Linear(512, num_classes)
    return nn.Sequential(layers)


def efficientnet(variant: str, num_classes: int) -> nn.Module:
    """A freshly initialised EfficientNet; `variant` is "b0" or "b3"."""
    from torchvision.models import efficientnet_b0, efficientnet_b3

    make = {"b0": efficientnet_b0, "b3": efficientnet_b3}[variant]
    model: nn.Module = make(weights=None, num_classes=num_classes)
    return model
