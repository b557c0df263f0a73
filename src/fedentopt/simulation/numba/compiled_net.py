"""A lowered net on the compiled kernels, with a worker's memory."""

from __future__ import annotations

import numpy as np
import torch

from fedentopt.randomness import GOLDEN, mix64_torch, signed
from fedentopt.simulation.augment import DRAWS, ImageTransform
from fedentopt.simulation.device import DeviceData
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.lowering import ConvBlock, LinearBlock
from fedentopt.simulation.numba.entry_kernel import run
from fedentopt.simulation.numba.gather import settings
from fedentopt.simulation.numba.plan import SLACK, Plan, make_plan
from fedentopt.simulation.work import Work

EVALUATED_AT_ONCE = 32
NOTHING, NO_SUMS = np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.float64)


class CompiledNet:
    """Trains and evaluates nets of one architecture on one thread."""

    def __init__(self, blocks: list[ConvBlock | LinearBlock], layout: FlatLayout) -> None:
        self.layout = layout
        self._blocks = blocks
        self._plan: Plan | None = None
        self._shape: tuple[int, ...] = ()

    def train(
        self, start: torch.Tensor, work: Work, i: int, data: DeviceData, transform: ImageTransform, out: torch.Tensor,
        sums: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Train row i of `work` from `start` (width,), leaving the result in `out` (width,).

        With `sums` (2,), float64, the sum and the sum of squares of the samples' plain cross-entropies are added there.
        """
        steps, batch = int(work.steps_host[i]), work.index.shape[2]
        plan = self._reserve(data.images, batch)
        index = work.index[:steps, i].reshape(-1).contiguous()  # of batches of one, `reshape` alone is a view with gaps
        keys = mix64_torch(work.augment_key[i] + torch.arange(steps * batch) * signed(GOLDEN))
        draws = transform.draw(keys).T.contiguous().view(-1).numpy()
        rates = np.array([float(getattr(work, r)[i]) for r in ("lr", "weight_decay", "momentum", "mu")], np.float32)
        mode = int(work.correction_mode[i]) if work.correction is not None else 0
        plan.pad(self.layout, start, self._row("w"))
        plan.pad(self.layout, start, self._row("anchor"))
        if mode and work.correction is not None:
            plan.pad(self.layout, work.correction[int(work.correction_row[i])], self._row("push"))
        self._row("v").zero_()
        run(
            plan.net, plan.convs, plan.linears, data.images.view(-1).numpy(), data.labels.numpy(),
            index.numpy(), work.filled(i), batch, draws, settings(transform), rates, mode,
            work.logit_scale[i].numpy(), work.logit_shift[i].numpy(), NOTHING,
            NO_SUMS if sums is None else sums.numpy(), *self._memory,
        )  # fmt: skip
        out.copy_(start)
        plan.unpad(self.layout, self._row("w"), out)

    def logits(self, row: torch.Tensor, images: torch.Tensor, transform: ImageTransform) -> torch.Tensor:
        """Logits (M, C) of the model in `row` (width,) for uint8 images (M, c, H, W), without augmentation."""
        plan = self._reserve(images, EVALUATED_AT_ONCE)
        plan.pad(self.layout, row, self._row("w"))
        many, at_once = len(images), EVALUATED_AT_ONCE
        filled = np.minimum(at_once, many - np.arange(0, many, at_once))
        result = np.empty(many * int(plan.linears[-1]["units"]), dtype=np.float32)
        plain = settings(ImageTransform(transform.mean, transform.std))
        run(
            plan.net, plan.convs, plan.linears, images.reshape(-1).numpy(), np.zeros(0, dtype=np.int64),
            np.arange(many, dtype=np.int32), filled, at_once, np.ones(many * DRAWS, dtype=np.float32), plain,
            NOTHING, 0, NOTHING, NOTHING, result, NO_SUMS, *self._memory,
        )  # fmt: skip
        return torch.from_numpy(result).view(many, int(plan.linears[-1]["units"]))

    def _row(self, name: str) -> torch.Tensor:
        """A padded row of the worker's memory."""
        assert self._plan is not None
        first = int(self._plan.net[0][name])
        return torch.from_numpy(self._memory[0])[first : first + int(self._plan.net[0]["width"])]

    def _reserve(self, images: torch.Tensor, batch: int) -> Plan:
        """Memory for batches of such images."""
        plan = self._plan
        if plan is None or plan.batch < batch or self._shape != images.shape[1:]:
            channels, height, width = (int(size) for size in images.shape[1:])
            plan = make_plan(self._blocks, self.layout, channels, (height, width), batch)
            self._plan, self._shape = plan, tuple(images.shape[1:])
            self._memory = _aligned(plan.floats), np.zeros(plan.origins, np.int32), np.zeros(plan.pixels, np.uint8)
        return plan


def _aligned(count: int) -> np.ndarray:
    """Zeros that begin at a cache line."""
    raw = np.zeros(count + SLACK, dtype=np.float32)
    first = -(raw.ctypes.data // 4) % 16
    return raw[first : first + count]
