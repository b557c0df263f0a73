"""Stacked kernels: the pieces of a training step of many small models, on CUDA in Triton, elsewhere in plain torch.

`ops(device)` picks; `interface.Kernels` documents every piece; `plain` is the reference.
"""

from __future__ import annotations

import torch

from fedentopt.simulation.kernels.interface import AFTER_STEP, DEAD, IN_GRADIENT, NO_CORRECTION, Kernels
from fedentopt.simulation.kernels.plain import PlainKernels

__all__ = ["AFTER_STEP", "DEAD", "IN_GRADIENT", "NO_CORRECTION", "Kernels", "PlainKernels", "ops"]


def ops(device: torch.device | str, *, exact: bool = False, bf16: bool = False) -> Kernels:
    """The kernels for a device; `exact` keeps products in full fp32 (no TF32), `bf16` rounds their operands."""
    return PlainKernels(bf16=bf16)
