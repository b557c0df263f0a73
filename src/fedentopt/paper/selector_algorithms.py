"""Does re-weighting help once cohorts are even: algorithms with random selection and with FedEntOpt's, in a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedentopt.paper import names
from fedentopt.paper.comparison import Comparison
from fedentopt.paper.formats import Section, Table, markdown
from fedentopt.paper.selector_asks import OURS
from fedentopt.paper.selector_table import SURE, Against, compared
from fedentopt.results.statistics import mean

ALGORITHMS = "selectors-algorithms"
COLUMNS = ("algorithm", "random selection", "minus FedAvg", "FedEntOpt's selection", "minus FedEntOpt with FedAvg")
NOTE = (
    "Test accuracy in per cent. The last column says whether an algorithm that re-weights or corrects still helps once "
    f"cohorts are even; bold below p = {SURE:g}, by Holm's correction over all differences of a setting."
)


def algorithms(entries: Sequence[Comparison]) -> str:
    """The section of the page; empty without results."""
    own = [entry for entry in entries if entry.cell.table == ALGORITHMS]
    sections, answers = [], []
    for heading in dict.fromkeys(names.heading(entry.cell) for entry in own):
        by_method = {e.cell.method or "": e for e in own if names.heading(e.cell) == heading}
        others = [method for method in by_method if "+" not in method and method not in ("fedavg", OURS)]
        with_ours = {a: by_method[f"{a}+{OURS}"] for a in others if f"{a}+{OURS}" in by_method}
        fedavg, ours = by_method.get("fedavg"), by_method.get(OURS)
        pairs = [(by_method[a], fedavg) for a in others] + [(entry, ours) for entry in with_ours.values()]
        found = compared(pairs)
        alone = dict(zip(others, found[: len(others)], strict=True))
        combined = dict(zip(with_ours, found[len(others) :], strict=True))
        rows = [("FedAvg", names.ours(fedavg), names.NOTHING, names.ours(ours), names.NOTHING)]
        rows += [
            (names.method(a), names.ours(by_method[a]), alone[a].text(), names.ours(with_ours.get(a)),
             combined.get(a, Against()).text())
            for a in others
        ]  # fmt: skip
        sections.append(Section(heading, tuple(rows)))
        if others:
            answers.append(
                f"- {heading}: {_helped(alone)} with random selection, {_helped(combined)} with FedEntOpt's."
                f"{_highest(by_method)}"
            )
    if not sections:
        return ""
    note = "\n".join(["Above FedAvg with the same selection:", "", *answers, "", _note(own)]) if answers else NOTE
    title = "Does re-weighting help once cohorts are even?"
    return markdown(Table(ALGORITHMS, title, note, COLUMNS, tuple(sections)), level=2)


def _highest(by_method: Mapping[str, Comparison]) -> str:
    """In a sentence: the algorithm with the highest mean in the seeds that all have, and what it is with the other
    selection; empty where that is FedAvg, or where no seed is common to all."""
    known = {method: entry.values for method, entry in by_method.items() if entry.values}
    seeds = set.intersection(*(set(values) for values in known.values())) if known else set()
    means = {method: mean([values[seed] for seed in seeds]) or 0.0 for method, values in known.items() if seeds}
    best = max(means, key=lambda method: means[method], default="fedavg")
    algorithm, _, selector = best.partition("+")
    base, other = (OURS, algorithm) if selector else ("fedavg", f"{algorithm}+{OURS}")
    if algorithm in ("fedavg", OURS) or base not in means:
        return ""
    ahead = sum(known[best][seed] > known[base][seed] for seed in seeds)
    selections = ("FedEntOpt's", "random") if selector else ("random", "FedEntOpt's")
    text = (
        f" Highest of all: {names.method(algorithm)} with {selections[0]} selection, {means[best]:.2f}, above FedAvg "
        f"with it in {ahead} of {len(seeds)} seeds"
    )
    return f"{text}; with {selections[1]} selection it has {means[other]:.2f}." if other in means else f"{text}."


def _note(own: Sequence[Comparison]) -> str:
    """What the table shows, and which SCAFFOLD it is."""
    inside = [
        e for e in own if e.cell.config is not None and e.cell.config.to_dict().get("scaffold_variant") == "gradient"
    ]
    if not any((entry.cell.method or "").startswith("scaffold") for entry in inside):
        return NOTE
    where = "the gradient (`variant=gradient`), not after the step as in [Results](RESULTS.md)"
    return f"{NOTE} SCAFFOLD's correction enters {where}."


def _helped(found: Mapping[str, Against]) -> str:
    """How many algorithms have the higher mean, and which of them clearly."""
    told = {method: against for method, against in found.items() if against.difference is not None}
    if not told:
        return "not yet known"
    above = f"{sum((against.difference or 0.0) > 0 for against in told.values())} of {len(told)}"
    if all(against.p is None for against in told.values()):
        return above
    clear = ", ".join(names.method(method) for method, against in told.items() if against.better)
    harm = ", ".join(names.method(method) for method, against in told.items() if against.worse)
    return f"{above} (clearly {clear or 'none'}{f'; clearly below: {harm}' if harm else ''})"
