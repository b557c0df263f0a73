"""The streams trainer: ordinary modules in a few slots, each with a CUDA stream and a graph of its own.

For what cannot be stacked (most models with BatchNorm, local losses that are code) and for large models, whose single
step already fills much of the GPU. A slot takes one client after another; slots run side by side. A step is captured
once per slot and replayed; padding is left out of the loss, so one graph serves all batches. BatchNorm must not see
padding either: on CUDA its last batches are padded to one of a few sizes, each with a graph of its own, whose
statistics leave padding out (`masked_norm`). What cannot be padded so (other buffers, a model that looks across
samples: `padding_trial`) runs partial batches outside graphs at their real size. On the CPU the same code runs in turn,
without streams, and every batch of BatchNorm at its real size.
Steps of small clients are shorter than the host takes to prepare a client piece by piece: so a round is packed once
(`packed_rows`), a slot takes over a client in one copy, and the host goes from slot to slot by several steps at a time.
"""

from __future__ import annotations

import contextlib
import heapq
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedentopt.models import keyed_draws
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData, to_device, untuned
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.trainers.bound_model import BoundModel, mixes_samples
from fedentopt.simulation.trainers.client_samples import (
    QueuedMeans,
    joined_samples,
    places_of_clients,
    places_of_models,
)
from fedentopt.simulation.trainers.fused_blocks import FusedForm, form_for, fusible
from fedentopt.simulation.trainers.packed_rows import RowFormat
from fedentopt.simulation.trainers.padding_trial import can_mask, can_pad
from fedentopt.simulation.trainers.stream_slot import BatchForm, Client, Slot
from fedentopt.simulation.triton import Kernels
from fedentopt.simulation.work import Room, Trained, Work

VISIT = 8  # steps queued on one slot before the next has its turn: few enough that no stream runs dry meanwhile
STEP_ROOM = 64  # slots make room for multiples of so many steps, so that few rounds ask for more
PREDICT_BATCH = 256  # images in one forward pass, or as many more as have so many pixels together
PREDICT_PIXELS = 1 << 22
REPEATABLE = True  # of a model with fused layers, whose kernels give the same bits from run to run: cuDNN's do too
FUSED = {"norms": "BatchNorm", "depthwise": "depthwise convolutions"}
PADDED_SIZES = 8  # of masked batches: with 64 samples multiples of 8, on average four rows of padding per last batch


def _visits(slot: Slot, clients: Sequence[Client]) -> Iterator[bool]:
    """Train the clients one after another; True between the visits, each of one client and few steps."""
    for client in clients:
        slot.load(client)
        for first in range(0, len(client.batches), VISIT):
            if first:
                yield True
            for batch in client.batches[first : first + VISIT]:
                slot.run(batch)
        slot.finish(client)
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
        slots: int, precision: str = "fp32", masks: bool | None = None, form: FusedForm | None = None,
    ) -> None:  # fmt: skip
        """`masks`: whether partial batches of BatchNorm are padded and masked; by default where that pays. `form`: what
        of a step is fused; by default what suits the device."""
        self.layout, self.data, self.transform, self.kernels = layout, data, transform, kernels
        self.bf16 = precision == "bf16"
        self.form = form_for(data.images.device, self.bf16) if form is None else form
        self.fused = fusible(model, self.form, data.images.device)
        # Autograd's thread says so once, then takes the context that it misses: nothing a user could do about.
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
        # Draws of a forward of one's own may be counted in any order, such as a recurrent layer's: step by step.
        size = int(data.images.shape[2]), int(data.images.shape[3])
        self.sees_padding = (
            bool(layout.buffers) or mixes_samples(model) or keyed_draws(model) is not None or not can_pad(model, size)
        )
        pays = data.images.is_cuda and self.sees_padding  # without graphs padding only adds work
        self.masks = can_mask(model, layout, size, data.images.device) if masks is None and pays else bool(masks)
        self.model = model
        self._room = slots
        self._slots: list[Slot] = []
        self._steps = 0
        self._form: RowFormat | None = None
        self._no_momentum = torch.zeros(layout.parameter_width, dtype=torch.int32, device=data.images.device)

    def describe(self) -> str:
        masked = ", partial batches padded and masked" if self.masks else ""
        parts = [FUSED[part] for part in FUSED if part in self.fused.values()]
        fused = f", fused: {', '.join(parts)}" if parts else ""
        return f"streams trainer, {self._room} slot(s), {self.kernels.describe()}{masked}{fused}"

    def choosing(self, *, timed: bool) -> contextlib.AbstractContextManager[None]:
        """How cuDNN chooses algorithms: by rule where layers are fused, since timing them takes half a minute for
        EfficientNet, gains next to nothing and may end otherwise next time; else by timing them if asked."""
        if self.fused:
            return untuned(repeatable=REPEATABLE)
        return contextlib.nullcontext() if timed else untuned()

    def _take(self, count: int) -> list[Slot]:
        while len(self._slots) < min(count, self._room):
            self._slots.append(Slot(self))
        return self._slots[:count]

    def _fit(self, work: Work) -> RowFormat:
        """A format for the rows of `work`: the same from round to round if it can be, as captured steps have it."""
        if self._form is None or not self._form.holds(work):
            steps, _, batch = work.index.shape
            room = max(self._steps, -(-steps // STEP_ROOM) * STEP_ROOM)
            self._form = RowFormat(room, batch, work.logit_scale.shape[1])
        return self._form

    def train(self, starts: torch.Tensor, work: Work, *, lend: bool = False) -> Trained:
        """See `Trainer`. Nothing is lent."""
        slots = self._take(work.rows)
        form = self._fit(work)
        for slot in slots:
            slot.prepare(form, work.wants_losses)
        packed = form.pack(work)
        out = torch.empty(work.rows, self.layout.width, device=starts.device)
        sums = torch.empty(work.rows, 2, dtype=torch.float64, device=starts.device) if work.wants_losses else None
        # Longest first onto the least loaded slot, so that slots end together.
        queues: list[list[Client]] = [[] for _ in slots]
        loads = [(0, i) for i in range(len(slots))]
        for client in self._clients(starts, work, packed, out, sums):
            load, lightest = loads[0]
            queues[lightest].append(client)
            heapq.heapreplace(loads, (load + len(client.batches), lightest))
        with side_by_side(slots):
            turns = deque(zip(slots, map(_visits, slots, queues), strict=True))
            while turns:
                slot, visits = turns.popleft()
                slot.enter()
                if next(visits, False):
                    turns.append((slot, visits))
        return Trained(out, None if sums is None else work.average_losses(sums))

    def _clients(
        self, starts: torch.Tensor, work: Work, packed: torch.Tensor, out: torch.Tensor, sums: torch.Tensor | None
    ) -> list[Client]:
        """The rows of a round, cut up all at once: a slice by itself costs the host about as much as a copy."""
        batches = [self._batches(work, i) for i in range(work.rows)]
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
        losses: Sequence[torch.Tensor | None] = [None] * work.rows if sums is None else sums.unbind()
        own = zip(batches, begins, corrections, out.unbind(), losses, work.codes, work.lr_host.tolist(), strict=True)
        return [
            Client(forms, start, work.correction, row, result, loss, code, lr)
            for forms, start, row, result, loss, code, lr in own
        ]

    def _batches(self, work: Work, i: int) -> list[BatchForm]:
        """The forms of a row's batches, one per step."""
        batch, code = int(work.index.shape[2]), work.codes[i] is not None
        if not self.sees_padding and not code:
            return [BatchForm(batch)] * int(work.steps_host[i])
        if code or not self.masks:
            return [BatchForm(size) for size in work.filled(i).tolist()]
        part = -(-batch // PADDED_SIZES)
        return [
            BatchForm(batch) if size == batch else BatchForm(min(batch, -(-size // part) * part), masked=True)
            for size in work.filled(i).tolist()
        ]

    def predict(self, models: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Logits (G, M, C) of every model for one batch of uint8 images."""
        bound = self._take(1)[0].bound
        results = []
        for row in models:
            bound.load(row)
            results.append(torch.cat([self._logits(bound, part) for part in images.split(self._at_once)]))
        return torch.stack(results)

    @property
    def _at_once(self) -> int:
        """Images of one forward pass."""
        return max(PREDICT_BATCH, PREDICT_PIXELS // (self.data.images.shape[2] * self.data.images.shape[3]))

    def _logits(self, bound: BoundModel, images: torch.Tensor) -> torch.Tensor:
        autocast = torch.autocast(images.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False)
        with self.choosing(timed=True), autocast:
            return bound.logits(self.transform.standardise(images))

    def soft_labels(self, trained: torch.Tensor, samples: list[np.ndarray]) -> np.ndarray:
        """Mean softmax of each trained model over its own samples, (N, C)."""
        means = []
        for row, chosen in zip(trained, samples, strict=True):
            index = torch.from_numpy(chosen).to(self.data.images.device, torch.int64)
            means.append(self.predict(row[None], self.data.images[index])[0].softmax(1).mean(0))
        return torch.stack(means).double().cpu().numpy()

    def mean_losses(self, models: torch.Tensor, rows: list[int], samples: list[np.ndarray]) -> QueuedMeans:
        """See `Trainer`. On CUDA the clients of a model share batches; on the CPU each has its own, so that its bits do
        not depend on its neighbours."""
        device, chosen, bound = self.data.images.device, joined_samples(samples), self._take(1)[0].bound
        if device.type == "cuda":
            lines = list(places_of_models(rows, samples).items())
        else:
            lines = list(zip(rows, places_of_clients(samples), strict=True))
        values = []
        for row, line in lines:
            if not len(line):
                continue
            bound.load(models[row])
            for index in to_device(chosen[line], device).split(self._at_once):
                logits = self._logits(bound, self.data.images[index])
                values.append(F.cross_entropy(logits, self.data.labels[index], reduction="none"))
        return QueuedMeans(values, [line for _, line in lines], samples)

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
