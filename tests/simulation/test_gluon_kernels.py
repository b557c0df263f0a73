"""Kernels in Gluon against float64, run on the CPU (`gluon_on_cpu`); on a GPU `test_gpu_kernels.py` does the same."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from fedentopt.simulation.triton import wide_forms
from gluon_on_cpu import run_on_cpu
from wide_references import check_shared_taps, check_weights_moved

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tensors would lie on the GPU")
PRECISIONS = ["fp32", "bf16"]


@pytest.fixture
def gluon() -> wide_forms.GluonKernels:
    kernels = wide_forms.gluon_kernels()
    if kernels is None:
        pytest.skip("Triton's version has another Gluon")
    return kernels


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layer", [(64, 64, (3, 4)), (128, 128, (4, 8)), (64, 256, (3, 12))], ids=str)
def test_convolutions_that_share_what_taps_read(
    gluon: wide_forms.GluonKernels, layer: tuple[int, int, tuple[int, int]], precision: str, back: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert gluon.taps is not None
    run_on_cpu(gluon.taps, monkeypatch)
    check_shared_taps(gluon.taps, layer, precision, back, monkeypatch)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layer", [(128, 64, (3, 4), 64), (128, 128, (5, 8), 32), (256, 64, (2, 8), 64)], ids=str)
def test_weights_moved_by_their_gradients_line_by_line(
    gluon: wide_forms.GluonKernels, layer: tuple[int, int, tuple[int, int], int], precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert gluon.step_lines is not None
    run_on_cpu(gluon.step_lines, monkeypatch)
    check_weights_moved(gluon.step_lines.weight_step, layer, precision)


# What makes such a kernel wrong on a GPU now and then, and right in a run that does one thing after the other.
FAULTS = [
    ("step_lines", "multiply_stage", "stage + RING - CHUNKS - 1", "stage + RING - CHUNKS"),  # a slot given too early
    ("step_lines", "multiply_stage", "warpgroup_mma_wait(3", "warpgroup_mma_wait(6"),
    ("step_lines", "multiply_stage", "stage // RING % 2)", "(stage // RING + 1) % 2)"),  # of the phase before
    ("step_lines", "weight_step_kernel", "i // SLICES % 2", "0"),
    ("step_lines", "weight_step_kernel", "warpgroup_mma_wait(0", "warpgroup_mma_wait(1"),
    ("step_lines", "weight_step_kernel", "barrier()", "pass"),
    ("step_lines", "weight_step_kernel", "fence_async_shared()", "pass"),
    ("taps", "multiply_all", "warpgroup_mma_wait(2", "warpgroup_mma_wait(4"),
    ("taps", "multiply_all", "mbarrier.wait(maps_here.index(half), phase)", "pass"),
    ("taps", "multiply_all", "mbarrier.arrive(weights_free.index(3 * last + 2), count=1)", "pass"),  # nobody goes on
    ("taps", "bring_all", "mbarrier.wait(maps_free.index(half), before)", "pass"),
    ("taps", "bring_all", "((count + g) >> 1) & 1 ^ 1", "((count + g) >> 1) & 1"),
    ("taps", "bring_maps", "row + 64 * i", "row + 64 * i + 1"),
    ("taps", "convolution_kernel", "fence_async_shared()", "pass"),
]


@pytest.mark.parametrize(("kernel", "function", "right", "wrong"), FAULTS)
def test_faults_in_what_is_waited_for_are_found(
    gluon: wide_forms.GluonKernels, kernel: str, function: str, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: ModuleType = getattr(gluon, kernel)
    source = inspect.getsource(getattr(module, function).fn)
    assert right in source
    made: dict[str, object] = {}
    exec(source[source.index("def ") :].replace(right, wrong), vars(module), made)
    run_on_cpu(module, monkeypatch)
    monkeypatch.setattr(module, function, getattr(module, function).changed(made[function]))
    if kernel == "taps":
        with pytest.raises(AssertionError):
            check_shared_taps(module, (128, 64, (3, 8)), "fp32", False, monkeypatch)
    else:
        with pytest.raises(AssertionError):
            check_weights_moved(module.weight_step, (128, 64, (3, 8), 64), "fp32")


def test_a_map_of_one_line_would_give_memory_back_too_early(
    gluon: wide_forms.GluonKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is why such maps do not fit."""
    lines = gluon.step_lines
    assert lines is not None
    run_on_cpu(lines, monkeypatch)
    with pytest.raises(AssertionError, match="while copies are on their way"):
        check_weights_moved(lines.weight_step, (128, 64, (1, 32), 64), "bf16")
