"""What a comparison comes to: tables to compute with, a plot, a page, the final models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedentopt.errors import InputError
from fedentopt.results.aggregate import MethodResult, difference
from fedentopt.results.clients import COLUMNS, NUMBERS, TRUTHS
from fedentopt.results.reading import RunResult
from fedentopt.results.rounds import columns_of
from fedentopt.results.statistics import Spread

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure

MEANS = (
    "worst_class_accuracy", "final_accuracy", "best_accuracy", "mean_entropy", "min_entropy", "h_norm",
    "never_selected", "rounds", "bytes_up", "bytes_down",
)  # fmt: skip
"""Figures of `summary.json` whose mean over the seeds stands in the summary."""
WHERE_KNOWN = {
    "validation_accuracy": "validation_accuracy", "client_mean": "client_accuracy.mean",
    "client_worst_tenth": "client_accuracy.worst_tenth",
}  # fmt: skip
"""The same for those that not every run has: the column's name and the figure's."""


class Result:
    """Finished runs of some methods over some seeds. The first method is the one the others are compared with.

    `labels` are the methods' names as they were asked for, one per run, and the order of their first appearance is
    the order of the methods. Refused: no runs, an unfinished one, more or fewer labels than runs, a seed twice.
    """

    def __init__(self, runs: Sequence[RunResult], labels: Sequence[str]) -> None:
        self.runs = list(runs)
        if not self.runs or len(self.runs) != len(labels):
            raise InputError(f"result: {len(self.runs)} runs with {len(labels)} labels; accepted: one for each run")
        groups: dict[str, dict[int, RunResult]] = {}
        for run, label in zip(self.runs, labels, strict=True):
            if not run.finished:
                raise InputError(f"result: {run.run_id} is unfinished; accepted: finished runs")
            seeds = groups.setdefault(label, {})
            if run.seed in seeds:
                raise InputError(f"result: {label} has seed {run.seed} twice; accepted: each seed once")
            seeds[run.seed] = run
        self._groups = groups
        self._labels = list(labels)

    @property
    def methods(self) -> list[MethodResult]:
        """The methods over their seeds."""
        return [MethodResult(label, tuple(seeds.values())) for label, seeds in self._groups.items()]

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per run and round: `method`, `seed` and the columns of `rounds.csv`, lists as Python lists.

        In a round without evaluation accuracies are NaN and `class_accuracy` is None.
        """
        import pandas as pd

        rows = []
        columns = dict.fromkeys(name for run in self.runs for name in columns_of(run.records))
        for run, label in zip(self.runs, self._labels, strict=True):
            for record in run.records:
                values = {name: getattr(record, name) for name in columns}
                lists = {name: list(value) for name, value in values.items() if isinstance(value, tuple)}
                rows.append({"method": label, "seed": run.seed} | values | lists)
        frame = pd.DataFrame(rows, columns=["method", "seed", *columns])
        numbers = [name for name in frame if name.endswith(("accuracy", "loss")) and name != "class_accuracy"]
        return frame.astype(dict.fromkeys(numbers, float))

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per run and client: `method`, `seed` and the columns of `clients.csv`, of the runs that have it.

        Clients are numbers, as in `rounds`. What nobody knows is missing.
        """
        import pandas as pd

        rows = [
            {"method": label, "seed": run.seed, **dataclasses.asdict(client)}
            for run, label in zip(self.runs, self._labels, strict=True)
            for client in run.clients or ()
        ]
        frame = pd.DataFrame(rows, columns=["method", "seed", *COLUMNS])
        kinds = dict.fromkeys(TRUTHS, "boolean") | dict.fromkeys(NUMBERS, float) | {"observed": "Int64"}
        return frame.astype(kinds)

    @property
    def summary(self) -> pd.DataFrame:
        """One row per method: means over its seeds.

        `accuracy` is the mean test accuracy of the last ten rounds (of all where there are fewer), `std` its sample
        standard deviation over the `seeds`. `difference` is the mean of the differences in accuracy to the first
        method, seed by seed over the seeds both have, `low` to `high` its 95 % Student interval (NaN for fewer than two
        shared seeds). `diverged` counts the seeds that diverged. `validation_accuracy` is there where clients hold
        data out, `client_mean` and `client_worst_tenth` where accuracy per client was asked for.
        """
        import pandas as pd

        return pd.DataFrame([self._row(method) for method in self.methods])

    def _row(self, method: MethodResult) -> dict[str, Any]:
        first = self.methods[0]
        accuracy = Spread.of(run.summary["accuracy"] for run in method.runs if run.summary["accuracy"] is not None)
        mean = low = high = math.nan
        if method.label != first.label:
            found = difference(method, first)
            mean = found.mean
            if found.low is not None and found.high is not None:
                low, high = found.low, found.high
        figures = {name: name for name in MEANS}
        figures |= {
            name: figure for name, figure in WHERE_KNOWN.items() if any(one.spread(figure) for one in self.methods)
        }
        means = {name: method.spread(figure) for name, figure in figures.items()}
        return {
            "method": method.label,
            "seeds": len(method.runs),
            "accuracy": accuracy.mean,
            "std": accuracy.std,
            "difference": mean,
            "low": low,
            "high": high,
            **{name: math.nan if spread is None else spread.mean for name, spread in means.items()},
            "diverged": len(method.diverged),
        }

    def plot(self, title: str | None = None) -> Figure:
        """Accuracy over rounds as a Matplotlib figure: a line per method, a band of one standard deviation."""
        from fedentopt.report.curve_plot import accuracy_figure
        from fedentopt.report.grouping import setting_title

        if title is not None and not isinstance(title, str):
            raise InputError(f"title: {title!r} cannot be used; accepted: text, or none")
        return accuracy_figure(self.methods, setting_title(self.runs[0].config) if title is None else title)

    def report(self, path: str | Path, *, title: str = "results") -> Path:
        """Write the self-contained HTML page of all runs and return its path."""
        from fedentopt.report import write_page

        return write_page(self.runs, path, title=title)

    @property
    def models(self) -> dict[str, dict[int, dict[str, torch.Tensor]]]:
        """The final models by method and seed, where they were kept."""
        found = {label: {seed: run.model for seed, run in seeds.items()} for label, seeds in self._groups.items()}
        return {
            label: {seed: model for seed, model in models.items() if model is not None}
            for label, models in found.items()
        }

    def model(self, method: str, seed: int) -> dict[str, torch.Tensor]:
        """The final model of one run by parameter name, on the CPU."""
        if method not in list(self._groups):
            raise InputError(f"method: {method!r} is not among the results; accepted: {', '.join(self._groups)}")
        seeds = self._groups[method]
        if seed not in list(seeds):
            raise InputError(f"seed: {method} has no seed {seed}; accepted: {', '.join(map(str, seeds))}")
        model = seeds[seed].model
        if model is None:
            raise InputError(f"model: that of {method}, seed {seed} was not kept")
        return model

    def __len__(self) -> int:
        return len(self.runs)

    def __repr__(self) -> str:
        return str(self.summary.to_string(index=False, float_format="{:.4g}".format, na_rep="–"))

    def _repr_html_(self) -> str:
        return str(self.summary.to_html(index=False, float_format="{:.4g}".format, na_rep="–"))
