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

from fedentopt.audit import travel_of
from fedentopt.models import find_head
from fedentopt.selection import Head, Observation
from fedentopt.simulation.device import to_device, to_host
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.planning import RoundPlan

DRIFT = "drift."
FROM_DEVICE = frozenset({"loss", "head", "update"})


@dataclass
class Feedback:
    """The figures of one round of one run: `tensors` in host memory, complete once `ready` has passed."""

    plan: RoundPlan
    needs: frozenset[str]
    kept: frozenset[int] | None
    travels: tuple[float, ...] = ()
    untrained: bool = False
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
            observations[task.client] = Observation(
                samples=len(task.samples),
                loss=float(own["losses"][0]) if "losses" in own else None,
                loss_rms=float(own["losses"][1]) if "losses" in own else None,
                head=_head(own, "") if "weight" in own else None,
                update=own["update"].copy() if "update" in own else None,
                seconds=task.seconds if "seconds" in self.needs else None,
                kept=(self.kept is None or task.client in self.kept) if "kept" in self.needs else None,
                travel=self.travels[i] if "weight" in own else None,
                drift=_head(own, DRIFT) if f"{DRIFT}weight" in own else None,
                untrained=self.untrained if "weight" in own else None,
            )
        return observations


@dataclass(frozen=True)
class StepSizes:
    """How local training of a round moves a parameter: `after_step` says that pushes do not pass through momentum."""

    lr: float
    momentum: float
    after_step: bool
    untrained: bool

    def travels(self, plan: RoundPlan) -> tuple[float, ...]:
        """What each client's steps add up to."""
        return tuple(travel_of(self.lr, self.momentum, int(steps)) for steps in plan.steps)

    def pushed(self, plan: RoundPlan) -> tuple[float, ...]:
        """The same for a push."""
        return tuple(self.lr * int(steps) for steps in plan.steps) if self.after_step else self.travels(plan)


def _head(arrays: Mapping[str, np.ndarray], prefix: str) -> Head:
    bias = arrays.get(f"{prefix}bias")
    return Head(arrays[f"{prefix}weight"].copy(), None if bias is None else bias.copy())


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

    def forge(self, trained: torch.Tensor, starts: torch.Tensor, which: np.ndarray) -> None:
        """Move the last layers of these rows of `trained` (N, width) back so far that they tell of no label: the bias
        to where it started, or without one each class's weights by their mean change."""
        rows = to_device(which, trained.device)
        if "bias" in self._head:
            slot = self._head["bias"]
            slot.view(trained)[rows] = slot.view(starts)
        else:
            slot = self._head["weight"]
            sent = slot.view(trained)[rows]
            slot.view(trained)[rows] = sent - (sent - slot.view(starts)).mean(-1, keepdim=True)

    @property
    def has_head(self) -> bool:
        """Whether the model has a last linear layer that trains."""
        return "weight" in self._head

    def queue(
        self, plan: RoundPlan, needs: frozenset[str], kept: frozenset[int] | None,
        starts: torch.Tensor, trained: torch.Tensor, losses: torch.Tensor | None, steps: StepSizes | None = None,
        push: torch.Tensor | None = None,
    ) -> Feedback:  # fmt: skip
        """Send what is needed of a run's clients to the host; where they started and got to is (M, width).

        With last layers go the `steps` that moved them, and what `push` (M, P), a term that the server knows, did.
        """
        tensors: dict[str, torch.Tensor] = {}
        if "loss" in needs and losses is not None:
            tensors["losses"] = losses
        if "head" in needs:
            for name, slot in self._head.items():
                tensors[name] = slot.view(trained) - slot.view(starts)
                if push is not None and steps is not None:
                    ways = to_device(np.array(steps.pushed(plan), dtype=np.float32), push.device)
                    tensors[f"{DRIFT}{name}"] = -slot.view(push) * ways.reshape(-1, *[1] * (slot.view(push).dim() - 1))
        if "update" in needs:
            width = self._layout.parameter_width
            change = trained[:, :width] - starts[:, :width]
            tensors["update"] = torch.cat([s.view(change).flatten(1) for s in self._layout.parameters], 1)
        host = {name: to_host(tensor.contiguous()) for name, tensor in tensors.items()}
        ready = None
        if host and trained.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        travels, untrained = ((), False) if steps is None else (steps.travels(plan), steps.untrained)
        return Feedback(plan, needs, kept, travels, untrained, host, ready)
