"""Compiled kernels for small convolutional nets on the CPU, where the loop trainer uses them.

`compiled_net` hands out a net, or None where the model does not fit (`plan.lowered` says which do) or numba, which
compiles them, is not installed. numba is imported only when a net is built, and keeps what it compiled on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.numba.plan import lowered

if TYPE_CHECKING:
    from fedentopt.simulation.numba.compiled_net import CompiledNet as CompiledNet


def compiled_net(model: nn.Module, layout: FlatLayout, image_size: tuple[int, int]) -> CompiledNet | None:
    """A net on the compiled kernels for images of this height and width, or None.

    The layout holds convolution weights channels last.
    """
    blocks = lowered(model, image_size)
    if blocks is None or not all(slot.channels_last for slot in layout.parameters if len(slot.shape) == 4):
        return None
    try:
        from fedentopt.simulation.numba.compiled_net import CompiledNet
    except ImportError:
        return None
    return CompiledNet(blocks, layout)
