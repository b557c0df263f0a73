"""A model as one flat row of floats, so that many models are one matrix.

Aggregation of all runs is then one matrix product, the optimiser one pass over a rectangle, and a checkpoint one
tensor. A row holds the parameters first, then the buffers (BatchNorm statistics), then what never changes: parameters
that need no gradient, and buffers that hold infinity, such as masks. Integer buffers travel as floats. A tensor that
the model has under several names lies in the row once.
Every tensor starts at a multiple of four floats (16 bytes), which the GPU kernels load in one go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

ALIGN = 4


@dataclass(frozen=True)
class TensorSlot:
    """One tensor of the state dict inside a row."""

    name: str
    shape: tuple[int, ...]
    offset: int
    size: int
    dtype: torch.dtype
    channels_last: bool

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """This tensor of every row: (N, *shape), sharing memory with `rows` (N, width)."""
        part = rows[:, self.offset : self.offset + self.size]
        if not self.channels_last:
            return part.unflatten(1, self.shape) if self.shape else part.squeeze(1)
        out, into, height, width = self.shape
        view: torch.Tensor = part.unflatten(1, (out, height, width, into)).permute(0, 1, 4, 2, 3)
        return view


class FlatLayout:
    """Where each tensor of `model` sits in a row: trained parameters end at `parameter_width`, buffers that training
    changes at `moving_width`.

    With `channels_last`, convolution weights lie in the row in that memory order, so that their views feed
    channels-last convolutions without a copy.
    """

    def __init__(self, model: nn.Module, *, channels_last: bool = False) -> None:
        state = model.state_dict()
        parameters = {name: p for name, p in model.named_parameters() if name in state}
        trained = [name for name, p in parameters.items() if p.requires_grad]
        self._twins = {name: first for name, first in _twins(model).items() if name in state and first in state}
        others = [name for name in state if name not in trained and name not in self._twins]
        fixed = [name for name in others if name in parameters or not torch.isfinite(state[name]).all()]
        moving = [name for name in others if name not in fixed]
        self._frozen = frozenset(name for name in fixed if name in parameters)
        self.slots: list[TensorSlot] = []
        ends = []
        offset = 0
        for names in (trained, moving, fixed):
            for name in names:
                tensor = state[name]
                last = channels_last and tensor.dim() == 4
                self.slots.append(TensorSlot(name, tuple(tensor.shape), offset, tensor.numel(), tensor.dtype, last))
                offset += -(-tensor.numel() // ALIGN) * ALIGN
            ends.append(offset)
        self.parameter_width, self.moving_width, self.width = ends
        count = len(trained)
        self.parameters, self.buffers = self.slots[:count], self.slots[count : count + len(moving)]
        self.num_parameters = sum(slot.size for slot in self.parameters)
        self.model_bytes = sum(slot.size * slot.dtype.itemsize for slot in self.slots)

    def pack(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
        """State dict -> one float32 row (width,), padding zero."""
        row = torch.zeros(1, self.width)
        for slot in self.slots:
            slot.view(row).copy_(state[slot.name].detach().to("cpu", torch.float32)[None])
        return row[0]

    def unpack(self, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """One row -> state dict on the CPU, contiguous, in the tensors' own types."""
        rows = row.detach().to("cpu")[None]
        state = {s.name: _restore(s.view(rows)[0], s.dtype) for s in self.slots}
        return state | {name: state[first].clone() for name, first in self._twins.items()}

    def parameter_views(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """All parameters of all rows by name, each (N, *shape)."""
        return {slot.name: slot.view(rows) for slot in self.parameters}

    def bind(self, model: nn.Module, row: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Make `model` live inside `row`: its tensors become views of it, its gradients views of `gradient`.

        Float buffers are bound too, so BatchNorm writes its statistics straight into the row. Integer buffers
        keep their own memory; `BoundModel` moves them.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        for slot in self.slots:
            owner, _, leaf = slot.name.rpartition(".")
            view = slot.view(row[None])[0]
            if slot in self.parameters:
                parameter = nn.Parameter(view)
                if gradient is not None:
                    parameter.grad = slot.view(gradient[None])[0]
                modules[owner]._parameters[leaf] = parameter
            elif slot.name in self._frozen:
                modules[owner]._parameters[leaf] = nn.Parameter(view, requires_grad=False)
            elif slot.dtype.is_floating_point:
                # As a tensor of its own in autograd's eyes: what moves it in a forward leaves the weights in the same
                # memory as they are, and the backward pass may read these.
                modules[owner]._buffers[leaf] = view.data
        for name, first in self._twins.items():
            (owner, _, leaf), (source, _, there) = name.rpartition("."), first.rpartition(".")
            table = "_parameters" if there in modules[source]._parameters else "_buffers"
            getattr(modules[owner], table)[leaf] = getattr(modules[source], table)[there]

    def padding(self, device: torch.device) -> torch.Tensor | None:
        """Which of the first `parameter_width` entries of a row hold no parameter; None where all do."""
        empty = torch.ones(self.parameter_width, dtype=torch.bool)
        for slot in self.parameters:
            empty[slot.offset : slot.offset + slot.size] = False
        return empty.to(device) if bool(empty.any()) else None

    def to_canonical(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows (N, width or parameter width) on the CPU with every tensor in its plain order: what a checkpoint keeps,
        so that any trainer can go on with it."""
        plain = rows.detach().to("cpu", copy=True)
        for slot in self.slots:
            if slot.channels_last and slot.offset < rows.shape[1]:
                plain[:, slot.offset : slot.offset + slot.size] = slot.view(rows).reshape(len(rows), -1).cpu()
        return plain

    def from_canonical(self, plain: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_canonical`."""
        rows = plain.clone()
        for slot in self.slots:
            if slot.channels_last and slot.offset < plain.shape[1]:
                part = plain[:, slot.offset : slot.offset + slot.size]
                slot.view(rows).copy_(part.unflatten(1, slot.shape))
        return rows

    def integer_slots(self) -> list[TensorSlot]:
        """Buffers whose values are whole numbers, such as BatchNorm's count of batches."""
        return [slot for slot in self.buffers if not slot.dtype.is_floating_point]


def _twins(model: nn.Module) -> dict[str, str]:
    """Further names of tensors that have several (shared layers, tied weights), each with the first one."""
    first: dict[int, str] = {}
    twins = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                twins[name] = first[id(tensor)]
    return twins


def _restore(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return value.to(dtype).contiguous().clone()
    return value.round().to(dtype).contiguous().clone()
