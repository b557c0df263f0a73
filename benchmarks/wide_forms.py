"""VGG-11's whole step (forward, backward, optimiser) in every form, with other tables of tiles, or with other kernels.

The part of `wide_kernels.py` behind `--steps-only`, `--chosen` and `--gluon`. Steps are checked against the plain form,
or against the first table or kernels, and timed inside CUDA graphs. Rates are beside those that the GPU reaches in
large products, counted without the taps that fall outside a map.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import wide_tiles
from kernels import time_us
from torch import Tensor

from fedentopt.models import build
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers.wide_blocks import wide_blocks
from fedentopt.simulation.trainers.wide_net import WideNet
from fedentopt.simulation.triton import EVERY, WideForm, ops, wide_forms
from fedentopt.simulation.triton.interface import Optimiser

PRECISIONS = ("tf32", "bf16")
ALL = WideForm(first=True, update=True, untransposed=True, descriptors=True)
TURNS = 2  # that settings are timed, one after the other: a GPU's clock moves with what came before
Settings = dict[str, Any]  # what is set otherwise in the modules of `simulation.triton`, by "module.name"


class Variant(NamedTuple):
    """A form, and what is set otherwise."""

    form: WideForm
    other: Settings = {}  # noqa: RUF012  (a default that nobody writes to)
    few_models: bool = True


def forms_of(precision: str) -> dict[str, Variant]:
    """Whole forms, then what each part brings by itself, then other settings of all parts together."""
    found = {"as it is": Variant(WideForm()), "default": Variant(EVERY), "all": Variant(ALL)}
    for part in ("aside", "joined"):
        found[f"all, {part}"] = Variant(ALL._replace(**{part: True}))
    others = {"first layer in eight warps": {"wide_first.WARPS": 8}}
    if precision == "tf32":
        others["pool apart below 16"] = {"wide_pooled.NARROWEST": 16}
    return found | {f"default, {name}": Variant(EVERY, set_, few_models=False) for name, set_ in others.items()}


FORMS = {precision: forms_of(precision) for precision in PRECISIONS}


@contextmanager
def set_otherwise(other: Settings) -> Iterator[None]:
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

    def moved(self) -> Tensor:
        """What three steps change in the first and in the last model."""
        self.optimiser.v.zero_()
        self.begin()
        for _ in range(3):
            self.run()
        moved = self.optimiser.w[[0, -1]] - self.optimiser.start
        if not bool(moved.isfinite().all()):
            raise ArithmeticError("not finite")
        return moved


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
                    if name in ("all", "default"):
                        found[-1]["kernels"], found[-1]["launches"] = kernels_of(step.run)
                    del step
        except Exception as problem:
            print(f"{precision} {name}: {type(problem).__name__} {str(problem)[:200]}", flush=True)
            if is_lost(problem):
                return found, forms[place + 1 :]
    return found, []


def moved_by(precision: str, form: WideForm) -> Tensor:
    """The weights of two models after three steps with a batch that is no whole tile."""
    return Step(2, 37, precision, form).moved()


every_gluon_kernel = wide_forms.gluon_kernels


def some_gluon_kernels(names: tuple[str, ...]) -> wide_forms.GluonKernels | None:
    """Those of the modules in Gluon that are named."""
    found = every_gluon_kernel()
    return found and found._replace(**dict.fromkeys(set(found._fields) - set(names)))


def gluon_settings() -> dict[str, Settings]:
    """Without any kernels in Gluon, with each module's, and with all."""
    parts = wide_forms.GluonKernels._fields
    chosen = {"none": (), **{f"{part} alone": (part,) for part in parts}, "all": parts}
    return {
        name: {"wide_forms.gluon_kernels": functools.partial(some_gluon_kernels, names)}
        for name, names in chosen.items()
    }


def time_settings(every: dict[str, Settings], models: list[int], batch: int, until: float) -> list[dict[str, Any]]:
    """Steps of the default form with each of the settings, in this process; the others are compared with the first."""
    found: list[dict[str, Any]] = []
    for precision, n in itertools.product(PRECISIONS, sorted(models, reverse=True)):
        torch.cuda.empty_cache()
        try:
            compared = compare_settings(Step(n, batch, precision, EVERY), every, until)
        except Exception as problem:
            print(f"{precision} {n:4d} models: {type(problem).__name__} {str(problem)[:200]}", flush=True)
            break
        rows = [{"precision": precision, "models": n, **row} for row in compared]
        print(*setting_lines(rows, batch), sep="\n", flush=True)
        found += rows
    return found


def compare_settings(step: Step, every: dict[str, Settings], until: float) -> list[dict[str, Any]]:
    """Microseconds of one stack's step with each of the settings, in turns, and how far it moves the models from where
    the first does."""
    rows: dict[str, dict[str, Any]] = {}
    failed: set[str] = set()
    wanted: Tensor | None = None
    for turn, (name, settings) in itertools.product(range(TURNS), every.items()):
        if time.time() > until or name in failed:
            continue
        try:
            with set_otherwise(settings):
                if turn == 0:
                    moved = step.moved()
                    wanted = moved if wanted is None else wanted
                    off = float((moved - wanted).norm() / wanted.norm())
                    same = torch.equal(moved, wanted)
                    rows[name] = {"with": name, "off": off, "same_bits": same, "microseconds": []}
                if name in rows:
                    rows[name]["microseconds"].append(round(time_us(step.run, calls=1, replays=9), 1))
        except Exception as problem:
            print(f"{name}: {type(problem).__name__} {str(problem)[:200]}", flush=True)
            failed.add(name)
            if is_lost(problem) or wanted is None:
                raise
    return [row for row in rows.values() if row["microseconds"]]


def setting_lines(rows: list[dict[str, Any]], batch: int) -> list[str]:
    """What settings change in the steps of one precision and number of models."""
    lines = []
    for row in rows:
        us, first = (statistics.mean(of["microseconds"]) for of in (row, rows[0]))
        times, rate = " and ".join(f"{t:.0f}" for t in row["microseconds"]), row["models"] * batch / us * 1e6
        bits = ", the same bits" if row["same_bits"] else ""
        lines.append(f"{row['precision']} {row['models']:4d} models, {row['with']:16s}: {times} us, {rate:9,.0f} "
                     f"samples/s, {us / first - 1:+.1%}, {row['off']:.1e} away{bits}")  # fmt: skip
    return lines


def compile_step(precision: str, variant: Variant, batch: int) -> None:
    """Compile and run a step."""
    with set_otherwise(variant.other):
        Step(10, batch, precision, variant.form).run()
    torch.cuda.synchronize()


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
