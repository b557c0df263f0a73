"""Time VGG-11's step on a CUDA device, in every form, and its products layer by layer with other tiles.

    python benchmarks/wide_kernels.py [--out wide.json] [--models 10 100] [--batch 64] [--seconds 220] [--steps-only]
    python benchmarks/wide_kernels.py --tiles [step input ...] [--out tiles.json] [--seconds 80]
    python benchmarks/wide_kernels.py --chosen tiles.json [--out tables.json] [--seconds 60]
    python benchmarks/wide_kernels.py --gluon [--out gluon.json] [--seconds 60]

First whole steps in every form (`wide_forms.py`), then, or with `--tiles` alone, the products of every layer with other
tiles (`wide_tiles.py`). `--chosen` takes what such a sweep has found (`wide_choice.py`) and times whole steps with it
beside those with the table that the code has, and with none. `--gluon` times whole steps with Triton's kernels alone,
with those in Gluon instead of some, and with all of these.
What does not compile or gives something else is said and left out. Kernels are compiled by several processes first.
After `--seconds` nothing new is begun; the tables hold what there is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import wide_choice
import wide_forms
import wide_tiles
from kernels import time_us

from fedentopt.simulation.triton.wide_tiles import CHOSEN

FEW = {"calls": 3, "replays": 5}


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


def apart(task: Callable[..., Any], *arguments: Any, limit: float | None = None) -> Any:
    """In a process of its own: one that loses the device takes no other with it. None where it ended badly, or has not
    ended after `limit` seconds."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return pool.apply_async(task, arguments).get(limit)
        except Exception as problem:
            print(f"{task.__name__}: {type(problem).__name__} {str(problem)[:200]}", flush=True)
            return None


def compile_all(task: Callable[..., None], wanted: dict[str, tuple[Any, ...]], workers: int, until: float) -> set[str]:
    """With which of these arguments, by name, a task has ended well and in time, in one of several processes: a kernel
    may hang, and takes no more than its process with it."""
    found = set()
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        begun = {name: pool.apply_async(task, arguments) for name, arguments in wanted.items()}
        for name, one in begun.items():
            try:
                one.get(max(0.0, until - time.time()))
                found.add(name)
            except Exception as problem:
                print(f"compiling {name}: {type(problem).__name__} {str(problem)[:120]}", flush=True)
    return found


def save(report: dict[str, Any], out: Path | None) -> None:
    """One row per line."""
    if out is not None:
        parts = [f"{json.dumps(key)}: " + ("[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
                                           if isinstance(value, list) and value else json.dumps(value))
                 for key, value in report.items()]  # fmt: skip
        out.write_text("{\n " + ",\n ".join(parts) + "\n}\n")


def time_tiles(report: dict[str, Any], options: argparse.Namespace, begin: float, until: float) -> None:
    """The products of every layer with other tiles: those that have run by themselves before."""
    report["tiles"] = []
    every = [job for kind in wide_tiles.KINDS for job in wide_tiles.jobs(kind, options.batch, options.tiles)]
    every.sort(key=lambda job: job.tiles is not None)  # what the others are compared with comes first
    end = time.time() + 0.55 * (until - time.time())
    wanted = {str(job): (job, options.batch) for job in every}
    ran = compile_all(wide_tiles.compile_job, wanted, options.workers, end)
    done = [job for job in every if str(job) in ran]
    print(f"{len(done)} of {len(every)} products compiled after {time.time() - begin:.0f} s", flush=True)
    for place, kind in enumerate(wide_tiles.KINDS):
        stop = time.time() + (until - time.time()) / (len(wide_tiles.KINDS) - place)
        common = (kind, done, options.models, options.batch, stop)
        report["tiles"] += apart(wide_tiles.time_jobs, *common, limit=stop + 10 - time.time()) or []
        save(report, options.out)
    if report["tiles"]:
        print("\n".join(wide_choice.report(wide_choice.Choice(report["tiles"]), options.batch)), flush=True)


def time_forms(report: dict[str, Any], options: argparse.Namespace, begin: float, until: float) -> None:
    """Whole steps in every form."""
    wanted = {f"{precision} {name}": (precision, variant, options.batch) for precision in wide_forms.PRECISIONS
              for name, variant in wide_forms.FORMS[precision].items()}  # fmt: skip
    compile_all(wide_forms.compile_step, wanted, options.workers, begin + 0.5 * options.seconds)
    print(f"forms compiled after {time.time() - begin:.0f} s", flush=True)
    for precision in wide_forms.PRECISIONS:
        left = list(wide_forms.FORMS[precision])
        while left:
            common = (options.models, options.batch, until, report["peak"])
            found, left = apart(wide_forms.time_steps, precision, left, *common) or ([], left[1:])
            report["steps"] += found
            save(report, options.out)


def chosen_tables(path: Path) -> dict[str, wide_forms.Settings]:
    """A sweep's tiles, those of the code's own table, and none."""
    tables = {"no table": {}, "the code's": dict(CHOSEN), "the sweep's": wide_choice.read(path).table()}
    return {name: {"wide_tiles.CHOSEN": table} for name, table in tables.items()}


def time_settings(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Whole steps of the default form with each of several settings."""
    begin = time.time()
    every = wide_forms.gluon_settings() if options.gluon else chosen_tables(options.chosen)
    until, wanted = begin + options.seconds, {}
    for precision, (name, settings) in itertools.product(wide_forms.PRECISIONS, every.items()):
        variant = wide_forms.Variant(wide_forms.EVERY, settings)
        wanted[f"{precision} {name}"] = (precision, variant, options.batch)
    compile_all(wide_forms.compile_step, wanted, options.workers, begin + 0.6 * options.seconds)
    print(f"steps compiled after {time.time() - begin:.0f} s", flush=True)
    limit = until + 20 - time.time()
    timed = apart(wide_forms.time_settings, every, options.models, options.batch, until, limit=limit)
    report["settings"] = timed or []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file for all numbers")
    parser.add_argument("--models", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=220)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--steps-only", action="store_true", help="whole steps alone")
    only.add_argument("--tiles", nargs="*", choices=wide_tiles.NAMES,
                      help="other tiles alone, of these products or of all")  # fmt: skip
    only.add_argument("--chosen", type=Path, help="whole steps with the tiles that this sweep's JSON file leads to")
    only.add_argument("--gluon", action="store_true", help="whole steps with kernels in Gluon and without")
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1), help="processes that compile")
    options = parser.parse_args()
    begin = time.time()
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                              "batch": options.batch, "steps": []}  # fmt: skip
    if options.chosen or options.gluon:
        time_settings(report, options)
    elif options.tiles is None:
        report["peak"] = peak = apart(rates)
        print(f"{report['device']}: TF32 {peak['tf32'] / 1e12:.0f} TFLOP/s, bf16 {peak['bf16'] / 1e12:.0f} TFLOP/s, "
              f"copy {peak['copy'] / 1e12:.2f} TB/s, sum {peak['sum'] / 1e12:.2f} TB/s", flush=True)  # fmt: skip
        time_forms(report, options, begin, begin + options.seconds * (1.0 if options.steps_only else 0.5))
    if not (options.steps_only or options.chosen or options.gluon):
        time_tiles(report, options, begin, begin + options.seconds)
    report["seconds"] = time.time() - begin
    save(report, options.out)
    print(f"\n{report['seconds']:.0f} s")
    for row in report["steps"]:
        print(f"{row['precision']} {row['models']:4d} models, {row['form']:27s} {row['samples_per_s']:9,.0f} samples/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
