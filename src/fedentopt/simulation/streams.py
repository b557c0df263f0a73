"""The streams trainer: ordinary modules in a few slots, each with a CUDA stream and a graph of its own.

For models with BatchNorm and for large ones, whose single step already fills much of the GPU. A slot takes one client
after another; slots run side by side. A step is captured once per slot and replayed. BatchNorm must not see padding,
so a model with BatchNorm or other buffers runs its partial batches outside the graph at their real size; without them
padding is masked in the loss and one graph serves all batches. On the CPU the same code runs in turn, without streams.
Steps of small clients are shorter than the host takes to prepare a client piece by piece: so a round is packed once
(`packed_rows`), a slot takes over a client in one copy, and the host goes from slot to slot by several steps at a time.
"""

from __future__ import annotations

import contextlib
import heapq
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from torch import nn

from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.bound_model import BoundModel, mixes_samples
from fedentopt.simulation.device_data import DeviceData
from fedentopt.simulation.kernels import Kernels
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.packed_rows import RowFormat
from fedentopt.simulation.work import Room, Work

VISIT = 8  # steps queued on one slot before the next has its turn: few enough that no stream runs dry meanwhile
STEP_ROOM = 64  # slots make room for multiples of so many steps, so that few rounds ask for more
PREDICT_BATCH = 256  # images in one forward pass, or as many more as have so many pixels together
PREDICT_PIXELS = 1 << 22


@dataclass(frozen=True)
class Client:
    """A row of a round: the sizes of its batches, what a slot copies to begin it, its correction, its result.

    `begin` is its packed row, its start model, that model's parameters and no momentum, all as int32. The correction
    is a row of a matrix whose number only the device knows. All of it is views of tensors that the round keeps.
    """

    sizes: list[int]
    begin: tuple[torch.Tensor, ...]
    corrections: torch.Tensor | None
    correction_row: torch.Tensor | None
    result: torch.Tensor


class Slot:
    """One module, the buffers of its step, its stream and its graph.

    The buffers are made on the stream that calls the trainer and used on the slot's own. That is sound because the
    trainer joins the two around every round.
    """

    def __init__(self, trainer: StreamsTrainer, model: nn.Module) -> None:
        device = trainer.data.images.device
        self.trainer = trainer
        self.bound = BoundModel(model, trainer.layout, device)
        self.bound.module.train()
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.graph: torch.cuda.CUDAGraph | None = None
        width = trainer.layout.parameter_width
        self.velocity = torch.zeros(1, width, device=device)
        self.start = torch.zeros(1, width, device=device)
        self.push = torch.zeros(1, width, device=device)
        self.own = torch.zeros(1, dtype=torch.int32, device=device)  # the row of `start` and `push`
        self.form: RowFormat | None = None
        self.packed = torch.empty(0, dtype=torch.int32, device=device)
        self.fields: dict[str, torch.Tensor] = {}
        self._targets: list[torch.Tensor] = []

    def prepare(self, form: RowFormat) -> None:
        """Before a round whose rows have this format. Another than before costs a new capture of the step."""
        if not self.bound.module.training:  # it has predicted since; telling every layer takes long
            self.bound.module.train()
        if self.form == form:
            return
        if self.stream is not None:
            self.stream.synchronize()  # nothing may still replay what is given back here
        self.graph = None
        self.form, self.packed = form, torch.zeros(form.width, dtype=torch.int32, device=self.packed.device)
        self.fields = form.views(self.packed[None])
        floats = (self.bound.row, self.start[0], self.velocity[0])
        self._targets = [self.packed, *(tensor.view(torch.int32) for tensor in floats)]

    def load(self, client: Client) -> None:
        """Take over a client. Its beginning is of one type so that CUDA copies all of it in one kernel."""
        torch._foreach_copy_(self._targets, client.begin)
        self.bound.read_integers()
        if client.corrections is not None and client.correction_row is not None:
            torch.index_select(client.corrections, 0, client.correction_row, out=self.push)

    def run(self, size: int) -> None:
        """One step on the first `size` samples of a batch."""
        assert self.form is not None
        if size < self.form.batch:
            with _untuned():
                self._step(size)
            return
        if self.stream is None:
            self._step(size)
            return
        if self.graph is None:
            self._capture()
        assert self.graph is not None
        self.graph.replay()

    def _step(self, size: int) -> None:
        t, row = self.trainer, self.fields
        x, labels = t.kernels.gather_augment(
            t.data.images, t.data.labels, row["index"], row["augment_key"], row["step"], t.transform, 1
        )
        self.bound.pick_dropout_key(row["dropout_keys"][0], row["step"])
        self.bound.gradient.zero_()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=t.bf16, cache_enabled=False):
            logits = self.bound.module(x[0, :size].contiguous(memory_format=torch.channels_last))
        logits = logits.float()
        upstream, _ = t.kernels.softmax_xent_grad(
            logits.detach()[None], labels[:, :size].contiguous(), row["logit_scale"], row["logit_shift"]
        )
        logits.backward(upstream[0])
        t.kernels.sgd_update(
            self.bound.parameters[None], self.velocity, self.bound.parameter_gradient[None], n=1, lr=row["lr"],
            momentum=row["momentum"], weight_decay=row["weight_decay"], mu=row["mu"], start=self.start,
            start_row=self.own, steps=row["steps"], step=row["step"], correction=self.push, correction_row=self.own,
            correction_mode=row["correction_mode"],
        )  # fmt: skip
        row["step"].add_(1)

    def _capture(self) -> None:
        """Capture a step at full batch size. What the warm-up changes (BatchNorm counts included) is put back."""
        assert self.form is not None
        state = [self.bound.row, self.velocity, self.fields["step"], *self.bound.integers]
        saved = [tensor.clone() for tensor in state]
        self._step(self.form.batch)
        torch.cuda.synchronize()
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self._step(self.form.batch)

    def enter(self) -> None:
        """What is queued from here on goes to this slot's stream. Cheaper by far than a context for every visit."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)


@contextlib.contextmanager
def _untuned() -> Iterator[None]:
    """Inside, cuDNN chooses algorithms by rule: timing them takes seconds for every new size of a last batch."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _visits(slot: Slot, clients: Sequence[Client]) -> Iterator[bool]:
    """Train the clients one after another; True between the visits, each of one client and few steps."""
    for client in clients:
        slot.load(client)
        for first in range(0, len(client.sizes), VISIT):
            if first:
                yield True
            for size in client.sizes[first : first + VISIT]:
                slot.run(size)
        slot.bound.store(client.result)
        yield True


@contextlib.contextmanager
def side_by_side(slots: Sequence[Slot]) -> Iterator[None]:
    """Inside, slots run after all that was queued before; what is queued afterwards runs after them.

    Memory that the caller took on its own stream and slots read or write inside may therefore be given back right
    after, also when something inside fails: its next user waits for the slots.
    """
    streams = [slot.stream for slot in slots if slot.stream is not None]
    if not streams:
        yield
        return
    caller = torch.cuda.current_stream()
    before = caller.record_event()
    for stream in streams:
        stream.wait_event(before)
    try:
        yield
    finally:
        torch.cuda.set_stream(caller)
        for stream in streams:
            caller.wait_stream(stream)


class StreamsTrainer:
    """Trains rows in `slots` concurrent slots."""

    name = "streams"

    def __init__(
        self, model: nn.Module, layout: FlatLayout, data: DeviceData, transform: ImageTransform, kernels: Kernels,
        slots: int, precision: str = "fp32",
    ) -> None:  # fmt: skip
        self.layout, self.data, self.transform, self.kernels = layout, data, transform, kernels
        self.bf16 = precision == "bf16"
        # Autograd's thread says so once, then takes the context that it misses: nothing a user could do about.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
        self.sees_padding = bool(layout.buffers) or mixes_samples(model)
        self._model = model
        self._room = slots
        self._slots: list[Slot] = []
        self._steps = 0
        self._form: RowFormat | None = None
        self._no_momentum = torch.zeros(layout.parameter_width, dtype=torch.int32, device=data.images.device)

    def describe(self) -> str:
        return f"streams trainer, {self._room} slot(s), {self.kernels.describe()}"

    def _take(self, count: int) -> list[Slot]:
        while len(self._slots) < min(count, self._room):
            self._slots.append(Slot(self, self._model))
        return self._slots[:count]

    def _fit(self, work: Work) -> RowFormat:
        """A format for the rows of `work`: the same from round to round if it can be, as captured steps have it."""
        if self._form is None or not self._form.holds(work):
            steps, _, batch = work.index.shape
            room = max(self._steps, -(-steps // STEP_ROOM) * STEP_ROOM)
            self._form = RowFormat(room, batch, work.logit_scale.shape[1])
        return self._form

    def train(self, starts: torch.Tensor, work: Work) -> torch.Tensor:
        """Trained models of all rows, (N, width)."""
        slots = self._take(work.rows)
        form = self._fit(work)
        for slot in slots:
            slot.prepare(form)
        packed = form.pack(work)
        out = torch.empty(work.rows, self.layout.width, device=starts.device)
        # Longest first onto the least loaded slot, so that slots end together.
        queues: list[list[Client]] = [[] for _ in slots]
        loads = [(0, i) for i in range(len(slots))]
        for client in self._clients(starts, work, packed, out):
            load, lightest = loads[0]
            queues[lightest].append(client)
            heapq.heapreplace(loads, (load + len(client.sizes), lightest))
        with side_by_side(slots):
            turns = deque(zip(slots, map(_visits, slots, queues), strict=True))
            while turns:
                slot, visits = turns.popleft()
                slot.enter()
                if next(visits, False):
                    turns.append((slot, visits))
        return out

    def _clients(self, starts: torch.Tensor, work: Work, packed: torch.Tensor, out: torch.Tensor) -> list[Client]:
        """The rows of a round, cut up all at once: a slice by itself costs the host about as much as a copy."""
        steps, batch = work.steps_host.tolist(), work.index.shape[2]
        sizes = [work.filled(i).tolist() if self.sees_padding else [batch] * steps[i] for i in range(work.rows)]
        # One start model is read where it is; of several, every client finds its own where its result will be.
        one = len(starts) == 1
        begin = starts.expand(work.rows, -1) if one else torch.index_select(starts, 0, work.start_row, out=out)
        begin = begin.view(torch.int32)
        parameters = begin[:, : self.layout.parameter_width]
        begins = zip(packed.unbind(), begin.unbind(), parameters.unbind(), repeat(self._no_momentum), strict=False)
        corrections: Sequence[torch.Tensor | None] = [None] * work.rows
        if work.correction is not None:
            # A row without a correction is given any: its mode says that it is not used.
            corrections = work.correction_row.clamp(min=0).split(1)
        rows = zip(sizes, begins, corrections, out.unbind(), strict=True)
        return [Client(s, b, work.correction, c, result) for s, b, c, result in rows]

    def predict(self, models: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Logits (G, M, C) of every model for one batch of uint8 images."""
        bound = self._take(1)[0].bound
        at_once = max(PREDICT_BATCH, PREDICT_PIXELS // (images.shape[2] * images.shape[3]))
        results = []
        for row in models:
            bound.load(row)
            with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False):
                parts = [bound.logits(self.transform.standardise(p)) for p in images.split(at_once)]
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
        """Steps captured from here on have room for the longest client to come."""
        self._steps = max(self._steps, room.steps)

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
