"""What the paper claims, and what our figures say to it: each claim a sentence made from results alone."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedentopt.paper import names
from fedentopt.paper.comparison import Comparison
from fedentopt.paper.measures import TARGETS
from fedentopt.paper.sizes import shapes
from fedentopt.results.statistics import Interval, mean, paired_differences, paired_interval

NOT_YET = "Not run yet."
FAR = 5.0
"""Points of accuracy beyond which a cell is named as far from the paper's."""

Entries = Sequence[Comparison]


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, where it stands, and ours."""

    claim: str
    place: str
    ours: str


def findings(entries: Entries) -> list[Finding]:
    """All claims that can be checked by figures, in the paper's order."""

    def of(*tables: str) -> list[Comparison]:
        return [entry for entry in entries if entry.cell.table in tables and entry.ours is not None]

    checks: list[tuple[str, str, Callable[[Entries], str], Entries]] = [
        ("FedEntOpt's cohorts have the highest label entropy, above log2(C-1)", "figure 1", _entropy, of("figure1")),
        ("random selection has a higher label entropy than FedEntropy", "figure 1", _random_above, of("figure1")),
        ("FedEntOpt beats FedAvg", "tables 1, 4", _beats_fedavg, of("table1", "table4")),
        ("FedEntOpt, with noise or without, is the best of its row", "tables 1, 4", _best, of("table1", "table4")),
        ("noise on the label counts costs no accuracy", "table 1", _private, of("table1")),
        ("FedEntOpt reaches a target accuracy sooner", "section V-B", _sooner, of("table1")),
        ("FedEntOpt keeps its accuracy at low participation", "figure 2", _participation, of("figure2")),
        ("baselines gain when FedEntOpt selects for them", "table 2", _combined, of("table2")),
        ("FedEntOpt beats FedAvg under dropout and straggling", "table 3", _beats_fedavg, of("table3")),
        ("label counts cost next to nothing", "table 5", _bytes, of("table5")),
        ("a larger buffer makes selection more even", "table 6", _even, of("table6")),
        ("every client was selected at least once", "table 6", _everyone, of("table6")),
    ]  # fmt: skip
    return [Finding(claim, place, check(own) if own else NOT_YET) for claim, place, check, own in checks]


def agreement(entries: Entries) -> str:
    """How far our accuracies lie from the printed ones."""
    gaps = [entry.difference for entry in _accuracies(entries) if entry.difference is not None]
    if not gaps:
        return NOT_YET
    within = sum(abs(gap) <= 2 for gap in gaps)
    return (
        f"{len(gaps)} cells with a printed accuracy have results. Ours minus the paper's: "
        f"{statistics.median(gaps):+.2f} points in the median; {within} cells lie within 2 points, "
        f"{len(far(entries))} beyond {FAR:g}."
    )


def far(entries: Entries) -> list[Comparison]:
    """Cells whose accuracy is more than `FAR` points from the printed one, farthest first."""
    found = [entry for entry in _accuracies(entries) if abs(entry.difference or 0.0) > FAR]
    return sorted(found, key=lambda entry: -abs(entry.difference or 0.0))


@dataclass(frozen=True)
class Ahead:
    """A method whose accuracy is above FedEntOpt's in a setting, both over the seeds they share.

    `interval` is that of the difference seed by seed, None for fewer than two of them.
    """

    entry: Comparison
    fedentopt: Comparison
    interval: Interval | None

    @property
    def lead(self) -> float:
        """How many points it is ahead."""
        return (self.entry.ours or 0.0) - (self.fedentopt.ours or 0.0)


def ahead(entries: Entries) -> list[Ahead] | None:
    """Every such method of the tables that compare all methods, farthest ahead first; None where no setting has results
    of FedEntOpt and another method in one seed."""
    compared = [entry for entry in entries if entry.cell.table in ("table1", "table4") and entry.ours is not None]
    pairs = [
        (entry.over(own.values), own.over(entry.values))
        for row in _rows(compared)
        for own in _by(row, "fedentopt")[:1]
        for entry in row
        if not _ours(entry) and entry.values.keys() & own.values.keys()
    ]
    met = [Ahead(entry, own, paired_interval(entry.values, own.values)) for entry, own in pairs]
    return sorted((one for one in met if one.lead > 0), key=lambda one: -one.lead) if met else None


def _accuracies(entries: Entries) -> list[Comparison]:
    return [entry for entry in entries if entry.cell.metric == "accuracy" and entry.difference is not None]


def _beats_fedavg(entries: Entries) -> str:
    gains, clear, below = [], 0, 0
    for row in _rows(_by(entries, "fedavg", "fedentopt")):
        by_method = {entry.cell.method: entry for entry in row}
        if len(by_method) < 2:
            continue
        own = by_method["fedentopt"]
        gain = _gain(own, by_method["fedavg"])
        if gain is None:
            continue
        gains.append(gain)
        clear += own.against is not None and own.against.low > 0
        below += own.against is not None and own.against.high < 0
    if not gains:
        return NOT_YET
    text = f"Above FedAvg in {sum(gain > 0 for gain in gains)} of {len(gains)} settings"
    text += f" ({min(gains):+.2f} to {max(gains):+.2f} points), clearly (95 % interval above zero) in {clear}"
    return text + (f", clearly below in {below}." if below else ".")


def _gain(entry: Comparison, other: Comparison) -> float | None:
    """By how much an entry is above another over the seeds they share: every seed has a partition of its own."""
    differences = paired_differences(entry.values, other.values)
    return statistics.fmean(differences) if differences else None


def _best(entries: Entries) -> str:
    full = [leads for row in _rows(entries) if len(row) > 2 and (leads := _leads(row))]
    if not full:
        return NOT_YET
    first = [max(leads, key=lambda one: one[0]) for leads in full]
    leaders = [entry for lead, entry in first if lead > 0]
    others = sorted({names.method(leader.cell.method) for leader in leaders})
    text = f"Best in {len(full) - len(leaders)} of {len(full)} settings"
    return f"{text}; elsewhere {', '.join(others)}." if others else f"{text}."


def _leads(row: Entries) -> list[tuple[float, Comparison]]:
    """How far every other method is above FedEntOpt with noise and without, where it shares a seed with either."""
    leads = []
    for entry in (entry for entry in row if not _ours(entry)):
        gains = [gain for own in row if _ours(own) and (gain := _gain(entry, own)) is not None]
        if gains:
            leads.append((min(gains), entry))
    return leads


def _ours(entry: Comparison) -> bool:
    return entry.cell.method in ("fedentopt", "fedentopt-dp")


def _private(entries: Entries) -> str:
    gaps = []
    for row in _rows(_by(entries, "fedentopt", "fedentopt-dp")):
        by_method = {entry.cell.method: entry.values for entry in row}
        noisy, plain = by_method.get("fedentopt-dp", {}), by_method.get("fedentopt", {})
        gaps += [noisy[seed] - plain[seed] for seed in noisy.keys() & plain.keys()]
    if not gaps:
        return NOT_YET
    return (
        f"With noise minus without, over {len(gaps)} pairs of runs: {statistics.fmean(gaps):+.2f} points in the mean."
    )


def _sooner(entries: Entries) -> str:
    """Only settings in which FedAvg and FedEntOpt both reach the target can be compared in rounds."""
    parts = []
    for target in TARGETS:
        shares, only_ours = [], 0
        for row in _rows(_by(entries, "fedavg", "fedentopt")):
            shared = set.intersection(*(set(entry.values) for entry in row))
            reached = {entry.cell.method: _rounds_to(entry, target, shared) for entry in row}
            ours, theirs = reached.get("fedentopt"), reached.get("fedavg")
            if ours is not None and theirs is not None:
                shares.append(ours / theirs)
            only_ours += ours is not None and theirs is None and "fedavg" in reached
        if shares:
            span = f"{min(shares):.2f}" if len(shares) == 1 else f"{min(shares):.2f} to {max(shares):.2f}"
            parts.append(f"To {target} % it needs {span} of FedAvg's rounds ({names.counted(len(shares), 'setting')}).")
        if only_ours:
            where = names.counted(only_ours, "setting")
            parts.append(f"In {where} all its seeds get to {target} %, but not all of FedAvg's.")
    return " ".join(parts) or "No setting where both reach a target."


def _rounds_to(entry: Comparison, target: int, seeds: set[int]) -> float | None:
    rounds = [getattr(run, f"rounds_to_{target}") for run in entry.runs if run.seed in seeds]
    return None if not rounds or None in rounds else mean(rounds)


def _participation(entries: Entries) -> str:
    """The lowest share of clients against the highest, over the settings where FedEntOpt and FedAvg have both in the
    same seeds."""
    shares = sorted({entry.cell.participation or 0.0 for entry in entries})
    drops: dict[str, list[float]] = {"fedentopt": [], "fedavg": []}
    for row in _rows(_by(entries, *drops), participation=False):
        found = {(entry.cell.method, entry.cell.participation): entry.values for entry in row}
        ends = [found.get((method, share), {}) for method in drops for share in (shares[0], shares[-1])]
        seeds = set.intersection(*map(set, ends))
        if seeds:
            for method, own in drops.items():
                low, high = found[method, shares[0]], found[method, shares[-1]]
                own.append(statistics.fmean(low[seed] - high[seed] for seed in seeds))
    if len(shares) < 2 or not drops["fedavg"]:
        return NOT_YET
    shift = f"{shares[0]:g} % of the clients instead of {shares[-1]:g} %"
    means = ", ".join(f"{names.method(method)} {statistics.fmean(own):+.2f}" for method, own in drops.items())
    return f"{shift}, in points, mean of the settings: {means}."


def _combined(entries: Entries) -> str:
    up = [entry for entry in entries if (entry.ours or 0.0) > 0]
    clear = [entry for entry in entries if entry.interval is not None and entry.interval.low > 0]
    worse = [entry for entry in entries if entry.interval is not None and entry.interval.high < 0]
    return (
        f"Better in {len(up)} of {len(entries)} combinations, clearly in {len(clear)}; clearly worse in {len(worse)}."
    )


def _entropy(entries: Entries) -> str:
    by_method = {entry.cell.method: entry for entry in entries}
    if not {"fedentopt", "fedavg"} <= by_method.keys():
        return NOT_YET
    own = by_method["fedentopt"]
    least = min((run.min_entropy for run in own.runs if run.min_entropy is not None), default=math.nan)
    shape = shapes().get(own.cell.dataset)
    figures = ", ".join(f"{names.method(name)} {entry.ours:.3f}" for name, entry in by_method.items())
    text = f"Mean entropy in bits: {figures}; FedEntOpt's lowest round {least:.3f}"
    return text + (f", log2({shape[0] - 1}) is {math.log2(shape[0] - 1):.3f}." if shape else ".")


def _random_above(entries: Entries) -> str:
    by_method = {entry.cell.method: entry for entry in entries}
    if not {"fedentropy", "fedavg"} <= by_method.keys():
        return NOT_YET
    gap = by_method["fedentropy"].against
    return (
        NOT_YET if gap is None else f"FedEntropy minus random: {gap.mean:+.3f} bits [{gap.low:+.3f}, {gap.high:+.3f}]."
    )


def _bytes(entries: Entries) -> str:
    from fedentopt.paper.sizes import size

    found = [size(entry.cell) for entry in entries]
    ratios = [one.parameters / one.labels for one in found if one is not None]
    return (
        f"One model is {min(ratios):,.0f} to {max(ratios):,.0f} times as large as all label counts."
        if ratios
        else NOT_YET
    )


def _even(entries: Entries) -> str:
    together = [_of_shared_seeds(row) for row in _rows([e for e in entries if e.cell.metric == "h_norm"])]
    rows = [row for row in together if len(row) > 1]
    if not rows:  # one buffer neither rises nor falls
        return NOT_YET
    rising = 0
    for row in rows:
        ordered = [entry.ours or 0.0 for entry in sorted(row, key=lambda entry: entry.cell.buffer or 0.0)]
        rising += all(low < high for low, high in itertools.pairwise(ordered))
    gaps = [
        abs(entry.difference) for entry in entries if entry.cell.metric == "h_norm" and entry.difference is not None
    ]
    close = f"; H_norm within {max(gaps):.3f} of the paper's" if gaps else ""
    return f"H_norm rises with the buffer in {rising} of {len(rows)} settings{close}."


def _of_shared_seeds(row: Entries) -> list[Comparison]:
    """The entries over the seeds that all of them have; none where there are no such."""
    seeds = set.intersection(*(set(entry.values) for entry in row))
    return [entry.over(seeds) for entry in row] if seeds else []


def _everyone(entries: Entries) -> str:
    cells = [entry for entry in entries if entry.cell.metric == "h_norm"]
    runs = [run for entry in cells for run in entry.runs if run.never_selected is not None]
    left_out = [run for run in runs if run.never_selected]
    if not left_out:
        return f"So in all {len(runs)} runs."
    where = sorted({f"{names.partition(e.cell.partition)}, Q={e.cell.buffer:g} %" for e in cells
                    if any(run.never_selected for run in e.runs)})  # fmt: skip
    most = max(run.never_selected or 0 for run in left_out)
    never = "a client was" if most == 1 else f"up to {most} clients were"
    return f"Not in {len(left_out)} of {len(runs)} runs ({'; '.join(where)}): {never} never selected."


def _rows(entries: Entries, *, participation: bool = True) -> list[list[Comparison]]:
    """Entries that share their setting: all but the method and its buffer, and participation where switched off."""
    rows: dict[object, list[Comparison]] = {}
    for entry in entries:
        cell = entry.cell
        share = cell.participation if participation else None
        key = (cell.table, cell.model, names.data(cell), cell.partition, cell.availability, cell.metric, share)
        rows.setdefault(key, []).append(entry)
    return list(rows.values())


def _by(entries: Entries, *methods: str) -> list[Comparison]:
    return [entry for entry in entries if entry.cell.method in methods]
