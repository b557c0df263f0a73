"""All that a step must know of a client, in one row of numbers, so that a slot takes over a client in one copy.

A row of int32 holds the step number (zero: where a client begins), the client's keys, rates and class terms, and for
each of its steps the dropout key and the samples; numbers of other types lie in it bit for bit. Every field starts at a
multiple of 16 bytes, as a tensor of its own would: kernels compiled for aligned addresses serve both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedentopt.simulation.trainers.bound_model import step_keys
from fedentopt.simulation.work import Work

ALIGN = 4  # int32 numbers in 16 bytes
PER_ROW = {
    "step": torch.int64, "augment_key": torch.int64, "steps": torch.int32, "lr": torch.float32,
    "weight_decay": torch.float32, "momentum": torch.float32, "mu": torch.float32, "correction_mode": torch.int32,
}  # fmt: skip
PER_CLASS = ("logit_scale", "logit_shift")


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class RowFormat:
    """Where each field lies in a row for clients of at most so many steps."""

    steps: int
    batch: int
    classes: int

    @property
    def width(self) -> int:
        """int32 numbers in a row."""
        fields = len(PER_ROW) * ALIGN + len(PER_CLASS) * _aligned(self.classes)
        return fields + _aligned(2 * self.steps) + _aligned(self.steps * self.batch)

    def holds(self, work: Work) -> bool:
        """Whether rows of this format have a place for all of `work`."""
        steps, _, batch = work.index.shape
        return (self.batch, self.classes) == (batch, work.logit_scale.shape[1]) and self.steps >= steps

    def views(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of rows (N, width), sharing their memory, by the names and in the shapes they have in `Work`.

        Besides these, `step` (N,) and `dropout_keys` (N, steps).
        """
        fields, at = {}, 0
        for name, dtype in PER_ROW.items():
            fields[name] = packed[:, at : at + dtype.itemsize // 4].view(dtype)[:, 0]
            at += ALIGN
        for name in PER_CLASS:
            fields[name] = packed[:, at : at + self.classes].view(torch.float32)
            at += _aligned(self.classes)
        fields["dropout_keys"] = packed[:, at : at + 2 * self.steps].view(torch.int64)
        at += _aligned(2 * self.steps)
        index = packed[:, at : at + self.steps * self.batch]
        fields["index"] = index.unflatten(1, (self.steps, self.batch)).transpose(0, 1)
        return fields

    def pack(self, work: Work) -> torch.Tensor:
        """The rows of `work`, which this format must hold: (N, width) int32 on its device."""
        device = work.index.device
        packed = torch.zeros(work.rows, self.width, dtype=torch.int32, device=device)
        fields = self.views(packed)
        fields["index"][: len(work.index)].copy_(work.index)
        fields["dropout_keys"].copy_(step_keys(work.dropout_key[:, None], torch.arange(self.steps, device=device)))
        for name in (*PER_ROW, *PER_CLASS):
            if name != "step":
                fields[name].copy_(getattr(work, name))
        return packed
