"""Fixtures for tests that run Triton kernels in its interpreter (a plugin: `pytest_plugins = ["interpreting"]`)."""

from __future__ import annotations

import math
from dataclasses import replace
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


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every load and store stays inside one of the launch's tensors: on a GPU, one outside may pass or end the process,
    depending on what lies there."""
    from triton.runtime import interpreter
    from triton.tools.tensor_descriptor import TensorDescriptor

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    begin, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    known: list[tuple[int, int]] = []

    def beginning(self: Any, arguments: Any, named: Any) -> Any:
        given = begin(self, arguments, named)
        known.clear()
        for value in (*given[0], *given[1].values()):
            tensor = value.base if isinstance(value, TensorDescriptor) else value
            if isinstance(tensor, Tensor) and tensor.numel():
                last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
                known.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
        return given

    def check(pointers: Any, mask: Any) -> None:
        wanted = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        if wanted.size:
            size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
            low, high = int(wanted.min()), int(wanted.max()) + size
            assert any(first <= low and high <= end for first, end in known), "outside every tensor of the launch"

    def loading(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        check(ptrs, mask)
        return load(self, ptrs, mask, *rest, **named)

    def storing(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        check(ptrs, mask)
        return store(self, ptrs, value, mask, *rest, **named)

    monkeypatch.setattr(executor, "_init_args_hst", beginning)
    monkeypatch.setattr(builder, "create_masked_load", loading)
    monkeypatch.setattr(builder, "create_masked_store", storing)


@pytest.fixture(autouse=True)
def overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its debug mode the interpreter works out for every whole number whether it overflows, half of its time,
    and tells nobody."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


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
