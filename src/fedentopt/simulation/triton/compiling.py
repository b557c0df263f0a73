"""Kernels compiled side by side, before the first of them is launched.

A kernel is compiled when it is first launched, one after the other: on a new machine some twenty seconds for LeNet-5,
in which one core works. Most of a compilation runs without Python's lock (MLIR's and LLVM's passes, and ptxas as a
process of its own), so threads share it out. The kernels and their settings are those of the launches themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
from triton.runtime.jit import JITFunction


@contextlib.contextmanager
def compiled_together() -> Iterator[None]:
    """Inside, a launch has its kernel compiled by another thread and launches nothing, so that what it would have
    written is undefined. When the block ends, all these kernels are ready; one that cannot be compiled is raised."""
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        return run(self, *arguments, grid=grid, warmup=True, **named)

    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
            yield
    finally:
        JITFunction.run = run
