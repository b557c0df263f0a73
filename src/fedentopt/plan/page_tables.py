"""Tables of a plan's page: plain HTML that the page's script can sort, one row per outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from fedentopt.pages import html_table
from fedentopt.plan.costs import round_number
from fedentopt.plan.outcome import Outcome
from fedentopt.plan.planning import Plan
from fedentopt.plan.recommendation import share
from fedentopt.results.statistics import Spread


def outcome_table(
    identity: str, caption: str, outcomes: Sequence[Outcome], plan: Plan, *, columns: Sequence[str]
) -> str:
    names = {"cohort": "M", "buffer": "Buffer Q", "epsilon": "ε", "away": "Away"}
    heads = [("Selector", "text"), *((names[column], "number") for column in columns)]
    heads += [
        ("Mean entropy (bits)", "number"), ("Worst", "number"), ("Rounds missing a class %", "number"),
        ("Most missed", "text"), ("H_norm", "number"), ("Never asked", "number"), ("Least asked", "number"),
        ("Most asked", "number"),
    ]  # fmt: skip
    lines = []
    for outcome in outcomes:
        missed = outcome.missed.mean(axis=0)
        worst = int(np.argmax(missed))
        which = f"{plan.federation.classes[worst]} {share(float(missed[worst]))}" if missed[worst] else "–"
        cells = [_choice_cell(outcome, column) for column in columns]
        cells += [
            spread(outcome.entropies.mean(axis=1), 3),
            cell(float(outcome.entropies.min()), f"{outcome.entropies.min():.3f}"),
            spread(100 * (1 - outcome.covered), 1),
            f'<td class="text">{escape(which)}</td>',
            spread(outcome.h_norm, 3),
            spread(outcome.never, 1),
            cell(float(outcome.times.min()), round_number(float(outcome.times.min()))),
            cell(float(outcome.times.max()), round_number(float(outcome.times.max()))),
        ]
        name = escape(outcome.name)
        mark = ' class="is-chosen"' if outcome is plan.recommendation.chosen else ""
        lines.append(f'<tr{mark}><th scope="row" data-value="{name}">{name}</th>{"".join(cells)}</tr>')
    return html_table(identity, caption, heads, lines)


def _choice_cell(outcome: Outcome, column: str) -> str:
    value = getattr(outcome.choice, column)
    if column == "away":
        return cell(value, share(value) if value else "–")
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return '<td class="number" data-value="">–</td>' if value is None else cell(float(value), shown)


def cell(value: float, text: str) -> str:
    return f'<td class="number" data-value="{value:.10g}">{text}</td>'


def spread(values: np.ndarray, digits: int) -> str:
    spread = Spread.of(values.tolist())
    around = f" ± {spread.std:.{digits}f}" if math.isfinite(spread.std) else ""
    return cell(spread.mean, f"{spread.mean:.{digits}f}{around}")


def deviation(values: np.ndarray) -> float:
    spread = Spread.of(values.tolist()).std
    return spread if math.isfinite(spread) else 0.0
