"""Whether what a stack has to hold at once fits on its device, asked before anything of it is made or written down.

A trainer takes a stack in smaller parts where memory is short. Some is needed whatever it does: what every run's method
remembers of its clients (SCAFFOLD's control variates, MOON's models, the directions that `clustered-update` compares:
K rows per run and vector), the global models, and the models of a round's clients until they are combined. That is
counted here; a stack that passes may still be too large, never the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedentopt.algorithms import Algorithm
from fedentopt.errors import InputError
from fedentopt.selection import Selector
from fedentopt.simulation.config import RunConfig
from fedentopt.simulation.layout import FlatLayout
from fedentopt.simulation.method_memory import keeps_updates

FLOAT_BYTES = 4


@dataclass(frozen=True)
class LeastMemory:
    """Bytes that a run needs at least: what its method `remembers`, in `rows` per client, and the `models` beside."""

    method: str
    clients: int
    rows: int
    remembers: int
    models: int

    @property
    def total(self) -> int:
        return self.remembers + self.models


def least_memory(config: RunConfig, algorithm: Algorithm, selector: Selector, layout: FlatLayout) -> LeastMemory:
    """What a run needs at least beside the data."""
    vectors = len(algorithm.client_vectors) + keeps_updates(selector)
    kept = layout.width if algorithm.keeps_models else 0
    remembered = config.clients * (vectors * layout.parameter_width + kept)
    remembered += len(algorithm.server_vectors) * layout.parameter_width
    # Before and after a round; of the clients only half, since a stack whose selectors wait trains in two parts.
    models = 2 + config.cohort_size // 2
    return LeastMemory(
        config.method, config.clients, vectors + bool(algorithm.keeps_models), FLOAT_BYTES * remembered,
        FLOAT_BYTES * models * layout.width,
    )  # fmt: skip


def check_memory(runs: Sequence[LeastMemory], free: int, hardware: str) -> None:
    """Refuse runs that cannot be together on a device with so many bytes `free`; says how many could."""
    needed = sum(run.total for run in runs)
    if needed <= free:
        return
    largest = sorted(runs, key=lambda run: run.total, reverse=True)
    fit, taken = 0, 0
    for run in largest:
        taken += run.total
        if taken > free:
            break
        fit += 1
    most = max(runs, key=lambda run: run.remembers)
    because = (
        f"; {most.method} alone remembers {_gb(most.remembers)} per run ({most.rows} times the parameters for each of "
        f"{most.clients} clients)"
        if most.rows
        else ""
    )
    accepted = (
        f"at most {fit} of these runs together (reproduce: --max-stack {fit}; else fewer methods or seeds at a time, "
        f"into the same folder)"
        if fit
        else "a device with more memory, fewer clients, a smaller model, or another method"
    )
    raise InputError(
        f"memory: {len(runs)} {'run' if len(runs) == 1 else 'runs together'} cannot fit on {hardware}, at least "
        f"{_gb(needed)} for {_gb(free)} that are free{because}; accepted: {accepted}"
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
