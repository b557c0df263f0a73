"""A grid on which certain nodes are online, and stay so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid


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
