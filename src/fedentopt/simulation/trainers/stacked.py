"""The stacked trainer: the clients of all runs on one leading axis, one step for all of them.

Rows are sorted by step count, so the clients still training are a prefix and the stack shrinks as clients finish.
On CUDA the step is captured once per prefix size (a short ladder of sizes, see `ladder`) and replayed; the step number
lives on the device, so one graph serves every step of every round. Nothing is read back inside a round. A row that has
finished but still lies inside the replayed prefix is left bit for bit as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedentopt.models import dropout_key
from fedentopt.randomness import GOLDEN, mix64_torch, signed
from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import FIRST, DeviceData, to_device
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.lowering import lower
from fedentopt.simulation.trainers.client_samples import (
    NARROW,
    UNLIKE_TRAINING,
    QueuedMeans,
    even_blocks,
    joined_samples,
    places_of_models,
)
from fedentopt.simulation.trainers.stacked_nets import LoweredNet, StackedNet, VmapNet
from fedentopt.simulation.trainers.wide_blocks import wide_blocks
from fedentopt.simulation.trainers.wide_net import WideNet
from fedentopt.simulation.triton import Kernels, Optimiser, compile_ahead, outline, runs_on
from fedentopt.simulation.work import Room, Trained, Work

LINE = 32  # floats
PREDICT_SAMPLES = 65536  # images times models in flight during evaluation
PREDICT_PIXELS = 1 << 24  # of these images, where each model has its own


def ladder(n: int) -> int:
    """The smallest captured prefix size that holds n rows: at most an eighth of its rows idle."""
    step = 1
    while n > 16 * step:
        step *= 2
    return -(-n // step) * step


def _stacked_net(model: nn.Module, layout: FlatLayout, data: DeviceData, kernels: Kernels) -> StackedNet:
    """The fastest form of the model: on the kernels for few channels, on those for many, or through vmap."""
    blocks = lower(model, kernels.fuses_conv)
    if blocks is not None:
        return LoweredNet(blocks, layout, kernels)
    wide = wide_blocks(model, int(data.images.shape[-1]))
    if wide is not None and kernels.wide is not None:
        return WideNet(wide, layout, kernels)
    return VmapNet(model.to(data.images.device), layout)


def _lines(n: int, p: int, device: torch.device) -> torch.Tensor:
    """Zeros (n, p) whose rows start at multiples of 128 bytes: a tile of weights then touches no memory line twice."""
    return torch.zeros(n, -(-p // LINE) * LINE, device=device)[:, :p]


class StepBuffers:
    """The tensors a step reads and writes. Their addresses are captured in graphs, so rounds are copied into them."""

    def __init__(self, room: Room, work: Work, layout: FlatLayout) -> None:
        device = work.index.device
        self.room = replace(room, rows=ladder(room.rows))
        n, p = self.room.rows, layout.parameter_width
        batch, classes = work.index.shape[2], work.logit_scale.shape[1]
        self.w, self.v, self.g = (_lines(n, p, device) for _ in range(3))
        self.start = torch.zeros(room.starts, p, device=device)
        self.start_state = torch.zeros(room.starts, layout.moving_width - p, device=device)
        self.index = torch.full((room.steps, n, batch), -1, dtype=torch.int32, device=device)
        # On a GPU there is always one, so that the compiled step does not depend on the other runs' methods.
        corrections = max(room.corrections, int(device.type == "cuda"))
        self.correction = torch.zeros(corrections, p, device=device) if corrections else None
        self.scale = torch.ones(n, classes, device=device)
        self.shift = torch.zeros(n, classes, device=device)
        self.per_row = {
            name: torch.zeros(n, dtype=getattr(work, name).dtype, device=device)
            for name in (
                "steps", "augment_key", "dropout_key", "start_row", "lr", "weight_decay", "momentum", "mu",
                "correction_row", "correction_mode",
            )
        }  # fmt: skip
        self.state = torch.zeros(n, layout.moving_width - p, device=device)  # running statistics of BatchNorm
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.losses = torch.zeros(n, 2, dtype=torch.float64, device=device)  # as `Kernels.add_sample_losses` adds them

    def load(self, work: Work, starts: torch.Tensor) -> None:
        """Copy a round in, but for the clients' models. Rows beyond it have zero steps, so they never move."""
        n = work.rows
        p = self.w.shape[1]
        self.start[: len(starts)].copy_(starts[:, :p])
        self.start_state[: len(starts)].copy_(starts[:, p : p + self.state.shape[1]])
        self.index[: work.index.shape[0], :n].copy_(work.index)
        self.index[:, n:].fill_(-1)
        pairs = [(room[:n], getattr(work, name)) for name, room in self.per_row.items()]
        pairs += [(self.scale[:n], work.logit_scale), (self.shift[:n], work.logit_shift)]
        # A GPU waits for what is launched before the first step, and one launch copies all vectors of a type.
        for dtype in {room.dtype for room, _ in pairs}:
            rooms, values = zip(*(pair for pair in pairs if pair[0].dtype == dtype), strict=True)
            torch._foreach_copy_(rooms, values)
        if n < self.room.rows:
            torch._foreach_zero_([room[n:] for room in self.per_row.values()])
        if self.correction is not None and work.correction is not None:
            self.correction[: len(work.correction)].copy_(work.correction)
        self.step.zero_()
        if work.wants_losses:
            self.losses.zero_()

    def outlines(self) -> StepBuffers:
        """The same without memory; see `triton.ahead`."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(twin, name, outline(value))
        twin.per_row = {name: outline(value) for name, value in self.per_row.items()}
        return twin


class StepShape(NamedTuple):
    """What tells captured steps apart: how many rows, whether none has terms in its logits, whether losses are kept."""

    rows: int
    plain_loss: bool
    wants_losses: bool = False


class StackedTrainer:
    """Trains all rows of a stack together, on CUDA with graphs, on the CPU without."""

    name = "stacked"

    def __init__(
        self, model: nn.Module, layout: FlatLayout, data: DeviceData, transform: ImageTransform, kernels: Kernels
    ) -> None:
        self.layout, self.data, self.transform, self.kernels = layout, data, transform, kernels
        self.net = _stacked_net(model, layout, data, kernels)
        self._draws = dropout_key(model) is not None
        self._normed = isinstance(self.net, WideNet) and self.net.blocks.normed
        self._evaluated = layout.moving_width if self._normed else layout.parameter_width  # columns that count
        self._buffers: StepBuffers | None = None
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}
        self._beginnings: dict[int, torch.cuda.CUDAGraph] = {}  # by rows
        self._pool: Any = None
        self._side: torch.cuda.Stream | None = None
        self._main: torch.cuda.Stream | None = None
        self._most_rows: int | None = None
        self._last_rows = 0
        self._room = Room()
        self._compiles = data.images.is_cuda and runs_on(data.images.device) and not isinstance(self.net, VmapNet)
        self._predicted: set[tuple[int, int]] = set()

    def describe(self) -> str:
        return f"stacked trainer, {self.net.describe()}"

    def reserve(self, room: Room) -> None:
        self._room = self._room.grown(room)

    def train(self, starts: torch.Tensor, work: Work, *, lend: bool = False) -> Trained:
        """See `Trainer`. Work with code is refused: a stack has no module that a user's function could call.

        Lent models are the rows that steps have moved; those of a stack in parts are never lent.
        """
        if work.has_code:
            raise ValueError("the stacked trainer cannot run a local objective that is code")
        self._last_rows = work.rows
        if self._most_rows is not None and work.rows > self._most_rows:
            cuts = range(0, work.rows, self._most_rows)
            parts = [self._owned(self._train(starts, work.part(i, i + self._most_rows))) for i in cuts]
            losses = [part.losses for part in parts if part.losses is not None]
            return Trained(torch.cat([part.models for part in parts]), torch.cat(losses) if losses else None)
        trained = self._train(starts, work)
        return trained if lend else self._owned(trained)

    def _owned(self, trained: Trained) -> Trained:
        """The same where the next round does not overwrite it."""
        if self.layout.width > self.layout.parameter_width:
            return trained
        return replace(trained, models=trained.models.clone(memory_format=torch.contiguous_format))

    def _train(self, starts: torch.Tensor, work: Work) -> Trained:
        """Trained models that lie in the buffers, unless there is more to a model than its parameters."""
        self._room = self._room.grown(work.room(len(starts)))
        if self._buffers is None or self._buffers.room != replace(self._room, rows=ladder(self._room.rows)):
            self.close()
            self._buffers = StepBuffers(self._room, work, self.layout)
            if isinstance(self.net, WideNet):
                self.net.reserve(self._buffers.w)
        buffers = self._buffers
        # active[t] rows have more than t steps left; rows are sorted, so they are a prefix.
        active = np.searchsorted(-work.steps_host, -np.arange(int(work.steps_host[0])), side="left")
        cuda = starts.device.type == "cuda"
        # Neutral terms change no bit, but another compiled kernel might.
        plain_loss = work.plain_loss and not cuda
        shapes = [
            StepShape(min(ladder(int(n)), buffers.room.rows) if cuda else int(n), plain_loss, work.wants_losses)
            for n in active
        ]
        self._compile(buffers, shapes)
        buffers.load(work, starts)
        if cuda and isinstance(self.net, WideNet):
            self._replay_beginning(buffers, min(ladder(work.rows), buffers.room.rows))
        else:
            self._begin(buffers, work.rows)
        for shape in shapes:
            if cuda:
                self._replay(buffers, shape)
            else:
                self._step(buffers, shape)
        models = buffers.w[: work.rows]
        if self._normed:
            models = torch.cat([models, buffers.state[: work.rows]], 1)
        p = models.shape[1]
        if self.layout.width > p:  # other buffers travel unchanged
            models = torch.cat([models, starts[:, p:].index_select(0, work.start_row)], 1)
        return Trained(models, work.average_losses(buffers.losses[: work.rows]) if work.wants_losses else None)

    def _begin(self, b: StepBuffers, n: int) -> None:
        """The first n rows as their clients start, without momentum."""
        w, start_row = b.w[:n], b.per_row["start_row"][:n]
        if self._normed:
            torch.index_select(b.start_state, 0, start_row, out=b.state[:n])
            for slot in self.layout.integer_slots():  # which the server's mean may not have left whole
                replace(slot, offset=slot.offset - self.layout.parameter_width).view(b.state[:n]).round_()
        if isinstance(self.net, WideNet):
            self.net.begin(b.start, start_row, w, b.v)
        else:
            torch.index_select(b.start, 0, start_row, out=w)
            b.v.zero_()

    def _step(self, b: StepBuffers, shape: StepShape) -> None:
        n = shape.rows
        x, labels = self.kernels.gather_augment(
            self.data.images, self.data.labels, b.index, b.per_row["augment_key"], b.step, self.transform, n
        )
        scale, shift = (None, None) if shape.plain_loss else (b.scale[:n], b.shift[:n])
        keys = mix64_torch(b.per_row["dropout_key"][:n] + b.step * signed(GOLDEN)) if self._draws else None
        optimiser = Optimiser(
            b.w, b.v, b.g, start=b.start, step=b.step, correction=b.correction,
            **{k: v for k, v in b.per_row.items() if not k.endswith("_key")},
        )  # fmt: skip
        if isinstance(self.net, WideNet):
            moves, state = self.net.updates, b.state if self._normed else None
            logits = self.net.step(b.w, b.g, x, labels, scale, shift, keys, optimiser if moves else None, state)
            if not moves:
                self.kernels.sgd_update(n=n, **optimiser._asdict())
        else:
            logits = self.net.step(b.w, b.g, x, labels, scale, shift, keys)
            self.kernels.sgd_update(n=n, **optimiser._asdict())
        if shape.wants_losses:  # rows that have finished see padding alone, and add nothing
            self.kernels.add_sample_losses(logits, labels, b.losses)
        b.step.add_(1)

    def _outline(self) -> StackedTrainer:
        """A trainer that launches what this one launches, on tensors without memory."""
        twin = copy.copy(self)
        assert isinstance(self.net, LoweredNet | WideNet)
        twin.net = type(self.net)(self.net.blocks, self.layout, self.kernels)  # type: ignore[arg-type]
        twin.data = DeviceData(
            outline(self.data.images), outline(self.data.labels), outline(self.data.test_images),
            outline(self.data.test_labels), self.data.num_classes,
        )  # fmt: skip
        twin._compiles = False
        return twin

    def _compile(self, b: StepBuffers, shapes: list[StepShape]) -> None:
        """Have all kernels compiled together that a round launches in steps not yet captured."""
        new = set(shapes) - self._graphs.keys()
        if not self._compiles or not new:
            return
        twin, outlines = self._outline(), b.outlines()

        def rehearse() -> None:
            if isinstance(twin.net, WideNet):
                twin.net.reserve(outlines.w)
                twin.net.refresh(outlines.w)
            twin._begin(outlines, b.room.rows)
            for shape in sorted(new, reverse=True):
                twin._step(outlines, shape)

        compile_ahead(rehearse)

    def _replay_beginning(self, b: StepBuffers, rows: int) -> None:
        """`_begin` for the rows of a round and those that fill them up, from the second such round on in one launch:
        launching its two dozen kernels takes longer than they do, and no step can begin before them."""
        graph = self._beginnings.get(rows)
        if graph is not None:
            graph.replay()
            return
        self._begin(b, rows)
        self._beginnings[rows] = self._captured(lambda: self._begin(b, rows))

    def _replay(self, b: StepBuffers, shape: StepShape) -> None:
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._capture(b, shape)
        graph.replay()

    def _capture(self, b: StepBuffers, shape: StepShape) -> torch.cuda.CUDAGraph:
        # A warm-up outside the capture compiles kernels and sets up libraries; what it changes is put back.
        state = (b.w, b.v, b.state, b.step, b.losses)
        saved = [t.clone() for t in state]
        # One stream for all warm-ups, so that they share their memory.
        self._side = side = self._side or torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(b, shape)
        torch.cuda.current_stream().wait_stream(side)
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)
        if isinstance(self.net, WideNet):
            self.net.refresh(b.w)
        graph = self._graphs[shape] = self._captured(lambda: self._step(b, shape))
        return graph

    def _captured(self, launches: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of what `launches` does, with kernels that have run before."""
        self._main = self._main or torch.cuda.Stream(priority=FIRST)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._main):
            launches()
        self._pool = graph.pool()
        return graph

    def predict(self, models: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Logits (G, M, C) of every model for one batch of uint8 images."""
        x = self.transform.standardise(images)[None]
        room = max(1, PREDICT_SAMPLES // x.shape[1])
        parts = models[:, : self._evaluated].contiguous().split(room)
        shape = (len(models), len(images))
        if self._compiles and shape not in self._predicted:
            self._predicted.add(shape)
            net = self._outline().net
            compile_ahead(lambda: [net.logits(outline(part), outline(x)) for part in parts])
        return torch.cat([self.net.logits(part, x) for part in parts])

    @property
    def _most_images(self) -> int:
        """Images of a pass in which models have their own: more would pass 32-bit offsets."""
        height, width = self.data.images.shape[-2:]
        most = min(PREDICT_SAMPLES, PREDICT_PIXELS // (height * width))
        return max(1, min(most, self.net.blocks.most_images(width)) if isinstance(self.net, WideNet) else most)

    def soft_labels(self, trained: torch.Tensor, samples: list[np.ndarray]) -> np.ndarray:
        """Mean softmax of each trained model over its own samples, (N, C)."""
        device, means = self.data.images.device, []
        for row, chosen in zip(trained[:, : self._evaluated], samples, strict=True):
            weights, logits = row[None].contiguous(), []
            for index in torch.from_numpy(chosen).to(device, torch.int64).split(self._most_images):
                x = self.transform.standardise(self.data.images[index])[None]
                logits.append(self.net.logits(weights, x)[0])
            # Of all samples at once: a mean of the blocks' means would add them in another order.
            means.append(torch.cat(logits).softmax(1).mean(0))
        return torch.stack(means).double().cpu().numpy()

    def mean_losses(self, models: torch.Tensor, rows: list[int], samples: list[np.ndarray]) -> QueuedMeans:
        """See `Trainer`. The samples of a model's clients are one line, and lines of many models pass side by side."""
        device = self.data.images.device
        lines, chosen = places_of_models(rows, samples), joined_samples(samples)
        order = to_device(np.array(list(lines), dtype=np.int64), device)
        parameters = models[:, : self._evaluated].index_select(0, order)
        values, places = [], []
        # How wide blocks are depends on all that are asked, and nobody's bits may.
        narrow = UNLIKE_TRAINING if isinstance(self.net, WideNet) else NARROW
        for block in even_blocks(list(lines.values()), self._most_images, narrow):
            index = to_device(chosen[block.places.clip(min=0)].reshape(-1), device)
            x = self.transform.standardise(self.data.images[index]).unflatten(0, block.places.shape)
            logits = self.net.logits(parameters[block.lines], x).flatten(0, 1)
            values.append(F.cross_entropy(logits, self.data.labels[index], reduction="none"))
            places.append(block.places.reshape(-1))
        return QueuedMeans(values, places, samples)

    def shrink(self) -> str | None:
        """Train half as many rows at a time from now on."""
        rows = min(self._last_rows, self._most_rows or self._last_rows)
        if rows <= 1:
            return None
        self._most_rows = -(-rows // 2)
        self._room = replace(self._room, rows=self._most_rows)
        self.close()
        return f"stacks of {self._most_rows} clients"

    def close(self) -> None:
        """Give back buffers and graphs; they come back with the next round."""
        self._graphs.clear()
        self._beginnings.clear()
        self._buffers, self._pool = None, None
        if isinstance(self.net, WideNet):
            self.net.release()
        if self.data.images.is_cuda:
            torch.cuda.empty_cache()
