"""A cell of the paper: one figure, the runs it needs, and what the paper prints there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedentopt.errors import InputError
from fedentopt.paper.block_checks import one_spelling
from fedentopt.simulation.config import RunConfig

METRICS = ("accuracy", "accuracy_change", "validation_accuracy", "h_norm", "entropy", "model_mb")
Identity = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One figure of a table or of a plot. Names are those of the command line's options.

    `participation` and `buffer` are per cent of the clients. `swept` names further settings that tell cells of
    one table apart (a grid's mu). `config` is the run that gives the figure, at seed 0; `baseline` the run it is
    compared with where the figure is a change; `reference` plain FedAvg under the same settings. All three are
    None for a figure that needs no run. `full_rounds` is what the paper trains for, also after `cut`. `stand_ins` are
    precisions whose runs count where there is none in the cell's own.
    """

    table: str
    metric: str
    model: str
    dataset: str
    partition: str | None = None
    method: str | None = None
    availability: str | None = None
    participation: float | None = None
    buffer: float | None = None
    swept: tuple[tuple[str, Any], ...] = ()
    paper: float | None = None
    paper_std: float | None = None
    extra: bool = False
    seeds: tuple[int, ...] = ()
    config: RunConfig | None = None
    baseline: RunConfig | None = None
    reference: RunConfig | None = None
    full_rounds: int | None = None
    stand_ins: tuple[str, ...] = ()

    @property
    def identity(self) -> Identity:
        """What no two cells share."""
        return (
            self.table,
            self.model,
            self.dataset,
            self.partition,
            self.method,
            self.availability,
            self.participation,
            self.buffer,
            self.metric,
            *self.swept,
        )

    @property
    def shortened(self) -> bool:
        """Whether fewer rounds are asked for than the cell has; such a cell is never done."""
        return self.config is not None and self.config.rounds != self.full_rounds

    def runs(self) -> list[RunConfig]:
        """Every run the cell needs, for all its wanted seeds."""
        needed = [config for config in (self.config, self.baseline) if config is not None]
        return [dataclasses.replace(config, seed=seed) for seed in self.seeds for config in needed]

    def versions(self, config: RunConfig) -> list[RunConfig]:
        """The runs that count for one of the cell's, which comes first."""
        return [config, *(dataclasses.replace(config, precision=other) for other in self.stand_ins)]

    def cut(self, rounds: int) -> Cell:
        """The same cell with runs of at most `rounds` rounds."""

        def shorter(config: RunConfig | None) -> RunConfig | None:
            return config and dataclasses.replace(config, rounds=min(rounds, config.rounds))

        return dataclasses.replace(
            self,
            config=shorter(self.config),
            baseline=shorter(self.baseline),
            reference=shorter(self.reference),
        )

    def with_seeds(self, seeds: Sequence[int]) -> Cell:
        """The same cell over other seeds; a cell without runs stays as it is."""
        return dataclasses.replace(self, seeds=tuple(seeds)) if self.config else self


def distinct_runs(cells: Iterable[Cell]) -> list[RunConfig]:
    """The runs of all cells, each once, in the order they are first needed."""
    return list(dict.fromkeys(run for cell in cells for run in cell.runs()))


def named_tables(target: str) -> list[str]:
    """The tables and figures that a target names, with commas between."""
    return list(dict.fromkeys(name.strip() for name in target.split(",")))


def select(
    cells: Sequence[Cell], target: str, *, elsewhere: Sequence[str] = (), **filters: Sequence[Any]
) -> list[Cell]:
    """The cells of one table or figure, or of several with commas between (`all` leaves extras out), that pass every
    filter; in the order in which the tables are named.

    A filter is a field of `Cell` and the values it may have; no values let everything pass. Refused: a table
    or a value that no cell has, and filters that together leave nothing. `elsewhere`: tables of other cells, to be
    named in such a refusal.
    """
    tables = list(dict.fromkeys(cell.table for cell in cells))
    chosen: list[Cell] = []
    for name in named_tables(target):
        if name != "all" and name not in tables:
            accepted = ", ".join([*tables, "all", *elsewhere])
            raise InputError(f"table or figure: {name!r} is unknown; accepted: {accepted}; several with commas between")
        before = set(map(id, chosen))
        own = [cell for cell in cells if (not cell.extra if name == "all" else cell.table == name)]
        chosen += [cell for cell in own if id(cell) not in before]
    if not chosen:
        raise InputError(f"{target}: all cells are extra, which it leaves out; accepted: {', '.join(tables)}")
    filters = {field: [one_spelling(field, value) for value in wanted] for field, wanted in filters.items()}
    for field, wanted in filters.items():
        known = list(dict.fromkeys(getattr(cell, field) for cell in chosen))
        known = [value for value in known if value is not None]
        for value in wanted:
            if value not in known:
                accepted = ", ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in known)
                raise InputError(f"{field}: no cell of {target} has {value!r}; accepted: {accepted or 'nothing'}")
    for field, wanted in filters.items():
        chosen = [cell for cell in chosen if not wanted or getattr(cell, field) in wanted]
    if not chosen:
        asked = ", ".join(f"{field} {' or '.join(map(str, wanted))}" for field, wanted in filters.items() if wanted)
        raise InputError(f"no cell of {target} has all of: {asked}; `--list` shows the cells")
    return chosen
