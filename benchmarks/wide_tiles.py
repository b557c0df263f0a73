"""Other tiles for every product of a VGG-11 step: timed for each layer in the form that a Hopper GPU takes by default.

The part of `wide_kernels.py` behind `--tiles`. Every candidate is checked against the tiles that the code takes; what
the times say is worked out by `wide_choice.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from kernels import time_us
from torch import Tensor

from fedentopt.simulation.triton import wide_descriptors, wide_lines, wide_maps, wide_pooled, wide_update
from fedentopt.simulation.triton.interface import Optimiser
from fedentopt.simulation.triton.wide_tiles import LayerProduct, WideTiles, misfit

KINDS = ("tf32", "bf16")
NAMES = ("forward", "pooled", "input", "weight", "step")
NEAR = {"tf32": 2e-3, "bf16": 2e-2}  # of a result's length; both sum in fp32, some in another order


class Layer(NamedTuple):
    """A convolution of VGG-11 behind the first: channels in and out, side of its maps, whether a pool follows."""

    name: str
    inputs: int
    outputs: int
    side: int
    pooled: bool

    def flops(self) -> int:
        """Of one sample's product, taps inside the map only."""
        return 2 * self.inputs * self.outputs * (3 * self.side - 2) ** 2

    @property
    def weights(self) -> int:
        return 9 * self.inputs * self.outputs


LAYERS = [
    Layer("conv2", 64, 128, 16, True), Layer("conv3", 128, 256, 8, False), Layer("conv4", 256, 256, 8, True),
    Layer("conv5", 256, 512, 4, False), Layer("conv6", 512, 512, 4, True), Layer("conv7", 512, 512, 2, False),
    Layer("conv8", 512, 512, 2, True),
]  # fmt: skip

# (rows, columns, warps, stages), without those that spill registers when compiled for compute capability 9.0; `misfit`
# leaves out what a layer cannot be cut into. "small" are maps of 2 x 2, "masked" goes back through a ReLU as well.
TILES = {
    "forward": [(128, 256, 8, 3), (128, 256, 8, 4), (128, 128, 8, 4), (128, 128, 4, 4), (256, 128, 8, 4)],
    "small forward": [(64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 4), (128, 128, 8, 4)],
    "pooled": [(128, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 4)],
    "input": [(128, 256, 8, 3), (128, 256, 8, 4), (128, 128, 8, 4), (128, 128, 4, 4), (256, 128, 8, 4), (256, 64, 8, 4),
              (128, 64, 4, 4)],
    "masked input": [(128, 128, 8, 3), (128, 128, 8, 4), (64, 128, 4, 4), (128, 64, 4, 4), (256, 64, 8, 4)],
    "small input": [(64, 128, 4, 4), (64, 64, 4, 6), (128, 64, 4, 4), (128, 128, 8, 4)],
    "step": [(64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 8, 3), (128, 64, 8, 3), (128, 128, 8, 3)],
}  # fmt: skip


class Case(NamedTuple):
    """A product of a layer as a step makes it, by the name it has in `LayerProduct`."""

    kind: str
    layer: int
    name: str

    @property
    def product(self) -> LayerProduct:
        layer = LAYERS[self.layer]
        return LayerProduct(self.name, layer.inputs, layer.outputs, layer.side, self.kind)

    @property
    def masked(self) -> bool:
        """Whether the layer below has no pool, so that its ReLU is gone back through at once."""
        return self.name == "input" and not LAYERS[self.layer - 1].pooled if self.layer else False

    def tiles(self, batch: int) -> list[WideTiles]:
        """Candidates."""
        summed = {"forward": self.product.inputs, "pooled": self.product.inputs, "input": self.product.outputs}
        step = min(summed.get(self.name, batch), 64 if self.kind == "bf16" else 32)
        small = LAYERS[self.layer].side == 2 and self.name in ("forward", "input")
        key = ("small " if small else "masked " if self.masked else "") + self.name
        every = [WideTiles(rows, columns, step, *rest) for rows, columns, *rest in TILES.get(key, [])]
        return [tiles for tiles in every if misfit(self.product, tiles, batch) is None]


class Job(NamedTuple):
    """A case with other tiles, or with those that the code takes (None)."""

    case: Case
    tiles: WideTiles | None

    def __str__(self) -> str:
        tiles = "" if self.tiles is None else f" {tuple(self.tiles)}"
        return f"{self.case.kind} {LAYERS[self.case.layer].name} {self.case.name}{tiles}"


def cases(kind: str) -> list[Case]:
    """All products of a step, those that take most time first."""
    found = []
    for place, layer in enumerate(LAYERS):
        fused = wide_update.fuses(layer.inputs, layer.outputs, 9)
        pools = layer.pooled and wide_pooled.fits(64, (layer.side, layer.side))
        found += [Case(kind, place, "step" if fused else "weight"), Case(kind, place, "input")]
        found.append(Case(kind, place, "pooled" if pools else "forward"))
    return found


def jobs(kind: str, batch: int, names: list[str] | None) -> list[Job]:
    """The default tiles of every case, and then others."""
    mine = [case for case in cases(kind) if not names or case.name in names]
    return [*(Job(case, None) for case in mine), *(Job(case, tiles) for case in mine for tiles in case.tiles(batch))]


class Tensors:
    """What the products of one layer of n models read and write."""

    def __init__(self, kind: str, layer: Layer, n: int, batch: int, device: str = "cuda") -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        self.kind, self.layer, self.n, self.size, self.turned = kind, layer, n, (layer.side,) * 2, kind == "tf32"

        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        pixels = layer.side**2
        self.x, self.dy = (drawn(n, pixels, batch, c).to(dtype) for c in (layer.inputs, layer.outputs))
        self.left = drawn(n, pixels, batch, layer.inputs).to(dtype)
        self.xt, self.dyt = (m.transpose(2, 3).contiguous() if self.turned else m for m in (self.x, self.dy))
        self.w, self.v = (drawn(n, layer.weights) / 30 for _ in range(2))
        self.g = torch.zeros_like(self.w)
        shaped = self.w.view(n, layer.outputs, 9, layer.inputs)
        self.plain, self.across = wide_maps.turn(shaped, dtype, copy=not self.turned, turned=self.turned)
        self.bias = drawn(n, layer.outputs)
        each, rows = torch.full((n,), 0.01, device=device), torch.zeros(n, dtype=torch.int32, device=device)
        step = torch.ones(1, dtype=torch.int64, device=device)  # step 0 would not read momentum
        self.optimiser = Optimiser(
            self.w, self.v, self.g, each, each * 90, each, each * 0, self.w[:1].clone(), rows, rows + 10**6, step,
            torch.zeros(1, layer.weights, device=device), rows - 1, rows,
        )  # fmt: skip

    def call(self, case: Case, tiles: WideTiles | None) -> Callable[[], list[Tensor]]:
        """The product; what it gives are the tensors that later kernels read."""
        layer, common = self.layer, {"precision": "tf32", "tiles": tiles}
        if case.name in ("forward", "pooled"):

            def run() -> list[Tensor]:
                of = (self.x, self.plain, self.bias, self.size, 1)
                given: list[Tensor | None]
                if case.name == "pooled":
                    given = [*wide_pooled.forward(*of, models=self.n, keep=True, turned=self.turned, **common)]
                else:  # where a pool comes behind, it turns the maps
                    turned = self.turned and not layer.pooled
                    given = [*wide_descriptors.joined(*of, models=self.n, turned=turned, **common)]
                return [tensor for tensor in given if tensor is not None]

            return run
        if case.name == "input":
            order = {"taps_first": True} if self.turned else {"inputs_first": True}
            weight = self.across if self.turned else self.plain

            def run_back() -> list[Tensor]:
                left, turned = (self.left, self.turned) if case.masked else (None, False)
                given = wide_descriptors.joined(
                    self.dy, weight, None, self.size, 1, models=self.n, left=left, turned=turned, **order, **common
                )
                return [tensor for tensor in given if tensor is not None]

            return run_back
        if case.name == "weight":  # has no other tiles
            into = self.g.view(self.n, layer.outputs, 9, layer.inputs)

            def run_gradient() -> list[Tensor]:
                wide_lines.weight_grad(self.xt, self.dyt, into, self.size, 1, turned=self.turned, precision="tf32")
                return [self.g]

            return run_gradient
        copies = wide_update.Copies(None if self.turned else self.plain, self.across)

        def run_step() -> list[Tensor]:
            wide_update.weight_step(
                self.xt, self.dyt, 0, self.optimiser, copies, self.size, 1, side=3, turned=self.turned, described=True,
                **common,
            )  # fmt: skip
            return [self.w, self.v, *(copy for copy in copies if copy is not None)]

        return run_step

    def results(self, case: Case, tiles: WideTiles | None) -> list[Tensor]:
        """Copies of what one call gives; parameters are put back."""
        kept = [tensor for tensor in (self.w, self.v, self.plain, self.across) if tensor is not None]
        before = [tensor.clone() for tensor in kept]
        found = [tensor.clone() for tensor in self.call(case, tiles)()]
        for tensor, old in zip(kept, before, strict=True):
            tensor.copy_(old)
        return found


def off(found: list[Tensor], wanted: list[Tensor]) -> float:
    """How far results are from others, of their length; arg-max codes are left out, which ties decide."""
    gaps = [0.0]
    for ours, theirs in zip(found, wanted, strict=True):
        if ours.is_floating_point():
            gap = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
            gaps.append(gap if gap == gap else float("inf"))
    return max(gaps)


def time_jobs(kind: str, todo: list[Job], models: list[int], batch: int, until: float) -> list[dict[str, Any]]:
    """Microseconds of every job of a kind, checked with the fewest models; what fails is said and left out."""
    found: list[dict[str, Any]] = []
    todo = [job for job in todo if job.case.kind == kind]
    gaps: dict[Job, float] = {}
    for n in sorted(models):
        for place, layer in enumerate(LAYERS):
            mine = [job for job in todo if job.case.layer == place]
            if not mine:
                continue
            torch.cuda.empty_cache()
            tensors = Tensors(kind, layer, n, batch)
            wanted: dict[Case, list[Tensor]] = {}
            for timed, job in [*((False, job) for job in mine if n == min(models)), *((True, job) for job in mine)]:
                if time.time() > until:
                    return found
                case = job.case
                try:
                    if not timed:  # before anything has moved
                        given = tensors.results(*job)
                        gaps[job] = off(given, wanted.setdefault(case, given))
                        if gaps[job] > NEAR[kind]:
                            raise ArithmeticError(f"{gaps[job]:.1e} from what the usual tiles give")
                    elif gaps[job] <= NEAR[kind]:
                        us = time_us(tensors.call(*job), calls=2, replays=3)
                        found.append({"kind": kind, "models": n, "layer": layer.name, "product": case.name,
                                      "tiles": job.tiles and list(job.tiles), "off": float(f"{gaps[job]:.2e}"),
                                      "microseconds": round(us, 3)})  # fmt: skip
                except Exception as problem:
                    text = f"{type(problem).__name__} {str(problem)[:120]}"
                    print(f"{job}: {text}", flush=True)
                    gaps[job] = float("inf")
                    if "CUDA error" in text or "illegal" in text:
                        return found
    return found


def compile_job(job: Job, batch: int) -> None:
    """Compile and run with two models."""
    Tensors(job.case.kind, LAYERS[job.case.layer], 2, batch).call(*job)()
    torch.cuda.synchronize()
