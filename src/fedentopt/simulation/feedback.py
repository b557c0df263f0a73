"""What a round tells a selector: exactly what it needs, copied from the device while the host goes on.

Losses, last layers and updates are on their way when a round has been queued; they are waited for when the selector is
told, which is before the run's next cohort and before a checkpoint. A run whose selector needs nothing of the device
never waits. Where cosines between updates suffice, updates stay on the device (`KeptUpdates`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from fedentopt.audit import Recall, travel_of
from fedentopt.models import find_head
from fedentopt.selection import Head, Observation
from fedentopt.simulation.aggregation import exact_products
from fedentopt.simulation.device import to_device, to_host
from fedentopt.simulation.layout import FlatLayout, TensorSlot
from fedentopt.simulation.planning import RoundPlan

DRIFT = "drift."
BEFORE, AFTER = "recall.before", "recall.after"
FROM_DEVICE = frozenset({"loss", "head", "update"})
BLOCK = 4096  # parameters whose products are added up at once


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
        if self.ready is not None:  # page-locked memory is scarce, and a selector may keep what it is told
            arrays = {name: array.copy() for name, array in arrays.items()}
        finite = np.ones(len(self.plan.work), dtype=bool)
        for array in arrays.values():
            finite &= np.isfinite(array).reshape(len(array), -1).all(axis=1)
        observations = {}
        for i, task in enumerate(self.plan.work):
            if not finite[i]:
                continue
            own = {name: array[i] for name, array in arrays.items()}
            observations[task.client] = Observation(
                samples=len(task.samples),
                loss=float(own["losses"][0]) if "losses" in own else None,
                loss_rms=float(own["losses"][1]) if "losses" in own else None,
                head=_head(own, "") if "weight" in own else None,
                update=own.get("update"),
                seconds=task.seconds if "seconds" in self.needs else None,
                kept=(self.kept is None or task.client in self.kept) if "kept" in self.needs else None,
                travel=self.travels[i] if "weight" in own else None,
                drift=_head(own, DRIFT) if f"{DRIFT}weight" in own else None,
                untrained=self.untrained if "weight" in own else None,
                cosines=own.get("cosines"),
            )
        return observations

    def recalls(self) -> dict[int, Recall]:
        """Recalls by client, where the server has images; `read` has waited for them."""
        if BEFORE not in self.tensors:
            return {}
        before, after = (self.tensors[name].double().numpy() for name in (BEFORE, AFTER))
        return {task.client: Recall(before[i], after[i]) for i, task in enumerate(self.plan.work)}


def told_by_host(plan: RoundPlan, needs: frozenset[str], kept: frozenset[int] | None = None) -> Feedback | None:
    """What a round tells a selector that needs nothing of the device, or cannot have it; None where that is nothing."""
    told = needs - {"candidate_loss"}
    return Feedback(plan, told - FROM_DEVICE, kept) if told and plan.work else None


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
    return Head(arrays[f"{prefix}weight"], arrays.get(f"{prefix}bias"))


def _drift(slot: TensorSlot, push: torch.Tensor, ways: Sequence[float]) -> torch.Tensor:
    """How far `push` (M, P) has moved a parameter of each client."""
    pushed = slot.view(push)
    lengths = to_device(np.array(ways, dtype=np.float32), push.device)
    return -pushed * lengths.reshape(-1, *[1] * (pushed.dim() - 1))


class KeptUpdates:
    """The direction of every client's last update, on the device: `rows` (K, P) of length 1, NaN where there has been
    no update or it was 0."""

    def __init__(self, clients: int, width: int, device: torch.device) -> None:
        self.rows = torch.full((clients, width), torch.nan, device=device)

    def cosines(self, clients: tuple[int, ...], changes: torch.Tensor) -> torch.Tensor:
        """Keep the updates `changes` (M, P), which are overwritten, of these clients; their cosines with all, (M, K).

        1 where one of the two has no direction. A row that is not finite is not kept, and its cosines are NaN.
        """
        peaks = changes.abs().amax(1, keepdim=True)
        units = changes.div_(peaks)  # squares of very long or short updates would leave single precision
        units.div_(units.square().sum(1, keepdim=True).sqrt())  # torch's norm loses digits of long rows on a CPU
        numbers = to_device(np.array(clients, dtype=np.int64), changes.device)
        finite = torch.isfinite(peaks)
        self.rows.index_copy_(0, numbers, torch.where(finite, units, self.rows[numbers]))
        return torch.where(finite, _products(units, self.rows).nan_to_num_(nan=1.0), torch.nan)


def _products(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Products (m, n) of long rows (m, P) and (n, P), block by block: one sum over all of P would lose digits."""
    blocks = some.shape[1] // BLOCK
    end = blocks * BLOCK
    left, right = (rows[:, :end].unflatten(1, (blocks, BLOCK)).transpose(0, 1) for rows in (some, others))
    with exact_products():
        return torch.bmm(left, right.transpose(1, 2)).sum(0) + some[:, end:] @ others[:, end:].t()


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

    def forge(
        self, plan: RoundPlan, forgers: frozenset[int], starts: torch.Tensor, origins: np.ndarray,
        trained: torch.Tensor, places: np.ndarray, steps: StepSizes, push: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Move the last layers of the plan's forgers back so far that they tell of no label: the bias to where it
        started, or without one each class's weights by their mean change.

        The plan's clients started from the rows `origins` of `starts` and are the rows `places` of `trained`, which
        changes. What `push` (M, P), a term that the server knows, did is left: the server takes it out by itself.
        """
        which = np.array([i for i, client in enumerate(plan.trained) if client in forgers], dtype=np.int64)
        if not len(which):
            return
        device = trained.device
        rows, begun = to_device(places[which], device), starts[to_device(origins[which], device)]
        slot = self._head.get("bias", self._head["weight"])
        expected = slot.view(begun)
        if push is not None:
            ways = steps.pushed(plan)
            expected = expected + _drift(slot, push[to_device(which, device)], [ways[i] for i in which])
        if "bias" in self._head:
            slot.view(trained)[rows] = expected
        else:
            sent = slot.view(trained)[rows]
            slot.view(trained)[rows] = sent - (sent - expected).mean(-1, keepdim=True)

    @property
    def outputs(self) -> int | None:
        """Outputs of the model's last linear layer; None where it has none that trains."""
        return self._head["weight"].shape[0] if "weight" in self._head else None

    def queue(
        self, plan: RoundPlan, needs: frozenset[str], kept: frozenset[int] | None,
        starts: torch.Tensor, trained: torch.Tensor, losses: torch.Tensor | None, steps: StepSizes,
        push: torch.Tensor | None, recalls: tuple[torch.Tensor, torch.Tensor] | None = None,
        kept_updates: KeptUpdates | None = None,
    ) -> Feedback:  # fmt: skip
        """Send what is needed of a run's clients to the host; where they started and got to is (M, width).

        With last layers go the `steps` that moved them, and what `push` (M, P), a term that the server knows, did.
        `recalls` (M, C) are those of the models before and after. With `kept_updates`, the cosines with those go in the
        place of updates.
        """
        tensors: dict[str, torch.Tensor] = {}
        if recalls is not None:
            tensors[BEFORE], tensors[AFTER] = recalls
        if "loss" in needs and losses is not None:
            tensors["losses"] = losses
        if "head" in needs:
            for name, slot in self._head.items():
                tensors[name] = slot.view(trained) - slot.view(starts)
                if push is not None:
                    tensors[f"{DRIFT}{name}"] = _drift(slot, push, steps.pushed(plan))
        if "update" in needs:
            width = self._layout.parameter_width
            change = trained[:, :width] - starts[:, :width]
            if kept_updates is not None:
                tensors["cosines"] = kept_updates.cosines(plan.trained, change)
            else:
                tensors["update"] = torch.cat([s.view(change).flatten(1) for s in self._layout.parameters], 1)
        host = {name: to_host(tensor.contiguous()) for name, tensor in tensors.items()}
        ready = None
        if host and trained.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        return Feedback(plan, needs, kept, steps.travels(plan), steps.untrained, host, ready)
