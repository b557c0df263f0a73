"""The clients of all runs of a stack as one rectangle of work, built on the device that trains.

Rows are clients, sorted by step count so that the clients still training at step t are a prefix. Column block t of
`index` says which sample sits in which slot of the batch at step t; -1 is padding.
Epoch e of a client with n samples is the order of hash(order key, e * n + i), i = 0..n-1: a permutation that is a
function of (seed, round, client, e) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
from torch import nn

from fedentopt.algorithms.local_code import Batch, LocalContext
from fedentopt.randomness import GOLDEN, mix64_torch, signed
from fedentopt.simulation.device import to_device
from fedentopt.simulation.planning import ClientWork

HASH_BITS = 43  # of the 63 usable bits of a sort key; the rest number the (client, epoch) segments
PER_ROW = (
    "source", "sizes", "steps_host", "lr_host", "codes", "steps", "augment_key", "dropout_key", "start_row", "lr",
    "weight_decay", "momentum", "mu", "logit_scale", "logit_shift", "correction_row", "correction_mode",
)  # fmt: skip
CORRECTION_MODES = {None: 0, "gradient": 1, "after": 2}


@dataclass(frozen=True)
class Room:
    """How large the work of a round can get: rows, steps of the longest, start models, rows with a correction."""

    rows: int = 0
    steps: int = 0
    starts: int = 0
    corrections: int = 0

    def grown(self, other: Room) -> Room:
        """Room for both."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return Room(*(max(a, b) for a, b in pairs))


@dataclass(frozen=True)
class LocalCode:
    """What a client whose local objective is code brings: the function `loss`, called as `algorithms.local_code` says,
    and what its context is made of.

    `method` names it in errors. `vectors` are flat parameter rows (parameter width,) of the client's own and `previous`
    the row (width,) of its model of the last round it trained in, all on the device that trains. `own` says what of the
    user's own runs in it: the `algorithm`, or in one of ours a model, as an error calls it, or nothing.
    """

    loss: Callable[[nn.Module, nn.Module, Batch, LocalContext], torch.Tensor]
    method: str
    client: int
    round: int
    label_counts: np.ndarray
    vectors: Mapping[str, torch.Tensor]
    previous: torch.Tensor | None
    key: int = 0
    own: str | None = "algorithm"


@dataclass(frozen=True)
class Row:
    """What one client brings into a stack. With `code`, scale and shift of the logits are the code's own business."""

    task: ClientWork
    start_row: int
    order_key: int
    augment_key: int
    dropout_key: int
    lr: float
    weight_decay: float
    momentum: float
    mu: float
    logit_scale: np.ndarray | None
    logit_shift: np.ndarray | None
    correction_mode: int = 0
    code: LocalCode | None = None


@dataclass(frozen=True)
class Trained:
    """What training gives back, in the order of the work: models (N, width) and, where the work wants them, losses.

    losses (N, 2), float32 on the device, is about the plain cross-entropy of the model's logits (no scale, shift or
    proximal term) over the samples of all local steps, each measured before its step's update: the mean, and the root
    mean square. Models that are lent (`Trainer.train`) need not lie side by side, and do not last.
    """

    models: torch.Tensor
    losses: torch.Tensor | None


@dataclass(frozen=True)
class Work:
    """Rows of clients on a device. `source[i]` is the position of row i in the sequence it was built from."""

    source: np.ndarray
    sizes: np.ndarray
    steps_host: np.ndarray
    lr_host: np.ndarray
    codes: tuple[LocalCode | None, ...]
    steps: torch.Tensor
    index: torch.Tensor
    augment_key: torch.Tensor
    dropout_key: torch.Tensor
    start_row: torch.Tensor
    lr: torch.Tensor
    weight_decay: torch.Tensor
    momentum: torch.Tensor
    mu: torch.Tensor
    logit_scale: torch.Tensor
    logit_shift: torch.Tensor
    correction: torch.Tensor | None
    correction_row: torch.Tensor
    correction_mode: torch.Tensor
    plain_loss: bool
    wants_losses: bool

    @property
    def rows(self) -> int:
        return len(self.source)

    @property
    def places(self) -> np.ndarray:
        """Which row each entry of the sequence is that it was built from: the inverse of `source`."""
        return np.argsort(self.source)

    @property
    def has_code(self) -> bool:
        """Whether a client's local objective is code, which only autograd can take."""
        return any(code is not None for code in self.codes)

    def room(self, starts: int) -> Room:
        """What a round with this work and so many start models takes."""
        corrections = 0 if self.correction is None else len(self.correction)
        return Room(self.rows, int(self.steps_host[0]), starts, corrections)

    def filled(self, row: int) -> np.ndarray:
        """Real samples in each of the row's batches, (steps,)."""
        batch = self.index.shape[2]
        epoch = np.minimum(batch, self.sizes[row] - np.arange(0, self.sizes[row], batch))
        return np.tile(epoch, int(self.steps_host[row]) // len(epoch))

    def average_losses(self, sums: torch.Tensor) -> torch.Tensor:
        """`Trained.losses` from the sum and the sum of squares of every row's sample losses, (N, 2) float64."""
        batches = -(-self.sizes // self.index.shape[2])
        seen = to_device(self.sizes * (self.steps_host // batches), sums.device)
        mean, square = (sums / seen[:, None]).unbind(1)
        return torch.stack([mean, square.sqrt()], 1).float()

    def part(self, start: int, stop: int) -> Work:
        """Rows start..stop-1, for a stack that does not fit at once."""
        longest = int(self.steps_host[start])
        cut = {name: getattr(self, name)[start:stop] for name in PER_ROW}
        return replace(self, index=self.index[:longest, start:stop].contiguous(), **cut)


def build_work(
    rows: Sequence[Row], batch_size: int, num_classes: int, device: torch.device,
    correction: torch.Tensor | None = None, *, wants_losses: bool = False,
) -> Work:  # fmt: skip
    """Lay out the rows on `device`. `correction` (Nc, P) holds the drift corrections of the rows that have a mode,
    in the order of `rows`. With `wants_losses`, training also tells the clients' losses (`Trained`)."""
    steps = np.array([row.task.steps for row in rows], dtype=np.int64)
    source = np.argsort(-steps, kind="stable")
    ordered = [rows[i] for i in source]
    steps = steps[source]
    modes = np.array([row.correction_mode for row in ordered], dtype=np.int32)
    # Corrections come in the order of `rows`; count the rows with a mode before each one.
    has = np.array([row.correction_mode != 0 for row in rows], dtype=np.int64)
    position = np.where(has, np.cumsum(has) - 1, -1)[source].astype(np.int32)

    def put(values: Sequence[float] | np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(np.asarray(values), dtype=dtype), device)

    def per_class(name: str, neutral: float) -> torch.Tensor:
        table = np.full((len(ordered), num_classes), neutral, dtype=np.float32)
        for i, row in enumerate(ordered):
            value = getattr(row, name)
            if value is not None:
                table[i] = value
        return put(table, torch.float32)

    return Work(
        source=source,
        sizes=np.array([len(row.task.samples) for row in ordered], dtype=np.int64),
        steps_host=steps,
        lr_host=np.array([r.lr for r in ordered], dtype=np.float32),
        codes=tuple(r.code for r in ordered),
        steps=put(steps, torch.int32),
        index=_sample_index(ordered, steps, batch_size, device),
        augment_key=put(np.array([signed(r.augment_key) for r in ordered]), torch.int64),
        dropout_key=put(np.array([signed(r.dropout_key) for r in ordered]), torch.int64),
        start_row=put([r.start_row for r in ordered], torch.int32),
        lr=put([r.lr for r in ordered], torch.float32),
        weight_decay=put([r.weight_decay for r in ordered], torch.float32),
        momentum=put([r.momentum for r in ordered], torch.float32),
        mu=put([r.mu for r in ordered], torch.float32),
        logit_scale=per_class("logit_scale", 1.0),
        logit_shift=per_class("logit_shift", 0.0),
        correction=correction,
        correction_row=put(position, torch.int32),
        correction_mode=put(modes, torch.int32),
        plain_loss=all(r.logit_scale is None and r.logit_shift is None for r in ordered),
        wants_losses=wants_losses,
    )


def _sample_index(rows: Sequence[Row], steps: np.ndarray, batch_size: int, device: torch.device) -> torch.Tensor:
    """int32 (T, N, B): the sample of every step, row and slot."""
    sizes = np.array([len(row.task.samples) for row in rows], dtype=np.int64)
    epochs = np.array([row.task.epochs for row in rows], dtype=np.int64)
    samples = np.concatenate([row.task.samples for row in rows]).astype(np.int32)
    first_sample = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    # One segment per (row, epoch).
    segment_row = np.repeat(np.arange(len(rows)), epochs)
    segment_epoch = np.concatenate([np.arange(e) for e in epochs])
    segment_size = sizes[segment_row]
    segment_start = np.concatenate([[0], np.cumsum(segment_size)[:-1]])
    total = int(segment_size.sum())
    if len(segment_row) >= 1 << (63 - HASH_BITS):
        raise ValueError(f"a stack of {len(segment_row)} client epochs is too large to order at once")

    def put(values: np.ndarray) -> torch.Tensor:
        return to_device(values, device)

    segment_keys = np.array([signed(row.order_key) for row in rows], dtype=np.int64)[segment_row]
    size_t, row_t, start_t = put(segment_size), put(segment_row), put(segment_start)
    segment = torch.repeat_interleave(torch.arange(len(segment_row), device=device), size_t, output_size=total)
    place = torch.arange(total, device=device) - start_t[segment]
    counter = put(segment_epoch * segment_size)[segment] + place
    bits = mix64_torch(put(segment_keys)[segment] + counter * signed(GOLDEN))
    short = (bits >> (64 - HASH_BITS)) & ((1 << HASH_BITS) - 1)
    # Sorting the whole stack at once keeps segments together: their number fills the high bits.
    order = torch.sort((segment << HASH_BITS) | short, stable=True).indices
    chosen = put(samples)[put(first_sample)[row_t][segment] + order - start_t[segment]]

    steps_per_epoch = put(-(-segment_size // batch_size))
    step = put(segment_epoch)[segment] * steps_per_epoch[segment] + torch.div(place, batch_size, rounding_mode="floor")
    flat = (step * len(rows) + row_t[segment]) * batch_size + place % batch_size
    index = torch.full((int(steps[0]) * len(rows) * batch_size,), -1, dtype=torch.int32, device=device)
    index[flat] = chosen
    return index.view(int(steps[0]), len(rows), batch_size)
