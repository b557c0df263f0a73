"""What each choice in the stacked LeNet-5 step is worth on a CUDA device: whole steps with one choice undone at a time.

    python benchmarks/step_variants.py --out DIR [--models 10 30 100 270] [--check tf32 exact bf16]

Kernels are checked against float64, the step on two streams against the step on one (bit for bit), every tile setting
against the default. Steps and kernels are timed in CUDA graphs; times are medians in microseconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernels as bench
import torch
from torch import Tensor

from fedentopt.models import build
from fedentopt.simulation.kernels import convolution, convolution_input_grad, convolution_weight_grad, linear
from fedentopt.simulation.kernels.stacked import TritonKernels
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.stacked_model import LoweredNet, lower

FT, WT = convolution.ForwardTiles, convolution_weight_grad.WeightTiles
IT, LT = convolution_input_grad.InputTiles, linear.LinearTiles
Tiles = dict[str, Any]  # by kernel ("conv1 forward"), None or missing for the default
BATCH = 64

FOLD_EIGHT = {"conv1 weight grad": WT(programs=528, fold=8), "conv2 weight grad": WT(programs=528, fold=8)}
MANY_PARTS = {"conv1 weight grad": WT(programs=2112), "conv2 weight grad": WT(programs=1056)}
OLD_PARTS = {"conv1 weight grad": WT(programs=2112, fold=8), "conv2 weight grad": WT(programs=1056, fold=8)}
WHOLE_INPUT = {"conv2 input grad": IT()}
OLD_FORWARD = {"conv1 forward": FT(64, 8, 32, 4), "conv2 forward": FT(128, 2, 32, 4)}
OLD_LINEAR_WEIGHTS = {"fc1 weight grad": LT(64, 64, 32, 4, 1), "fc2 weight grad": LT(32, 32, 64, 4, 1),
                      "fc3 weight grad": LT(32, 32, 64, 4, 1)}  # fmt: skip
OLD_LINEAR_INPUTS = {f"{name} input grad": LT(32, 64, 32, 4, 3) for name in bench.LINEAR}
AHEAD = {"conv1 weight grad": WT(programs=528, ahead=True), "conv2 weight grad": WT(programs=528, ahead=True)}
AHEAD_MANY = {"conv1 weight grad": WT(programs=2112, ahead=True), "conv2 weight grad": WT(programs=1056, ahead=True)}

# name -> tiles, streams, least and most models it makes sense for
STEPS: dict[str, tuple[Tiles, int, int, int]] = {
    "default": ({}, 2, 0, 10**6),
    "one stream": ({}, 1, 0, 10**6),
    "forward tiles as for many": (OLD_FORWARD, 2, 0, 99),
    "as many parts as before": (MANY_PARTS, 2, 0, 63),
    "fold eight at once": (FOLD_EIGHT, 2, 0, 63),
    "linear weight grads not in fours": (OLD_LINEAR_WEIGHTS, 2, 0, 10**6),
    "linear input grads not in fours": (OLD_LINEAR_INPUTS, 2, 0, 10**6),
    "conv2 input grad not in halves": (WHOLE_INPUT, 2, 0, 18),
    "all undone": (OLD_FORWARD | OLD_PARTS | WHOLE_INPUT | OLD_LINEAR_WEIGHTS | OLD_LINEAR_INPUTS, 1, 0, 10**6),
    "+ read ahead, one wave": (AHEAD, 2, 0, 99),
    "+ read ahead, many parts": (AHEAD_MANY, 2, 64, 10**6),
}
SINGLES: dict[str, list[Any]] = {
    "conv1 forward": [FT(64, 8, 32, 4), FT(64, 4, 32, 4), FT(64, 2, 32, 8)],
    "conv2 forward": [FT(128, 2, 32, 4), FT(64, 1, 32, 8), FT(128, 1, 32, 4)],
    "conv1 weight grad": [MANY_PARTS["conv1 weight grad"], FOLD_EIGHT["conv1 weight grad"], AHEAD["conv1 weight grad"],
                          AHEAD_MANY["conv1 weight grad"], WT(programs=264)],
    "conv2 weight grad": [MANY_PARTS["conv2 weight grad"], FOLD_EIGHT["conv2 weight grad"], AHEAD["conv2 weight grad"],
                          AHEAD_MANY["conv2 weight grad"], WT(programs=264)],
    "conv2 input grad": [IT(), IT(halves=2), IT(64, 8)],
    "fc1 forward": [LT(64, 16, 64, 4, 3), LT(64, 32, 128, 4, 2), LT(32, 16, 128, 4, 2)],
    "fc1 weight grad": [LT(64, 64, 32, 4, 1), LT(64, 64, 32, 4, 1, True), LT(32, 64, 64, 4, 1, True)],
    "fc2 weight grad": [LT(32, 32, 64, 4, 1), LT(64, 64, 64, 4, 1, True)],
    "fc1 input grad": [LT(32, 64, 32, 4, 3), LT(64, 64, 64, 4, 1, True), LT(64, 64, 32, 4, 1, True)],
    "fc2 input grad": [LT(32, 64, 32, 4, 3), LT(64, 64, 64, 4, 1, True)],
}  # fmt: skip


class Chosen(bench.Tuned):
    """The kernels in TF32 with the given tiles."""

    def __init__(self, tiles: Tiles) -> None:
        names = [
            f"{k} {what}" for k in (*bench.LAYERS, *bench.LINEAR) for what in ("forward", "weight grad", "input grad")
        ]
        super().__init__(bench.products_of("tf32"), dict.fromkeys(names) | tiles)


class OneStream:
    """In place of the net's SideStream."""

    def fork(self, x: Tensor) -> Any:
        return nullcontext()

    def join(self, x: Tensor) -> None:
        pass


class Step:
    """The step as the stacked trainer makes it: gather, `LoweredNet.step`, optimiser."""

    def __init__(self, n: int, tiles: Tiles, streams: int) -> None:
        model = build("lenet5", 10, seed=0)
        layout = FlatLayout(model)
        self.kernels: TritonKernels = Chosen(tiles)
        blocks = lower(model, self.kernels.fuses_conv)
        assert blocks is not None
        self.net = LoweredNet(blocks, layout, self.kernels)
        if streams == 1:
            self.net._beside = OneStream()  # type: ignore[assignment]
        self.buffers = bench.Lenet(n, BATCH, 2)
        assert self.buffers.width == layout.parameter_width

    def __call__(self) -> None:
        b = self.buffers
        x, labels = self.kernels.gather_augment(b.images, b.labels, b.plan, b.keys, b.step, bench.TRANSFORM, b.n)
        self.net.step(b.w, b.g, x, labels, None, None)
        self.kernels.sgd_update(b.w, b.v, b.g, n=b.n, start=b.start, step=b.step, **b.per_row)
        b.step.add_(1).remainder_(40)


def after(n: int, streams: int, steps: int) -> Tensor:
    """The parameters after some replayed steps: 20 of a graph of two."""
    step = Step(n, {}, streams)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        step()
    for _ in range(steps):
        graph.replay()
    torch.cuda.synchronize()
    return step.buffers.w


def case_set(n: int) -> dict[str, bench.Case]:
    """Every kernel on the tensors of a real step."""
    net = bench.Lenet(n, BATCH, 1)
    net.train_step(Chosen({}))
    return {case.name: case for case in bench.cases(net, bench.products_of("tf32"))}


Job = tuple[str, Any, int, int, str]  # kernel, tiles, models, batch, precision


def compile_jobs(models: list[int], precisions: list[str]) -> list[Job]:
    """All that the checks and the timings will need, slow ones first."""
    convolutions = ["conv2 input grad", "conv1 forward", "conv2 forward", "conv1 weight grad", "conv2 weight grad"]
    everything = [*convolutions, *(f"{k} {w}" for k in bench.LINEAR for w in ("forward", "weight grad", "input grad"))]
    jobs: list[Job] = []
    for name in everything:
        jobs += [(name, None, 3, batch, precision) for precision in precisions for batch in (BATCH, 50)]
        jobs += [(name, None, n, BATCH, "tf32") for n in (sorted({min(n, 100) for n in models}))]
    chosen = [item for tiles, *_ in STEPS.values() for item in tiles.items()]
    chosen += [(name, tiles) for name, several in SINGLES.items() for tiles in several]
    jobs += [(name, tiles, 10, BATCH, "tf32") for name, tiles in chosen]
    kept = {f"{job[:2]} {job[2] if job[0] in convolutions and job[1] is None else ''} {job[3:]}": job for job in jobs}
    return list(kept.values())


def compile_some(jobs: list[Job]) -> None:
    """Compile kernels in a process of its own, each on zeros of its shapes."""
    for job in jobs:
        try:
            compile_one(*job)
        except Exception as problem:
            print(f"{job}: {type(problem).__name__} {str(problem)[:100]}", flush=True)


def compile_one(name: str, tiles: Any, n: int, batch: int, precision: str) -> None:
    layer, what = name.split(" ", 1)
    settings = bench.products_of(precision) | {"tiles": tiles}
    flat = torch.zeros(n, 62012, device="cuda")
    if layer in bench.LAYERS:
        ci, co, k, side = bench.LAYERS[layer]
        pooled = (side - k + 1) // 2
        x = torch.zeros(n, batch, ci, side, side, device="cuda")
        dy = torch.zeros(n, batch, co, pooled, pooled, device="cuda")
        top = torch.zeros_like(dy, dtype=torch.uint8)
        w, b = flat[:, : co * ci * k * k].unflatten(1, (co, ci, k, k)), flat[:, :co]
        if what == "forward":
            convolution.forward(x, w, b, **settings)
        elif what == "weight grad":
            convolution_weight_grad.weight_grad(x, dy, top, w, b, **settings)
        else:
            convolution_input_grad.input_grad(dy, top, w, (side, side), **settings)
    else:
        inputs, outputs, relu = bench.LINEAR[layer]
        x, dy = torch.zeros(n, batch, inputs, device="cuda"), torch.zeros(n, batch, outputs, device="cuda")
        w, b = flat[:, : inputs * outputs].unflatten(1, (outputs, inputs)), flat[:, :outputs]
        if what == "forward":
            linear.forward(x, w, b, relu, **settings)
        elif what == "weight grad":
            linear.weight_grad(x, dy, w, b, **settings)
        else:
            linear.input_grad(dy, w, None if layer == "fc1" else x, **settings)


def short(tiles: Any) -> str:
    """Tiles in a few characters: the fields that differ from the type's own defaults."""
    if tiles is None:
        return "default"
    defaults = type(tiles)()._asdict()
    return ",".join(f"{k}={v}" for k, v in tiles._asdict().items() if v != defaults[k]) or "plain"


def time_steps(models: list[int], report: dict[str, Any], said: Callable[[str], None]) -> None:
    said("whole steps, us (default against each choice undone; + is a choice added)")
    for n in models:
        times: dict[str, float] = {}
        for name, (tiles, streams, least, most) in STEPS.items():
            if least <= n <= most:
                times[name] = bench.time_us(Step(n, tiles, streams), calls=8 if n < 64 else 4, replays=15)
        times["default again"] = bench.time_us(Step(n, {}, 2), calls=8 if n < 64 else 4, replays=15)
        report["steps"][n] = times
        rate = n * BATCH / times["default"]
        said(f" N={n}: default {times['default']:.1f} ({rate:.2f} M samples/s)")
        for name, us in times.items():
            if name != "default":
                said(f"   {us:8.1f}  {us - times['default']:+8.1f}  {name}")


def time_singles(n: int, report: dict[str, Any], said: Callable[[str], None]) -> None:
    said(f"single kernels, N={n}, us")
    total = 0.0
    for name, case in case_set(n).items():
        wanted = [t.clone() for t in case.call(None)]
        rows = {"default": bench.time_us(lambda case=case: case.call(None), calls=20 if n < 64 else 10)}
        for tiles in SINGLES.get(name, []):
            off = max(bench.relative_error(o, w) for o, w in zip(case.call(tiles), wanted, strict=True))
            us = bench.time_us(lambda case=case, tiles=tiles: case.call(tiles), calls=20 if n < 64 else 10)
            rows[short(tiles) + ("" if off < 2e-3 else f" WRONG {off:.1e}")] = us
        total += rows["default"]
        report["singles"].setdefault(n, {})[name] = rows
        said(f"  {name:18} " + "  ".join(f"{k}: {v:.1f}" for k, v in rows.items()))
    said(f"  sum of the defaults {total:.1f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for log.txt and report.json")
    parser.add_argument("--models", nargs="*", type=int, default=[10, 30, 100, 270])
    parser.add_argument("--single", nargs="*", type=int, default=[10, 30, 100], help="models for single kernels")
    parser.add_argument("--check", nargs="*", choices=list(bench.PRECISIONS), default=["tf32"])
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    lines: list[str] = []
    report: dict[str, Any] = {"steps": {}, "singles": {}, "checks": [], "same": {}}

    def said(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        (options.out / "log.txt").write_text("\n".join(lines) + "\n")
        (options.out / "report.json").write_text(json.dumps(report, indent=1))

    jobs = compile_jobs(options.models, options.check)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        pool.map(compile_some, [jobs[i :: options.workers] for i in range(options.workers)], chunksize=1)
    said(f"{len(jobs)} compiled after {time.time() - begin:.0f} s")
    passed = True
    for precision in options.check:
        for row in (row for batch in (BATCH, 50) for row in bench.check(precision, batch)):
            report["checks"].append(row)
            passed &= row["passed"]
            if not row["passed"]:
                said(f"FAILED {precision} {row['kernel']} {row['errors']}")
    rows = report["checks"]
    said(f"{sum(r['passed'] for r in rows)} of {len(rows)} checks passed after {time.time() - begin:.0f} s")
    for n in options.models[:3]:
        one, two = after(n, 1, 20), after(n, 2, 20)
        same = bool(torch.equal(one, two)) and bool(one.isfinite().all())
        report["same"][n] = same
        passed &= same
        said(f"N={n}: 40 steps on two streams {'are' if same else 'ARE NOT'} bit for bit those on one")
    time_steps(options.models, report, said)
    said(f"after {time.time() - begin:.0f} s")
    for n in options.single:
        time_singles(n, report, said)
    said(f"{'passed' if passed else 'FAILED'}, done after {time.time() - begin:.0f} s")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
