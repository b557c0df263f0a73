"""A cell beside what the paper prints there: our mean and spread, the difference, and what is more than noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedentopt.errors import InputError
from fedentopt.paper.cells import Cell
from fedentopt.paper.measures import Measured, Results, settings_key
from fedentopt.paper.sizes import size
from fedentopt.results.reading import is_same_data
from fedentopt.results.statistics import Interval, mean, mean_interval, paired_differences, sample_std

DONE, PARTLY, MISSING_DATA, NOT_RUN, REFUSED = "done", "partly", "missing-data", "not-run", "refused"


@dataclass(frozen=True)
class Comparison:
    """One cell with its results. `values` are by seed; `ours` and `std` their mean and sample deviation.

    `lead` is the mean difference to FedAvg under the same settings, seed by seed (None for FedAvg itself), `against`
    the same with its interval, None where fewer than two seeds are shared; `interval` is that of a change's own mean.
    `state` is one of done, partly, missing-data, not-run, and in a list refused. `stand_ins` are, by precision, the
    seeds in which the run, or the one it is compared with where the figure is a change, has another precision than the
    cell's own.
    """

    cell: Cell
    values: dict[int, float]
    ours: float | None
    std: float | None
    state: str
    lead: float | None = None
    against: Interval | None = None
    interval: Interval | None = None
    runs: tuple[Measured, ...] = ()
    stand_ins: dict[str, list[int]] = field(default_factory=dict)

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        return None if self.ours is None or self.cell.paper is None else self.ours - self.cell.paper

    @property
    def diverged(self) -> int:
        """How many of the seeds diverged; they count as chance from that round on."""
        return sum(run.diverged_round is not None for run in self.runs)

    def over(self, seeds: Collection[int]) -> Comparison:
        """Mean and deviation over these of its seeds alone, without intervals."""
        values = {seed: value for seed, value in self.values.items() if seed in seeds}
        numbers = list(values.values())
        return dataclasses.replace(
            self,
            values=values,
            ours=mean(numbers),
            std=sample_std(numbers),
            lead=None,
            against=None,
            interval=None,
            runs=tuple(run for run in self.runs if run.seed in values),
            stand_ins={name: [seed for seed in own if seed in values] for name, own in self.stand_ins.items()},
        )

    def listed(self) -> dict[str, Any]:
        """What `--list --json` says of it; the settings of a grid come on top."""
        cell = self.cell
        names = ("table", "model", "dataset", "partition", "method", "availability", "participation", "buffer")
        entry: dict[str, Any] = {name: getattr(cell, name) for name in (*names, "metric", "paper")}
        entry |= {"ours": _short(self.ours), "std": _short(self.std)}
        entry |= {"seeds": sorted(self.values), "state": self.state}
        entry |= {f"seeds_{name}": seeds for name, seeds in self.stand_ins.items()}
        return entry | ({"settings": dict(cell.swept)} if cell.swept else {})


def grouped(entries: Iterable[Comparison], by: Callable[[Cell], str]) -> dict[str, list[Comparison]]:
    """Entries by what `by` says of their cells, in the order of first appearance."""
    groups: dict[str, list[Comparison]] = {}
    for entry in entries:
        groups.setdefault(by(entry.cell), []).append(entry)
    return groups


def compare(cells: Iterable[Cell], results: Results, has_data: Callable[[str], bool]) -> list[Comparison]:
    """Every cell with what is known of it. `has_data` says whether a data set's files are there."""
    return [_compare(cell, results, has_data) for cell in cells]


def _compare(cell: Cell, results: Results, has_data: Callable[[str], bool]) -> Comparison:
    if cell.metric == "model_mb":
        found = size(cell)
        if found is None:
            return Comparison(cell, {}, None, None, NOT_RUN)
        return Comparison(cell, {}, found.parameters / 1e6, None, DONE)
    known = {seed: results.value(cell, seed) for seed in cell.seeds}
    values = {seed: value for seed, value in known.items() if value is not None}
    if len(values) == len(cell.seeds) and not cell.shortened:
        state = DONE
    elif values:
        state = PARTLY
    else:
        state = NOT_RUN if has_data(cell.dataset) else MISSING_DATA
    numbers, leads, runs = list(values.values()), _leads(cell, values, results), _runs(cell, values, results)
    _check_one_data(cell, runs, results)
    return Comparison(
        cell,
        values,
        mean(numbers),
        sample_std(numbers),
        state,
        lead=mean(leads),
        against=mean_interval(leads),
        interval=mean_interval(numbers) if cell.metric == "accuracy_change" else None,
        runs=runs,
        stand_ins=_stand_ins(cell, values, results),
    )


def _leads(cell: Cell, seeds: Iterable[int], results: Results) -> list[float]:
    """The same figure of plain FedAvg, subtracted seed by seed."""
    if cell.metric == "h_norm" or cell.config == cell.reference:
        return []
    metric = "accuracy" if cell.metric == "accuracy_change" else cell.metric
    fedavg = dataclasses.replace(cell, config=cell.reference, metric=metric)
    ours = {seed: results.value(cell, seed, metric) for seed in seeds}
    theirs = {seed: results.value(fedavg, seed) for seed in seeds}
    return paired_differences(_known(ours), _known(theirs))


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _known(values: dict[int, float | None]) -> dict[int, float]:
    return {seed: value for seed, value in values.items() if value is not None}


def _runs(cell: Cell, seeds: Iterable[int], results: Results) -> tuple[Measured, ...]:
    assert cell.config is not None
    found = [results.run_of(cell, cell.config, seed) for seed in seeds]
    return tuple(run for run in found if run is not None)


def _check_one_data(cell: Cell, runs: Sequence[Measured], results: Results) -> None:
    """Refuse runs of other data than the others that a figure is made of, or than those that it is compared with."""
    beside = [(config, run.seed) for run in runs for config in (cell.baseline, cell.reference) if config is not None]
    found = [*runs, *(other for config, seed in beside if (other := results.run_of(cell, config, seed)) is not None)]
    digests = [(run.data, run.seed) for run in found if run.data]
    for digest, seed in digests[1:]:
        first, its_seed = digests[0]
        if not is_same_data(first, digest):
            raise InputError(
                f"dataset: {cell.method} on {cell.dataset} stands on results of different data of that name (digest "
                f"{first[:8]} in seed {its_seed}, {digest[:8]} in seed {seed}); accepted: results of one of the two"
            )


def _stand_ins(cell: Cell, seeds: Iterable[int], results: Results) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for seed in seeds if cell.stand_ins else ():
        for config in (cell.config, cell.baseline):
            run = None if config is None else results.run_of(cell, config, seed)
            if config is None or run is None:
                continue
            others = zip(cell.stand_ins, cell.versions(config)[1:], strict=True)
            name = next((name for name, other in others if settings_key(other) == run.settings), None)
            if name is not None and seed not in found.setdefault(name, []):
                found[name].append(seed)
    return found
