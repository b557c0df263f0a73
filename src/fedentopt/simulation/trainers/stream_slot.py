"""A slot of the streams trainer: one module with a CUDA stream and a captured step, which takes client after client.

A step is captured once for every size of batch it comes in, and replayed. All graphs of a slot share one pool of
memory: none of them leaves anything in it for another, and they never run side by side. Batches at a real size of their
own run outside graphs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fedentopt.models import host_reads
from fedentopt.simulation.trainers.bound_model import BoundModel
from fedentopt.simulation.trainers.code_objective import CodeObjective
from fedentopt.simulation.trainers.fused_blocks import fuse_blocks
from fedentopt.simulation.trainers.masked_norm import Padding, mask_norms
from fedentopt.simulation.trainers.packed_rows import RowFormat
from fedentopt.simulation.trainers.padding_trial import fill_padding
from fedentopt.simulation.work import LocalCode

if TYPE_CHECKING:
    from fedentopt.simulation.trainers.streams import StreamsTrainer


class BatchForm(NamedTuple):
    """How a step takes its batch: the first `size` rows, all of them in BatchNorm's statistics unless `masked`, when
    padding is left out there. (The loss never counts padding.)"""

    size: int
    masked: bool = False


@dataclass(frozen=True)
class Client:
    """A row of a round: the forms of its batches, what a slot copies to begin it, its correction, its result, and where
    the sums of its samples' losses go, if anybody wants them; its local objective, if that is code, and what that knows
    of its learning rate.

    `begin` is its packed row, its start model, that model's parameters and no momentum, all as int32. The correction
    is a row of a matrix whose number only the device knows. All of it is views of tensors that the round keeps.
    """

    batches: list[BatchForm]
    begin: tuple[torch.Tensor, ...]
    corrections: torch.Tensor | None
    correction_row: torch.Tensor | None
    result: torch.Tensor
    losses: torch.Tensor | None
    code: LocalCode | None
    lr: float

    @property
    def start(self) -> torch.Tensor:
        """Its start model, (width,)."""
        return self.begin[1].view(torch.float32)


class Slot:
    """One module, the buffers of its step, its stream and its graph.

    The buffers are made on the stream that calls the trainer and used on the slot's own. That is sound because the
    trainer joins the two around every round.
    """

    def __init__(self, trainer: StreamsTrainer) -> None:
        device = trainer.data.images.device
        self.trainer = trainer
        self.bound = BoundModel(trainer.model, trainer.layout, device)
        self.bound.module.train()
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.padding = mask_norms(self.bound.module) if trainer.masks else Padding()
        self.fused = fuse_blocks(self.bound.module, trainer.model, trainer.form, self.padding, device)
        self.graphs: dict[tuple[BatchForm, bool], torch.cuda.CUDAGraph] = {}  # steps, without and with losses
        self._pool: Any = None
        self.wants_losses = False
        width = trainer.layout.parameter_width
        self.velocity = torch.zeros(1, width, device=device)
        self.start = torch.zeros(1, width, device=device)
        self.push = torch.zeros(1, width, device=device)
        self.own = torch.zeros(1, dtype=torch.int32, device=device)  # the row of `start` and `push`
        self.sums = torch.zeros(1, 2, dtype=torch.float64, device=device)  # of the client's losses so far
        self.code: LocalCode | None = None
        self._objective: CodeObjective | None = None
        self.form: RowFormat | None = None
        self.packed = torch.empty(0, dtype=torch.int32, device=device)
        self.fields: dict[str, torch.Tensor] = {}
        self._targets: list[torch.Tensor] = []

    def prepare(self, form: RowFormat, wants_losses: bool) -> None:
        """Before a round whose rows have this format. Another than before costs a new capture of the step."""
        self.wants_losses = wants_losses
        if not self.bound.module.training:  # it has predicted since; telling every layer takes long
            self.bound.module.train()
        if self.form == form:
            return
        if self.stream is not None:
            self.stream.synchronize()  # nothing may still replay what is given back here
        self.graphs.clear()
        self._pool = None
        self.form, self.packed = form, torch.zeros(form.width, dtype=torch.int32, device=self.packed.device)
        self.fields = form.views(self.packed[None])
        floats = (self.bound.row, self.start[0], self.velocity[0])
        self._targets = [self.packed, *(tensor.view(torch.int32) for tensor in floats)]

    def load(self, client: Client) -> None:
        """Take over a client. Its beginning is of one type so that CUDA copies all of it in one kernel."""
        if self.code is not None:  # of the client before
            self.bound.reset()
        self.bound.take_buffers()
        torch._foreach_copy_(self._targets, client.begin)
        self.bound.read_integers()
        if client.corrections is not None and client.correction_row is not None:
            torch.index_select(client.corrections, 0, client.correction_row, out=self.push)
        if self.wants_losses:
            self.sums.zero_()
        self.code = client.code
        if client.code is not None:
            if self._objective is None:
                self._objective = CodeObjective(self.bound, self.trainer.model, bf16=self.trainer.bf16)
            self._objective.begin(client.code, client.start, client.lr)

    def finish(self, client: Client) -> None:
        """Hand over the client's model, and its losses where they are wanted."""
        self.bound.store(client.result)
        if client.losses is not None:
            client.losses.copy_(self.sums[0])

    def run(self, batch: BatchForm) -> None:
        """One step on a batch of this form."""
        assert self.form is not None
        full = batch.size == self.form.batch
        if self.stream is None or not self._captures or not (full or batch.masked):
            with self._choosing(batch):
                self._step(batch)
            return
        key = batch, self.wants_losses
        if key not in self.graphs:
            self.graphs[key] = self._capture(batch)
        self.graphs[key].replay()

    def _choosing(self, batch: BatchForm) -> contextlib.AbstractContextManager[None]:
        """How cuDNN chooses algorithms: timed, if at all, for the one size that most batches have."""
        assert self.form is not None
        return self.trainer.choosing(timed=batch.size == self.form.batch)

    @property
    def _captures(self) -> bool:
        """What code of one's own does in a step, such as drawing on the CPU or deciding by numbers, may not be
        captured."""
        return self.code is None and not self.bound.draws and not host_reads(self.trainer.model)

    def _step(self, batch: BatchForm) -> None:
        t, row = self.trainer, self.fields
        x, labels = t.kernels.gather_augment(
            t.data.images, t.data.labels, row["index"], row["augment_key"], row["step"], t.transform, 1
        )
        self.bound.pick_dropout_key(row["dropout_keys"][0], row["step"])
        x, labels = x[0, : batch.size], labels[:, : batch.size].contiguous()
        real = labels[0] >= 0 if batch.masked else None
        x = (x if real is None else fill_padding(x, real)).contiguous(memory_format=torch.channels_last)
        if self.code is None:
            self._backward(x, labels, real)
        else:
            self._backward_code(x, labels)
        self.bound.take_buffers()
        t.kernels.sgd_update(
            self.bound.parameters[None], self.velocity, self.bound.parameter_gradient[None], n=1, lr=row["lr"],
            momentum=row["momentum"], weight_decay=row["weight_decay"], mu=row["mu"], start=self.start,
            start_row=self.own, steps=row["steps"], step=row["step"], correction=self.push, correction_row=self.own,
            correction_mode=row["correction_mode"],
        )  # fmt: skip
        row["step"].add_(1)

    def _backward(self, x: torch.Tensor, labels: torch.Tensor, real: torch.Tensor | None) -> None:
        """Write the gradient of the client's loss on x (B, 3, H, W) with labels (1, B), -1 for padding, which BatchNorm
        leaves out where `real` (B,) says so."""
        t, row = self.trainer, self.fields
        self.bound.gradient.zero_()
        autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=t.bf16, cache_enabled=False)
        with self.bound.drawing(), self.padding.masking(real), self.fused.running(), autocast:
            logits = self.bound.module(x)
        logits = logits.float()
        plain = logits.detach()[None]
        upstream, _ = t.kernels.softmax_xent_grad(plain, labels, row["logit_scale"], row["logit_shift"])
        if self.wants_losses:
            t.kernels.add_sample_losses(plain, labels, self.sums)
        logits.backward(upstream[0])

    def _backward_code(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        """The same where the loss is code; there is no padding then."""
        assert self._objective is not None
        with self.bound.drawing():
            logits = self._objective.backward(x, labels[0], wants_logits=self.wants_losses)
        if logits is not None:
            self.trainer.kernels.add_sample_losses(logits[None], labels, self.sums)

    def _capture(self, batch: BatchForm) -> torch.cuda.CUDAGraph:
        """Capture a step. What the warm-up changes (BatchNorm counts included) is put back."""
        assert self.form is not None
        state = [self.bound.row, self.velocity, self.fields["step"], self.sums, *self.bound.integers]
        saved = [tensor.clone() for tensor in state]
        with self._choosing(batch):
            self._step(batch)
            torch.cuda.synchronize()
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Sizes turn up in any round: other threads, such as one that writes a checkpoint, may use CUDA meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"):
                self._step(batch)
        return graph

    def enter(self) -> None:
        """What is queued from here on goes to this slot's stream. Cheaper by far than a context for every visit."""
        if self.stream is not None:
            torch.cuda.set_stream(self.stream)
