"""Whether numbers of a model's forward reach Python: `if x.max() > 1`, or a shape that depends on them (`x[x > 0]`).

A step of such a model cannot be captured in a CUDA graph and replayed: what Python has made of the numbers of one batch
would be done to all. So it is where a mask says which rows of a tensor take another's values: a GPU counts them first.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ATTRIBUTE = "host_reads"
_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_LEAVING = {torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__array__}
_PUTTING = {torch.Tensor.__setitem__, torch.Tensor.index_put, torch.Tensor.index_put_}  # self, indices, value


class _Noting(TorchDispatchMode):
    """Notes whether an operation inside gives Python a number, or a tensor of a shape that numbers decide."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        reads = bool(_READING.intersection(func.tags))
        if func is torch.ops.aten.index.Tensor:  # of indices of its own, only masks count
            reads = _has_mask(args[1])
        self.reads |= reads
        return func(*args, **(kwargs or {}))


def _has_mask(indices: Sequence[Any]) -> bool:
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


class _NotingCalls(TorchFunctionMode):
    """Notes for what a GPU would be read, though the same on the CPU is no operation that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.reads |= func in _LEAVING
        if func in _PUTTING:
            indices, value, *_ = [*args, *(kwargs or {}).values()][1:]
            several = indices if isinstance(indices, tuple | list) else [indices]
            self.reads |= isinstance(value, torch.Tensor) and _has_mask(several)  # numbers of Python's take no counting
        return func(*args, **(kwargs or {}))


def note_host_reads(model: nn.Module, images: torch.Tensor) -> None:
    """Try `images` in training mode on a copy, and let the model tell (`host_reads`). Nothing is left of its draws."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _Noting() as operations, _NotingCalls() as calls:
        copy.deepcopy(model).train()(images)
    setattr(model, ATTRIBUTE, operations.reads or calls.reads)


def host_reads(model: nn.Module) -> bool:
    """Whether `note_host_reads` has found that numbers of the model reach Python."""
    return bool(vars(model).get(ATTRIBUTE))
