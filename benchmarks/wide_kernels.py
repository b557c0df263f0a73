"""Time every product of VGG-11's step on a CUDA device, in every form and with other tiles, layer by layer.

    python benchmarks/wide_kernels.py [--out wide.json] [--models 10 100] [--batch 64] [--seconds 220] [--steps-only]

First whole steps (forward, backward, optimiser) in every form (`WideForm`) and with other settings, checked against
the default form and timed inside CUDA graphs, with what a round does before its first step; then forward, input
gradient, weight gradient and weight step of every layer with other tiles. Rates are beside those that this GPU reaches
in an 8192 x 8192 x 8192 product, counted without the taps that fall outside a map.
What does not compile or gives something else is said and left out. Kernels are compiled by several processes first.
After `--seconds` nothing new is begun; the tables hold what there is.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from kernels import time_us

from fedentopt.models import build
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers.wide_blocks import wide_blocks
from fedentopt.simulation.trainers.wide_net import WideNet
from fedentopt.simulation.triton import WideForm, ops, wide, wide_descriptors, wide_maps, wide_update
from fedentopt.simulation.triton.interface import Optimiser
from fedentopt.simulation.triton.wide import WideTiles

FEW = {"calls": 3, "replays": 5}
LARGEST_SHARED = 227 * 1024  # bytes of shared memory of one program
PRECISIONS = ("tf32", "bf16")
ALL = {
    "tf32": WideForm(first=True, update=True, descriptors=True),
    "bf16": WideForm(first=True, update=True, untransposed=True, descriptors=True),
}
EVERY = {precision: form._replace(aside=True, joined=True) for precision, form in ALL.items()}


class Variant(NamedTuple):
    """A form, and what is set otherwise in the modules of `simulation.triton`, by "module.name"."""

    form: WideForm
    other: dict[str, int] = {}  # noqa: RUF012  (a default that nobody writes to)
    few_models: bool = True


def forms_of(precision: str) -> dict[str, Variant]:
    """Whole forms, then what each part brings by itself, then other settings of all parts together."""
    found = {"as it is": Variant(WideForm()), "every": Variant(EVERY[precision]), "all": Variant(ALL[precision])}
    for part in ("aside", "joined"):
        found[f"all, {part}"] = Variant(ALL[precision]._replace(**{part: True}))
    others = {"first layer in eight warps": {"wide_first.WARPS": 8}}
    if precision == "tf32":
        others["pool apart below 16"] = {"wide_pooled.NARROWEST": 16}
    return found | {
        f"every, {name}": Variant(EVERY[precision], set_, few_models=False) for name, set_ in others.items()
    }


FORMS = {precision: forms_of(precision) for precision in PRECISIONS}


@contextmanager
def set_otherwise(other: dict[str, int]) -> Iterator[None]:
    """With other settings in the kernels' modules."""
    places = {name: importlib.import_module("fedentopt.simulation.triton." + name.split(".")[0]) for name in other}
    before = {name: getattr(module, name.split(".")[1]) for name, module in places.items()}
    try:
        for name, module in places.items():
            setattr(module, name.split(".")[1], other[name])
        yield
    finally:
        for name, module in places.items():
            setattr(module, name.split(".")[1], before[name])


class Layer(NamedTuple):
    """A convolution of VGG-11 behind the first: channels in and out, side of its maps."""

    name: str
    inputs: int
    outputs: int
    side: int

    def flops(self) -> int:
        """Of one sample's product, taps inside the map only."""
        return 2 * self.inputs * self.outputs * (3 * self.side - 2) ** 2


LAYERS = [
    Layer("conv2", 64, 128, 16), Layer("conv3", 128, 256, 8), Layer("conv4", 256, 256, 8), Layer("conv5", 256, 512, 4),
    Layer("conv6", 512, 512, 4), Layer("conv7, 8", 512, 512, 2),
]  # fmt: skip
FLOPS_OF_A_STEP = 3 * (sum(layer.flops() for layer in LAYERS) + LAYERS[-1].flops()) + 2 * 2 * 1024 * 64 * 27


def rates() -> dict[str, float]:
    """FLOP/s of large products and bytes/s of a copy (read and written) on this GPU."""
    found = {}
    for precision, dtype in (("tf32", torch.float32), ("bf16", torch.bfloat16)):
        torch.backends.cuda.matmul.allow_tf32 = True
        a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
        found[precision] = 2 * 8192**3 / (1e-6 * time_us(lambda a=a, b=b: a @ b, **FEW))
    a = torch.randn(2**29, device="cuda")
    b = torch.empty_like(a)
    found["copy"] = 2 * 4 * 2**29 / (1e-6 * time_us(lambda: b.copy_(a), **FEW))
    return found


# Whole steps.


class Step:
    """A stack of n VGG-11 with all that a step needs."""

    def __init__(self, n: int, batch: int, precision: str, form: WideForm) -> None:
        torch.manual_seed(0)
        model = build("vgg11", 10, seed=0)
        self.layout = FlatLayout(model, channels_last=True)
        blocks = wide_blocks(model, 32)
        assert blocks is not None
        self.net = WideNet(blocks, self.layout, ops("cuda", bf16=precision == "bf16", form=form))
        row = self.layout.pack(model.state_dict()).cuda()
        p = self.layout.parameter_width
        w, v, g = (torch.zeros(n, -(-p // 32) * 32, device="cuda")[:, :p] for _ in range(3))
        w.copy_(row)

        def each(value: float) -> Tensor:
            return torch.full((n,), value, device="cuda")

        rows = torch.zeros(n, dtype=torch.int32, device="cuda")
        self.x = torch.randn(n, batch, 3, 32, 32, device="cuda")
        self.labels = torch.randint(0, 10, (n, batch), device="cuda")
        self.optimiser = Optimiser(
            w, v, g, each(0.01), each(0.9), each(5e-4), each(0.0), row[None].clone(), rows, rows + 10**6,
            torch.ones(1, dtype=torch.int64, device="cuda"), torch.zeros(1, p, device="cuda"), rows - 1, rows,
        )  # fmt: skip
        self.net.reserve(w)
        self.begin()

    def begin(self) -> None:
        """What a round does before its first step."""
        o = self.optimiser
        self.net.begin(o.start, o.start_row, o.w, o.v)

    def run(self) -> None:
        o = self.optimiser
        if self.net.updates:
            self.net.step(o.w, o.g, self.x, self.labels, None, None, None, o)
        else:
            self.net.step(o.w, o.g, self.x, self.labels, None, None)
            self.net.kernels.sgd_update(n=len(self.x), **o._asdict())


def is_lost(problem: Exception) -> bool:
    """Whether the device is of no more use to this process."""
    return "CUDA error" in str(problem) or "illegal" in str(problem)


def time_steps(precision: str, forms: list[str], models: list[int], batch: int, until: float, peak: dict[str, float]) \
        -> tuple[list[dict[str, Any]], list[str]]:  # fmt: skip
    """What was found, and the forms that are left after one has lost the device."""
    found: list[dict[str, Any]] = []
    wanted = moved_by(precision, WideForm())
    for place, name in enumerate(forms):
        form, other, few_models = FORMS[precision][name]
        try:
            with set_otherwise(other):
                moved = moved_by(precision, form)
                off = float((moved - wanted).norm() / wanted.norm())
                for n in sorted(models, reverse=True)[: None if few_models else 1]:
                    if time.time() > until:
                        continue
                    torch.cuda.empty_cache()
                    step = Step(n, batch, precision, form)
                    us = time_us(step.run, calls=1, replays=7)
                    begin_us = time_us(step.begin, calls=1, replays=7)
                    rate = n * batch / us * 1e6
                    share = rate * FLOPS_OF_A_STEP / peak[precision]
                    found.append({"precision": precision, "form": name, "models": n, "microseconds": us,
                                  "begin_microseconds": begin_us, "samples_per_s": rate, "of_peak": share,
                                  "off": off})  # fmt: skip
                    print(f"{precision} {n:4d} models, {name:27s}: {us:9.0f} us, {rate:9,.0f} samples/s, {share:4.0%} "
                          f"of peak, {off:.1e} from the usual form, a round begins in {begin_us:.0f} us",
                          flush=True)  # fmt: skip
                    if name in ("all", "every"):
                        found[-1]["kernels"], found[-1]["launches"] = kernels_of(step.run)
                    del step
        except Exception as problem:
            print(f"{precision} {name}: {type(problem).__name__} {str(problem)[:200]}", flush=True)
            if is_lost(problem):
                return found, forms[place + 1 :]
    return found, []


def moved_by(precision: str, form: WideForm) -> Tensor:
    """The weights of two models after three steps with a batch that is no whole tile."""
    step = Step(2, 37, precision, form)
    for _ in range(3):
        step.run()
    moved: Tensor = step.optimiser.w - step.optimiser.start
    if not bool(moved.isfinite().all()):
        raise ArithmeticError("not finite")
    return moved


def kernels_of(call: Callable[[], None]) -> tuple[dict[str, float], list[tuple[str, float]]]:
    """Microseconds per kernel name of one call, and of every launch in order."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    parts = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)[:12]
    for e in parts:
        print(f"        {e.self_device_time_total:9.0f} us  {e.count:3d} x {e.key[:60]}")
    events = [e for e in seen.events() if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    launches = [(e.name[:40], round(e.time_range.end - e.time_range.start, 1)) for e in events]
    print("        " + ", ".join(f"{name[:18]} {us:.0f}" for name, us in launches), flush=True)
    return {e.key[:60]: e.self_device_time_total for e in parts}, launches


# Layer by layer.


def tiles_for(product: str, columns_of: int, rows_of: int | None, step: int, itemsize: int) -> Iterator[WideTiles]:
    shapes = [(128, 256, 8, 4), (128, 128, 8, 3)]
    if "described" in product:
        shapes = [(128, 256, 8, 3), (128, 256, 8, 4), (128, 128, 4, 4), (64, 256, 8, 4), (256, 128, 8, 4),
                  (256, 64, 8, 4)]  # fmt: skip
    if product.startswith("weight step"):
        shapes = [(128, 128, 8, 3), (128, 128, 4, 3), (64, 128, 4, 4), (128, 256, 8, 3)]
    for rows, columns, warps, stages in shapes:
        fits = (rows + columns) * step * itemsize * stages <= LARGEST_SHARED
        if fits and columns_of % columns == 0 and (rows_of is None or rows_of % rows == 0):
            yield WideTiles(rows, columns, step, warps, stages)


class Work:
    """The tensors of one layer of n models, in both orders."""

    def __init__(self, layer: Layer, n: int, batch: int, precision: str) -> None:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        pixels = layer.side**2
        self.layer, self.size = layer, (layer.side, layer.side)
        self.x = torch.randn(n, pixels, batch, layer.inputs, device="cuda").to(dtype)
        self.dy = torch.randn(n, pixels, batch, layer.outputs, device="cuda").to(dtype)
        self.xt, self.dyt = (m.transpose(2, 3).contiguous() for m in (self.x, self.dy))
        weights = layer.outputs * 9 * layer.inputs
        self.w, self.v, self.g = (torch.randn(n, weights, device="cuda") / 30 for _ in range(3))
        shaped = self.w.view(n, layer.outputs, 9, layer.inputs)
        self.plain, turned = wide_maps.turn(shaped, dtype, copy=dtype != torch.float32, turned=True)
        assert turned is not None
        self.turned, self.bias, self.n = turned, torch.randn(n, layer.outputs, device="cuda"), n

    def optimiser(self) -> Optimiser:
        one, rows = torch.zeros(self.n, device="cuda"), torch.zeros(self.n, dtype=torch.int32, device="cuda")
        step = torch.ones(1, dtype=torch.int64, device="cuda")  # step 0 would not read momentum
        return Optimiser(self.w, self.v, self.g, one, one, one, one, self.w[:1].clone(), rows, rows + 9, step, None,
                         rows, rows)  # fmt: skip

    def calls(self, product: str, tiles: WideTiles | None) -> Callable[[], Any]:
        """The product by its name: what it is, then "as it lies" without transposed copies, then "described"."""
        layer, described = self.layer, "described" in product
        as_it_lies = "as it lies" in product
        common: dict[str, Any] = {"precision": "tf32", "tiles": tiles}
        convolve = wide_descriptors.convolution if described else wide.convolution
        if product.startswith("forward"):
            return lambda: convolve(self.x, self.plain, self.bias, self.size, 1, models=self.n, **common)
        if product.startswith("input grad"):
            order = {"inputs_first": True} if as_it_lies else {"taps_first": True}
            weight = self.plain if as_it_lies else self.turned
            return lambda: convolve(self.dy, weight, None, self.size, 1, models=self.n, **order, **common)
        common |= {"turned": not as_it_lies, "described": described}
        x, dy = (self.x, self.dy) if as_it_lies else (self.xt, self.dyt)
        if product.startswith("weight grad"):
            into = self.g.view(self.n, layer.outputs, 9, layer.inputs)
            return lambda: wide.weight_grad(x, dy, into, self.size, 1, **common)
        copies = wide_update.Copies(None, None if as_it_lies else self.turned)
        if self.x.dtype == torch.bfloat16:
            copies = copies._replace(plain=self.plain)
        optimiser = self.optimiser()
        return lambda: wide_update.weight_step(x, dy, 0, optimiser, copies, self.size, 1, side=3, **common)


def products_of(precision: str) -> list[str]:
    found = ["forward", "input grad", "weight grad", "weight step"]
    if precision == "bf16":
        found += [f"{product}, as it lies" for product in found[1:]]
    return [name for product in found for name in (product, f"{product}, described")]


def jobs_of(batch: int) -> list[tuple[str, int, str, WideTiles | None]]:
    """(precision, layer, product, tiles), the default tiles first."""
    found: list[tuple[str, int, str, WideTiles | None]] = []
    for precision in PRECISIONS:
        itemsize = 2 if precision == "bf16" else 4
        for place, layer in enumerate(LAYERS):
            for product in products_of(precision):
                found.append((precision, place, product, None))
                if product.startswith("weight"):
                    every = tiles_for(product, layer.inputs, layer.outputs, min(batch, 128 // itemsize), itemsize)
                else:
                    outputs, inputs = layer.outputs, layer.inputs
                    outputs, inputs = (outputs, inputs) if product.startswith("forward") else (inputs, outputs)
                    every = tiles_for(product, outputs, None, min(inputs, 128 // itemsize), itemsize)
                found += [(precision, place, product, tiles) for tiles in every]
    return found


def compile_some(job: tuple[list[Any], int, float]) -> list[str]:
    """Compile in a process of its own, so that compiling many takes the time of the slowest."""
    wanted, batch, until = job
    problems = []
    for what in wanted:
        if time.time() > until:
            break
        try:
            if len(what) == 2:
                precision, name = what
                form, other, _ = FORMS[precision][name]
                with set_otherwise(other):
                    Step(10, batch, precision, form).run()
            else:
                precision, place, product, tiles = what
                Work(LAYERS[place], 10, batch, precision).calls(product, tiles)()
            torch.cuda.synchronize()
        except Exception as problem:
            problems.append(f"{what}: {type(problem).__name__} {str(problem)[:120]}")
    return problems


def time_layers(
    precision: str, models: list[int], batch: int, until: float, peak: dict[str, float]
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    jobs = jobs_of(batch)
    for n in sorted(models, reverse=True):
        for place, layer in enumerate(LAYERS):
            torch.cuda.empty_cache()
            work = Work(layer, n, batch, precision)
            for product in products_of(precision):
                rows: list[tuple[float, WideTiles | None]] = []
                for tiles in [job[3] for job in jobs if job[:3] == (precision, place, product)]:
                    if time.time() > until:
                        return found
                    try:
                        rows.append((time_us(work.calls(product, tiles), **FEW), tiles))
                    except Exception as problem:
                        text = f"{type(problem).__name__} {str(problem)[:100]}"
                        print(f"{layer.name} {product} {tiles}: {text}", flush=True)
                        if is_lost(problem):
                            return found
                for us, tiles in rows:
                    share = n * batch * layer.flops() / (1e-6 * us) / peak[precision]
                    found.append({"models": n, "precision": precision, "layer": layer.name, "product": product,
                                  "tiles": tiles, "microseconds": us, "of_peak": share})  # fmt: skip
                if rows:
                    (first, _), (best, tiles) = rows[0], min(rows, key=lambda row: row[0])
                    share = n * batch * layer.flops() / (1e-6 * first) / peak[precision]
                    print(f"{precision} {n:4d} {layer.name:9s} {product:34s} {first:8.0f} us {share:4.0%}, best "
                          f"{best:8.0f} us {tiles and tuple(tiles)}", flush=True)  # fmt: skip
    return found


def apart(task: Callable[..., Any], *arguments: Any) -> Any:
    """In a process of its own: one that loses the device takes no other with it. None where it ended badly."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply(task, arguments)
        except Exception as problem:
            print(f"{task.__name__}: {type(problem).__name__} {str(problem)[:200]}", flush=True)
            return None


def save(report: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for all numbers")
    parser.add_argument("--models", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--steps-only", action="store_true", help="whole steps alone")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="processes that compile")
    options = parser.parse_args()
    begin = time.time()
    wanted: list[Any] = [(precision, form) for precision in PRECISIONS for form in FORMS[precision]]
    wanted += [] if options.steps_only else jobs_of(options.batch)
    until = begin + 0.5 * options.seconds
    shares = [(wanted[i :: options.workers], options.batch, until) for i in range(options.workers)]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for problems in pool.map(compile_some, shares, chunksize=1):
            for problem in problems:
                print(problem, flush=True)
    print(f"compiled after {time.time() - begin:.0f} s", flush=True)
    peak = apart(rates)
    print(f"{torch.cuda.get_device_name()}: TF32 {peak['tf32'] / 1e12:.0f} TFLOP/s, bf16 {peak['bf16'] / 1e12:.0f} "
          f"TFLOP/s, copy {peak['copy'] / 1e12:.2f} TB/s", flush=True)  # fmt: skip
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "peak": peak,
                              "batch": options.batch, "steps": [], "layers": []}  # fmt: skip
    common = (options.models, options.batch, begin + options.seconds, peak)
    for precision in PRECISIONS:
        left = list(FORMS[precision])
        while left:
            found, left = apart(time_steps, precision, left, *common) or ([], left[1:])
            report["steps"] += found
            save(report, options.out)
    for precision in PRECISIONS if not options.steps_only else ():
        report["layers"] += apart(time_layers, precision, *common) or []
        save(report, options.out)
    report["seconds"] = time.time() - begin
    save(report, options.out)
    print(f"\n{report['seconds']:.0f} s")
    for row in report["steps"]:
        print(f"{row['precision']} {row['models']:4d} models, {row['form']:27s} {row['samples_per_s']:9,.0f} samples/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
