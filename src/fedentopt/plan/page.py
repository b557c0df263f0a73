"""A plan as one HTML file: no network, no second file, and nothing in it that needs a script to be read.

It shares the style sheet and the sorting of tables with the page of results, so both look alike.
"""

from __future__ import annotations

import math
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from fedentopt import __version__
from fedentopt.pages import html_table, save_page
from fedentopt.plan.charts import Axis, Level, Series, bar_chart, legend, line_chart
from fedentopt.plan.costs import round_number
from fedentopt.plan.outcome import Outcome
from fedentopt.plan.page_tables import cell, deviation, outcome_table
from fedentopt.plan.planning import Plan
from fedentopt.plan.recommendation import describe, headline, share
from fedentopt.selection import EntropySelector, RandomSelector

MOST_CLASSES = 30  # shown in the chart of missing classes
MOST_SITES = 300  # listed one by one; of more, those asked most and least
MOST_POINTS = 400  # of a curve


def write_page(plan: Plan, path: Path | str) -> Path:
    """Write the page; what `check_page` refuses is not overwritten."""
    return save_page(render(plan), path)


def render(plan: Plan) -> str:
    """The page as text."""
    sections = (_recommendation, _rounds, _classes, _cohorts, _noise, _sites, _all, _settings)
    body = "".join(section(plan) for section in sections)
    return Template(_asset("plan", "plan.html")).substitute(
        version=escape(__version__),
        title=escape(Path(plan.settings["file"]).name or "label counts"),
        css=_asset("report", "page.css") + _asset("plan", "plan.css"),
        body=body,
        scripts=_asset("report", "tables.js") + _asset("plan", "plan.js"),
    )


def _recommendation(plan: Plan) -> str:
    found = plan.recommendation
    chosen, random, top = found.chosen, found.random, plan.federation.top
    texts = [found.reason, found.trade, plan.privacy, plan.availability, plan.settings["sampled"] or ""]
    sentences = "".join(f"<p>{escape(text)}</p>" for text in texts if text)

    def both(value: str, beside: str) -> str:
        return value if found.is_random else f"{value} <span>random {beside}</span>"

    tiles = [
        (both(f"{chosen.entropy:.2f}", f"{random.entropy:.2f}"), f"bits of entropy on average, of {top:.2f}"),
        (both(f"{chosen.entropies.min():.2f}", f"{random.entropies.min():.2f}"), "bits in the worst round"),
        (
            both(share(float(1 - chosen.covered.mean())), share(float(1 - random.covered.mean()))),
            "of rounds miss a class",
        ),
        (both(f"{chosen.h_norm.mean():.2f}", f"{random.h_norm.mean():.2f}"), "H_norm: 1 asks everybody equally often"),
        (both(*(round_number(float(o.never.mean())) for o in (chosen, random))), "clients never asked"),
    ]
    listed = "".join(f"<li><b>{number}</b><span>{escape(text)}</span></li>" for number, text in tiles)
    ways = [
        ("Command", plan.command(), "Prints the cohorts of the first repetition, and its figures"),
        ("Python", plan.python(), "The same cohorts in Python"),
        ("Flower", plan.flower(), "For a Flower app, see Flower in the documentation"),
    ]
    blocks = "".join(
        f"<h3>{name}</h3>"
        f'<div class="command"><pre tabindex="0" aria-label="{escape(about)}"><code>{escape(text)}</code></pre>'
        f'<button type="button" data-copy>Copy</button></div>'
        for name, text, about in ways
    )
    return (
        f'<section id="recommendation"><h2>Recommendation</h2><div class="answer"><p class="headline">'
        f"{escape(headline(plan.federation, chosen))}</p>{sentences}</div>"
        f'<ul class="numbers">{listed}</ul>{blocks}</section>'
    )


def _shown(plan: Plan) -> list[tuple[Outcome, int]]:
    """Random selection and the recommended choice (FedEntOpt where random is recommended), with their styles."""
    found = plan.recommendation
    if not found.is_random:
        return [(found.random, 0), (found.chosen, 1)]
    size = found.chosen.choice.cohort
    others = [o for o in plan.by_size if o.choice.selector is EntropySelector and o.choice.cohort == size]
    return [(found.random, 0), (others[len(others) // 2], 1)]


def _rounds(plan: Plan) -> str:
    shown = _shown(plan)
    rounds = shown[0][0].entropies.shape[1]
    step = max(1, math.ceil(rounds / MOST_POINTS))
    series = []
    for outcome, style in shown:
        first = outcome.entropies[0]
        points = [(float(i + 1), float(first[i : i + step].mean())) for i in range(0, rounds, step)]
        series.append(Series(describe(outcome), style, points))
    held = int(plan.federation.held.sum())
    levels = [Level(math.log2(count), f"log₂({count})") for count in (held, held - 1) if count > 1]
    chart = line_chart(
        series, label="Entropy of the cohort's labels in every round", x=Axis("round"), y=Axis("bits"), levels=levels,
        marks=rounds <= 12,
    )  # fmt: skip
    thinned = f" Each point is the mean of {step} rounds." if step > 1 else ""
    return _section(
        "rounds", "Entropy per round",
        "How even the labels of each cohort are, in the first repetition. The upper line means all classes in equal "
        f"parts; below the lower one at least one class may be missing.{thinned}",
        legend([(describe(o), s) for o, s in shown]) + chart,
    )  # fmt: skip


def _classes(plan: Plan) -> str:
    shown = _shown(plan)
    names = plan.federation.classes
    missed = [outcome.missed.mean(axis=0) for outcome, _ in shown]
    held = [c for c in range(len(names)) if plan.federation.held[c]]
    order = sorted(held, key=lambda c: (-max(values[c] for values in missed), c))
    nobody = [names[c] for c in range(len(names)) if not plan.federation.held[c]]
    said = f" Held by nobody, and left out: {', '.join(nobody[:8])}." if nobody else ""
    if len(order) > MOST_CLASSES:
        said += f" Shown are the {MOST_CLASSES} that are missed most, of {len(order)}."
    order = order[:MOST_CLASSES]
    chart = bar_chart(
        [names[c] for c in order],
        [(describe(o), s, [float(v[c]) for c in order]) for (o, s), v in zip(shown, missed, strict=True)],
        label="Share of rounds in which nobody of the cohort holds a class",
        title="share of rounds without the class",
    )
    return _section(
        "classes", "Classes that rounds miss",
        f"In such a round the model trains without a single sample of the class.{said}",
        legend([(describe(o), s) for o, s in shown]) + chart,
    )  # fmt: skip


def _by_selector(plan: Plan) -> list[tuple[str, int, list[Outcome]]]:
    """Every selector's line over cohort sizes: name, style, outcomes; with a buffer, the one of the recommendation,
    or the largest that fits in it."""
    chosen = plan.recommendation.chosen.choice
    wanted = chosen.buffer
    lines = []
    style = 2
    for cls in dict.fromkeys(o.choice.selector for o in plan.by_size):
        of_class = [o for o in plan.by_size if o.choice.selector is cls]
        picked = []
        for size in sorted({o.choice.cohort for o in of_class}):
            of_size = [o for o in of_class if o.choice.cohort == size]
            if wanted is None:
                picked.append(of_size[len(of_size) // 2])
            else:
                picked.append(min(of_size, key=lambda o: abs((o.choice.buffer or 0) - wanted)))
        shown_as = 0 if cls is RandomSelector else 1 if cls is _shown(plan)[1][0].choice.selector else style
        style += shown_as == style
        lines.append((cls.label or cls.name, shown_as, picked))
    return sorted(lines, key=lambda line: line[1])


def _cohorts(plan: Plan) -> str:
    lines = _by_selector(plan)
    series = [
        Series(
            name, style, [(float(o.choice.cohort), o.entropy) for o in outcomes],
            [deviation(o.entropies.mean(axis=1)) for o in outcomes],
            [f"{name}, cohorts of {o.choice.cohort}: {o.entropy:.3f} bits" for o in outcomes],
        )
        for name, style, outcomes in lines
    ]  # fmt: skip
    sizes = sorted({o.choice.cohort for o in plan.by_size})
    top = plan.federation.top
    chart = line_chart(
        series, label="Mean entropy of the cohorts by their size, one line per selector",
        x=Axis("clients per round, M", [(float(size), str(size)) for size in sizes]), y=Axis("bits"),
        levels=[Level(top, f"largest possible, {top:.2f}")] if top else (),
    )  # fmt: skip
    size = plan.recommendation.chosen.choice.cohort
    rows = outcome_table(
        "size-table", f"Every selector and buffer with cohorts of {size}; click a column to sort",
        [o for o in plan.by_size if o.choice.cohort == size], plan, columns=("buffer",),
    )  # fmt: skip
    return _section(
        "cohorts", "Cohort sizes and buffers",
        "Mean entropy over all rounds; bars show the standard deviation over repetitions. All selectors at the same "
        "place have cohorts of the same size. A round costs traffic and time in proportion to M.",
        legend([(name, style) for name, style, _ in lines]) + chart + rows
        + '<p class="note">Mean ± standard deviation over repetitions; worst is the least entropy of any round. A '
        "larger buffer asks more evenly and leaves fewer clients to choose from. The recommended row is marked.</p>",
    )  # fmt: skip


def _noise(plan: Plan) -> str:
    size = plan.recommendation.chosen.choice.cohort
    alike = plan.noised(size)
    if not alike:
        return _section("noise", "What noise costs", escape(plan.privacy) or "No noise was tried.", "")
    samples = plan.samples
    ticks = [(float(i), _tick(o.choice.epsilon, samples)) for i, o in enumerate(alike)]
    random = plan.recommendation.random
    name = describe(alike[0])
    series = [
        Series("Random", 0, [(0.0, random.entropy), (float(len(alike) - 1), random.entropy)]),
        Series(
            name, 1, [(float(i), o.entropy) for i, o in enumerate(alike)],
            [deviation(o.entropies.mean(axis=1)) for o in alike],
            [f"ε {o.choice.epsilon or 'none'}: {o.entropy:.3f} bits" for o in alike],
        ),
    ]  # fmt: skip
    top = plan.federation.top
    chart = line_chart(
        series, label=f"Mean entropy of {name} by privacy budget, beside random selection",
        x=Axis("ε, privacy budget", ticks), y=Axis("bits"), levels=[Level(top, f"largest possible, {top:.2f}")],
    )  # fmt: skip
    return _section(
        "noise", "What noise costs",
        escape(plan.privacy) + f" With ε every count gets Laplace noise of scale 1/ε; n is {round_number(samples)}, "
        "the samples per client at the median, and below ε·n of about 50 noise starts to tell.",
        legend([("Random", 0), (name, 1)]) + chart,
    )  # fmt: skip


def _tick(epsilon: float | None, samples: float) -> str:
    return "none" if epsilon is None else f"{epsilon:g}\nε·n {round_number(epsilon * samples)}"


def _sites(plan: Plan) -> str:
    shown = _shown(plan)
    clients = len(plan.federation.clients)
    series = []
    for outcome, style in shown:
        times = np.sort(outcome.times)[::-1]
        places = sorted({round(i * (clients - 1) / MOST_POINTS) for i in range(MOST_POINTS + 1)})
        series.append(Series(describe(outcome), style, [(float(i + 1), float(times[i])) for i in places]))
    chart = line_chart(
        series, label="How often each client is asked, the most asked first", marks=False, steps=True,
        x=Axis("clients, the most asked first"), y=Axis("times asked", low=0.0),
    )  # fmt: skip
    order = np.argsort(-shown[1][0].times, kind="stable")
    if clients > MOST_SITES:
        order = np.concatenate([order[: MOST_SITES // 2], order[-MOST_SITES // 2 :]])
    heads = [("Site", "text"), ("Samples", "number"), ("Classes", "number")]
    heads += [(f"Asked by {o.name}", "number") for o, _ in shown]
    lines = []
    for client in order.tolist():
        row = np.maximum(plan.federation.counts[client], 0)
        numbers = [float(row.sum()), float((row > 0).sum()), *(float(o.times[client]) for o, _ in shown)]
        cells = "".join(cell(value, round_number(value)) for value in numbers)
        name = escape(plan.federation.clients[client])
        lines.append(f'<tr><th scope="row" data-value="{name}">{name}</th>{cells}</tr>')
    rounds = shown[0][0].entropies.shape[1]
    about = f"Times asked in {rounds} rounds, mean over repetitions"
    if clients > MOST_SITES:
        about += f"; the {MOST_SITES // 2} asked most and the {MOST_SITES // 2} asked least of {clients}"
    table = html_table("sites-table", about, heads, lines)
    return _section(
        "sites", "How often each site is asked", "A flat line asks everybody equally often.",
        legend([(describe(o), s) for o, s in shown]) + chart
        + f'<details class="more"><summary>Site by site</summary>{table}</details>',
    )  # fmt: skip


def _all(plan: Plan) -> str:
    skipped = "".join(
        f"<li><strong>{escape(one.label)}</strong>"
        f"{f', cohorts of {one.cohort}' if one.cohort else ''}: {escape(one.reason)}</li>"
        for one in plan.skipped
    )
    outcomes = (*plan.by_size, *plan.by_noise, *plan.by_absence)
    rows = outcome_table(
        "all-table", "Everything that was tried; click a column to sort", outcomes, plan,
        columns=("cohort", "buffer", "epsilon", "away"),
    )  # fmt: skip
    return _section(
        "all", "All that was tried", "Every choice of selector, sizes, noise and absence, with the figures of each.",
        f'<details class="more"><summary>{len(outcomes)} rows</summary>{rows}</details>'
        + (f"<h3>Not tried</h3><ul>{skipped}</ul>" if skipped else ""),
    )  # fmt: skip


def _settings(plan: Plan) -> str:
    asked = dict(plan.settings)
    asked["label_counts"] = {
        name: round(value, 3) for name, value in zip(asked.pop("classes"), asked["label_counts"], strict=True)
    }
    asked["away"] = share(asked["away"])
    items = "".join(
        f"<div><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_value(value))}</dd></div>"
        for name, value in asked.items()
        if value not in (None, [])
    )
    return f'<section id="settings"><h2>Settings</h2><dl>{items}</dl></section>'


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        shown = [f"{name}: {_value(number)}" for name, number in list(value.items())[:30]]
        return ", ".join(shown) + (f" and {len(value) - 30} more" if len(value) > 30 else "")
    if isinstance(value, list | tuple):
        return ", ".join("none" if one is None else _value(one) for one in value)
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1e6 else f"{value:g}"  # no powers of ten
    return str(value)


def _section(identity: str, title: str, lead: str, content: str) -> str:
    """`lead` is HTML already."""
    return f'<section id="{identity}"><h2>{escape(title)}</h2><p class="lead">{lead}</p>{content}</section>'


@cache
def _asset(room: str, name: str) -> str:
    return resources.files(f"fedentopt.{room}").joinpath("assets", name).read_text(encoding="utf-8")
