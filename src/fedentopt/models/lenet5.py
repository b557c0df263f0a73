"""LeNet-5 for RGB images (LeCun et al., "Gradient-based learning applied to document recognition", 1998).

Two 5×5 convolutions (6 and 16 channels), each with ReLU and 2×2 max pooling, then 120, 84 and C units:
62,006 parameters for 32×32 images and ten classes.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from fedentopt.errors import InputError

SMALLEST = 16  # below, nothing is left after the second pooling


def lenet5(num_classes: int, image_size: int) -> nn.Sequential:
    """A freshly initialised LeNet-5; the first linear layer's width follows the image size."""
    side = ((image_size - 4) // 2 - 4) // 2
    if side < 1:
        raise InputError(f"image_size: {image_size} is too small for lenet5; accepted: at least {SMALLEST}")
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
