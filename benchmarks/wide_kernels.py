"""Time VGG-11's step on a CUDA device, in every form, and its products layer by layer with other tiles.

    python benchmarks/wide_kernels.py [--out wide.json] [--models 10 100] [--batch 64] [--seconds 220] [--steps-only]
    python benchmarks/wide_kernels.py --tiles [step input ...] [--out tiles.json] [--seconds 80]

First whole steps (forward, backward, optimiser) in every form (`WideForm`) and with other settings, checked against
the default form and timed inside CUDA graphs, with what a round does before its first step; then, or with `--tiles`
alone, the products of every layer with other tiles (`wide_tiles.py`). Rates of steps are beside those that this GPU
reaches in an 8192 x 8192 x 8192 product, counted without the taps that fall outside a map.
What does not compile or gives something else is said and left out. Kernels are compiled by several processes first.
After `--seconds` nothing new is begun; the tables hold what there is.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
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

import wide_tiles
from kernels import time_us

from fedentopt.models import build
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers.wide_blocks import wide_blocks
from fedentopt.simulation.trainers.wide_net import WideNet
from fedentopt.simulation.triton import WideForm, ops
from fedentopt.simulation.triton.interface import Optimiser

FEW = {"calls": 3, "replays": 5}
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
    found["default"] = Variant(ALL[precision]._replace(joined=True, aside=precision == "tf32"))
    for part in ("aside", "joined"):
        found[f"all, {part}"] = Variant(ALL[precision]._replace(**{part: True}))
    if precision == "tf32":
        found["default, once"] = Variant(found["default"].form._replace(once=True))
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


FLOPS_OF_A_STEP = 3 * sum(layer.flops() for layer in wide_tiles.LAYERS) + 2 * 2 * 1024 * 64 * 27


def rates() -> dict[str, float]:
    """FLOP/s of large products and bytes/s of a copy and of a sum of two (read and written) on this GPU."""
    found = {}
    for precision, dtype in (("tf32", torch.float32), ("bf16", torch.bfloat16)):
        torch.backends.cuda.matmul.allow_tf32 = True
        a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
        found[precision] = 2 * 8192**3 / (1e-6 * time_us(lambda a=a, b=b: a @ b, **FEW))
    a = torch.randn(2**29, device="cuda")
    b = torch.empty_like(a)
    found["copy"] = 2 * 4 * 2**29 / (1e-6 * time_us(lambda: b.copy_(a), **FEW))
    found["sum"] = 3 * 4 * 2**29 / (1e-6 * time_us(lambda: b.add_(a), **FEW))
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
                    if name in ("all", "every", "default", "default, once"):
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


def compile_some(share: tuple[list[tuple[str, str]], int, float]) -> list[str]:
    """Compile in a process of its own, so that compiling many takes the time of the slowest."""
    wanted, batch, until = share
    problems = []
    for what in wanted:
        if time.time() > until:
            break
        try:
            precision, name = what
            form, other, _ = FORMS[precision][name]
            with set_otherwise(other):
                Step(10, batch, precision, form).run()
            torch.cuda.synchronize()
        except Exception as problem:
            problems.append(f"{what}: {type(problem).__name__} {str(problem)[:120]}")
    return problems


def apart(task: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Any:
    """In a process of its own: one that loses the device takes no other with it. None where it ended badly, or has not
    ended after `limit` seconds."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply_async(task, arguments).get(limit)
        except Exception as problem:
            print(f"{task.__name__}: {type(problem).__name__} {str(problem)[:200]}", flush=True)
            return None


def compile_all(task: Callable[..., list[str]], wanted: list[Any], batch: int, workers: int, until: float) -> None:
    """In several processes, none of which is waited for much longer than `until`: a kernel may hang."""
    shares = [(wanted[i::workers], batch, until) for i in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        try:
            found = pool.map_async(task, shares, chunksize=1).get(max(1.0, until + 10 - time.time()))
        except multiprocessing.TimeoutError:
            found = [["some processes had not compiled their kernels in time"]]
    for problem in (line for problems in found for line in problems):
        print(problem, flush=True)


def save(report: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")


def time_tiles(report: dict[str, Any], options: argparse.Namespace, begin: float, until: float) -> None:
    """The products of every layer with other tiles, those that may hang last and by themselves."""
    report["tiles"] = []
    every = [[job for kind in wide_tiles.KINDS
              for job in wide_tiles.jobs(kind, options.batch, options.tiles, specialised=specialised)]
             for specialised in (False, True)]  # fmt: skip
    wanted = list(dict.fromkeys(itertools.chain(*every)))
    end = time.time() + 0.55 * (until - time.time())
    compile_all(wide_tiles.compile_jobs, wanted, options.batch, options.workers, end)
    print(f"{len(wanted)} products compiled after {time.time() - begin:.0f} s", flush=True)
    for specialised in (False, True):
        stop = until if specialised else time.time() + 0.65 * (until - time.time())
        common = (options.models, options.batch, stop, options.tiles, specialised)
        report["tiles"] += apart(wide_tiles.time_all, *common, limit=stop + 10 - time.time()) or []
        save(report, options.out)
    print("\n".join(wide_tiles.report(report["tiles"], options.models, options.batch)), flush=True)


def time_forms(report: dict[str, Any], options: argparse.Namespace, begin: float, until: float) -> None:
    """Whole steps in every form."""
    wanted = [(precision, form) for precision in PRECISIONS for form in FORMS[precision]]
    compile_all(compile_some, wanted, options.batch, options.workers, begin + 0.5 * options.seconds)
    print(f"forms compiled after {time.time() - begin:.0f} s", flush=True)
    for precision in PRECISIONS:
        left = list(FORMS[precision])
        while left:
            common = (options.models, options.batch, until, report["peak"])
            found, left = apart(time_steps, precision, left, *common) or ([], left[1:])
            report["steps"] += found
            save(report, options.out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for all numbers")
    parser.add_argument("--models", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--steps-only", action="store_true", help="whole steps alone")
    parser.add_argument(
        "--tiles", nargs="*", choices=wide_tiles.NAMES, help="other tiles alone, of these products or of all"
    )
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="processes that compile")
    options = parser.parse_args()
    begin = time.time()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                              "batch": options.batch, "steps": []}  # fmt: skip
    if options.tiles is None:
        report["peak"] = peak = apart(rates)
        print(f"{report['device']}: TF32 {peak['tf32'] / 1e12:.0f} TFLOP/s, bf16 {peak['bf16'] / 1e12:.0f} TFLOP/s, "
              f"copy {peak['copy'] / 1e12:.2f} TB/s, sum {peak['sum'] / 1e12:.2f} TB/s", flush=True)  # fmt: skip
        time_forms(report, options, begin, begin + options.seconds * (1.0 if options.steps_only else 0.5))
    if not options.steps_only:
        time_tiles(report, options, begin, begin + options.seconds)
    report["seconds"] = time.time() - begin
    save(report, options.out)
    print(f"\n{report['seconds']:.0f} s")
    for row in report["steps"]:
        print(f"{row['precision']} {row['models']:4d} models, {row['form']:27s} {row['samples_per_s']:9,.0f} samples/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
