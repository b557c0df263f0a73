# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Gluon for Hopper GPUs, the part of Triton in which a program says itself what lies in shared memory and what it waits
for: what kernels written in it share, and one name for what its versions call differently.

Triton's interpreter does not know it (tests run these kernels as Python), and its names change: `wide_forms.GLUON` says
which versions of Triton compile them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

bring = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


def described(matrix: Tensor, *block: int) -> Any:
    """The descriptor of a tensor for tiles of this shape, whose lines lie as tensor cores want them."""
    kind = gl.bfloat16 if matrix.dtype == torch.bfloat16 else gl.float32
    layout = gl.NVMMASharedLayout.get_default_for(list(block), kind)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(block), layout)
