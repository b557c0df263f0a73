"""Test accuracy of many models at once, per class, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from fedentopt.simulation.device import DeviceData, to_device, to_host
from fedentopt.simulation.run_state import RunState
from fedentopt.simulation.second_stage import SecondStages
from fedentopt.simulation.trainers import Trainer

TEST_BATCH = 1000


@dataclass(frozen=True)
class Scores:
    """Per evaluated run: correct predictions of every class, (R, C), and summed loss, (R,), in host memory."""

    correct: torch.Tensor
    loss: torch.Tensor

    def read(self, row: int, class_sizes: torch.Tensor) -> tuple[float, float, tuple[float, ...]]:
        """Accuracy in per cent, mean loss, and class accuracies in per cent: NaN for a class without test samples."""
        correct = self.correct[row].double()
        per_class = (100.0 * correct / class_sizes).tolist()
        total = float(class_sizes.sum())
        return 100.0 * float(correct.sum()) / total, float(self.loss[row]) / total, tuple(per_class)


@dataclass(frozen=True)
class HeldOutScores:
    """Per run: which of its held-out samples are right, and their summed loss, in host memory."""

    hits: tuple[torch.Tensor, ...]
    loss: tuple[torch.Tensor, ...]

    def read(self, place: int) -> tuple[float, float]:
        """Accuracy in per cent and mean loss."""
        hits = self.hits[place]
        return 100.0 * float(hits.sum()) / len(hits), float(self.loss[place]) / len(hits)


class Evaluator:
    """Evaluates runs on the test split. A run with several models is judged by the mean of their logits, in its second
    stage by its new layer."""

    def __init__(self, trainer: Trainer, second: SecondStages, data: DeviceData) -> None:
        self.trainer, self.second, self.data = trainer, second, data
        self.class_sizes = torch.bincount(data.test_labels, minlength=data.num_classes).double().cpu()

    def evaluate(self, runs: list[RunState]) -> Scores:
        """Scores of `runs`; on CUDA their transfer is only queued: synchronise before reading."""
        device = self.data.test_labels.device
        classes = self.data.num_classes
        correct = torch.zeros(len(runs), classes, dtype=torch.int64, device=device)
        loss = torch.zeros(len(runs), dtype=torch.float64, device=device)
        plain = [i for i, run in enumerate(runs) if run.stage is None]
        second = [(i, run.stage) for i, run in enumerate(runs) if run.stage is not None]
        for chosen in self.second.test_groups([stage for _, stage in second]):
            logits = self.second.test_logits([second[k][1] for k in chosen])
            c = torch.zeros_like(correct[: len(chosen)])
            losses = self._count(c, logits, self.data.test_labels)
            self._put([second[k][0] for k in chosen], (correct, c), (loss, total_losses([losses])))
        # On the CPU each run is evaluated by itself, so that its bits do not depend on its neighbours.
        for group in [plain] if device.type == "cuda" and plain else [[i] for i in plain]:
            self._evaluate(runs, group, correct, loss)
        return Scores(to_host(correct), to_host(loss))

    def validate(self, runs: list[RunState]) -> HeldOutScores:
        """Scores of `runs` on what their clients hold out; transfers are queued as in `evaluate`."""
        hits: dict[int, torch.Tensor] = {}
        loss: dict[int, torch.Tensor] = {}
        groups: dict[object, list[int]] = {}
        for i, run in enumerate(runs):
            assert run.planner.held_out is not None
            # Runs that hold out the same samples go together, on CUDA; on the CPU, and in a second stage, none does.
            alike = self.data.test_labels.is_cuda and run.stage is None
            groups.setdefault(run.planner.held_out.key if alike else i, []).append(i)
        for group in groups.values():
            right, losses = self._validate([runs[i] for i in group])
            for place, i in enumerate(group):
                hits[i], loss[i] = to_host(right[place]), to_host(losses[place])
        return HeldOutScores(tuple(hits[i] for i in range(len(runs))), tuple(loss[i] for i in range(len(runs))))

    def recalls(self, models: torch.Tensor, samples: np.ndarray) -> torch.Tensor:
        """Recall of every class at every depth, (M, C), of models on samples of the training data, as many of each
        class (see `fedentopt.audit.recall`); NaN for a model that is not finite."""
        classes = self.data.num_classes
        above = torch.zeros(len(models), classes, dtype=torch.float64, device=self.data.labels.device)
        for start in range(0, len(samples), TEST_BATCH):
            index = to_device(samples[start : start + TEST_BATCH], self.data.labels.device)
            labels = self.data.labels[index].expand(len(models), -1)
            logits = self.trainer.predict(models, self.data.images[index])
            own = logits.gather(2, labels[:, :, None])
            # Ties count half, so that a model which gives the same answer to everything has no skill.
            ahead = (logits > own).sum(2) + ((logits == own).sum(2) - 1) / 2
            above.scatter_add_(1, labels, torch.where(torch.isfinite(logits).all(2), ahead.double(), torch.nan))
        return 1.0 - above * (classes / len(samples) / max(classes - 1, 1))

    def _validate(self, runs: list[RunState]) -> tuple[torch.Tensor, torch.Tensor]:
        """Which held-out samples, the same ones for all, are right, (R, n), and summed losses, (R,)."""
        held, stage = runs[0].planner.held_out, runs[0].stage
        assert held is not None
        predict = self._predictor(runs) if stage is None else partial(self.second.logits, stage)
        right, losses = [], []
        for start in range(0, len(held.samples), TEST_BATCH):
            index = to_device(held.samples[start : start + TEST_BATCH], self.data.labels.device)
            logits, labels = predict(self.data.images[index]), self.data.labels[index]
            right.append(logits.argmax(-1) == labels)
            losses.append(sample_losses(logits, labels))
        return torch.cat(right, dim=1), total_losses(losses)

    def _evaluate(self, runs: list[RunState], group: list[int], correct: torch.Tensor, loss: torch.Tensor) -> None:
        predict = self._predictor([runs[i] for i in group])
        c, losses = torch.zeros_like(correct[: len(group)]), []
        for start in range(0, len(self.data.test_labels), TEST_BATCH):
            part = slice(start, start + TEST_BATCH)
            losses.append(self._count(c, predict(self.data.test_images[part]), self.data.test_labels[part]))
        self._put(group, (correct, c), (loss, total_losses(losses)))

    def _predictor(self, runs: list[RunState]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Gives the logits of images, (R, m, C): of a run with several models their mean."""
        shown = [run.evaluated_models() for run in runs]
        models, sizes = torch.cat(shown), [len(rows) for rows in shown]

        def predict(images: torch.Tensor) -> torch.Tensor:
            logits = self.trainer.predict(models, images)
            return logits if max(sizes) == 1 else torch.stack([block.mean(0) for block in logits.split(sizes)])

        return predict

    @staticmethod
    def _put(rows: list[int], *figures: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Copy the second of each pair into these rows of the first."""
        index = to_device(torch.tensor(rows), figures[0][0].device)
        for into, values in figures:
            into.index_copy_(0, index, values)

    @staticmethod
    def _count(correct: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Add what is right to `correct` (R, C); the samples' losses, (R, m)."""
        hits = (logits.argmax(-1) == labels).to(torch.int64)
        correct.scatter_add_(1, labels.expand(len(logits), -1), hits)
        return sample_losses(logits, labels)


def sample_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropies (R, m) of logits (R, m, C)."""
    flat = F.cross_entropy(logits.flatten(0, 1), labels.repeat(len(logits)), reduction="none")
    return flat.view(len(logits), -1)


def total_losses(parts: list[torch.Tensor]) -> torch.Tensor:
    """Sums of losses (R, m) over all parts, (R,) float64, whose bits do not depend on R.

    On CUDA halves are added to halves: how torch splits a sum there depends on how many sums there are.
    """
    if not parts[0].is_cuda:
        total = torch.zeros(len(parts[0]), dtype=torch.float64)
        for part in parts:
            total += part.sum(1, dtype=torch.float64)
        return total
    filled = sum(part.shape[1] for part in parts)
    length = 1 << (filled - 1).bit_length()
    sums = F.pad(torch.cat(parts, 1).double(), (0, length - filled))
    while length > 1:
        length //= 2
        sums = sums[:, :length] + sums[:, length:]
    return sums[:, 0]
