"""Compiling the CPU kernels with numba, and keeping the result for the next process.

No flag here lets the compiler assume that a value is finite: a client that diverges must be seen to diverge.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

# Some releases of numba carry annotations and some do not, none for what is used here.
numba: Any = import_module("numba")

if numba.config.DISABLE_JIT:
    raise ImportError("numba is told not to compile (NUMBA_DISABLE_JIT)")

P = ParamSpec("P")
R = TypeVar("R")
OPTIONS: dict[str, Any] = {
    "nogil": True,
    "fastmath": {"contract"},  # a product and a sum may become one instruction
    "error_model": "numpy",
}


def inner(function: Callable[P, R]) -> Callable[P, R]:
    """A kernel that other kernels call; compiled as part of them."""
    compiled: Callable[P, R] = numba.njit(**OPTIONS)(function)
    return compiled


def part(function: Callable[P, R]) -> Callable[P, R]:
    """A piece of a kernel under a name of its own: becomes code of its one caller, which compiles faster."""
    inlined: Callable[P, R] = numba.njit(**OPTIONS, inline="always")(function)
    return inlined


def entry(signature: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A kernel that Python calls: compiled at once for `signature`, or read from numba's cache on disk.

    Where no folder can be written, it is compiled anew in every process.
    """

    def compile_(function: Callable[P, R]) -> Callable[P, R]:
        # numba knows a cached function by its own file alone; the name carries what it calls as well.
        function.__qualname__ = f"{function.__qualname__}_{_fingerprint():08x}"
        try:
            compiled: Callable[P, R] = numba.njit(signature, **OPTIONS, cache=True)(function)
        except (RuntimeError, OSError):
            compiled = numba.njit(signature, **OPTIONS)(function)
        return compiled

    return compile_


def _fingerprint() -> int:
    """Of all sources in this folder."""
    value = 0
    for path in sorted(Path(__file__).parent.glob("*.py")):
        value = zlib.crc32(path.read_bytes(), value)
    return value
