"""Kernels compiled side by side: launches are asked for without being made, and are made again afterwards."""

from __future__ import annotations

import pytest
import torch

import toy

pytest.importorskip("triton")
from triton.runtime import _async_compile
from triton.runtime.jit import JITFunction

from fedentopt.simulation.triton.compiling import compiled_together
from fedentopt.simulation.triton.plain import PlainKernels
from fedentopt.simulation.triton.triton_kernels import TritonKernels

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_launches_are_compiled_by_other_threads_and_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, compiled = [], []

    def run(self: str, *arguments: object, grid: object, warmup: bool, **named: object) -> None:
        asked.append((self, arguments, grid, warmup, named))
        mode = _async_compile.active_mode.get()
        if warmup:
            mode.executor.submit(compiled.append, self)

    monkeypatch.setattr(JITFunction, "run", run)
    with compiled_together():
        JITFunction.run("kernel", 1, grid=(2,), warmup=False, num_warps=4)
        JITFunction.run("other", grid=(3,), warmup=False)
    assert asked == [("kernel", (1,), (2,), True, {"num_warps": 4}), ("other", (), (3,), True, {})]
    assert sorted(compiled) == ["kernel", "other"]
    assert JITFunction.run is run
    assert _async_compile.active_mode.get() is None


def test_a_failure_inside_leaves_nothing_behind() -> None:
    run = JITFunction.run
    with pytest.raises(torch.OutOfMemoryError), compiled_together():
        raise torch.OutOfMemoryError
    assert JITFunction.run is run
    assert _async_compile.active_mode.get() is None


@gpu
@pytest.mark.parametrize("model", ["lenet5", "toy:wide"])
def test_a_run_has_the_same_bits_as_with_kernels_compiled_one_by_one(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    data = toy.images(samples=120, size=32 if model == "lenet5" else 8)
    config = toy.config(model=model, stragglers=0.5)
    (together,) = toy.run([config], data, device="cuda", trainer="stacked")
    monkeypatch.setattr(TritonKernels, "compiling", PlainKernels.compiling)
    (one_by_one,) = toy.run([config], data, device="cuda", trainer="stacked")
    assert toy.difference(together, one_by_one) == 0
