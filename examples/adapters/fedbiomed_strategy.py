"""Fed-BioMed (pip install fedbiomed): a strategy with cohorts of maximum label entropy, kept in its breakpoints.

    experiment = Experiment(..., node_selection_strategy=EntropyStrategy(counts, cohort_size=3, buffer_size=4))

`counts` are label counts by node id, as the nodes' owners gave them (noise: fedentopt.release).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedbiomed.researcher.strategies.default_strategy import DefaultStrategy

from fedentopt import EntropySelector


class EntropyStrategy(DefaultStrategy):
    """What becomes of the replies (`refine`) is Fed-BioMed's default."""

    def __init__(
        self, counts: Mapping[str, Sequence[float]], cohort_size: int, buffer_size: int = 0, seed: int = 0
    ) -> None:
        super().__init__()
        self._selector = EntropySelector(cohort_size, buffer_size, seed)
        self._selector.register(dict(sorted(counts.items())), noisy=True)  # true counts pass as well

    def sample_nodes(self, from_nodes: list[str], round_i: int) -> list[str]:
        known = [node for node in from_nodes if node in self._selector.clients]
        chosen = [str(node) for node in self._selector.select(known).clients]
        self._sampling_node_history[round_i] = chosen
        return chosen

    def save_state_breakpoint(self) -> dict[str, Any]:
        return {**super().save_state_breakpoint(), "selector": self._selector.state_dict()}

    def load_state_breakpoint(self, state: dict[str, Any]) -> None:
        super().load_state_breakpoint(state)
        self._selector.load_state_dict(state["selector"])
