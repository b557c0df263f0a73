"""The page's first lines: what this comparison shows, in sentences made from its numbers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from fedentopt.report.figures import Figures, Rows, most_accurate
from fedentopt.report.grouping import Group, Method
from fedentopt.results.aggregate import accuracies
from fedentopt.results.statistics import Spread, mean_interval, paired_differences
from fedentopt.results.summary import averaged_rounds


def plus_minus(value: Spread, digits: int = 2) -> str:
    """`53.84 ± 0.31`; without ± for a single seed, a dash for nothing."""
    if not math.isfinite(value.mean):
        return "–"
    text = f"{value.mean:.{digits}f}"
    return f"{text} ± {value.std:.{digits}f}" if math.isfinite(value.std) else text


def findings(group: Group, rows: Rows) -> list[str]:
    """Up to four plain-text sentences; empty where there is nothing to compare. Methods that a sentence names and that
    diverged in some seed are named as such."""
    figures_of = {method.label: figures for method, figures in rows}
    sentences = []
    named: dict[str, None] = {}
    scored, best = most_accurate(rows)
    if scored:
        named |= dict.fromkeys(method.label for method, _ in best)
        names = _listed(list(named))
        if len(scored) > len(best):
            names = f"The best of {len(scored)} methods {'is' if len(best) == 1 else 'are'} {names}"
        accuracy = plus_minus(best[0][1].accuracy)
        if any(values.finished for _, values in scored):
            rounds = averaged_rounds(run.summary for method, _ in scored for run in method.finished or method.runs)
            when = f", {rounds}{_not_finished(sum(not values.finished for _, values in rows))}"
        else:
            when = " so far; no run is finished"
        sentences.append(f"{names}: {accuracy} % test accuracy{when}.")
    plain, balanced = group.plain(), group.balanced()
    if plain is None or balanced is None:
        return sentences + _diverged(named, figures_of)
    gains = paired_gains(plain, balanced)
    if gains:
        mean, interval = Spread.of(gains).mean, mean_interval(gains)
        verb = "gains" if mean >= 0 else "loses"
        sentence = f"Against {plain.label} {balanced.label} {verb} {abs(mean):.2f} points"
        if interval is None:
            sentences.append(f"{sentence} in the one seed that both have.")
        else:
            chance = "" if interval.clear else ", so it may be chance"
            sentences.append(
                f"{sentence}, mean of the differences seed by seed over {len(gains)} seeds; its 95 % interval "
                f"(Student) is {interval.low:+.2f} to {interval.high:+.2f}{chance}."
            )
    sentences += _diverged({plain.label: None, balanced.label: None} | named, figures_of)
    ours, random = figures_of[balanced.label].full_cover, figures_of[plain.label].full_cover
    sentences.append(
        f"Every class was in the cohort in {ours.mean:.1f} % of the rounds with {balanced.label}, "
        f"in {random.mean:.1f} % with {plain.label}."
    )
    return sentences


def _not_finished(methods: int) -> str:
    """How many more methods there are, of which nothing can be said yet."""
    if not methods:
        return ""
    return f"; {'another method has' if methods == 1 else f'{methods} other methods have'} no finished run yet"


def _listed(names: list[str], most: int = 4) -> str:
    """As `a, b and c`; of many, the first few and how many more there are."""
    kept = names if len(names) <= most + 1 else [*names[:most], f"{len(names) - most} more"]
    return " and ".join([", ".join(kept[:-1]), kept[-1]] if len(kept) > 1 else kept)


def _diverged(named: Iterable[str], figures_of: Mapping[str, Figures]) -> list[str]:
    """A sentence on those that diverged, since their accuracy is chance and says nothing else; empty where none did."""
    times = {label: len(figures_of[label].diverged) for label in named}
    said = [f"{label} diverged in {'one seed' if n == 1 else f'{n} seeds'}" for label, n in times.items() if n]
    return [f"{', '.join(said)}; such a run counts as chance from there on."] if said else []


def paired_gains(plain: Method, balanced: Method) -> list[float]:
    """Accuracy differences between runs of the same seed: same partition, same start."""
    return paired_differences(accuracies(balanced.finished), accuracies(plain.finished))
