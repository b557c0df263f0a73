"""All that a step must know of a client, in one row of numbers, so that a slot takes over a client in one copy.

A row of int32 holds the step number (zero: where a client begins), the client's keys, rates and class terms, and the
samples of all its steps; numbers of other types lie in it bit for bit. Every field starts at a multiple of 16 bytes, as
a tensor of its own would: kernels compiled for aligned addresses serve both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedentopt.simulation.work import Work

ALIGN = 4  # int32 numbers in 16 bytes
PER_ROW = {
    "step": torch.int64, "augment_key": torch.int64, "dropout_key": torch.int64, "steps": torch.int32,
    "lr": torch.float32, "weight_decay": torch.float32, "momentum": torch.float32, "mu": torch.float32,
    "correction_mode": torch.int32,
}  # fmt: skip
PER_CLASS = ("logit_scale", "logit_shift")


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class RowFormat:
    """Where each field lies in a row. Rows of a format with fewer steps, all else equal, are prefixes of this one's."""

    steps: int
    batch: int
    classes: int

    @property
    def width(self) -> int:
        """int32 numbers in a row."""
        fields = len(PER_ROW) * ALIGN + len(PER_CLASS) * _aligned(self.classes)
        return fields + _aligned(self.steps * self.batch)

    def holds(self, other: RowFormat) -> bool:
        """Whether a row of `other` may be copied over the beginning of a row of this format."""
        return (self.batch, self.classes) == (other.batch, other.classes) and self.steps >= other.steps

    def views(self, packed: torch.Tensor) -> dict[str, torch.Tensor]:
        """The fields of rows (N, width) by the names and in the shapes they have in `Work`, sharing their memory."""
        fields, at = {}, 0
        for name, dtype in PER_ROW.items():
            fields[name] = packed[:, at : at + dtype.itemsize // 4].view(dtype)[:, 0]
            at += ALIGN
        for name in PER_CLASS:
            fields[name] = packed[:, at : at + self.classes].view(torch.float32)
            at += _aligned(self.classes)
        index = packed[:, at : at + self.steps * self.batch]
        fields["index"] = index.unflatten(1, (self.steps, self.batch)).transpose(0, 1)
        return fields


def pack(work: Work) -> tuple[RowFormat, torch.Tensor]:
    """The rows of `work`, (N, width) int32 on its device, and their format."""
    steps, rows, batch = work.index.shape
    form = RowFormat(steps, batch, work.logit_scale.shape[1])
    packed = torch.zeros(rows, form.width, dtype=torch.int32, device=work.index.device)
    for name, field in form.views(packed).items():
        if name != "step":
            field.copy_(getattr(work, name))
    return form, packed
