"""What is known of finished runs, from their folders on disk and from exported results.

Figures are rounded the same way in both, so that a table made from exported results equals, byte for byte, the
one made from the run folders they came from.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedentopt.datasets.catalog import may_differ
from fedentopt.errors import InputError
from fedentopt.files import file_digest
from fedentopt.own_code import code_digest
from fedentopt.paper.cells import Cell
from fedentopt.results.checked_files import REMEDY
from fedentopt.results.folder import RunFolder
from fedentopt.results.reading import RUN, SUMMARY, RunResult, read_run
from fedentopt.results.summary import TRUST, rounds_to
from fedentopt.simulation.config import RunConfig

TARGETS = (40, 45, 50)
"""Accuracies in per cent whose first round is compared."""
LOWER_TARGETS = (10, 20, 30)
"""Those of harder data sets."""
OWN = ("code", "data", "weights")
"""What may be the user's own behind a run: known again by digests."""
LATER = (
    *(f"rounds_to_{target}" for target in LOWER_TARGETS), "bytes_up", "bytes_down", "asked", "selection_seconds",
    "simulated_seconds", "validation_accuracy", "client_mean", "client_worst_tenth", *TRUST, *OWN,
)  # fmt: skip
"""What results of earlier versions lack, and not every run has."""

DIGITS = {"h_norm": 6, "mean_entropy": 6, "believed_entropy": 6, "min_entropy": 6, "seconds": 1, "simulated_seconds": 1}
FIGURES = (
    "accuracy", "final_accuracy", "worst_class_accuracy", "h_norm", "never_selected", "mean_entropy", "min_entropy",
    "diverged_round", "seconds",
)  # fmt: skip
"""What is taken over from a run's `summary.json` as it stands there."""

Curve = list[tuple[int, float | None, float | None]]
"""Round, accuracy, entropy; None where not evaluated or not kept."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The figures of one finished run; None where it has none. `settings` and `seed` say which run; those in
    `OWN` are digests."""

    settings: str
    seed: int
    rounds: int
    accuracy: float | None
    final_accuracy: float | None = None
    worst_class_accuracy: float | None = None
    h_norm: float | None = None
    never_selected: int | None = None
    mean_entropy: float | None = None
    min_entropy: float | None = None
    rounds_to_40: int | None = None
    rounds_to_45: int | None = None
    rounds_to_50: int | None = None
    diverged_round: int | None = None
    seconds: float | None = None
    rounds_to_10: int | None = None
    rounds_to_20: int | None = None
    rounds_to_30: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    asked: int | None = None
    selection_seconds: float | None = None
    simulated_seconds: float | None = None
    validation_accuracy: float | None = None
    client_mean: float | None = None
    client_worst_tenth: float | None = None
    believed_entropy: float | None = None
    liars_chosen: float | None = None
    estimate_error: float | None = None
    suspects: float | None = None
    honest_suspects: float | None = None
    suspicion_auc: float | None = None
    first_auc: float | None = None
    third_auc: float | None = None
    code: str | None = None
    data: str | None = None
    weights: str | None = None


@cache  # asked for again and again, and a config never changes
def settings_key(config: RunConfig) -> str:
    """Eight hexadecimal digits for the settings of a run, its seed apart.

    Only what differs from the defaults counts, so results stay valid when a later version brings a new setting
    whose default changes nothing.
    """
    named_anyway = ("seed", "rounds", "dataset", "model")
    changed = {name: value for name, value in config.changed().items() if name not in named_anyway}
    named = {name: getattr(config, name) for name in ("rounds", "dataset", "model")}
    return hashlib.sha256(json.dumps(changed | named, sort_keys=True).encode()).hexdigest()[:8]


class Results:
    """Finished runs by their settings: those exported, and those in the folders below `out_dir`.

    Where there is such a folder more runs may come from it, so those that other code of the user's made are refused.
    """

    def __init__(
        self,
        out_dir: Path | None = None,
        exported: Mapping[tuple[str, int], Measured] | None = None,
        curves: Mapping[tuple[str, int], Curve] | None = None,
    ) -> None:
        self._out_dir = out_dir
        self._exported = dict(exported or {})
        self._curves = dict(curves or {})
        self._read: dict[tuple[str, int], Measured] = {}  # of finished runs, which never change
        self._digests: dict[tuple[str, ...], str] = {}  # of own code

    def get(self, config: RunConfig, seed: int) -> Measured | None:
        """The run of these settings in this seed, if finished; a run folder wins over an exported result."""
        key = (settings_key(config), seed)
        if key not in self._read:
            run = self._folder(config, seed)
            if run is None:
                return self._same_code(config, self._exported.get(key))
            self._read[key] = _measured(run, config, seed)
        return self._read[key]

    def run_of(self, cell: Cell, config: RunConfig, seed: int) -> Measured | None:
        """The run that counts for one of a cell's in this seed, if any of its versions is finished."""
        found = (self.get(version, seed) for version in cell.versions(config))
        return next((run for run in found if run is not None), None)

    def curve_of(self, cell: Cell, config: RunConfig, seed: int) -> Curve:
        """The rounds of that run; empty where nothing is known."""
        finished = (version for version in cell.versions(config) if self.get(version, seed) is not None)
        return self.curve(next(finished, config), seed)

    def curve(self, config: RunConfig, seed: int) -> Curve:
        """Its rounds; empty where nothing is known."""
        run = self._folder(config, seed)
        if run is None:
            return list(self._curves.get((settings_key(config), seed), []))
        curve, table = run.curve, run.rounds
        entropy = dict(zip(table.number.tolist(), table.entropy.tolist(), strict=True))
        return [
            (number, _rounded("accuracy", curve.get(number)), _rounded("mean_entropy", entropy.get(number)))
            for number in sorted(curve.keys() | entropy.keys())
        ]

    def seeds(self, config: RunConfig) -> set[int]:
        """The seeds in which a run of these settings is finished, asked for or not."""
        key = settings_key(config)
        found = {seed for settings, seed in self._exported if settings == key}
        if self._out_dir is not None:
            # A run's folder is named by its settings in words, so only those of the right name are opened. In an older
            # one's the partition may be spelt otherwise.
            method, dataset, _, model = map(glob.escape, config.run_id.split("_")[:4])
            paths = self._out_dir.glob(f"{method}_{dataset}_*_{model}_s*/{SUMMARY}")
            numbers = {path.parent.name.split("_")[4].removeprefix("s") for path in paths}
            found |= {int(n) for n in numbers if n.isdigit() and self._folder(config, int(n)) is not None}
        return found

    def on(self, out_dir: Path) -> Results:
        """The same exported results, and the run folders below `out_dir`."""
        return Results(out_dir, self._exported, self._curves)

    def value(self, cell: Cell, seed: int, metric: str | None = None) -> float | None:
        """The cell's figure in one seed (or another metric of the same run), None while it is not known."""
        if cell.config is None:
            return None
        measured = self.run_of(cell, cell.config, seed)
        if measured is None:
            return None
        metric = metric or cell.metric
        if metric == "accuracy_change":
            baseline = self.run_of(cell, cell.baseline, seed) if cell.baseline else None
            if baseline is None or baseline.accuracy is None or measured.accuracy is None:
                return None
            return round(measured.accuracy - baseline.accuracy, 4)
        return figure(measured, metric)

    def digests(self, config: RunConfig, of: str) -> set[str]:
        """Digests of the user's own `code`, `data` or `weights` behind the finished runs of these settings."""
        found = (self.get(config, seed) for seed in self.seeds(config))
        return {getattr(run, of) for run in found if run is not None and getattr(run, of)}

    def _folder(self, config: RunConfig, seed: int) -> RunResult | None:
        if self._out_dir is None:
            return None
        folder = RunFolder(self._out_dir, dataclasses.replace(config, seed=seed))
        if not folder.is_finished():
            return None
        folder.check_code(self._digest(config), "bring the old code back, give another folder, or delete that one")
        folder.check_weights(
            file_digest(config.weights), "bring the old file back, give another folder, or delete that one"
        )
        folder.clear_lock()
        return read_run(folder.path)

    def _same_code(self, config: RunConfig, run: Measured | None) -> Measured | None:
        """An exported run, refused where runs of other code would stand beside it."""
        now = "" if run is None or self._out_dir is None else self._digest(config)
        if run is not None and run.code and now and run.code != now:
            raise InputError(
                f"known: the code behind {config.method} has changed since its results were exported (digest "
                f"{run.code[:8]}, now {now[:8]}); bring the old code back, or give a folder without these results"
            )
        return run

    def _digest(self, config: RunConfig) -> str:
        """Digest of the user's own code as it is now; empty where there is none."""
        own = config.own_code
        if own not in self._digests:
            self._digests[own] = code_digest(own)
        return self._digests[own]


def figure(measured: Measured, metric: str) -> float | None:
    """One of a run's figures by the name a cell gives it."""
    return {
        "accuracy": measured.accuracy,
        "validation_accuracy": measured.validation_accuracy,
        "h_norm": measured.h_norm,
        "entropy": measured.mean_entropy,
    }[metric]


def _measured(run: RunResult, config: RunConfig, seed: int) -> Measured:
    _check(run)
    summary = run.summary
    given: dict[str, Any] = {name: _rounded(name, summary[name]) for name in FIGURES}
    known = summary["rounds_to"]
    given |= {
        f"rounds_to_{target}": known[str(target)] if str(target) in known else rounds_to(run.curve, target)
        for target in (*TARGETS, *LOWER_TARGETS)
    }
    taken = ("bytes_up", "bytes_down", "selection_seconds", "simulated_seconds", "validation_accuracy", *TRUST)
    given |= {name: _rounded(name, summary.get(name)) for name in taken}
    given["asked"] = summary.get("asked", 0)
    given |= {of: run.about.get(of, {}).get("digest") for of in ("code", "weights")}
    given["data"] = run.about["dataset"].get("digest") if may_differ(config.dataset) else None
    per_client = summary.get("client_accuracy") or {}
    given["client_mean"] = _rounded("client_mean", per_client.get("mean"))
    given["client_worst_tenth"] = _rounded("client_worst_tenth", per_client.get("worst_tenth"))
    # A run of FedConcat has more rounds than asked for; what was asked for is what tells a full run from a cut one.
    return Measured(**given | {"settings": settings_key(config), "seed": seed, "rounds": config.rounds})


def _check(run: RunResult) -> None:
    """Refuse a run whose notes lack what is read here, as those written by hand or by other code may."""
    assert run.path is not None
    dataset = run.about.get("dataset", {})
    if not isinstance(dataset.get("classes"), list) or not dataset["classes"]:
        raise InputError(f"{run.path / RUN}: the classes of the dataset are missing; {REMEDY}")


def _rounded(name: str, value: Any) -> Any:
    return round(value, DIGITS.get(name, 4)) if isinstance(value, float) else value
