"""The loop trainer: one model per worker, one client after another, the reference on the CPU.

A worker is a thread with one torch thread of its own: LeNet-sized operations are too short to split, and torch
releases the interpreter lock while it computes. A client's arithmetic is the same whichever worker takes it and
whatever trains beside it, so results are bit for bit those of the run alone.
Nets like LeNet-5 run on compiled kernels (`simulation.numba`), all others as ordinary modules through autograd.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedentopt.randomness import GOLDEN, mix64_torch, signed
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.numba import compiled_net
from fedentopt.simulation.trainers.bound_model import BoundModel
from fedentopt.simulation.trainers.client_samples import KnownMeans
from fedentopt.simulation.trainers.code_objective import CodeObjective
from fedentopt.simulation.work import CORRECTION_MODES, LocalCode, Room, Trained, Work

if TYPE_CHECKING:
    from fedentopt.simulation.numba import CompiledNet

PREDICTED_AT_ONCE = 250  # images; the same however many workers share them, so that no bit depends on their number
IN_GRADIENT, AFTER_STEP = CORRECTION_MODES["gradient"], CORRECTION_MODES["after"]


class Worker(BoundModel):
    """One model and the optimiser over its row; `compiled` allows compiled kernels where they fit."""

    def __init__(self, model: nn.Module, layout: FlatLayout, *, compiled: bool = True) -> None:
        super().__init__(model, layout, torch.device("cpu"))
        self.velocity = torch.zeros(layout.parameter_width)
        self._model, self._allowed = model, compiled
        self._nets: dict[tuple[int, int], CompiledNet | None] = {}
        self._objective: CodeObjective | None = None

    def compiled(self, images: torch.Tensor) -> CompiledNet | None:
        """The model on compiled kernels for such images (m, c, H, W), or None if it runs as a module."""
        size = int(images.shape[-2]), int(images.shape[-1])
        if size not in self._nets:
            self._nets[size] = compiled_net(self._model, self.layout, size) if self._allowed else None
        return self._nets[size]

    def predict(self, row: torch.Tensor, images: torch.Tensor, transform: ImageTransform) -> torch.Tensor:
        """Logits (M, C) of the model in `row` for uint8 images, without augmentation."""
        net = self.compiled(images)
        if net is not None:
            return net.logits(row, images, transform)
        self.load(row)
        return self.logits(transform.standardise(images))

    def train(
        self, start: torch.Tensor, work: Work, i: int, data: DeviceData, transform: ImageTransform, out: torch.Tensor,
        autocast: bool = False, sums: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Train row i of `work` from `start`, leaving the result in `out` (width,).

        With `sums` (2,), float64, the sum and the sum of squares of the samples' plain cross-entropies are added there.
        """
        net = None if autocast or work.codes[i] is not None else self.compiled(data.images)
        if net is not None:
            net.train(start, work, i, data, transform, out, sums)
        else:
            self._train_module(start, work, i, data, transform, out, autocast, sums)

    def _train_module(
        self, start: torch.Tensor, work: Work, i: int, data: DeviceData, transform: ImageTransform, out: torch.Tensor,
        autocast: bool, sums: torch.Tensor | None,
    ) -> None:  # fmt: skip
        self.load(start)
        self.velocity.zero_()
        self.reset()
        steps, batch = int(work.steps_host[i]), work.index.shape[2]
        index = work.index[:steps, i].to(torch.int64)
        filled = work.filled(i).tolist()
        position = torch.arange(steps * batch)
        draws = transform.draw(mix64_torch(work.augment_key[i] + position * signed(GOLDEN))).view(-1, steps, batch)
        settings = {name: float(getattr(work, name)[i]) for name in ("lr", "weight_decay", "momentum", "mu")}
        mode = int(work.correction_mode[i])
        push = work.correction[int(work.correction_row[i])] if mode and work.correction is not None else None
        scale, shift = (None, None) if work.plain_loss else (work.logit_scale[i], work.logit_shift[i])
        parameters, gradient = self.parameters, self.parameter_gradient
        anchor = start[: self.layout.parameter_width]
        objective = self._begin(work.codes[i], start, settings["lr"], autocast)
        for t in range(steps):
            chosen = index[t, : filled[t]]
            x = transform.apply(data.images[chosen], draws[:, t, : filled[t]])
            x, labels = x.contiguous(memory_format=torch.channels_last), data.labels[chosen]
            self.set_dropout_key(work.dropout_key[i], position[t])
            if objective is None:
                gradient.zero_()
                with self.drawing(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    logits = self.module(x)
                logits = plain = logits.float()
                if scale is not None and shift is not None:
                    logits = logits * scale + shift
                F.cross_entropy(logits, labels).backward()
            else:
                with self.drawing():
                    plain = objective.backward(x, labels, wants_logits=sums is not None)
            self.take_buffers()
            if sums is not None:
                _add_sample_losses(plain.detach(), labels, sums)
            sgd_step(parameters, self.velocity, gradient, anchor, push=push, mode=mode, **settings)
        self.store(out)

    def _begin(self, code: LocalCode | None, start: torch.Tensor, lr: float, bf16: bool) -> CodeObjective | None:
        """Made ready for the client, if its local objective is code."""
        if code is None:
            return None
        self._objective = self._objective or CodeObjective(self, self._model, bf16=bf16)
        self._objective.begin(code, start, lr)
        return self._objective


def _add_sample_losses(logits: torch.Tensor, labels: torch.Tensor, sums: torch.Tensor) -> None:
    """As `Kernels.add_sample_losses`, for one model: logits (B, C), labels (B,), sums (2,)."""
    losses = F.cross_entropy(logits, labels, reduction="none").double()
    sums += torch.stack([losses.sum(), losses.square().sum()])


@torch.no_grad()
def sgd_step(
    w: torch.Tensor, v: torch.Tensor, g: torch.Tensor, anchor: torch.Tensor, *,
    lr: float, weight_decay: float, momentum: float, mu: float, push: torch.Tensor | None, mode: int,
) -> None:  # fmt: skip
    """One SGD step on flat rows, in place: the same formula as `Kernels.sgd_update`."""
    g.add_(w, alpha=weight_decay)
    if mu:
        g.add_(w - anchor, alpha=mu)
    if push is not None and mode == IN_GRADIENT:
        g.add_(push)
    v.mul_(momentum).add_(g)
    w.add_(v, alpha=-lr)
    if push is not None and mode == AFTER_STEP:
        w.add_(push, alpha=-lr)


class LoopTrainer:
    """Trains the rows of a stack one by one on `workers` threads."""

    name = "loop"

    def __init__(
        self, model: nn.Module, layout: FlatLayout, data: DeviceData, transform: ImageTransform, workers: int,
        precision: str = "fp32",
    ) -> None:  # fmt: skip
        self.layout, self.data, self.transform = layout, data, transform
        self._autocast = precision == "bf16"
        self._workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(workers):
            worker = Worker(model, layout, compiled=not self._autocast)
            self._compiled = worker.compiled(data.images) is not None  # compiles here, not in the workers' threads
            self._workers.put(worker)
        self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))

    def describe(self) -> str:
        runs = "compiled kernels" if self._compiled else "torch modules"
        return f"loop trainer, {self._pool._max_workers} CPU worker(s) of one thread, {runs}"

    def train(self, starts: torch.Tensor, work: Work, *, lend: bool = False) -> Trained:
        """See `Trainer`. Longest first, so that workers end together. Nothing is lent."""
        out = torch.empty(work.rows, self.layout.width)
        sums = torch.zeros(work.rows, 2, dtype=torch.float64) if work.wants_losses else None

        def one(i: int) -> Callable[[Worker], None]:
            start, own = starts[int(work.start_row[i])], None if sums is None else sums[i]
            return lambda w: w.train(start, work, i, self.data, self.transform, out[i], self._autocast, own)

        self._each([one(i) for i in range(work.rows)])
        return Trained(out, None if sums is None else work.average_losses(sums))

    def predict(self, models: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Logits (G, M, C) of every model for one batch of uint8 images, in parts that all workers share."""
        parts = images.split(PREDICTED_AT_ONCE)
        results: list[torch.Tensor] = [torch.empty(0)] * (len(models) * len(parts))

        def one(i: int) -> Callable[[Worker], None]:
            def run(worker: Worker) -> None:
                results[i] = worker.predict(models[i // len(parts)], parts[i % len(parts)], self.transform)

            return run

        self._each([one(i) for i in range(len(results))])
        return torch.cat(results).view(len(models), len(images), -1)

    def soft_labels(self, trained: torch.Tensor, samples: list[np.ndarray]) -> np.ndarray:
        """Mean softmax of each trained model over its own samples, (N, C)."""
        results: list[torch.Tensor] = [torch.empty(0)] * len(samples)

        def one(i: int) -> Callable[[Worker], None]:
            def run(worker: Worker) -> None:
                images = self.data.images[torch.from_numpy(samples[i]).to(torch.int64)]
                parts = images.split(PREDICTED_AT_ONCE)
                sums = [worker.predict(trained[i], part, self.transform).softmax(1).sum(0) for part in parts]
                results[i] = torch.stack(sums).sum(0) / len(samples[i])

            return run

        self._each([one(i) for i in range(len(samples))])
        return torch.stack(results).double().numpy()

    def mean_losses(self, models: torch.Tensor, rows: list[int], samples: list[np.ndarray]) -> KnownMeans:
        """See `Trainer`. A client's parts are its own: no bit depends on the others."""
        results = np.full(len(samples), np.nan)

        def one(i: int) -> Callable[[Worker], None]:
            def run(worker: Worker) -> None:
                total = 0.0
                for index in torch.from_numpy(samples[i]).to(torch.int64).split(PREDICTED_AT_ONCE):
                    logits = worker.predict(models[rows[i]], self.data.images[index], self.transform)
                    total += float(F.cross_entropy(logits, self.data.labels[index], reduction="none").double().sum())
                results[i] = total / len(samples[i])

            return run

        self._each([one(i) for i in range(len(samples)) if len(samples[i])])
        return KnownMeans(results)

    def reserve(self, room: Room) -> None:
        """Nothing here depends on the size of a round."""

    def shrink(self) -> str | None:
        return None

    def close(self) -> None:
        self._pool.shutdown()

    def _each(self, jobs: list[Callable[[Worker], None]]) -> None:
        def take(job: Callable[[Worker], None]) -> None:
            worker = self._workers.get()
            try:
                job(worker)
            finally:
                self._workers.put(worker)

        for _ in self._pool.map(take, jobs):
            pass
