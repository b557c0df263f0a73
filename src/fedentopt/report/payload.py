"""What the charts of a page draw, as JSON: one object per setting, at a chosen level of detail.

A page must stay small enough to send by mail, also for hundreds of runs. `LEVELS` goes from everything to the
least; the page takes the first level that fits. Totals (selection counts, accuracies, bytes to a target) are
always computed from all rounds: only what is drawn round by round gets thinner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedentopt.report.belief import drawn, has_beliefs, liars_among_all, liars_among_chosen, threshold
from fedentopt.report.figures import costs, curve, figures, thin
from fedentopt.report.grouping import Group, Method
from fedentopt.report.styles import styles
from fedentopt.results.clients import verdicts
from fedentopt.results.reading import RunResult
from fedentopt.results.rounds import FIGURES, Floats
from fedentopt.results.statistics import Spread


@dataclass(frozen=True)
class Detail:
    """How much is kept; `all_seeds` is about the picks, curves always use every seed.

    A label table with more than `label_cells` numbers is left out; `clients` are drawn one by one.
    """

    curve_points: int
    pick_rounds: int
    class_rounds: int
    all_seeds: bool
    label_cells: int
    clients: int


LEVELS = (
    Detail(curve_points=500, pick_rounds=2000, class_rounds=250, all_seeds=True, label_cells=4_000_000, clients=5_000),
    Detail(curve_points=250, pick_rounds=500, class_rounds=125, all_seeds=False, label_cells=200_000, clients=2_000),
    Detail(curve_points=120, pick_rounds=150, class_rounds=60, all_seeds=False, label_cells=50_000, clients=1_000),
    Detail(curve_points=60, pick_rounds=50, class_rounds=30, all_seeds=False, label_cells=20_000, clients=500),
    Detail(curve_points=30, pick_rounds=15, class_rounds=15, all_seeds=False, label_cells=5_000, clients=200),
    Detail(curve_points=20, pick_rounds=0, class_rounds=0, all_seeds=False, label_cells=0, clients=100),
)


def group_payload(group: Group, detail: Detail) -> dict[str, Any]:
    """Everything the charts of one setting need. Clients and classes are numbers; names are in two lists."""
    tables: list[list[list[float | None]]] = []
    table_of: dict[bytes, int] = {}
    targets, seed = _targets(group), _common_seed(group)

    def label_table(run: RunResult) -> int | None:
        counts = run.labels.counts
        if counts is None or counts.size > detail.label_cells:
            return None
        key = counts.tobytes()
        if key not in table_of:
            table_of[key] = len(tables)
            tables.append([_list(row, 1) for row in counts.tolist()])
        return table_of[key]

    methods = []
    for method, style in zip(group.methods, styles(group), strict=True):
        shown = method.runs if detail.all_seeds else _of_seed(method, seed)
        values = figures(method)
        methods.append(
            {
                "label": method.label,
                "style": style.to_dict(),
                "accuracy": _column(method, "accuracy", 2, detail),
                "entropy": _column(method, "entropy", 4, detail),
                "belief": _belief(method, detail),
                "classAccuracy": _list(values.class_accuracy.tolist(), 2),
                "hNorm": _short(values.h_norm.mean, 3),  # shown with as many digits, and rounded once, as in the table
                "costs": [
                    None if cost is None else [_short(cost.rounds, 1), round(cost.bytes_sent), cost.reached]
                    for cost in costs(method, targets)
                ],
                "seeds": len(method.finished or method.runs),
                "runs": [_run(run, label_table(run), detail) for run in shown],
            }
        )
    plain, balanced = group.plain(), group.balanced()
    return {
        "title": group.title,
        "classes": list(group.methods[0].runs[0].labels.classes),
        "clients": list(group.methods[0].runs[0].labels.clients),
        "targets": targets,
        "methods": methods,
        "labelTables": tables,
        "left": group.methods.index(plain) if plain else 0,
        "right": group.methods.index(balanced) if balanced else len(group.methods) - 1,
        "thinned": _thinned(group, detail),
    }


def _common_seed(group: Group) -> int:
    """The seed that most methods have, the lowest of several: methods can be compared only within one."""
    seeds = Counter(seed for method in group.methods for seed in {run.seed for run in method.runs})
    return max(sorted(seeds), key=lambda seed: seeds[seed])


def _of_seed(method: Method, seed: int) -> Sequence[RunResult]:
    """One run of the method: of this seed, else its first."""
    return [run for run in method.runs if run.seed == seed][:1] or method.runs[:1]


def _run(run: RunResult, table: int | None, detail: Detail) -> dict[str, Any]:
    """The picks of one run; `absent` are chosen clients that did not train."""
    rounds = run.rounds
    kept = thin(range(len(rounds)), detail.pick_rounds)
    evaluated = [i for i in range(len(rounds)) if np.isfinite(rounds.class_accuracy[i]).any()]
    by_class = thin(evaluated, detail.class_rounds)
    absent = {int(rounds.number[i]): sorted(set(rounds.clients[i]) - set(rounds.trained[i])) for i in kept}
    return {
        "seed": run.seed,
        "table": table,
        "noisy": run.labels.noisy,
        "rounds": [int(rounds.number[i]) for i in kept],
        "picks": [rounds.clients[i] for i in kept],
        "absent": {str(number): clients for number, clients in absent.items() if clients},
        "entropy": _list((rounds.entropy[i] for i in kept), 4),
        "covered": [int(rounds.classes_covered[i]) for i in kept],
        "accuracy": _list((rounds.accuracy[i] for i in kept), 2),
        "classRounds": [int(rounds.number[i]) for i in by_class],
        "classAccuracy": [_list(rounds.class_accuracy[i].tolist(), 1) for i in by_class],
        "times": run.times_selected.tolist(),
        "clients": _clients(run, detail),
    }


def _belief(method: Method, detail: Detail) -> dict[str, Any] | None:
    """What the server believed by round: a curve for each figure that there is."""
    if not has_beliefs(method.runs):
        return None
    figures = {
        name: _column(method, name, 4, detail)
        for name in FIGURES
        if not name.startswith("validation_")
        and any(np.isfinite(getattr(run.rounds, name)).any() for run in method.runs)
    }
    return {
        "policy": str(method.config.get("audit", "off")),
        "figures": figures,
        "liars": _curve(method, liars_among_chosen, 2, detail),
        "liarsAmongAll": _short(Spread.of(map(liars_among_all, method.runs)).mean, 2),
    }


def _clients(run: RunResult, detail: Detail) -> dict[str, Any] | None:
    """The clients of a run as its server sees them, as columns; None where it does not say."""
    if run.clients is None:
        return None
    found = verdicts(run.clients)
    kept = drawn(run.clients, detail.clients)
    line = threshold(run.clients)
    columns = {"suspicion": 2, "distance": 4, "agreement": 3, "estimate_error": 4, "reported_size": 1, "true_size": 1}
    return {
        "verdicts": None if found is None else str(found),
        "unseen": sum(client.observed == 0 for client in run.clients),
        "threshold": None if line is None else _short(line, 4),
        "number": [client.client for client in kept],
        "liar": [client.liar for client in kept],
        "suspected": [client.suspected for client in kept],
        "chosen": [client.chosen for client in kept],
        "observed": [client.observed for client in kept],
        **{
            name: _list((math.nan if (value := getattr(c, name)) is None else value for c in kept), digits)
            for name, digits in columns.items()
        },
    }


def _column(method: Method, name: str, digits: int, detail: Detail) -> dict[str, Any]:
    return _curve(method, lambda run: getattr(run.rounds, name), digits, detail)


def _curve(method: Method, values: Callable[[RunResult], Floats], digits: int, detail: Detail) -> dict[str, Any]:
    line = curve(method.runs, values, detail.curve_points)
    return {"x": line.rounds, "mean": _list(line.mean, digits), "std": _list(line.std, digits)}


def _targets(group: Group) -> list[int]:
    """Whole per cents from just above guessing to the best accuracy anyone reached."""
    best = max(
        (float(np.nanmax(run.rounds.accuracy)) for m in group.methods for run in m.runs if _evaluated(run)), default=0.0
    )
    chance = 100 / len(group.methods[0].runs[0].labels.classes)
    return list(range(math.floor(chance) + 1, math.floor(best) + 1))


def _evaluated(run: RunResult) -> bool:
    return bool(np.isfinite(run.rounds.accuracy).any())


def _thinned(group: Group, detail: Detail) -> list[str]:
    """What was left out, in words, so that no reader takes a thinned chart for a full one."""
    runs = [run for method in group.methods for run in method.runs]
    longest = max(len(run.rounds) for run in runs)
    notes = []
    if not detail.all_seeds and any(len(method.runs) > 1 for method in group.methods):
        notes.append("client picks are kept for one seed")
    if longest > detail.pick_rounds:
        notes.append(
            f"client picks are kept for {detail.pick_rounds} of {longest} rounds"
            if detail.pick_rounds
            else "client picks are left out"
        )
    if any(run.labels.counts is not None and run.labels.counts.size > detail.label_cells for run in runs):
        notes.append("label counts are left out")
    if any(len(run.clients or ()) > detail.clients for run in runs):
        notes.append(f"of the clients that were watched, {detail.clients} and the suspects are drawn")
    if longest > detail.curve_points:
        notes.append(f"curves show {detail.curve_points} of {longest} rounds")
    return notes


def _short(value: float, digits: int) -> float | None:
    """A JSON number without needless digits: an integer where it is one, null where it is not finite."""
    if not math.isfinite(value):
        return None
    rounded = round(float(value), digits)
    return int(rounded) if rounded == int(rounded) else rounded


def _list(values: Iterable[float], digits: int) -> list[float | None]:
    rounded = np.round(np.fromiter(values, dtype=np.float64), digits).tolist()
    return [int(value) if value.is_integer() else value if math.isfinite(value) else None for value in rounded]
