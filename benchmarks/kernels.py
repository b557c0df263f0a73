"""Check and time the stacked Triton kernels on a CUDA device, at LeNet-5's shapes.

    python benchmarks/kernels.py --out kernels.json [--variants] [--models 100] [--batch 64] [--precision tf32]

Every kernel is compared with its plain twin in float64 on fresh random input (relative error ||out - ref|| / ||ref||;
NaN never passes, gradients are poisoned first), then timed inside CUDA graphs: microseconds are medians over replays.
With `--variants` other tile settings are timed too. The last lines are the table; the JSON file holds everything.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import FIRST
from fedentopt.simulation.triton import (
    convolution,
    convolution_input_grad,
    convolution_weight_grad,
    gather,
    linear,
    loss,
    ops,
    update,
)
from fedentopt.simulation.triton.plain import PlainKernels
from fedentopt.simulation.triton.triton_kernels import TritonKernels

LAYERS = {"conv1": (3, 6, 5, 32), "conv2": (6, 16, 5, 14)}
LINEAR = {"fc1": (400, 120, True), "fc2": (120, 84, True), "fc3": (84, 10, False)}
LARGEST_ERROR = {"tf32": 2e-3, "exact": 2e-6, "bf16": 2e-2}
TRANSFORM = ImageTransform((0.49, 0.48, 0.45), (0.25, 0.24, 0.26), jitter=0.2, flip=0.5, grayscale=0.1)

Result = dict[str, Any]


@dataclass
class Case:
    """One kernel on one layer: how to call it (with optional tiles), what it must give, which tiles to try."""

    name: str
    call: Callable[[Any], tuple[Tensor, ...]]
    reference: Callable[[], tuple[Tensor, ...]] | None = None
    variants: list[Any] = field(default_factory=list)


class Lenet:
    """Flat buffers of n LeNet-5 models, a batch for each, and the intermediate tensors of one step."""

    def __init__(self, n: int, batch: int, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device="cuda")

        self.n, self.batch = n, batch
        self.slots: dict[str, tuple[int, tuple[int, ...], int]] = {}
        offset = 0
        for name, (ci, co, k, _) in LAYERS.items():
            offset = self._add(name, (co, ci, k, k), offset)
        for name, (inputs, outputs, _) in LINEAR.items():
            offset = self._add(name, (outputs, inputs), offset)
        self.width = offset
        self.w = normal(n, offset)
        for shape, at, size in ((s, o, math.prod(s)) for o, s, _ in self.slots.values()):
            self.w[:, at : at + size] /= math.sqrt(math.prod(shape[1:]) if len(shape) > 1 else 4.0)
        self.v, self.start = normal(n, offset), normal(n, offset)
        self.g = torch.zeros(n, offset, device="cuda")
        self.images = torch.randint(0, 256, (50000, 3, 32, 32), generator=generator, device="cuda", dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (50000,), generator=generator, device="cuda")
        self.plan = torch.randint(0, 50000, (40, n, batch), generator=generator, device="cuda", dtype=torch.int32)
        self.plan[:, :, -3:] = -1
        self.keys = torch.randint(-(2**62), 2**62, (n,), generator=generator, device="cuda")
        self.step = torch.zeros(1, dtype=torch.int64, device="cuda")
        rows = torch.arange(n, device="cuda")
        self.per_row = {
            "lr": torch.full((n,), 1e-3, device="cuda"), "momentum": torch.full((n,), 0.9, device="cuda"),
            "weight_decay": torch.full((n,), 5e-4, device="cuda"), "mu": torch.where(rows % 9 == 0, 1e-4, 0.0),
            "start_row": rows.to(torch.int32), "steps": torch.full((n,), 10**6, dtype=torch.int32, device="cuda"),
        }  # fmt: skip
        self.kept: dict[str, Tensor] = {}

    def _add(self, name: str, shape: tuple[int, ...], offset: int) -> int:
        for part, size in ((name + ".w", shape), (name + ".b", shape[:1])):
            self.slots[part] = (offset, size, math.prod(size))
            offset += -(-math.prod(size) // 4) * 4
        return offset

    def view(self, buffer: Tensor, name: str) -> Tensor:
        offset, shape, size = self.slots[name]
        return buffer[:, offset : offset + size].view(buffer.shape[0], *shape)

    def train_step(self, k: Any, side: torch.cuda.Stream | None = None) -> None:
        """One whole step, keeping what the single cases need; weight gradients on a stream of their own if given."""
        t = self.kept
        main = torch.cuda.current_stream()

        def beside() -> Any:
            if side is None:
                return contextlib.nullcontext()
            side.wait_stream(main)
            return torch.cuda.stream(side)

        t["x"], t["labels"] = k.gather_augment(
            self.images, self.labels, self.plan, self.keys, self.step, TRANSFORM, self.n
        )
        h = t["x"]
        for name in LAYERS:
            t[name + ".in"] = h
            h, t[name + ".max"] = k.conv_relu_pool_forward(
                h, self.view(self.w, name + ".w"), self.view(self.w, name + ".b")
            )
        h = h.view(self.n, self.batch, -1)
        for name, (_, _, relu) in LINEAR.items():
            t[name + ".in"] = h
            h = k.linear_forward(h, self.view(self.w, name + ".w"), self.view(self.w, name + ".b"), relu)
        t["logits"] = h
        d, _ = k.softmax_xent_grad(h, t["labels"])
        for name in reversed(LINEAR):
            t[name + ".dy"] = d
            with beside():
                k.linear_weight_grad(t[name + ".in"], d, self.view(self.g, name + ".w"), self.view(self.g, name + ".b"))
            d = k.linear_input_grad(d, self.view(self.w, name + ".w"), None if name == "fc1" else t[name + ".in"])
        for name in reversed(LAYERS):
            d = d.view(t[name + ".max"].shape)
            t[name + ".dy"] = d
            with beside():
                dw, db = self.view(self.g, name + ".w"), self.view(self.g, name + ".b")
                k.conv_relu_pool_weight_grad(t[name + ".in"], d, t[name + ".max"], dw, db)
            if name == "conv2":
                d = k.conv_relu_pool_input_grad(d, t[name + ".max"], self.view(self.w, name + ".w"), (14, 14))
        if side is not None:
            main.wait_stream(side)
        k.sgd_update(self.w, self.v, self.g, n=self.n, start=self.start, step=self.step, **self.per_row)
        self.step.add_(1).remainder_(40)


def cases(net: Lenet, products: dict[str, Any]) -> list[Case]:
    """Every kernel at every layer it runs on in LeNet-5, with the tiles worth trying."""
    plain = PlainKernels(bf16=products["bf16"])
    t = net.kept
    found: list[Case] = []

    def double(*tensors: Tensor) -> list[Tensor]:
        return [x.double() for x in tensors]

    for name, (_, _, _, side) in LAYERS.items():
        x, dy, top = t[name + ".in"], t[name + ".dy"], t[name + ".max"]
        w, b = net.view(net.w, name + ".w"), net.view(net.w, name + ".b")

        def forward(tiles: Any, x: Tensor = x, w: Tensor = w, b: Tensor = b) -> tuple[Tensor, ...]:
            return convolution.forward(x, w, b, **products, tiles=tiles)[:1]

        def forward_reference(x: Tensor = x, w: Tensor = w, b: Tensor = b) -> tuple[Tensor, ...]:
            return plain.conv_relu_pool_forward(*double(x, w, b))[:1]

        def weights(
            tiles: Any, x: Tensor = x, dy: Tensor = dy, top: Tensor = top, name: str = name
        ) -> tuple[Tensor, ...]:
            dw, db = net.view(net.g, name + ".w"), net.view(net.g, name + ".b")
            convolution_weight_grad.weight_grad(x, dy, top, dw, db, **products, tiles=tiles)
            return dw, db

        def weights_reference(
            x: Tensor = x, dy: Tensor = dy, top: Tensor = top, w: Tensor = w, b: Tensor = b
        ) -> tuple[Tensor, ...]:
            dw, db = torch.empty(w.shape, **F64), torch.empty(b.shape, **F64)
            plain.conv_relu_pool_weight_grad(*double(x, dy), top, dw, db)
            return dw, db

        found.append(Case(f"{name} forward", forward, forward_reference, FORWARD_TILES[name]))
        found.append(Case(f"{name} weight grad", weights, weights_reference, WEIGHT_TILES[name]))
        if name == "conv2":
            found.append(Case(
                "conv2 input grad",
                lambda tiles, dy=dy, top=top, w=w, side=side: (
                    convolution_input_grad.input_grad(dy, top, w, (side, side), **products, tiles=tiles),
                ),
                lambda dy=dy, top=top, w=w, side=side: (
                    plain.conv_relu_pool_input_grad(dy.double(), top, w.double(), (side, side)),
                ),
                INPUT_TILES,
            ))  # fmt: skip
    for name, (_, _, relu) in LINEAR.items():
        x, dy = t[name + ".in"], t[name + ".dy"]
        w, b = net.view(net.w, name + ".w"), net.view(net.w, name + ".b")
        mask = None if name == "fc1" else x

        def linear_weights(tiles: Any, x: Tensor = x, dy: Tensor = dy, name: str = name) -> tuple[Tensor, ...]:
            dw, db = net.view(net.g, name + ".w"), net.view(net.g, name + ".b")
            linear.weight_grad(x, dy, dw, db, **products, tiles=tiles)
            return dw, db

        def linear_weights_reference(
            x: Tensor = x, dy: Tensor = dy, w: Tensor = w, b: Tensor = b
        ) -> tuple[Tensor, ...]:
            dw, db = torch.empty(w.shape, **F64), torch.empty(b.shape, **F64)
            plain.linear_weight_grad(*double(x, dy), dw, db)
            return dw, db

        found.append(Case(
            f"{name} forward",
            lambda tiles, x=x, w=w, b=b, relu=relu: (linear.forward(x, w, b, relu, **products, tiles=tiles),),
            lambda x=x, w=w, b=b, relu=relu: (plain.linear_forward(*double(x, w, b), relu),),
            LINEAR_FORWARD_TILES,
        ))  # fmt: skip
        found.append(Case(f"{name} weight grad", linear_weights, linear_weights_reference, LINEAR_WEIGHT_TILES))
        found.append(Case(
            f"{name} input grad",
            lambda tiles, dy=dy, w=w, mask=mask: (linear.input_grad(dy, w, mask, **products, tiles=tiles),),
            lambda dy=dy, w=w, mask=mask: (
                plain.linear_input_grad(*double(dy, w), None if mask is None else mask.double()),
            ),
            LINEAR_INPUT_TILES,
        ))  # fmt: skip
    found.append(Case(
        "gather + augment",
        lambda tiles: gather.gather_augment(
            net.images, net.labels, net.plan, net.keys, net.step, TRANSFORM, net.n, **(tiles or {})
        )[:1],
        lambda: plain.gather_augment(net.images, net.labels, net.plan, net.keys, net.step, TRANSFORM, net.n)[:1],
        GATHER_TILES,
    ))  # fmt: skip
    found.append(Case(
        "softmax + loss",
        lambda tiles: loss.softmax_xent_grad(t["logits"], t["labels"], None, None),
        lambda: plain.softmax_xent_grad(t["logits"].double(), t["labels"]),
    ))  # fmt: skip
    old_w, old_v, grads = net.w.clone(), net.v.clone(), torch.randn_like(net.w)

    def sgd(tiles: Any) -> tuple[Tensor, ...]:
        update.sgd_update(old_w, old_v, grads, n=net.n, start=net.start, step=net.step, **net.per_row, **(tiles or {}))
        return old_w, old_v

    def sgd_reference() -> tuple[Tensor, ...]:
        w, v = net.w.double(), net.v.double()
        plain.sgd_update(w, v, grads.double(), n=net.n, start=net.start.double(), step=net.step, **net.per_row)
        return w, v

    found.append(Case("optimiser", sgd, sgd_reference, UPDATE_TILES))
    return found


F64 = {"dtype": torch.float64, "device": "cuda"}
FT, WT = convolution.ForwardTiles, convolution_weight_grad.WeightTiles
IT, LT = convolution_input_grad.InputTiles, linear.LinearTiles
FORWARD_TILES = {
    "conv1": [FT(64, 8, 32, 4), FT(64, 8, 16, 4, None, 2), FT(64, 8, 32, 4, None, 2), FT(64, 8, 16, 4, None, 2, 2),
              FT(64, 4, 16, 4, None, 2),
              FT(64, 14, 16, 4, None, 2), FT(128, 4, 16, 4, None, 2), FT(64, 7, 64, 4)],
    "conv2": [FT(128, 2, 32, 4), FT(64, 5, 64, 4), FT(64, 5, 32, 4, None, 2), FT(64, 5, 64, 4, None, 2),
              FT(64, 3, 32, 4, None, 2), FT(64, 2, 32, 4), FT(128, 1, 32, 4), FT(128, 2, 64, 4), FT(64, 2, 64, 4),
              FT(128, 3, 32, 4)],
}  # fmt: skip
WEIGHT_TILES = {name: [WT(stages=2), WT(registers=128), WT(registers=168), WT(rows=128)] for name in LAYERS}
INPUT_TILES = [IT(64, 4), IT(64, 4, 2), IT(128, 8), IT(128, 4)]
LINEAR_FORWARD_TILES = [LT(64, 128, 32, 4, 3), LT(64, 32, 32, 4, 3), LT(64, 64, 32, 4, 4), LT(64, 32, 64, 4, 2)]
LINEAR_WEIGHT_TILES = [
    LT(64, 64, 64, 4, 1, True), LT(64, 64, 32, 4, 1, True), LT(32, 64, 64, 4, 1, True), LT(32, 32, 64, 4, 1, True),
    LT(64, 64, 32, 4, 1), LT(32, 32, 64, 4, 1), LT(32, 64, 32, 4, 2), LT(64, 128, 64, 8, 1),
]  # fmt: skip
LINEAR_INPUT_TILES = [
    LT(64, 32, 64, 4, 1, True), LT(64, 64, 64, 4, 1, True), LT(64, 64, 32, 4, 1, True), LT(32, 64, 64, 4, 1, True),
    LT(32, 64, 32, 4, 3), LT(32, 128, 32, 4, 3), LT(64, 64, 32, 4, 1), LT(64, 32, 32, 4, 3),
]  # fmt: skip
GATHER_TILES = [{"block": 512}, {"block": 512, "warps": 2}, {"block": 256, "warps": 1}]
UPDATE_TILES = [{"block": 2048, "warps": 8}]


class Tuned(TritonKernels):
    """The kernels with the tiles that were fastest here, by case name."""

    def __init__(self, products: dict[str, Any], tiles: dict[str, Any]) -> None:
        super().__init__(exact=products["precision"] != "tf32", bf16=products["bf16"])
        self.products, self.tiles = products, tiles

    def _linear(self, w: Tensor, what: str) -> Any:
        return self.tiles[next(f"{k} {what}" for k, (i, o, _) in LINEAR.items() if (o, i) == tuple(w.shape[1:3]))]

    def _conv(self, in_channels: int, what: str) -> Any:
        return self.tiles[next(f"{k} {what}" for k, sizes in LAYERS.items() if sizes[0] == in_channels)]

    def conv_relu_pool_forward(self, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return convolution.forward(x, w, b, **self.products, tiles=self._conv(x.shape[2], "forward"))

    def conv_relu_pool_weight_grad(self, x: Tensor, dy: Tensor, argmax: Tensor, dw: Tensor, db: Tensor) -> None:
        tiles = self._conv(x.shape[2], "weight grad")
        convolution_weight_grad.weight_grad(x, dy, argmax, dw, db, **self.products, tiles=tiles)

    def conv_relu_pool_input_grad(self, dy: Tensor, argmax: Tensor, w: Tensor, size: tuple[int, int]) -> Tensor:
        tiles = self._conv(w.shape[2], "input grad")
        return convolution_input_grad.input_grad(dy, argmax, w, size, **self.products, tiles=tiles)

    def linear_forward(self, x: Tensor, w: Tensor, b: Tensor, relu: bool = False) -> Tensor:
        return linear.forward(x, w, b, relu, **self.products, tiles=self._linear(w, "forward"))

    def linear_weight_grad(self, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor) -> None:
        linear.weight_grad(x, dy, dw, db, **self.products, tiles=self._linear(dw, "weight grad"))

    def linear_input_grad(self, dy: Tensor, w: Tensor, relu_of: Tensor | None = None) -> Tensor:
        return linear.input_grad(dy, w, relu_of, **self.products, tiles=self._linear(w, "input grad"))


def relative_error(out: Tensor, reference: Tensor) -> float:
    return float((out.double() - reference).norm() / reference.norm())


def time_us(call: Callable[[], Any], calls: int = 10, replays: int = 7) -> float:
    """Median over replays of a CUDA graph that holds `calls` calls, per call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(priority=FIRST)):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    """Device microseconds per kernel name over one call, by torch's profiler: times in the company they keep."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    return {e.key[:60]: e.self_device_time_total / 5 for e in trace.key_averages() if e.self_device_time_total > 0}


def compile_some(job: tuple[list[tuple[str, int | None]], dict[str, Any], int]) -> None:
    """Compile kernels in a process of its own, so that compiling many takes the time of the slowest."""
    wanted, products, batch = job
    net = Lenet(1, batch, 0)
    net.train_step(ops("cuda", **PRECISIONS["tf32"]))
    by_name = {case.name: case for case in cases(net, products)}
    for name, variant in wanted:
        case = by_name[name]
        try:
            case.call(None if variant is None else case.variants[variant])
        except Exception as problem:
            print(f"{name} {variant}: {type(problem).__name__} {str(problem)[:100]}", flush=True)
    torch.cuda.synchronize()


PRECISIONS: dict[str, dict[str, bool]] = {"tf32": {}, "exact": {"exact": True}, "bf16": {"bf16": True}}


def products_of(precision: str) -> dict[str, Any]:
    return {"bf16": precision == "bf16", "precision": "tf32x3" if precision == "exact" else "tf32"}


def check(precision: str, batch: int) -> list[Result]:
    """Every kernel against float64 on fresh input."""
    net = Lenet(3, batch, int.from_bytes(os.urandom(4), "little"))
    net.train_step(ops("cuda", **PRECISIONS[precision]))
    results = []
    for case in cases(net, products_of(precision)):
        if case.reference is None:
            continue
        wanted = case.reference()
        net.g.fill_(float("nan"))
        errors = [relative_error(o, r) for o, r in zip(case.call(None), wanted, strict=True)]
        results.append({"kernel": case.name, "precision": precision, "errors": errors,
                        "passed": all(e < LARGEST_ERROR[precision] for e in errors)})  # fmt: skip
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for all numbers")
    parser.add_argument("--models", type=int, default=100, help="models side by side for the single kernels")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--precision", choices=list(PRECISIONS), default="tf32")
    parser.add_argument("--check", nargs="*", choices=list(PRECISIONS), default=list(PRECISIONS), help="what to check")
    parser.add_argument("--steps", nargs="*", type=int, default=[10, 30, 100, 270, 714], help="stacks for whole steps")
    parser.add_argument("--variants", action="store_true", help="time other tile settings too")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    options = parser.parse_args()
    begin = time.time()
    products = products_of(options.precision)
    wanted: list[tuple[str, int | None]] = []
    small = Lenet(1, options.batch, 0)
    small.train_step(ops("cuda", **PRECISIONS[options.precision]))
    for case in cases(small, products):
        wanted += [(case.name, i) for i in range(len(case.variants) if options.variants else 0)]
    if wanted and options.workers > 1:
        jobs = [(wanted[i :: options.workers], products, options.batch) for i in range(options.workers)]
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            pool.map(compile_some, jobs, chunksize=1)
    print(f"compiled after {time.time() - begin:.0f} s", flush=True)
    report: Result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "models": options.models,
                      "batch": options.batch, "precision": options.precision}  # fmt: skip
    report["checks"] = [row for p in options.check for batch in (options.batch, 50) for row in check(p, batch)]
    print(f"checked after {time.time() - begin:.0f} s", flush=True)
    net = Lenet(options.models, options.batch, 1)
    kernels = ops("cuda", **PRECISIONS[options.precision])
    net.train_step(kernels)
    report["kernels"] = []
    fastest: dict[str, Any] = {}
    for case in cases(net, products):
        rows = {"default": time_us(lambda case=case: case.call(None))}
        for variant in case.variants if options.variants else []:
            try:
                rows[str(variant)] = time_us(lambda case=case, variant=variant: case.call(variant))
            except Exception as problem:
                print(f"{case.name} {variant}: {type(problem).__name__} {str(problem)[:100]}", flush=True)
        report["kernels"].append({"kernel": case.name, "microseconds": rows})
        best = min(rows, key=lambda r: rows[r])
        fastest[case.name] = next((v for v in case.variants if str(v) == best), None)
        print(f"{case.name}: default {rows['default']:.1f}, best {rows[best]:.1f} {best}", flush=True)
        if options.variants:
            print("    " + "  ".join(f"{k}: {v:.1f}" for k, v in sorted(rows.items(), key=lambda r: r[1])), flush=True)
    if options.variants:
        kernels = Tuned(products, fastest)
    report["in the step"] = kernel_times(lambda: net.train_step(kernels))
    report["steps"] = []
    for n in options.steps:
        whole = Lenet(n, options.batch, 2)
        for side in (None, torch.cuda.Stream()):
            us = time_us(lambda whole=whole, side=side: whole.train_step(kernels, side), calls=4)
            rate = n * options.batch / us * 1e6
            report["steps"].append({"models": n, "streams": 1 if side is None else 2, "microseconds": us,
                                    "samples_per_s": rate})  # fmt: skip
        del whole
    report["seconds"] = time.time() - begin
    options.out.write_text(json.dumps(report, indent=1))
    print_table(report)
    return 0 if all(row["passed"] for row in report["checks"]) else 1


def print_table(report: Result) -> None:
    for row in report["checks"]:
        mark = "" if row["passed"] else "  FAILED"
        print(f"{row['kernel']:20} {row['precision']:6} error " + " ".join(f"{e:.1e}" for e in row["errors"]) + mark)
    print(f"\nkernels in the step, {report['models']} models, batch {report['batch']}, microseconds")
    for name, us in sorted(report["in the step"].items(), key=lambda item: -item[1]):
        print(f"  {us:8.1f}  {name}")
    print(f"  {sum(report['in the step'].values()):8.1f}  sum")
    for row in report["steps"]:
        rate = row["samples_per_s"] / 1e6
        print(f"step of {row['models']:4} models, {row['streams']} streams: {row['microseconds']:8.1f} us, "
              f"{rate:.2f} M samples/s")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
