"""What a round tells a selector: exactly what it needs, copied from the device while the host goes on.

Losses, last layers and updates are on their way when a round has been queued; they are waited for when the selector is
told, which is before the run's next cohort and before a checkpoint. A run whose selector needs nothing of the device
never waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from fedentopt.models import find_head
from fedentopt.selection import Head, Observation
from fedentopt.simulation.device import to_host
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.planning import RoundPlan

FROM_DEVICE = frozenset({"loss", "head", "update"})


@dataclass
class Feedback:
    """The figures of one round of one run: `tensors` in host memory, complete once `ready` has passed."""

    plan: RoundPlan
    needs: frozenset[str]
    kept: frozenset[int] | None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    ready: torch.cuda.Event | None = None

    def read(self) -> dict[int, Observation]:
        """Observations by client, in the order they trained; clients whose figures are not finite are left out."""
        if self.ready is not None:
            self.ready.synchronize()
        arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        observations = {}
        for i, task in enumerate(self.plan.work):
            own = {name: array[i] for name, array in arrays.items()}
            if not all(np.isfinite(array).all() for array in own.values()):
                continue
            bias = own["bias"].copy() if "bias" in own else None
            observations[task.client] = Observation(
                samples=len(task.samples),
                loss=float(own["losses"][0]) if "losses" in own else None,
                loss_rms=float(own["losses"][1]) if "losses" in own else None,
                head=Head(own["weight"].copy(), bias) if "weight" in own else None,
                update=own["update"].copy() if "update" in own else None,
                seconds=task.seconds if "seconds" in self.needs else None,
                kept=(self.kept is None or task.client in self.kept) if "kept" in self.needs else None,
            )
        return observations


class FeedbackReader:
    """Takes from trained models what selectors need of them."""

    def __init__(self, model: nn.Module, layout: FlatLayout) -> None:
        self._layout = layout
        head = find_head(model)
        self._head = {slot.name.rpartition(".")[2]: slot for slot in layout.parameters if self._is_of(slot.name, head)}

    @staticmethod
    def _is_of(name: str, head: str | None) -> bool:
        prefix = f"{head}." if head else ""  # a model that is its own last layer has no name for it
        return head is not None and name in (f"{prefix}weight", f"{prefix}bias")

    @property
    def has_head(self) -> bool:
        """Whether the model has a last linear layer that trains."""
        return "weight" in self._head

    def queue(
        self, plan: RoundPlan, needs: frozenset[str], kept: frozenset[int] | None,
        starts: torch.Tensor, trained: torch.Tensor, losses: torch.Tensor | None,
    ) -> Feedback:  # fmt: skip
        """Send what is needed of a run's clients to the host; where they started and got to is (M, width)."""
        tensors: dict[str, torch.Tensor] = {}
        if "loss" in needs and losses is not None:
            tensors["losses"] = losses
        if "head" in needs:
            for name, slot in self._head.items():
                tensors[name] = slot.view(trained) - slot.view(starts)
        if "update" in needs:
            width = self._layout.parameter_width
            change = trained[:, :width] - starts[:, :width]
            tensors["update"] = torch.cat([s.view(change).flatten(1) for s in self._layout.parameters], 1)
        host = {name: to_host(tensor.contiguous()) for name, tensor in tensors.items()}
        ready = None
        if host and trained.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        return Feedback(plan, needs, kept, host, ready)
