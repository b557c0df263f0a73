"""How fast the engine trains: samples per second of whole local training, beside the arithmetic floor of the machine.

Work: N clients with 500 random 32x32 images each, five epochs, batch 64, augmentation on, from start models to trained
models (gather, augmentation, forward, backward, optimiser). Uneven clients have last batches of all sizes. The first
round, which compiles kernels, times cuDNN's algorithms and captures graphs, is told apart. The floor divides the
machine's measured fp32 matrix rate by the model's operations per sample: a bound that no fp32 implementation without
tensor cores beats.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedentopt.models import build
from fedentopt.results.environment import environment, source_digest
from fedentopt.simulation.aggregation import exact_products
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData, torch_settings
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.planning import ClientWork
from fedentopt.simulation.trainers import choose_trainer, make_trainer, resolve_device, wants_channels_last
from fedentopt.simulation.work import Row, build_work

BATCH = 64


@dataclass(frozen=True)
class Case:
    """One line of the benchmark. Uneven clients have 1 to 2 `samples` - 1 samples, so many on average."""

    model: str
    clients: int
    samples: int
    epochs: int
    image_size: int = 32
    precision: str = "fp32"
    uneven: bool = False

    def sizes(self) -> list[int]:
        """How many samples every client has."""
        if not self.uneven:
            return [self.samples] * self.clients
        return [round(size) for size in np.linspace(1, 2 * self.samples - 1, self.clients)]


GPU_CASES = (
    *(Case("lenet5", n, 500, 5) for n in (10, 30, 100, 270)),
    Case("vgg11", 10, 500, 1),
    Case("vgg11", 100, 500, 1),
    *(Case("vgg11", n, 500, 1, precision="bf16") for n in (10, 100)),
    *(Case("vgg11-bn", n, 500, 1, precision=precision) for precision in ("fp32", "bf16") for n in (10, 100)),
    Case("efficientnet-b0", 4, 128, 1, 224),
    Case("efficientnet-b0", 10, 143, 2, 224, uneven=True),  # as many samples as a client of Brain-Tumor MRI has
    Case("efficientnet-b0", 4, 128, 1, 224, "bf16"),  # last: cuDNN chooses all algorithms anew
)
CPU_CASES = (
    *(Case("lenet5", n, 500, 1) for n in (10, 30)),
    Case("vgg11", 2, 64, 1),
    Case("efficientnet-b0", 1, 16, 1, 64),
)


@dataclass(frozen=True)
class Speed:
    """What a case measured. `floor_share` is samples_per_second over the arithmetic floor; `first_round_s` the seconds
    of the first round."""

    model: str
    precision: str
    clients: int
    samples_per_second: float
    floor_share: float
    megaflop_per_sample: float
    runs: str
    uneven: bool = False
    first_round_s: float = 0.0


def bench_engine(
    device: str = "auto", *, cases: tuple[Case, ...] | None = None, repeats: int = 5, workers: int | None = None
) -> Iterator[Speed]:
    """Measure case by case; the best of `repeats` counts, since other work on the machine only adds time."""
    place = resolve_device(device)
    rate = matrix_rate(place)
    for case in cases or (GPU_CASES if place.type == "cuda" else CPU_CASES):
        yield _measure(case, place, rate, repeats, workers)


def _measure(case: Case, device: torch.device, rate: float, repeats: int, workers: int | None) -> Speed:
    rng = np.random.default_rng(0)
    sizes = case.sizes()
    total = sum(sizes)
    shape = (min(total, 50_000), 3, case.image_size, case.image_size)
    pixels = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)).to(device)
    labels = torch.from_numpy(rng.integers(0, 10, shape[0])).to(device)
    data = DeviceData(pixels, labels, pixels[:1], labels[:1], 10)
    model = build(case.model, 10, seed=0, image_size=case.image_size)
    name = choose_trainer("auto", model, device, case.image_size, precision=case.precision)
    layout = FlatLayout(model, channels_last=wants_channels_last(name, model, case.image_size, device, case.precision))
    transform = ImageTransform((0.5,) * 3, (0.25,) * 3, 0.2, 0.5, 0.1)
    trainer = make_trainer(name, model, layout, data, transform, precision=case.precision, workers=workers)
    starts = layout.pack(model.state_dict())[None].to(device)
    own = np.split(np.arange(total) % shape[0], np.cumsum(sizes)[:-1])
    rows = [
        Row(
            task=ClientWork(k, own[k], np.ones(10), case.epochs, BATCH),
            start_row=0, order_key=k, augment_key=k, dropout_key=k, lr=0.01, weight_decay=5e-4, momentum=0.9, mu=0.0,
            logit_scale=None, logit_shift=None,
        )
        for k in range(case.clients)
    ]  # fmt: skip
    work = build_work(rows, BATCH, 10, device)
    with torch_settings(device, case.precision):
        first, seconds = _first_and_best(lambda: trainer.train(starts, work, lend=True), device, repeats)
    speed = total * case.epochs / seconds
    flop = sample_flop(case.model, case.image_size)
    what = trainer.describe()
    trainer.close()
    share = speed * flop / rate
    return Speed(case.model, case.precision, case.clients, speed, share, flop / 1e6, what, case.uneven, round(first, 3))


@functools.cache
def sample_flop(model: str, image_size: int) -> float:
    """Operations of one sample in training (multiply and add are two): three times torch's count of the forward pass.

    Each product of the forward pass has two in the backward pass. Torch's own count of those overlooks groups, and so
    takes depthwise convolutions for full ones.
    """
    net = build(model, 10, seed=0, image_size=image_size).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        net(torch.zeros(1, 3, image_size, image_size))
    return 3.0 * float(counter.get_total_flops())


def matrix_rate(device: torch.device) -> float:
    """Operations a second of a large fp32 matrix product without TF32, on all cores or the GPU."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    with exact_products():
        return 2 * n**3 / _first_and_best(lambda: a @ b, device, 5)[1]


def _first_and_best(job: Callable[[], Any], device: torch.device, repeats: int) -> tuple[float, float]:
    """Seconds of a first run and of the best of some more."""

    def seconds() -> float:
        start = time.perf_counter()
        job()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return seconds(), min(seconds() for _ in range(repeats))


def as_json(speeds: list[Speed], device: str) -> dict[str, Any]:
    """The measurement for machines, with the code, the libraries and the hardware it was made with."""
    place = resolve_device(device)
    hardware = torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"
    made_with = {**environment(), "sources": source_digest()}
    return {"device": hardware, **made_with, "speeds": [asdict(s) for s in speeds]}
