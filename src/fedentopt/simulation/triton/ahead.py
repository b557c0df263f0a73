"""Kernels compiled side by side before the first of them is launched.

Triton compiles a kernel at its first launch, one after the other. Here the launches are rehearsed on outlines: tensors
that have a shape, strides and an alignment but no memory (torch's device "meta"), so that nothing reaches a device,
neither a kernel nor what torch does between them. Every launch has its kernel compiled by another thread and returns.
MLIR's and LLVM's passes run without Python's lock, ptxas and the C compiler (for the function that launches) as
processes, so the threads share the work out. What is compiled are the variants that the same calls launch afterwards.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch

ALIGNMENT = 16  # bytes: Triton compiles a variant for addresses that are multiples of so many

_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)
_one_at_a_time = threading.Lock()


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides, type and alignment, without memory."""
    offset = tensor.data_ptr() % ALIGNMENT // tensor.element_size()
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    room = torch.empty(offset + max(0, reach) + 1, dtype=tensor.dtype, device="meta")
    return room.as_strided(tensor.shape, tensor.stride(), offset)


def compile_ahead(rehearse: Callable[[], object]) -> None:
    """Have the kernels compiled that `rehearse` launches on outlines; they are ready when this returns.

    A kernel that cannot be compiled is left to its launch, which says why. Where Triton cannot compile in threads,
    nothing happens: kernels are then compiled when they are launched.
    """
    import triton
    from triton.runtime.jit import JITFunction

    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with _one_at_a_time, _Compilers(cores) as pool:
        launch = JITFunction.run

        def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
            # Other threads go on launching.
            return launch(self, *arguments, grid=grid, warmup=warmup or _rehearsing.get(), **named)

        JITFunction.run = run
        before = _rehearsing.set(True)
        try:
            with mode(pool, ignore_errors=True):
                rehearse()
        finally:
            _rehearsing.reset(before)
            JITFunction.run = launch


class _Compilers(ThreadPoolExecutor):
    """Threads that make a kernel ready to be loaded: Triton's own work, and the C function that launches it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(_with_launcher, fn, *args, **kwargs)


def _with_launcher(compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from triton.runtime import driver

    kernel = compiled(*args, **kwargs)
    launcher = getattr(driver.active, "launcher_cls", None)
    if launcher is not None:
        launcher(kernel.src, kernel.metadata)  # Triton keeps it on disk, where the launch finds it
    return kernel
