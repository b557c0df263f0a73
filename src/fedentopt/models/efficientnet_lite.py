"""EfficientNet-Lite0 (Liu, "Higher accuracy on vision models with EfficientNet-Lite", TensorFlow blog, 2020).

EfficientNet-B0 (Tan and Le, 2019) without squeeze-and-excitation and with ReLU6 in the place of SiLU: 4,652,008
parameters with 1,000 classes. As in the network that was published, whose weights therefore fit (see `pretrained`):
- convolutions pad as TensorFlow's "SAME", where an odd number of zeros has one more to the right and below;
- BatchNorm's eps is 1e-3. Its momentum, which no weights hang on, is torch's 0.1 as in torchvision's B0; the published
  training moved its statistics by 0.01 per step, which a federated round of a few steps hardly sees;
- stochastic depth grows from 0 to 0.2 over the blocks, and 0.2 of the features are dropped before the last layer.
The start is that of torchvision's B0, normal by fan-out, but for the last layer, which starts as any `nn.Linear` of
torch does: B0's is uniform up to 1 / sqrt(classes), meant for a thousand of them; with four it would drown what a body
has learnt elsewhere in logits of several units.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

BLOCKS = (
    # repeats, kernel, stride, expansion, channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, FEATURES = 32, 1280
EPS = 1e-3
DROPPED_BLOCKS = DROPPED_FEATURES = 0.2


class SameConv2d(nn.Conv2d):
    """A convolution without bias that gives ceil(size / stride) pixels per side, for maps of any size."""

    def __init__(self, into: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(into, out, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (top, bottom), (left, right) = (
            _same(size, kernel, stride)
            for size, kernel, stride in zip(x.shape[-2:], self.kernel_size, self.stride, strict=True)
        )
        if (top, left) != (bottom, right):
            x, top, left = F.pad(x, (left, right, top, bottom)), 0, 0
        return F.conv2d(x, self.weight, None, self.stride, (top, left), 1, self.groups)


def _same(size: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after a side of `size` pixels."""
    zeros = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
    return zeros // 2, zeros - zeros // 2


def _normed(into: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> OrderedDict[str, nn.Module]:
    return OrderedDict(conv=SameConv2d(into, out, kernel, stride, groups), norm=nn.BatchNorm2d(out, eps=EPS))


def _activated(into: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(OrderedDict(_normed(into, out, kernel, stride, groups), act=nn.ReLU6(inplace=True)))


class InvertedResidual(nn.Module):
    """Expand, filter each channel by itself, project; added to what came in where the shapes are the same."""

    def __init__(self, into: int, out: int, kernel: int, stride: int, expansion: int, dropped: float) -> None:
        from torchvision.ops import StochasticDepth  # takes seconds to load

        super().__init__()
        inner = into * expansion
        self.expand = _activated(into, inner) if expansion > 1 else nn.Identity()
        self.depthwise = _activated(inner, inner, kernel, stride, groups=inner)
        self.project = nn.Sequential(_normed(inner, out))
        self.drop = StochasticDepth(dropped, "row") if stride == 1 and into == out else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(self.depthwise(self.expand(x)))
        return y if self.drop is None else self.drop(y) + x


class EfficientNetLite(nn.Module):
    """Stem, blocks, head convolution, mean over the map, dropout, last layer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = _activated(3, STEM, 3, 2)
        blocks: list[nn.Module] = []
        into, total = STEM, sum(repeats for repeats, *_ in BLOCKS)
        for repeats, kernel, stride, expansion, out in BLOCKS:
            for i in range(repeats):
                dropped = DROPPED_BLOCKS * len(blocks) / total
                blocks.append(InvertedResidual(into, out, kernel, stride if i == 0 else 1, expansion, dropped))
                into = out
        self.blocks = nn.Sequential(*blocks)
        self.head = _activated(into, FEATURES)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(DROPPED_FEATURES)
        self.classifier = nn.Linear(FEATURES, num_classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out")

    def forward(self, x: Tensor) -> Tensor:
        features = self.pool(self.head(self.blocks(self.stem(x)))).flatten(1)
        logits: Tensor = self.classifier(self.dropout(features))
        return logits
