"""What is settled before a model is touched, as one digest: who trains, for how long, on which samples in which order.

Everything in it is whole numbers out of keyed draws and label counts, so it is the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from fedentopt.simulation.work import Row, build_work

CLASSES, ROUNDS = 6, 8
LABELS = (np.arange(960, dtype=np.int64) ** 2 // 7) % CLASSES
"""Uneven classes: 205, 91, 183, 206, 92 and 183 samples."""


class Planner(Protocol):
    """The part of a run's planner that is digested."""

    def plan(self, round_: int) -> Any: ...
    def row_keys(self, round_: int, clients: Sequence[int]) -> list[list[int]]: ...


def plan_digest(planner: Planner, batch_size: int) -> str:
    """Of the first rounds, 12 hexadecimal digits."""
    text = json.dumps([_round(planner, round_, batch_size) for round_ in range(1, ROUNDS + 1)])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _round(planner: Planner, round_: int, batch_size: int) -> list[Any]:
    plan = planner.plan(round_)
    rows = [
        Row(
            task=task, start_row=0, order_key=order, augment_key=augment, dropout_key=dropout,
            lr=0.1, weight_decay=0.0, momentum=0.0, mu=0.0, logit_scale=None, logit_shift=None,
        )
        for task, (order, augment, dropout) in zip(plan.work, planner.row_keys(round_, plan.trained), strict=True)
    ]  # fmt: skip
    tasks = [[row.task.client, row.task.epochs, row.task.steps, row.augment_key, row.dropout_key] for row in rows]
    return [list(plan.selected), tasks, _orders(rows, batch_size)]


def _orders(rows: list[Row], batch_size: int) -> list[list[int]]:
    """The samples of each client in the order it sees them."""
    if not rows:
        return []
    work = build_work(rows, batch_size, CLASSES, torch.device("cpu"))
    orders: list[list[int]] = [[] for _ in rows]
    for place, source in enumerate(work.source):
        seen = work.index[:, place].flatten()
        orders[source] = seen[seen >= 0].tolist()
    return orders
