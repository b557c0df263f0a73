"""A strategy of Flower's made to ask exactly certain nodes.

Flower's strategies sample a fraction of the nodes they see online, and wait for more where they see too few. So one is
shown a grid on which the wanted nodes alone are online, and stay so, and is told to take all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg


class CohortGrid(Grid):
    """Flower's grid, seen by a strategy that shall choose among these nodes and no others."""

    def __init__(self, grid: Grid, nodes: Sequence[int]) -> None:
        self._grid = grid
        self._nodes = list(nodes)

    def get_node_ids(self) -> Iterable[int]:
        """The nodes."""
        return list(self._nodes)

    def set_run(self, run: Any) -> None:
        """As the grid behind it."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """As the grid behind it."""
        return self._grid.run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """As the grid behind it."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As the grid behind it."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """As the grid behind it."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """As the grid behind it."""
        return self._grid.send_and_receive(messages, timeout=timeout)


@contextmanager
def only(
    nodes: Sequence[int], grid: Grid, strategy: FedAvg, kind: Literal["train", "evaluate"]
) -> Iterator[CohortGrid]:
    """The grid on which the strategy's `configure_train` or `configure_evaluate`, called inside, takes these nodes."""
    names = f"fraction_{kind}", f"min_{kind}_nodes", "min_available_nodes"
    kept = [getattr(strategy, name) for name in names]
    try:
        for name, value in zip(names, (1.0, len(nodes), len(nodes)), strict=True):
            setattr(strategy, name, value)
        yield CohortGrid(grid, nodes)
    finally:
        for name, value in zip(names, kept, strict=True):
            setattr(strategy, name, value)


def in_order(messages: Iterable[Message], nodes: Sequence[int]) -> list[Message]:
    """Messages in the order of the nodes they go to; Flower shuffles."""
    place = {node: index for index, node in enumerate(nodes)}
    return sorted(messages, key=lambda message: place[message.metadata.dst_node_id])
