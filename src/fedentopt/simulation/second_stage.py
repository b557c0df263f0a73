"""The second stages of all runs of a stack that have one: their new layers trained and evaluated together.

The new layers are rows of one matrix, a row per client, and the samples of a client pass its own run's encoders only.
Runs whose new layers have one size form a group. Its rows are a rectangle with a line per run; a run with fewer clients
than the longest leaves empty rows, which never move and count in no mean. On CUDA groups are as large as they can be;
on the CPU each run is a group of its own, so that its bits do not depend on its neighbours.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from fedentopt.simulation.augment import ImageTransform
from fedentopt.simulation.device import DeviceData, to_device
from fedentopt.simulation.head_stage import (
    Encoders,
    HeadStage,
    ModuleEncoders,
    StackedEncoders,
    TestFeatures,
    fresh_head,
    joined,
    last_layer,
)
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.planning import RoundPlan
from fedentopt.simulation.run_state import RunState
from fedentopt.simulation.trainers import LoweredNet, StackedTrainer, Trainer, WideNet
from fedentopt.simulation.triton import PlainKernels
from fedentopt.simulation.work import Work, build_work

ROOM = 2**28  # floats that a group's images, features and new layers may take
UNEVEN = 4 / 3  # the longest line of a group over its shortest, at most: no line is empty by more than a quarter
TEST_BATCH = 1024
TEST_ROOM = 2**26  # floats of logits counted at once


class SecondStages:
    """Begins, trains and evaluates second stages. `together` (on CUDA unless told otherwise): many runs at once."""

    def __init__(
        self, model: nn.Module, layout: FlatLayout, data: DeviceData, transform: ImageTransform, trainer: Trainer,
        *, together: bool | None = None,
    ) -> None:  # fmt: skip
        self._model, self._layout, self._data, self._transform = model, layout, data, transform
        self._net = trainer.net if isinstance(trainer, StackedTrainer) else None
        self._kernels = trainer.kernels if isinstance(trainer, StackedTrainer) else PlainKernels()
        self._device = data.images.device
        self.together = self._device.type == "cuda" if together is None else together

    @functools.cached_property
    def _encoders(self) -> Encoders:
        if isinstance(self._net, LoweredNet | WideNet):
            return StackedEncoders(self._net)
        return ModuleEncoders(self._model, self._layout, self._device)

    def train(self, runs: Sequence[RunState], plans: Sequence[RoundPlan]) -> list[torch.Tensor]:
        """One round of every run (its first one begins its stage); says of each whether its new layer was finite.

        A few batches on every client, then the plain mean of a run's new layers. Without a client, or where that mean
        is not finite, the layer stays as it is.
        """
        stages = [run.stage or self._begin(run) for run in runs]
        rows = [run.rows(plan, 0) for run, plan in zip(runs, plans, strict=True)]
        flat = [row for own in rows for row in own]
        if flat:
            work = build_work(flat, runs[0].planner.batch_size, self._data.num_classes, self._device)
            # In the order of the work, as if the run's rows were alone in it.
            places = [np.sort(own) for own in np.split(work.places, np.cumsum([len(own) for own in rows])[:-1])]
            for group in self._groups(stages, [len(own) for own in rows], work.index.shape[2]):
                self._train([stages[i] for i in group], work, [places[i] for i in group])
        return [stage.sound for stage in stages]

    def _begin(self, run: RunState) -> HeadStage:
        """The start of a run's second stage, or where a checkpoint left it."""
        run.models = run.models.clone()  # out of the matrix of all runs' models, which would be kept whole
        inputs, classes = len(run.models) * last_layer(self._model).in_features, self._data.num_classes
        head = fresh_head(inputs, classes, run.config.seed) if run.head is None else run.head
        assert run.local_batches is not None
        run.stage = HeadStage(run.models, inputs, classes, head, run.local_batches)
        return run.stage

    def _groups(self, stages: Sequence[HeadStage], rows: Sequence[int], batch: int) -> list[list[int]]:
        """The runs that have rows, in groups that train at once."""
        busy = [i for i in range(len(stages)) if rows[i]]
        if not self.together:
            return [[i] for i in busy]
        image = 3 * int(self._data.images.shape[-2] * self._data.images.shape[-1])
        groups: list[list[int]] = []
        for i in sorted(busy, key=lambda i: (stages[i].inputs, stages[i].batches, -rows[i])):
            if groups:
                first = groups[-1][0]
                inputs, line = stages[first].inputs, rows[first]
                floats = line * (batch * (image + 2 * inputs) + 3 * len(stages[first].head))
                same = stages[i].inputs == inputs and stages[i].batches == stages[first].batches
                alike = same and line <= UNEVEN * rows[i]
                if alike and (len(groups[-1]) + 1) * floats <= ROOM:
                    groups[-1].append(i)
                    continue
            groups.append([i])
        return [sorted(group) for group in groups]

    def _train(self, stages: Sequence[HeadStage], work: Work, places: Sequence[np.ndarray]) -> None:
        """One round of a group; `places` are each run's rows of the work."""
        runs, line = len(stages), max(len(own) for own in places)
        seats = np.full((runs, line), -1, dtype=np.int64)
        for seat, own in zip(seats, places, strict=True):
            seat[: len(own)] = own
        n = seats.size
        seat_t = to_device(seats.reshape(-1), self._device)
        real, chosen = seat_t >= 0, seat_t.clamp(min=0)

        def pick(values: torch.Tensor) -> torch.Tensor:
            return values.index_select(0, chosen)

        batches = min(stages[0].batches, len(work.index))
        index = torch.where(real[:, None], work.index[:batches].index_select(1, chosen), -1)
        limit = torch.where(real, pick(work.steps).clamp(max=batches), 0)
        keys = pick(work.augment_key)
        rates = {name: pick(getattr(work, name)) for name in ("lr", "weight_decay", "momentum", "mu")}
        start_row = torch.div(torch.arange(n, device=self._device), line, rounding_mode="floor").to(torch.int32)

        encoders = [stage.encoders for stage in stages]
        start = torch.stack([stage.head for stage in stages])
        w = start[:, None].expand(-1, line, -1).clone().flatten(0, 1)
        v, g = torch.zeros_like(w), torch.zeros_like(w)
        weight, bias = stages[0].views(w)
        into, into_bias = stages[0].views(g)
        for t in range(batches):
            step = torch.full((1,), t, dtype=torch.int64, device=self._device)
            x, labels = self._kernels.gather_augment(
                self._data.images, self._data.labels, index, keys, step, self._transform, n
            )
            images = x.flatten(0, 1).unflatten(0, (runs, -1))
            features = self._encoders.features(encoders, images).flatten(0, 1).unflatten(0, (n, -1))
            # Of a padding row, all zeros, a model may make NaN, and 0 times that would reach the gradient.
            features = features.masked_fill(labels[..., None] < 0, 0.0)
            logits = self._kernels.linear_forward(features, weight, bias)
            upstream, _ = self._kernels.softmax_xent_grad(logits, labels)
            self._kernels.linear_weight_grad(features, upstream, into, into_bias)
            self._kernels.sgd_update(w, v, g, n=n, start=start, start_row=start_row, steps=limit, step=step, **rates)
        # Each run sums its own line: a layer that is not finite spoils no other run's mean.
        total = _line_sums(torch.where(real[:, None], w, 0.0).unflatten(0, (runs, line)))
        heads = total / real.view(runs, line).sum(1, keepdim=True)
        sound = torch.isfinite(heads).all(1)
        # As in the first stage: a layer that is not finite is never kept, and the flag tells of it.
        heads = torch.where(sound[:, None], heads, start)
        for stage, head, flag in zip(stages, heads, sound, strict=True):
            stage.head, stage.sound = head, flag

    def test_groups(self, stages: Sequence[HeadStage]) -> list[list[int]]:
        """The positions of stages whose test logits are computed and counted at once."""
        order = sorted(range(len(stages)), key=lambda i: stages[i].inputs)
        logits = len(self._data.test_labels) * self._data.num_classes
        room = max(1, TEST_ROOM // logits) if self.together else 1
        return [order[i : i + room] for i in range(0, len(order), room)]

    def test_logits(self, stages: Sequence[HeadStage]) -> torch.Tensor:
        """Logits of the test split, (runs, M, classes); its features never change, so they are computed once."""
        self._place_test([stage for stage in stages if stage.test is None])
        parts = []
        for line in _lines(stages):
            tests = [stage.test for stage in line]
            assert tests[0] is not None
            features = tests[0].block[tests[0].line : tests[0].line + len(line)]
            weight, bias = line[0].views(torch.stack([stage.head for stage in line]))
            parts.append(self._apply(features, weight, bias))
        return joined(parts)

    def _apply(self, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """New layers (n, classes, inputs) on features (n, M, inputs); on CUDA through kernels whose sums do not depend
        on n."""
        if features.is_cuda:
            return self._kernels.linear_forward(features.contiguous(), weight, bias)
        return torch.baddbmm(bias[:, None], features, weight.transpose(1, 2))

    def logits(self, stage: HeadStage, images: torch.Tensor) -> torch.Tensor:
        """Logits (1, M, classes) of one stage for uint8 images."""
        features = self._encoders.features([stage.encoders], self._transform.standardise(images)[None])
        weight, bias = stage.views(stage.head[None])
        return self._apply(features, weight, bias)

    def _place_test(self, stages: Sequence[HeadStage]) -> None:
        """Compute test features; those of runs with as many inputs lie in one block, so that one product reads them."""
        for inputs in sorted({stage.inputs for stage in stages}):
            alike = [stage for stage in stages if stage.inputs == inputs]
            block = torch.empty(len(alike), len(self._data.test_images), inputs, device=self._device)
            for line, stage in enumerate(alike):
                filled = 0
                for images in self._data.test_images.split(TEST_BATCH):
                    x = self._transform.standardise(images)[None]
                    block[line, filled : filled + len(images)] = self._encoders.features([stage.encoders], x)[0]
                    filled += len(images)
                stage.test = TestFeatures(block, line)


def _line_sums(layers: torch.Tensor) -> torch.Tensor:
    """Sums of (runs, line, size) over the lines. On CUDA one row after the other: empty rows at a line's end, which
    come from longer lines of other runs, then change no bit."""
    if not layers.is_cuda:
        return layers.sum(1)
    total = layers[:, 0]
    for row in range(1, layers.shape[1]):
        total = total + layers[:, row]
    return total


def _lines(stages: Sequence[HeadStage]) -> list[list[HeadStage]]:
    """The stages in their order, cut where the next one's test features do not follow in the same block."""
    lines: list[list[HeadStage]] = []
    for stage in stages:
        before = lines[-1][-1].test if lines else None
        if before and stage.test and stage.test.block is before.block and stage.test.line == before.line + 1:
            lines[-1].append(stage)
        else:
            lines.append([stage])
    return lines
