"""The streams trainer: ordinary modules in a few slots, each with a CUDA stream and a graph of its own.

For models with BatchNorm and for large ones, whose single step already fills much of the GPU. A slot takes one client
after another; slots run side by side. A step is captured once per slot and replayed. BatchNorm must not see padding,
so a model with buffers runs its partial batches outside the graph at their real size; without buffers padding is
masked in the loss and one graph serves all batches. On the CPU the same code runs in turn, without streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.bound_model import BoundModel
from fedentopt.simulation.device_data import DeviceData
from fedentopt.simulation.kernels import Kernels
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.work import Room, Work

PER_ROW = (
    "steps", "augment_key", "dropout_key", "start_row", "lr", "weight_decay", "momentum", "mu",
    "correction_row", "correction_mode",
)  # fmt: skip
PREDICT_BATCH = 256


class Slot:
    """One module, the buffers of its step, its stream and its graph."""

    def __init__(self, trainer: StreamsTrainer, model: nn.Module) -> None:
        device = trainer.data.images.device
        self.trainer = trainer
        self.bound = BoundModel(model, trainer.layout, device)
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.index = torch.full((0, 1, 1), -1, dtype=torch.int32, device=device)
        width = trainer.layout.parameter_width
        self.velocity = torch.zeros(1, width, device=device)
        self.start = torch.zeros(1, width, device=device)
        self.push = torch.zeros(1, width, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.per_row: dict[str, torch.Tensor] = {}
        self.scale = self.shift = torch.empty(0, device=device)

    def load(self, start: torch.Tensor, work: Work, i: int) -> None:
        """Take over row i of the work."""
        device = start.device
        steps, batch = int(work.steps_host[i]), work.index.shape[2]
        if self.index.shape[0] < steps or self.index.shape[2] != batch:
            room = -(-steps // 64) * 64
            self.index = torch.full((room, 1, batch), -1, dtype=torch.int32, device=device)
            self.per_row = {name: torch.zeros_like(getattr(work, name)[:1]) for name in PER_ROW}
            self.scale, self.shift = (torch.zeros_like(work.logit_scale[:1]) for _ in range(2))
            self.graph = None
        width = self.start.shape[1]
        self.bound.load(start)
        self.bound.module.train()
        self.start[0].copy_(start[:width])
        self.velocity.zero_()
        self.index[:steps, 0].copy_(work.index[:steps, i])
        for name, room_ in self.per_row.items():
            room_.copy_(getattr(work, name)[i : i + 1])
        self.per_row["start_row"].zero_()
        self.per_row["correction_row"].clamp_(max=0)
        self.scale.copy_(work.logit_scale[i : i + 1])
        self.shift.copy_(work.logit_shift[i : i + 1])
        if work.correction is not None:
            row = work.correction_row[i : i + 1].clamp(min=0).to(torch.int64)
            self.push.copy_(work.correction.index_select(0, row))
        self.step.zero_()

    def run(self, filled: int) -> None:
        """One step on a batch with `filled` real samples."""
        batch = self.index.shape[2]
        if self.stream is None or (filled < batch and self.trainer.sees_padding):
            self._step(filled if self.trainer.sees_padding else batch)
            return
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()

    def _step(self, size: int) -> None:
        t = self.trainer
        x, labels = t.kernels.gather_augment(
            t.data.images, t.data.labels, self.index, self.per_row["augment_key"], self.step, t.transform, 1
        )
        self.bound.set_dropout_key(self.per_row["dropout_key"], self.step)
        self.bound.gradient.zero_()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=t.bf16, cache_enabled=False):
            logits = self.bound.module(x[0, :size].contiguous(memory_format=torch.channels_last))
        logits = logits.float()
        upstream, _ = t.kernels.softmax_xent_grad(
            logits.detach()[None], labels[:, :size].contiguous(), self.scale, self.shift
        )
        logits.backward(upstream[0])
        t.kernels.sgd_update(
            self.bound.parameters[None], self.velocity, self.bound.parameter_gradient[None], n=1, start=self.start,
            step=self.step, correction=self.push,
            **{name: value for name, value in self.per_row.items() if not name.endswith("_key")},
        )  # fmt: skip
        self.step.add_(1)

    def _capture(self) -> None:
        """Capture a step at full batch size. What the warm-up changes (BatchNorm counts included) is put back."""
        state = [self.bound.row, self.velocity, self.step, *self.bound.module.buffers()]
        saved = [tensor.clone() for tensor in state]
        self._step(self.index.shape[2])
        torch.cuda.synchronize()
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self._step(self.index.shape[2])

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Work inside goes to this slot's stream."""
        if self.stream is None:
            yield
        else:
            with torch.cuda.stream(self.stream):
                yield


class StreamsTrainer:
    """Trains rows in `slots` concurrent slots."""

    name = "streams"

    def __init__(
        self, model: nn.Module, layout: FlatLayout, data: DeviceData, transform: ImageTransform, kernels: Kernels,
        slots: int, precision: str = "fp32",
    ) -> None:  # fmt: skip
        self.layout, self.data, self.transform, self.kernels = layout, data, transform, kernels
        self.bf16 = precision == "bf16"
        self.sees_padding = bool(layout.buffers)
        self._model = model
        self._room = slots
        self._slots: list[Slot] = []

    def describe(self) -> str:
        return f"streams trainer, {self._room} slot(s), {self.kernels.describe()}"

    def _take(self, count: int) -> list[Slot]:
        while len(self._slots) < min(count, self._room):
            self._slots.append(Slot(self, self._model))
        return self._slots[:count]

    def train(self, starts: torch.Tensor, work: Work) -> torch.Tensor:
        """Trained models of all rows, (N, width)."""
        slots = self._take(work.rows)
        out = torch.empty(work.rows, self.layout.width, device=starts.device)
        # Longest first onto the least loaded slot, so that slots end together.
        queues: list[list[int]] = [[] for _ in slots]
        load = np.zeros(len(slots), dtype=np.int64)
        for row in range(work.rows):
            lightest = int(load.argmin())
            queues[lightest].append(row)
            load[lightest] += work.steps_host[row]
        start_rows = work.start_row.to(torch.int64)
        for slot in slots:
            if slot.stream is not None:
                slot.stream.wait_stream(torch.cuda.current_stream())
        jobs = [self._job(slot, rows, starts, start_rows, work, out) for slot, rows in zip(slots, queues, strict=True)]
        while jobs:  # one step of every slot in turn keeps all streams fed
            jobs = [job for job in jobs if next(job, None) is not None]
        for slot in slots:
            if slot.stream is not None:
                torch.cuda.current_stream().wait_stream(slot.stream)
        return out

    @staticmethod
    def _job(
        slot: Slot, rows: list[int], starts: torch.Tensor, start_rows: torch.Tensor, work: Work, out: torch.Tensor
    ) -> Iterator[bool]:
        for row in rows:
            with slot.current():
                slot.load(starts.index_select(0, start_rows[row : row + 1])[0], work, row)
            for filled in work.filled(row):
                with slot.current():
                    slot.run(int(filled))
                yield True
            with slot.current():
                slot.bound.store(out[row])

    def predict(self, models: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Logits (G, M, C) of every model for one batch of uint8 images."""
        bound = self._take(1)[0].bound
        results = []
        for row in models:
            bound.load(row)
            with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
                parts = [bound.logits(self.transform.standardise(p)) for p in images.split(PREDICT_BATCH)]
            results.append(torch.cat(parts))
        return torch.stack(results)

    def soft_labels(self, trained: torch.Tensor, samples: list[np.ndarray]) -> np.ndarray:
        """Mean softmax of each trained model over its own samples, (N, C)."""
        means = []
        for row, chosen in zip(trained, samples, strict=True):
            index = torch.from_numpy(chosen).to(self.data.images.device, torch.int64)
            means.append(self.predict(row[None], self.data.images[index])[0].softmax(1).mean(0))
        return torch.stack(means).double().cpu().numpy()

    def reserve(self, room: Room) -> None:
        """Nothing here depends on the size of a round."""

    def shrink(self) -> str | None:
        """Give back slots and graphs, and take half as many from now on."""
        if self._room == 1:
            return None
        self._room = max(1, min(self._room, len(self._slots) or 1) // 2)
        self.close()
        return f"{self._room} client(s) side by side"

    def close(self) -> None:
        self._slots.clear()
        if self.data.images.is_cuda:
            torch.cuda.empty_cache()
