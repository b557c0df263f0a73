"""Check and time VGG-11 on the wide convolution kernels of a CUDA device.

    python benchmarks/wide_step.py [--out wide.json] [--models 10 40 120] [--batch 64]

The gradients of three models are compared with float64 autograd on fresh random input, beside those of cuDNN (relative
error ||out - ref|| / ||ref||, the worst of three models; NaN never passes). Most of it is the same for both: a sum
close to zero that rounding turns around switches a ReLU, and with it everything behind; even in exact fp32 that makes
some 1e-3, without it 1e-6 is left. Exact fp32 passes up to 1e-2, TF32 and bf16 up to twice cuDNN's error. Then forward
and backward of whole stacks are timed inside a CUDA graph (median of replays), kernel by kernel for the largest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fedentopt.models import build
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers.wide_blocks import wide_blocks
from fedentopt.simulation.trainers.wide_net import WideNet
from fedentopt.simulation.triton import ops

PRECISIONS: dict[str, dict[str, bool]] = {"fp32-exact": {"exact": True}, "tf32": {}, "bf16": {"bf16": True}}
REPEATS = 9

model = build("vgg11", 10, seed=0)
layout = FlatLayout(model, channels_last=True)


def wide(precision: str) -> WideNet:
    blocks = wide_blocks(model, 32)
    assert blocks is not None
    return WideNet(blocks, layout, ops("cuda", **PRECISIONS[precision]))


def autograd(rows: Tensor, i: int, x: Tensor, y: Tensor, precision: str) -> dict[str, Tensor]:
    """The gradients of model i through torch; precision as above, or float64."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    leaves = {name: view[i].to(dtype).requires_grad_() for name, view in layout.parameter_views(rows).items()}
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        logits = functional_call(model.cuda().to(dtype), leaves, (x[i].to(dtype),))
    loss = F.cross_entropy(logits.to(dtype), y[i])
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def check(batch: int) -> dict[str, dict[str, float]]:
    """Worst error over all parameters and models, ours and cuDNN's, by precision."""
    rows = torch.stack([layout.pack(build("vgg11", 10, seed=i).state_dict()) for i in range(3)]).cuda()
    x, y = torch.randn(3, batch, 3, 32, 32, device="cuda"), torch.randint(0, 10, (3, batch), device="cuda")
    exact = [autograd(rows, i, x, y, "float64") for i in range(3)]

    def worst(gradients: Callable[[int], dict[str, Tensor]]) -> float:
        errors = [
            float((gradient.double() - exact[i][name]).norm() / exact[i][name].norm())
            for i in range(3)
            for name, gradient in gradients(i).items()
        ]
        return max(errors) if all(e == e for e in errors) else float("nan")

    found = {}
    for precision in PRECISIONS:
        into = torch.full_like(rows, float("nan"))
        wide(precision).step(rows, into, x, y, None, None)
        views = layout.parameter_views(into)
        ours = worst(lambda i, views=views: {name: view[i] for name, view in views.items()})
        theirs = worst(lambda i, precision=precision: autograd(rows, i, x, y, precision))
        found[precision] = {"ours": ours, "cudnn": theirs}
        print(f"{precision:10s} largest error {ours:.1e}, cuDNN {theirs:.1e}", flush=True)
    return found


def time_steps(sizes: list[int], batch: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for precision in ("tf32", "bf16"):
        net = wide(precision)
        for n in sizes:
            rows = layout.pack(build("vgg11", 10, seed=0).state_dict()).cuda().repeat(n, 1)
            gradient = torch.zeros_like(rows)
            x, y = torch.randn(n, batch, 3, 32, 32, device="cuda"), torch.randint(0, 10, (n, batch), device="cuda")
            net.step(rows, gradient, x, y, None, None)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                net.step(rows, gradient, x, y, None, None)
            times = []
            for _ in range(REPEATS):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(1e3 * start.elapsed_time(end))
            middle = statistics.median(times)
            result: dict[str, Any] = {"precision": precision, "models": n, "microseconds": round(middle)}
            result["samples_per_s"] = round(n * batch / middle * 1e6)
            print(f"{precision} {n:4d} models: {middle:8.0f} us, {result['samples_per_s']:,} samples/s", flush=True)
            if n == max(sizes):
                with profile(activities=[ProfilerActivity.CUDA]) as seen:
                    graph.replay()
                    torch.cuda.synchronize()
                parts = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:10]
                result["kernels"] = {e.key[:60]: round(e.self_device_time_total) for e in parts}
                for name, spent in result["kernels"].items():
                    print(f"    {spent:8.0f} us  {name}")
            found.append(result)
            del graph, rows, gradient
            torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", type=int, nargs="+", default=[10, 40, 120])
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    torch.manual_seed(0)
    errors = check(options.batch)
    report = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "batch": options.batch,
        "errors": errors,
        "steps": time_steps(options.models, options.batch),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    if not errors["fp32-exact"]["ours"] < 1e-2:
        sys.exit("the exact gradients are off")
    if not all(e["ours"] < 2 * e["cudnn"] for name, e in errors.items() if name != "fp32-exact"):
        sys.exit("the gradients are further off than cuDNN's")


if __name__ == "__main__":
    main()
