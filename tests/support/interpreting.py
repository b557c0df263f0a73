"""Fixtures for tests that run Triton kernels in its interpreter (a plugin: `pytest_plugins = ["interpreting"]`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN (or 77), so an element that a kernel forgets to write cannot pass."""
    empty = torch.empty

    def poisoned(*size: object, **options: object) -> Tensor:
        out: Tensor = empty(*size, **options)  # type: ignore[call-overload]
        return out.fill_(math.nan if out.is_floating_point() else 77)

    def poisoned_like(x: Tensor) -> Tensor:
        return poisoned(x.shape, dtype=x.dtype)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", poisoned_like)
    torch.manual_seed(0)


@pytest.fixture
def bf16_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 as bits and multiplies the bits; give its product the numbers.

    It also cuts digits off where a GPU rounds, so operands should have none to lose.
    """
    from triton.runtime import interpreter

    product = interpreter.InterpreterBuilder.create_dot

    def of_numbers(self: object, a: Any, b: Any, *rest: object) -> object:
        assert a.data.dtype == b.data.dtype == np.uint16
        parts = [(x.data.astype(np.uint32) << 16).view(np.float32) for x in (a, b)]
        float32 = interpreter.tl.float32
        return product(self, *(interpreter.TensorHandle(part, float32) for part in parts), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", of_numbers)
