"""Check and time EfficientNet-B0 in the streams trainer, as it is and with fused layers, on a CUDA device.

    python benchmarks/efficientnet_step.py [--out step.json] [--limit 100] [--parts even uneven ...]

Parts, as far as the time goes (`--limit` seconds; what had to be left out is said):
- check: gradients of a batch with padding against float64, plain and fused (relative error of all of them together);
- even: samples per second of whole local training of clients with full batches, by form (`FusedForm`), and the seconds
  that the first round took; "in place" is torch as it comes, where SiLU overwrites its input;
- uneven: the same of clients as in `fedentopt bench engine`, whose last batches are padded;
- kernels: those that took longest, plain and fused;
- layers: our kernels beside torch's, and the memory traffic that they reach;
- deterministic: the form that runs by default with and without keeping cuDNN to algorithms that give the same bits from
  run to run: samples per second, whether rounds of the same work do give the same bits, and if not, in which tensors a
  single step does not;
- tuned: plain layers with cuDNN timing its algorithms, in a process of its own. Everything above leaves that out: an
  algorithm found by rule stays for the rest of a process.
The first three come with TF32 first, then with bf16. `--tiny` tries all of it with a small network, on the CPU with
TRITON_INTERPRET=1 as well.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fedentopt.models import build, dropout_key
from fedentopt.models.keyed_dropout import key_dropout
from fedentopt.results.environment import source_digest
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData, torch_settings, untuned, without_cudnn
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.planning import ClientWork
from fedentopt.simulation.trainers import StreamsTrainer, bound_model, fused_convolutions, streams
from fedentopt.simulation.trainers.fused_blocks import FusedForm, form_for, fuse_blocks
from fedentopt.simulation.trainers.masked_norm import mask_norms
from fedentopt.simulation.triton import norm_apply, norm_excite, norm_statistics, ops
from fedentopt.simulation.work import Row, build_work

CLASSES = 4
FORMS = {
    "in place": FusedForm(),
    "plain": FusedForm(),
    "norms": FusedForm(norms=True),
    "norms, depthwise": FusedForm(norms=True, depthwise=True),
}
LEAST = {"fp32": list(FORMS), "bf16": ["plain", "norms", "norms, depthwise"]}
LAYERS = ((32, 112, 3, 1), (96, 112, 3, 2), (240, 28, 5, 1), (672, 14, 5, 1), (1152, 7, 5, 1))
REPEATS = 5
PARTS = ("check", "even", "uneven", "kernels", "layers", "deterministic", "tuned")


def usual(precision: str) -> str:
    """The form that runs on a GPU by default."""
    wanted = form_for(torch.device("cuda"), precision == "bf16")
    return next(name for name, form in FORMS.items() if form == wanted)


class Bench:
    """The network, images for it, and the time that is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.began = time.perf_counter()
        self.tiny, self.limit = options.tiny, options.limit
        self.device = torch.device(options.device)
        self.size, self.batch, self.clients = (9, 4, 2) if self.tiny else (224, 64, 4)
        self.model = small() if self.tiny else build("efficientnet-b0", CLASSES, seed=0, image_size=self.size)
        self.layout = FlatLayout(self.model, channels_last=True)
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (24 if self.tiny else 1430, 3, self.size, self.size), dtype=np.uint8)
        labels = torch.from_numpy(rng.integers(0, CLASSES, len(pixels))).to(self.device)
        images = torch.from_numpy(pixels).to(self.device)
        self.data = DeviceData(images, labels, images[:1], labels[:1], CLASSES)
        self.exact: Tensor | None = None
        self.report: dict[str, Any] = {"sources": source_digest(), "torch": torch.__version__, "right": True}
        if self.device.type == "cuda":
            self.report["device"] = torch.cuda.get_device_name()

    @property
    def left(self) -> float:
        return self.limit - (time.perf_counter() - self.began)

    def enough(self, seconds: float, what: str) -> bool:
        """Whether so much time is left; says what is left out if not."""
        if self.left >= seconds:
            return True
        print(f"left out, {self.left:.0f} s to go: {what}", flush=True)
        self.report.setdefault("left_out", []).append(what)
        return False

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def best(self, job: Callable[[], Any], repeats: int = REPEATS) -> float:
        """Seconds of the fastest of some runs."""
        times = []
        for _ in range(1 if self.tiny else repeats):
            self.finish()
            start = time.perf_counter()
            job()
            self.finish()
            times.append(time.perf_counter() - start)
        return min(times)


def small() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    blocks = [MBConvConfig(1, 3, 1, 8, 8, 1, 1.0, 1.0), MBConvConfig(2, 5, 2, 8, 12, 2, 1.0, 1.0)]
    model = EfficientNet(blocks, dropout=0.2, stochastic_depth_prob=0.5, num_classes=CLASSES, last_channel=16)
    key_dropout(model)
    return model


def gradients(bench: Bench, form: FusedForm, precision: str) -> Tensor:
    """Of one batch, all parameters in one vector of float64; precision as in the engine, or float64."""
    count, real = bench.batch, bench.batch * 3 // 4
    dtype = torch.float64 if precision == "float64" else torch.float32
    module = copy.deepcopy(bench.model).to(bench.device, dtype).to(memory_format=torch.channels_last).train()
    key = dropout_key(module)
    assert key is not None
    key.set(5)
    padding = mask_norms(module)
    fused = fuse_blocks(module, bench.model, form, padding, bench.device)
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, bench.size, bench.size, generator=drawn).to(bench.device, dtype)
    labels = torch.arange(count, device=bench.device) % CLASSES
    mask = torch.arange(count, device=bench.device) < real
    autocast = torch.autocast(bench.device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
    switches = torch_settings(bench.device, "fp32-exact" if precision == "float64" else precision)
    with switches, untuned(), without_cudnn() if precision == "float64" else contextlib.nullcontext():
        with padding.masking(mask), fused.running(), autocast:
            logits = module(x.contiguous(memory_format=torch.channels_last))
        F.cross_entropy(logits[:real].to(dtype), labels[:real]).backward()
    return torch.cat([p.grad.double().flatten() for p in module.parameters()])


def check(bench: Bench, precision: str) -> None:
    if bench.exact is None:
        bench.exact = gradients(bench, FusedForm(), "float64")
    exact = bench.exact
    errors = {
        name: float((gradients(bench, FORMS[name], precision) - exact).norm() / exact.norm())
        for name in ("plain", "norms", "norms, depthwise")
    }
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    print(f"gradients, {precision}: {shown}; after {bench.limit - bench.left:.0f} s", flush=True)
    bench.report.setdefault("errors", {})[precision] = errors
    if not all(error < 2 * errors["plain"] for error in errors.values()):  # nor where one is no number
        bench.report["right"] = False


@contextlib.contextmanager
def trainer(bench: Bench, name: str, precision: str, slots: int, *, masks: bool) -> Iterator[StreamsTrainer]:
    keep = bound_model._keep_silu_inputs
    if name == "in place":
        bound_model._keep_silu_inputs = lambda model: None
    transform = ImageTransform((0.5,) * 3, (0.25,) * 3, 0.2, 0.5, 0.1)
    kernels = ops(bench.device, bf16=precision == "bf16")
    made = StreamsTrainer(
        bench.model, bench.layout, bench.data, transform, kernels, slots, precision, masks=masks, form=FORMS[name]
    )
    try:
        with torch_settings(bench.device, precision):
            yield made
    finally:
        bound_model._keep_silu_inputs = keep
        made.close()


def work_of(bench: Bench, sizes: list[int], epochs: int) -> Any:
    own = np.split(np.arange(sum(sizes)) % len(bench.data.images), np.cumsum(sizes)[:-1])
    rows = [
        Row(
            task=ClientWork(k, own[k], np.ones(CLASSES), epochs, bench.batch), start_row=0, order_key=k, augment_key=k,
            dropout_key=k, lr=0.01, weight_decay=5e-4, momentum=0.9, mu=0.0, logit_scale=None, logit_shift=None,
        )
        for k in range(len(sizes))
    ]  # fmt: skip
    return build_work(rows, bench.batch, CLASSES, bench.device)


def clients_of(bench: Bench, *, uneven: bool) -> tuple[list[int], int]:
    """Samples of each client, and epochs."""
    if uneven:
        return ([1, 5] if bench.tiny else [round(s) for s in np.linspace(1, 285, 10)]), 2
    return [2 * bench.batch] * bench.clients, 1


def speed(bench: Bench, name: str, precision: str, *, uneven: bool = False, tuned: bool = False) -> dict[str, Any]:
    """Samples per second and the seconds of the first round."""
    sizes, epochs = clients_of(bench, uneven=uneven)
    starts = bench.layout.pack(bench.model.state_dict())[None].to(bench.device)
    work = work_of(bench, sizes, epochs)
    with (
        trainer(bench, name, precision, len(sizes), masks=uneven) as made,
        contextlib.nullcontext() if tuned else untuned(),
    ):
        first = bench.best(lambda: made.train(starts, work), 1)
        seconds = bench.best(lambda: made.train(starts, work), 3 if uneven else REPEATS)
    rate = sum(sizes) * epochs / seconds
    case = f"{'uneven' if uneven else 'even'}, {precision}{', tuned' if tuned else ''}"
    print(f"{case}, {name}: {rate:,.0f} samples/s, first round {first:.1f} s", flush=True)
    return {"case": case, "form": name, "samples_per_s": round(rate), "first_round_s": round(first, 1)}


def busiest(bench: Bench, name: str, precision: str = "fp32") -> None:
    """The kernels of one client's two steps that took longest together."""
    starts = bench.layout.pack(bench.model.state_dict())[None].to(bench.device)
    work = work_of(bench, [2 * bench.batch], 1)
    cuda = bench.device.type == "cuda"
    with trainer(bench, name, precision, 1, masks=False) as made, untuned():
        made.train(starts, work)
        bench.finish()
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as seen:
            made.train(starts, work)
            bench.finish()

    def spent(event: Any) -> float:
        return float(event.self_device_time_total if cuda else event.self_cpu_time_total)

    events = sorted(seen.key_averages(), key=lambda event: -spent(event))
    total = sum(spent(event) for event in events) or 1.0
    print(f"{name}, {precision}: {total / 2e3:.2f} ms of kernels per step", flush=True)
    table = []
    for event in events[:12]:
        share = {"kernel": event.key[:90], "calls": event.count // 2, "us_per_step": round(spent(event) / 2, 1)}
        table.append(share)
        part = 100 * spent(event) / total
        print(f"    {share['us_per_step']:9.1f} us {part:5.1f} % {share['calls']:4d} x {share['kernel']}", flush=True)
    bench.report.setdefault("kernels", {})[f"{name}, {precision}"] = table


def on_device(job: Callable[[], Any], repeats: int = 10) -> float:
    """Microseconds that a job's kernels take; the device waits until the host has queued them all."""
    torch.cuda.synchronize()
    torch.cuda._sleep(30_000_000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        job()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / repeats


def layers(bench: Bench, dtype: torch.dtype) -> None:
    """Microseconds of single layers, and the traffic that their maps mean (those read or written once)."""
    drawn = torch.Generator(bench.device).manual_seed(0)
    found: dict[str, dict[str, float]] = {}

    def maps(channels: int, side: int) -> Tensor:
        x = torch.randn(bench.batch, channels, side, side, generator=drawn, device=bench.device)
        return x.contiguous(memory_format=torch.channels_last).to(dtype)

    def timed(where: str, what: str, job: Callable[[], Any], moved: int) -> None:
        job()
        took = 1e6 * bench.best(job) if bench.device.type == "cpu" else on_device(job)
        found.setdefault(where, {})[what] = round(took, 1)
        rate = moved * dtype.itemsize / took / 1e6
        print(f"    {where:24s} {what:28s} {took:8.1f} us {rate:6.2f} TB/s", flush=True)

    print(f"single layers, {dtype}, batch {bench.batch}", flush=True)
    for channels, side, kernel, stride in ((8, 6, 5, 1),) if bench.tiny else LAYERS:
        x, where = maps(channels, side), f"{channels} x {side} x {side}"
        norm = nn.BatchNorm2d(channels).to(bench.device)
        statistics = norm_statistics.statistics(norm, x, None)
        how = norm_apply.Norm(statistics, norm.weight.detach(), norm.bias.detach(), "silu")
        both = norm_apply.sums(x, x, how)
        n = x.numel()
        timed(where, "statistics", lambda x=x, norm=norm: norm_statistics.statistics(norm, x, None), n)
        timed(where, "normalise, SiLU", lambda x=x, how=how: norm_apply.apply(x, how), 2 * n)
        timed(where, "dw, db", lambda x=x, how=how: norm_apply.sums(x, x, how), 2 * n)
        timed(where, "dx", lambda x=x, how=how, both=both: norm_apply.input_grad(x, x, how, both, real=None), 3 * n)
        timed(where, "means", lambda x=x, how=how: norm_excite.means(x, how), n)
        timed(where, "excitation's sums", lambda x=x, how=how: norm_excite.excite_sums(x, x, how), 2 * n)
        given = x.clone().requires_grad_()
        y = F.silu(norm(given))
        timed(where, "torch: BatchNorm, SiLU", lambda g=given, norm=norm: F.silu(norm(g)), 3 * n)
        timed(where, "torch: both backward", lambda y=y, x=x: y.backward(x, retain_graph=True), 5 * n)
        conv = nn.Conv2d(channels, channels, kernel, stride, kernel // 2, groups=channels, bias=False).to(bench.device)
        conv = conv.to(memory_format=torch.channels_last)
        twin = copy.deepcopy(conv).to(dtype)
        for what, run in (("depthwise", fused_convolutions.depthwise), ("torch: depthwise", lambda c, g: c(g))):
            layer = conv if what == "depthwise" else twin
            given = x.clone().requires_grad_()
            y = run(layer, given)
            name = f"{what} {kernel}x{kernel}/{stride}"
            timed(where, name, lambda r=run, c=layer, g=given: r(c, g), n + y.numel())
            push = torch.randn_like(y)
            timed(where, f"{name} back", lambda y=y, p=push: y.backward(p, retain_graph=True), 2 * n + 2 * y.numel())
    bench.report.setdefault("layers", {})[str(dtype)] = found


@contextlib.contextmanager
def any_algorithm() -> Iterator[None]:
    """Inside, cuDNN may take algorithms whose sums have no fixed order for fused models, too."""
    before, streams.REPEATABLE = streams.REPEATABLE, False
    try:
        yield
    finally:
        streams.REPEATABLE = before


def deterministic(bench: Bench, name: str, precision: str, *, uneven: bool, repeatable: bool) -> dict[str, Any]:
    """Speed, and whether rounds of the same work give the same bits; if not, in which tensors of the model a single
    step does not. The digest is for comparing processes."""
    sizes, epochs = clients_of(bench, uneven=uneven)
    starts = bench.layout.pack(bench.model.state_dict())[None].to(bench.device)
    work = work_of(bench, sizes, epochs)
    # A batch whose step the first slot has captured by then: it gets the largest client.
    single = work_of(bench, [sizes[-1] % bench.batch or bench.batch], 1)
    with (
        contextlib.nullcontext() if repeatable else any_algorithm(),
        trainer(bench, name, precision, len(sizes), masks=uneven) as made,
    ):
        rounds: list[Tensor] = []
        first = bench.best(lambda: rounds.append(made.train(starts, work).models.clone()), 1)
        seconds = bench.best(lambda: rounds.append(made.train(starts, work).models.clone()), 2 if uneven else REPEATS)
        steps = [made.train(starts, single).models.clone() for _ in range(3)]
        bench.finish()
    same = all(same_bits(rounds[0], other) for other in rounds[1:])
    found = {
        "case": f"{'uneven' if uneven else 'even'}, {precision}", "form": name, "repeatable": repeatable,
        "samples_per_s": round(sum(sizes) * epochs / seconds), "first_round_s": round(first, 1), "same_bits": same,
        "digest": hashlib.sha256(rounds[0].cpu().numpy().tobytes()).hexdigest()[:12],
        "other_after_a_step": other_tensors(bench, steps),
    }  # fmt: skip
    how = "repeatable algorithms" if repeatable else "any algorithms"
    print(
        f"{found['case']}, {name}, {how}: {found['samples_per_s']:,} samples/s, first round {first:.1f} s, "
        f"{'the same bits' if same else 'OTHER BITS'} in {len(rounds)} rounds, digest {found['digest']}",
        flush=True,
    )
    others = found["other_after_a_step"]
    if others:
        shown = ", ".join(others[-8:])
        print(f"    after a step {len(others)} of {len(bench.layout.slots)} tensors differ; last: {shown}", flush=True)
    return found


def same_bits(mine: Tensor, its: Tensor) -> bool:
    """Of float32, also where they are no numbers."""
    return torch.equal(mine.contiguous().view(torch.int32), its.contiguous().view(torch.int32))


def other_tensors(bench: Bench, steps: list[Tensor]) -> list[str]:
    """Names, in the order of the forward pass, of the tensors that are not the same in all rows. The backward pass
    comes to the last of them first: what only weight gradients do differently shows in single tensors; what an input
    gradient does, in all before; what the forward pass does, in statistics (running_mean) from there on."""
    names = []
    for slot in bench.layout.slots:
        rows = [step[:, slot.offset : slot.offset + slot.size] for step in steps]
        if not all(same_bits(rows[0], row) for row in rows[1:]):
            names.append(slot.name)
    order = {name: i for i, name in enumerate(bench.model.state_dict())}
    return sorted(names, key=lambda name: order[name])


def all_deterministic(bench: Bench) -> None:
    both = ("fp32", "bf16")
    cases = [(False, precision, usual(precision), kept) for precision in both for kept in (True, False)]
    cases.append((False, "bf16", "norms, depthwise", True))  # should cuDNN's repeatable ones be slow
    cases += [(True, precision, usual(precision), kept) for kept in (True, False) for precision in both]
    for uneven, precision, name, repeatable in cases:
        what = f"deterministic, {'uneven' if uneven else 'even'}, {precision}, {name}, {repeatable}"
        if not bench.enough(5 if uneven else 3, what):
            continue
        try:
            found = deterministic(bench, name, precision, uneven=uneven, repeatable=repeatable)
        except RuntimeError as error:  # cuDNN may have no such algorithm for a layer
            print(f"{what}: {error}", flush=True)
            found = {"case": what, "error": str(error)[:300]}
        bench.report.setdefault("deterministic", []).append(found)


def run(bench: Bench, parts: list[str]) -> None:
    def speeds(part: str, names: list[str], precision: str, seconds: float) -> None:
        for name in names if part in parts else []:
            if bench.enough(seconds, f"{part}, {precision}, {name}"):
                found = speed(bench, name, precision, uneven=part == "uneven")
                bench.report.setdefault("speeds", []).append(found)

    for precision, names in LEAST.items():
        if "check" in parts and bench.enough(15, f"check, {precision}"):
            check(bench, precision)
        speeds("even", names, precision, 6)
        speeds("uneven", [usual(precision), "plain"], precision, 12)
        for name in ("plain", usual(precision)) if "kernels" in parts else ():
            if bench.enough(5, f"kernels, {precision}, {name}"):
                busiest(bench, name, precision)
    for dtype in (torch.float32, torch.bfloat16) if "layers" in parts else ():
        if bench.enough(6, f"layers, {dtype}"):
            with torch_settings(bench.device, "fp32"), untuned():
                layers(bench, dtype)
    if "deterministic" in parts:
        all_deterministic(bench)


def tuned(bench: Bench, options: argparse.Namespace) -> None:
    command = [sys.executable, __file__, "--tuned", "plain", "--device", options.device, *["--tiny"] * options.tiny]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=bench.left, check=True)
    except subprocess.TimeoutExpired:
        print("plain, tuned: cuDNN was not done when the time was up")
        return
    bench.report.setdefault("speeds", []).append(json.loads(done.stdout.splitlines()[-1]))
    print(done.stdout.splitlines()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=100, help="seconds for all of it")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tuned", choices=list(FORMS), help="only this form, with cuDNN timing its algorithms, TF32")
    options = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(options)
    if options.tuned is not None:
        print(json.dumps(speed(bench, options.tuned, "fp32", tuned=True)))
        return
    try:
        run(bench, options.parts)
        if "tuned" in options.parts and bench.enough(25, "tuned"):
            tuned(bench, options)
    finally:
        bench.report["seconds"] = round(bench.limit - bench.left, 1)
        if options.out is not None:
            options.out.write_text(json.dumps(bench.report, indent=1) + "\n")
    print(f"{bench.report['seconds']} s in all")
    if not bench.report["right"]:
        sys.exit("gradients of fused layers are further off than those of plain ones")


if __name__ == "__main__":
    main()
