"""Stacked kernels: the pieces of a training step of many small models, on CUDA in Triton, elsewhere in plain torch.

`ops(device)` picks; `interface.Kernels` documents every piece; `plain` is the reference; `compile_ahead` has what will
be launched compiled before. Triton is imported only where it runs. With TRITON_INTERPRET=1 its kernels run on the CPU,
one operation at a time, which is how they are tested.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os

import torch

from fedentopt.errors import InputError
from fedentopt.simulation.triton.ahead import compile_ahead, outline
from fedentopt.simulation.triton.interface import (
    AFTER_STEP,
    DEAD,
    EVERY,
    IN_GRADIENT,
    Kernels,
    Optimiser,
    WideForm,
)
from fedentopt.simulation.triton.plain import PlainKernels

__all__ = [
    "AFTER_STEP",
    "DEAD",
    "EVERY",
    "IN_GRADIENT",
    "Kernels",
    "Optimiser",
    "PlainKernels",
    "WideForm",
    "compile_ahead",
    "form_for",
    "ops",
    "outline",
    "runs_on",
    "wide_runs_on",
]

OLDEST_CAPABILITY = (8, 0)  # TF32 and bf16 tensor cores
WIDE_SHARED_MEMORY = 147456  # bytes of three stages of the largest tile
OLDEST_TRITON = (3, 6)  # the kernels keep tuples of tensors
GLUON_RUN = ((3, 6),)  # versions of Triton with which the kernels in Gluon have run; newer ones have only compiled them

HOPPER = (9, 0)  # the first to have the copy engine that descriptors are for
FORM_SHARED_MEMORY = 210_000  # bytes of the stages that forms with descriptors keep


def ops(
    device: torch.device | str, *, exact: bool = False, bf16: bool = False, form: WideForm | None = None
) -> Kernels:
    """The kernels for a device; `exact` keeps products at fp32's accuracy (no TF32), `bf16` rounds their operands."""
    if exact and bf16:
        raise InputError("precision: products cannot be exact and bf16 at once; accepted: one of the two, or neither")
    if not runs_on(torch.device(device)):
        return PlainKernels(bf16=bf16)
    from fedentopt.simulation.triton.triton_kernels import TritonKernels

    # Read when a kernel is compiled: a product and a sum are one operation. Triton 3.9 warns that 3.10 will round them
    # one by one unless told otherwise, which gives other bits.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    form = form or form_for(device)
    if form.gluon and not is_hopper(torch.device(device)):
        form = form._replace(gluon=False)  # its kernels are written for that chip's tensor cores
    return TritonKernels(exact=exact, bf16=bf16, wide=wide_runs_on(torch.device(device)), form=form)


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER[0]


def form_for(device: torch.device | str) -> WideForm:
    """The form of wide convolutions that is fastest there, as measured on an H200 (`benchmarks/wide_kernels.py`)."""
    place = torch.device(device)
    if place.type != "cuda" or torch.cuda.get_device_capability(place) < HOPPER:
        return WideForm()
    if torch.cuda.get_device_properties(place).shared_memory_per_block_optin < FORM_SHARED_MEMORY:
        return WideForm()
    return EVERY._replace(gluon=_triton_version() in GLUON_RUN)


def wide_runs_on(device: torch.device) -> bool:
    """Whether the kernels for wide convolutions run there: their tiles want more shared memory than small GPUs have."""
    if not runs_on(device):
        return False
    return device.type == "cpu" or (
        torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= WIDE_SHARED_MEMORY
    )


def runs_on(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    if importlib.util.find_spec("triton") is None or _triton_version() < OLDEST_TRITON:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton_version() -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
